"""Discovery of the modules of a library model whose hidden states and expert choices can be captured by hooks.

The decoder's blocks are the only list of modules that all contain an attention module. A block is a mixture of experts
if one of its modules gets the chosen experts of each token as an argument. Hooks are registered only while a step is
captured.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from batchgen.kernels.stream import in_lines
from batchgen.models.base import CaptureSpec


@dataclass(frozen=True, slots=True)
class ModelHooks:
    """Modules of a decoder whose states and expert choices can be captured."""

    blocks: tuple[nn.Module, ...]
    """Blocks in execution order; empty if the states between them cannot be read."""
    experts: tuple[tuple[int, nn.Module], ...] = ()
    """(block, module that gets the tokens' experts as an argument), in order; empty for a dense model."""
    experts_per_token: int = 0

    @property
    def layers(self) -> tuple[int, ...]:
        """Mixture-of-experts blocks."""
        return tuple(block for block, _ in self.experts)

    @contextmanager
    def captured(self, capture: CaptureSpec) -> Iterator[None]:
        """Fill `capture` from the forward that runs in this context, except for the state after the final norm."""
        choices: list[Tensor] = []
        with ExitStack() as stack:

            def hook(handle: Any) -> None:
                stack.callback(handle.remove)

            if 0 in capture.layers:
                hook(self.blocks[0].register_forward_pre_hook(_capture_input(capture), with_kwargs=True))
            for layer in capture.layers:
                if layer > 0:
                    hook(self.blocks[layer - 1].register_forward_hook(_capture_output(capture, layer)))
            for _, module in self.experts if capture.experts else ():
                hook(module.register_forward_pre_hook(_capture_choice(capture, choices), with_kwargs=True))
            yield
        if capture.experts:
            capture.routed = torch.stack(choices, dim=1)  # [S, M, K]


def find_hooks(decoder: nn.Module, run: Callable[[], Any], tokens: int) -> ModelHooks:
    """Find the modules of a decoder that can be captured.

    Args:
        decoder: decoder of a library model.
        run: runs one forward over `tokens` tokens with all hidden states; returns the library's output.
        tokens: at least 2, otherwise positions would look like expert choices.
    """
    assert tokens > 1
    blocks = decoder_blocks(decoder)
    seen: list[Tensor] = []
    chosen: list[tuple[int, nn.Module, int]] = []
    with ExitStack() as stack:
        for number, block in enumerate(blocks):
            stack.callback(block.register_forward_pre_hook(_record_states(seen), with_kwargs=True).remove)
            for module in block.modules():
                if module is not block:
                    note = _record_choice(chosen, number, tokens)
                    stack.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        states = getattr(run(), "hidden_states", None)
    if not _matches_library_states(states, seen, len(blocks), tokens):
        blocks = ()
    # Blocks that choose twice, or different numbers of experts per block, do not fit into one array.
    numbers = [number for number, _, _ in chosen]
    sizes = {size for _, _, size in chosen}
    if len(set(numbers)) != len(numbers) or len(sizes) != 1:
        return ModelHooks(blocks)
    return ModelHooks(blocks, tuple((number, module) for number, module, _ in chosen), sizes.pop())


def decoder_blocks(decoder: nn.Module) -> tuple[nn.Module, ...]:
    """The decoder's blocks: the only outermost list of modules that all contain attention; empty if not unique."""
    lists: list[tuple[str, list[nn.Module]]] = []
    for name, module in decoder.named_modules():
        nested = any(name.startswith(f"{outer}.") for outer, _ in lists)
        # Blocks that do not run for text are None.
        blocks = [block for block in module if block is not None] if isinstance(module, nn.ModuleList) else []
        if blocks and not nested and all(map(_has_attention, blocks)):
            lists.append((name, blocks))
    return tuple(lists[0][1]) if len(lists) == 1 else ()


def block_parameters(decoder: nn.Module, model: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each block of a model's decoder that no other module has; empty if no blocks are found."""
    blocks = decoder_blocks(decoder)
    uses = Counter(id(own) for module in model.modules() for own in module._parameters.values())
    inside = [Counter(id(own) for module in block.modules() for own in module._parameters.values()) for block in blocks]
    return [
        [own for own in block.parameters() if counts[id(own)] == uses[id(own)]]
        for block, counts in zip(blocks, inside, strict=True)
    ]


def block_bytes(decoder: nn.Module, model: nn.Module, itemsize: int) -> tuple[int, ...]:
    """Bytes of the parameters of each block, as `LayerStream` copies them, with numbers of `itemsize` bytes."""
    return tuple(sum(in_lines(own.numel() * itemsize) for own in block) for block in block_parameters(decoder, model))


def _has_attention(module: nn.Module) -> bool:
    return any(hasattr(child, "layer_idx") for child in module.modules())


def _matches_library_states(states: Any, seen: list[Tensor], blocks: int, tokens: int) -> bool:
    """Whether the hidden states that the library returns are the recorded inputs of its blocks, or begin with the
    second: Mamba's are without the first.
    """
    return (
        isinstance(states, tuple)
        and len(states) == blocks + 1 == len(seen) + 1
        and any(part and all(map(operator.is_, part, states)) for part in (seen, seen[1:]))
        and all(state.dim() == 3 and state.shape[:2] == (1, tokens) for state in seen)
    )


def _block_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Hidden states that a block is called with."""
    states: Tensor = args[0] if args else kwargs["hidden_states"]
    return states


def _expert_choice(args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int) -> Tensor | None:
    """[T, K] expert choices among a module's arguments; None if there are none."""
    for value in (*args, *kwargs.values()):
        whole = isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)
        if whole and value.dim() == 2 and value.shape[0] == tokens:
            return value  # type: ignore[no-any-return]
    return None


def _record_states(seen: list[Tensor]) -> Callable[..., None]:
    return lambda module, args, kwargs: seen.append(_block_input(args, kwargs))


def _record_choice(chosen: list[tuple[int, nn.Module, int]], number: int, tokens: int) -> Callable[..., None]:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        choice = _expert_choice(args, kwargs, tokens)
        if choice is not None:
            chosen.append((number, module, choice.shape[1]))

    return note


def _capture_input(capture: CaptureSpec) -> Callable[..., None]:
    def store(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        capture.store(0, _block_input(args, kwargs)[0])

    return store


def _capture_output(capture: CaptureSpec, layer: int) -> Callable[..., None]:
    def store(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output  # [1, T, H]
        capture.store(layer, states[0])

    return store


def _capture_choice(capture: CaptureSpec, choices: list[Tensor]) -> Callable[..., None]:
    def store(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        choice = _expert_choice(args, kwargs, capture.tokens)
        assert choice is not None, "find_hooks found the module by this argument"
        choices.append(choice[capture.rows].to(torch.int32))  # [S, K]

    return store
