"""Captured hidden states and expert choices of both model paths, against those that transformers returns."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchgen.kernels.mixers.states import StatePool
from batchgen.models.base import CaptureSpec, Model, ModelInput
from batchgen.models.library.model import decoder_name
from batchgen.models.library.module_discovery import find_hooks
from tests.engine.test_hybrid import TYPES as HYBRIDS
from tests.models.dense_attention import DenseCache
from tests.models.loading import load_model
from tests.models.packed import pooled_states
from tests.models.tiny import NATIVE_TYPES, VOCAB, save_tiny, tiny_model

torch.set_num_threads(1)

TOKENS = 9
SPLIT = 5
"""Tokens of the first of two steps."""
TOP_LOGITS = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe")
"""Types whose routers choose the largest logits without a correction."""
NO_CHOICES = {"llama4_text", "jetmoe"}
"""Mixtures of experts of which no module gets the chosen experts as an argument."""


def loaded(model_type: str, folder: Path, implementation: str, **more: Any) -> Model:
    save_tiny(model_type, folder, **more)
    return load_model(folder, implementation=implementation, dtype="float32", device="cpu")  # type: ignore[arg-type]


def ids_of(seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(seed))


def run_captured(
    model: Model, ids: Tensor, layers: tuple[int, ...], experts: bool = False
) -> tuple[dict[int, Tensor], Tensor]:
    """States and choices of every position, from two steps that capture rows in reverse order."""
    cache, pool = DenseCache(), StatePool.allocate(model.spec.states, 2, torch.float32, torch.device("cpu"))
    steps = []
    for start, end in ((0, SPLIT), (SPLIT, len(ids))):
        capture = CaptureSpec(torch.arange(end - start).flip(0), end - start, layers, experts)
        parts = [(0, end - start)]
        states = pooled_states(pool, parts)
        model.hidden(ModelInput(ids[start:end], torch.arange(start, end), cache.step(parts), capture, states=states))
        steps.append(capture)
    states = {layer: torch.cat([capture.states[layer].flip(0) for capture in steps]) for layer in layers}
    routed = [capture.routed.flip(0) for capture in steps if capture.routed is not None]
    return states, torch.cat(routed) if routed else torch.zeros(0)


def check_states(model: Model, reference: Any, first: int = 0) -> None:
    """States of all layers against those that the library returns, which begin with those of layer `first`."""
    ids = ids_of()
    blocks = model.spec.state_layers
    after: list[Tensor] = []
    last_block = find_hooks(
        getattr(reference, str(decoder_name(reference))),
        lambda: reference(input_ids=ids[None], use_cache=False, output_hidden_states=True),
        TOKENS,
    ).blocks[-1]
    hook = last_block.register_forward_hook(lambda m, a, out: after.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        out = reference(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    hook.remove()
    assert len(out.hidden_states) == blocks + 1
    states, _ = run_captured(model, ids, (*range(blocks + 1), -1))
    for layer in range(first, blocks):
        torch.testing.assert_close(states[layer], out.hidden_states[layer - first][0], atol=1e-4, rtol=1e-4)
    # The library's last entry is normalised; layer `blocks` is not.
    torch.testing.assert_close(states[-1], out.hidden_states[-1][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states[blocks], after[0][0], atol=1e-4, rtol=1e-4)


@pytest.mark.field("return_hidden_states")
@pytest.mark.parametrize("model_type", NATIVE_TYPES)
def test_states_of_the_native_path_equal_the_library(model_type: str, tmp_path: Path) -> None:
    check_states(loaded(model_type, tmp_path, "native"), tiny_model(model_type))


@pytest.mark.parametrize(("model_type", "first"), [("nemotron_h", 0), ("mamba", 1)])
def test_states_and_choices_of_recurrent_models_equal_the_library(model_type: str, first: int, tmp_path: Path) -> None:
    model = loaded(model_type, tmp_path, "transformers", **HYBRIDS[model_type])
    reference = tiny_model(model_type, **HYBRIDS[model_type])
    check_states(model, reference, first)
    if model.spec.moe_layers:
        check_experts(model, reference)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_capture_does_not_change_the_output(implementation: str, tmp_path: Path) -> None:
    model = loaded("llama", tmp_path, implementation)
    ids = ids_of()

    def hidden(capture: CaptureSpec | None) -> Tensor:
        return model.hidden(ModelInput(ids, torch.arange(TOKENS), DenseCache().step([(0, TOKENS)]), capture))

    plain = hidden(None)
    capture = CaptureSpec(torch.tensor([2, 2, 0]), TOKENS, (3, 0))
    assert torch.equal(hidden(capture), plain)
    assert set(capture.states) == {0, 3}
    assert torch.equal(capture.states[3][0], capture.states[3][1])
    assert capture.routed is None
    assert torch.equal(hidden(None), plain)


def test_a_captured_step_leaves_nothing_behind(tmp_path: Path) -> None:
    """No hook of its remains, which would keep what it has captured."""
    model = loaded("qwen3_moe", tmp_path, "transformers")
    capture = CaptureSpec(torch.arange(TOKENS), TOKENS, (0, 1, -1), experts=True)
    model.hidden(ModelInput(ids_of(), torch.arange(TOKENS), DenseCache().step([(0, TOKENS)]), capture))
    captured = [weakref.ref(tensor) for tensor in (*capture.states.values(), capture.routed)]
    assert all(tensor() is not None for tensor in captured)
    del capture
    gc.collect()
    assert [tensor() for tensor in captured] == [None] * 4


def check_experts(model: Model, reference: Any) -> None:
    """Captured choices of experts against those of the library's routers, in order if they choose the top logits."""
    ids = ids_of()
    _, routed = run_captured(model, ids, (), experts=True)
    k = model.spec.experts_per_token
    if model.spec.name in TOP_LOGITS:
        with torch.no_grad():
            logits = reference(input_ids=ids[None], use_cache=False, output_router_logits=True).router_logits
        choices = [scores.topk(k, dim=-1).indices for scores in logits]
        assert model.spec.moe_layers == tuple(range(len(logits)))
    else:
        choices = chosen_by_routers(reference, ids)
        routed, choices = routed.sort(-1).values, [choice.to(torch.int64).sort(-1).values for choice in choices]
    assert routed.shape == (TOKENS, len(choices), k)
    assert routed.dtype == torch.int32
    assert len(choices) == len(model.spec.moe_layers) > 0
    for layer, choice in enumerate(choices):
        assert torch.equal(routed[:, layer].long(), choice)


def chosen_by_routers(reference: Any, ids: Tensor) -> list[Tensor]:
    """[T, K] expert choices that the reference's routers return, for each mixture-of-experts layer."""
    choices: list[Tensor] = []

    def note(module: nn.Module, args: Any, out: Any) -> None:
        if isinstance(out, tuple):
            choices.extend(x for x in out if isinstance(x, Tensor) and x.dtype == torch.int64 and x.dim() == 2)

    for module in reference.modules():
        if any(word in type(module).__name__ for word in ("Router", "Gate")):
            module.register_forward_hook(note)
    with torch.no_grad():
        reference(input_ids=ids[None], use_cache=False)
    return choices


def test_layers_without_experts_are_left_out(tmp_path: Path) -> None:
    assert loaded("deepseek_v3", tmp_path, "transformers").spec.moe_layers == (1, 2)


@pytest.mark.parametrize("model_type", ["llama", *sorted(NO_CHOICES)])
def test_models_without_visible_choices_have_no_moe_layers(model_type: str, tmp_path: Path) -> None:
    spec = loaded(model_type, tmp_path, "transformers").spec
    assert spec.moe_layers == ()
    assert spec.experts_per_token == 0


class _Decoder(nn.Module):
    """A decoder with its blocks in one or more lists."""

    def __init__(self, lists: int) -> None:
        super().__init__()
        for i in range(lists):
            block = nn.Linear(4, 4)
            block.layer_idx = i  # type: ignore[assignment]
            setattr(self, f"layers{i}", nn.ModuleList([block]))


class _Output:
    def __init__(self, *states: Tensor) -> None:
        self.hidden_states = states


def test_decoder_with_two_lists_of_blocks_cannot_be_captured() -> None:
    assert find_hooks(_Decoder(2), lambda: _Output(), 4).blocks == ()


def test_decoder_with_other_states_cannot_be_captured() -> None:
    decoder = _Decoder(1)
    states = torch.zeros(1, 4, 4)

    def run(first: Tensor) -> _Output:
        return _Output(first, decoder.layers0[0](states))  # type: ignore[index]

    assert len(find_hooks(decoder, lambda: run(states), 4).blocks) == 1
    assert find_hooks(decoder, lambda: run(states + 1), 4).blocks == ()
