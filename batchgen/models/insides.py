"""Where a library model keeps its inner states and its routers' choices: found by structure, read by hooks.

The decoder's blocks are the one list of modules of which each holds an attention module. A block routes where one of
its modules is handed the experts chosen for each token. Hooks stand only while a step is tapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from batchgen.models.base import Taps

__all__ = ["Insides", "find_insides"]


@dataclass(frozen=True, slots=True)
class Insides:
    """What of a decoder can be tapped."""

    blocks: tuple[nn.Module, ...]
    """In the order they run; none where the states between them cannot be read."""
    experts: tuple[tuple[int, nn.Module], ...] = ()
    """(block, the module that is handed its tokens' experts), in order; none for a dense model."""
    experts_per_token: int = 0

    @property
    def layers(self) -> tuple[int, ...]:
        """Blocks that route."""
        return tuple(block for block, _ in self.experts)

    @contextmanager
    def tapped(self, taps: Taps) -> Iterator[None]:
        """Fill `taps` from the forward that runs inside; the state after the final norm is its caller's."""
        choices: list[Tensor] = []
        with ExitStack() as stack:

            def hook(handle: Any) -> None:
                stack.callback(handle.remove)

            if 0 in taps.layers:
                hook(self.blocks[0].register_forward_pre_hook(_before(taps), with_kwargs=True))
            for layer in taps.layers:
                if layer > 0:
                    hook(self.blocks[layer - 1].register_forward_hook(_after(taps, layer)))
            for _, module in self.experts if taps.experts else ():
                hook(module.register_forward_pre_hook(_choosing(taps, choices), with_kwargs=True))
            yield
        if taps.experts:
            taps.routed = torch.stack(choices, dim=1)  # [S, M, K]


def find_insides(decoder: nn.Module, run: Callable[[], Any], tokens: int) -> Insides:
    """Find what of a decoder can be tapped.

    Args:
        decoder: the library's.
        run: one forward of it over `tokens` tokens with every state asked for; returns the library's output.
        tokens: at least 2, or a list of positions would look like a choice of experts.
    """
    assert tokens > 1
    blocks = _blocks(decoder)
    seen: list[Tensor] = []
    chosen: list[tuple[int, nn.Module, int]] = []
    with ExitStack() as stack:
        for number, block in enumerate(blocks):
            stack.callback(block.register_forward_pre_hook(_keeping(seen), with_kwargs=True).remove)
            for module in block.modules():
                if module is not block:
                    note = _noting(chosen, number, tokens)
                    stack.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        states = getattr(run(), "hidden_states", None)
    if not _same_states(states, seen, len(blocks), tokens):
        blocks = ()
    # A block that chooses twice, or layers that choose unequal numbers, have no place in one array.
    numbers = [number for number, _, _ in chosen]
    sizes = {size for _, _, size in chosen}
    if len(set(numbers)) != len(numbers) or len(sizes) != 1:
        return Insides(blocks)
    return Insides(blocks, tuple((number, module) for number, module, _ in chosen), sizes.pop())


def _blocks(decoder: nn.Module) -> tuple[nn.Module, ...]:
    """The decoder's blocks: the only outermost list of modules that all attend."""
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in decoder.named_modules():
        nested = any(name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, nn.ModuleList) and len(module) and not nested and all(map(_attends, module)):
            found.append((name, module))
    return tuple(found[0][1]) if len(found) == 1 else ()


def _attends(module: nn.Module) -> bool:
    return any(hasattr(child, "layer_idx") for child in module.modules())


def _same_states(states: Any, seen: list[Tensor], blocks: int, tokens: int) -> bool:
    """Whether the library returns, as the states between its blocks, those that we saw enter them."""
    return (
        isinstance(states, tuple)
        and len(states) == blocks + 1 == len(seen) + 1
        and all(ours is theirs for ours, theirs in zip(seen, states, strict=False))
        and all(state.dim() == 3 and state.shape[:2] == (1, tokens) for state in seen)
    )


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The states that a block is called with."""
    states: Tensor = args[0] if args else kwargs["hidden_states"]
    return states


def _choice(args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int) -> Tensor | None:
    """[T, K] the experts that a module is handed for each token, if that is what it is handed."""
    for value in (*args, *kwargs.values()):
        whole = isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)
        if whole and value.dim() == 2 and value.shape[0] == tokens:
            return value  # type: ignore[no-any-return]
    return None


def _keeping(seen: list[Tensor]) -> Callable[..., None]:
    return lambda module, args, kwargs: seen.append(_first(args, kwargs))


def _noting(chosen: list[tuple[int, nn.Module, int]], number: int, tokens: int) -> Callable[..., None]:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        choice = _choice(args, kwargs, tokens)
        if choice is not None:
            chosen.append((number, module, choice.shape[1]))

    return note


def _before(taps: Taps) -> Callable[..., None]:
    def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taps.take(0, _first(args, kwargs)[0])

    return take


def _after(taps: Taps, layer: int) -> Callable[..., None]:
    def take(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output  # [1, T, H]
        taps.take(layer, states[0])

    return take


def _choosing(taps: Taps, choices: list[Tensor]) -> Callable[..., None]:
    def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        choice = _choice(args, kwargs, taps.tokens)
        assert choice is not None, "the module was found by what it is handed"
        choices.append(choice[taps.rows].to(torch.int32))  # [S, K]

    return take
