"""Inner states and router choices of both model paths, against what the library itself returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchgen.models.base import Model, ModelInput, Taps
from batchgen.models.hf import decoder_name
from batchgen.models.insides import find_insides
from batchgen.models.load import load_model
from tests.models.dense_attention import DenseCache
from tests.models.tiny import MORE_TYPES, NATIVE_TYPES, TYPES, VOCAB, save_tiny, tiny_model

torch.set_num_threads(1)

TOKENS = 9
SPLIT = 5
"""The second of two steps is fed the rest."""
BY_LOGITS = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe")
"""Types whose routers choose the largest logits, nothing added."""
UNSEEN = {"llama4_text", "jetmoe"}
"""Mixtures of experts whose modules are never told which experts a token goes to."""


def loaded(model_type: str, folder: Path, implementation: str, **more: Any) -> Model:
    save_tiny(model_type, folder, **more)
    return load_model(folder, implementation=implementation, dtype="float32", device="cpu")  # type: ignore[arg-type]


def ids_of(seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(seed))


def tap(model: Model, ids: Tensor, layers: tuple[int, ...], experts: bool = False) -> tuple[dict[int, Tensor], Tensor]:
    """States and choices of every position, from two steps; rows are asked for in reverse order."""
    cache = DenseCache()
    steps = []
    for start, end in ((0, SPLIT), (SPLIT, len(ids))):
        taps = Taps(torch.arange(end - start).flip(0), end - start, layers, experts)
        model.hidden(ModelInput(ids[start:end], torch.arange(start, end), cache.step([(0, end - start)]), taps))
        steps.append(taps)
    states = {layer: torch.cat([taps.states[layer].flip(0) for taps in steps]) for layer in layers}
    routed = [taps.routed.flip(0) for taps in steps if taps.routed is not None]
    return states, torch.cat(routed) if routed else torch.zeros(0)


def check_states(model_type: str, folder: Path, implementation: str) -> None:
    model = loaded(model_type, folder, implementation)
    reference = tiny_model(model_type)
    ids = ids_of()
    blocks = model.spec.state_layers
    assert blocks is not None
    after: list[Tensor] = []
    last_block = find_insides(
        getattr(reference, str(decoder_name(reference))),
        lambda: reference(input_ids=ids[None], use_cache=False, output_hidden_states=True),
        TOKENS,
    ).blocks[-1]
    last_block.register_forward_hook(lambda m, a, out: after.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        out = reference(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    assert len(out.hidden_states) == blocks + 1
    states, _ = tap(model, ids, (*range(blocks + 1), -1))
    for layer in range(blocks):
        torch.testing.assert_close(states[layer], out.hidden_states[layer][0], atol=1e-4, rtol=1e-4)
    # The library's last entry is normalised; ours have both.
    torch.testing.assert_close(states[-1], out.hidden_states[-1][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states[blocks], after[0][0], atol=1e-4, rtol=1e-4)


@pytest.mark.field("return_hidden_states")
@pytest.mark.parametrize("model_type", NATIVE_TYPES)
def test_states_of_the_native_path_equal_the_library(model_type: str, tmp_path: Path) -> None:
    check_states(model_type, tmp_path, "native")


@pytest.mark.field("return_hidden_states")
@pytest.mark.parametrize("model_type", TYPES)
def test_states_of_the_transformers_path_equal_the_library(model_type: str, tmp_path: Path) -> None:
    check_states(model_type, tmp_path, "transformers")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MORE_TYPES)
def test_states_of_more_types_equal_the_library(model_type: str, tmp_path: Path) -> None:
    check_states(model_type, tmp_path, "transformers")


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_tapped_step_gives_the_same_output(implementation: str, tmp_path: Path) -> None:
    model = loaded("llama", tmp_path, implementation)
    ids = ids_of()

    def hidden(taps: Taps | None) -> Tensor:
        return model.hidden(ModelInput(ids, torch.arange(TOKENS), DenseCache().step([(0, TOKENS)]), taps))

    plain = hidden(None)
    taps = Taps(torch.tensor([2, 2, 0]), TOKENS, (3, 0))
    assert torch.equal(hidden(taps), plain)
    assert set(taps.states) == {0, 3}
    assert torch.equal(taps.states[3][0], taps.states[3][1])
    assert taps.routed is None
    assert torch.equal(hidden(None), plain)


def test_hooks_stand_only_while_a_step_is_tapped(tmp_path: Path) -> None:
    model = loaded("qwen3_moe", tmp_path, "transformers")
    decoder: nn.Module = model._model._decoder  # type: ignore[attr-defined]

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in decoder.modules())

    before = hooks()
    tap(model, ids_of(), (0, 1, -1), experts=True)
    assert hooks() == before


def chosen_by_routers(model_type: str, ids: Tensor) -> list[Tensor]:
    """[T, K] for each layer that routes: what the reference's routers return."""
    reference = tiny_model(model_type)
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


def sorted_choice(choice: Tensor) -> Tensor:
    return choice.to(torch.int64).sort(-1).values


@pytest.mark.field("return_routed_experts")
@pytest.mark.parametrize("model_type", BY_LOGITS)
def test_experts_are_the_top_of_the_librarys_router_logits(model_type: str, tmp_path: Path) -> None:
    model = loaded(model_type, tmp_path, "transformers")
    ids = ids_of()
    with torch.no_grad():
        logits = tiny_model(model_type)(input_ids=ids[None], use_cache=False, output_router_logits=True).router_logits
    _, routed = tap(model, ids, (), experts=True)
    k = model.spec.experts_per_token
    assert model.spec.moe_layers == tuple(range(len(logits)))
    assert routed.shape == (TOKENS, len(logits), k)
    assert routed.dtype == torch.int32
    for layer, scores in enumerate(logits):
        assert torch.equal(routed[:, layer].long(), scores.topk(k, dim=-1).indices)


@pytest.mark.parametrize("model_type", [t for t in TYPES if "moe" in t or t in ("deepseek_v2", "deepseek_v3")])
def test_experts_are_those_that_the_routers_return(model_type: str, tmp_path: Path) -> None:
    check_experts(model_type, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", sorted({t for t in MORE_TYPES if "moe" in t or t in ("dots1", "laguna")} - UNSEEN)
)
def test_experts_of_more_types_are_those_that_the_routers_return(model_type: str, tmp_path: Path) -> None:
    check_experts(model_type, tmp_path)


def check_experts(model_type: str, folder: Path) -> None:
    model = loaded(model_type, folder, "transformers")
    ids = ids_of()
    expected = chosen_by_routers(model_type, ids)
    _, routed = tap(model, ids, (), experts=True)
    assert len(expected) == len(model.spec.moe_layers) > 0
    for layer, choice in enumerate(expected):
        assert torch.equal(sorted_choice(routed[:, layer]), sorted_choice(choice))


def test_layers_without_experts_are_left_out(tmp_path: Path) -> None:
    assert loaded("deepseek_v3", tmp_path, "transformers").spec.moe_layers == (1, 2)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", *sorted(UNSEEN)])
def test_models_that_show_no_choice_have_no_moe_layers(model_type: str, tmp_path: Path) -> None:
    spec = loaded(model_type, tmp_path, "transformers").spec
    assert spec.moe_layers == ()
    assert spec.experts_per_token == 0


class _Decoder(nn.Module):
    """Blocks in two lists, or states that are not those between its blocks."""

    def __init__(self, lists: int) -> None:
        super().__init__()
        for i in range(lists):
            block = nn.Linear(4, 4)
            block.layer_idx = i  # type: ignore[assignment]
            setattr(self, f"layers{i}", nn.ModuleList([block]))


class _Output:
    def __init__(self, *states: Tensor) -> None:
        self.hidden_states = states


def test_a_decoder_with_two_lists_of_blocks_cannot_be_tapped() -> None:
    assert find_insides(_Decoder(2), lambda: _Output(), 4).blocks == ()


def test_a_decoder_whose_states_are_others_cannot_be_tapped() -> None:
    decoder = _Decoder(1)
    states = torch.zeros(1, 4, 4)

    def run(first: Tensor) -> _Output:
        return _Output(first, decoder.layers0[0](states))  # type: ignore[index]

    assert len(find_insides(decoder, lambda: run(states), 4).blocks) == 1
    assert find_insides(decoder, lambda: run(states + 1), 4).blocks == ()
