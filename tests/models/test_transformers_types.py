"""Transformers path of each architecture, against the library's eager attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.models.dense_attention import DenseCache
from tests.models.loading import inspect_model, load_model
from tests.models.packed import PagedCache, packed_logits, random_sequences
from tests.models.test_taps import NO_CHOICES, check_experts, check_states
from tests.models.tiny import HYBRID_TYPES, MORE_TYPES, TYPES, WINDOW, save_tiny, tiny_config, tiny_model

torch.set_num_threads(1)

EXPERTS = {t for t in (*TYPES, *MORE_TYPES) if "moe" in t} - NO_CHOICES
EXPERTS |= {"mixtral", "gpt_oss", "olmoe", "deepseek_v2", "deepseek_v3", "dots1", "laguna"}
"""Mixtures of experts whose choices can be captured."""
NO_STATES = ("dory", "gemma3n_text", "hrm_text")
"""Types whose states between blocks cannot be read."""


def check(
    model_type: str, folder: Path, implementation: Literal["auto", "transformers"] = "transformers", **overrides: Any
) -> None:
    """Logits, hidden states and routed experts."""
    save_tiny(model_type, folder, **overrides)
    model = load_model(folder, implementation=implementation, dtype="float32", device="cpu")
    assert (model.spec.implementation, model.spec.name) == ("transformers", model_type)
    assert inspect_model(folder, implementation=implementation, dtype="float32", device="cpu") == model.spec
    reference = tiny_model(model_type, **overrides)
    sequences = random_sequences(model.spec.vocab_size)
    with torch.no_grad():
        expected = [reference(input_ids=ids[None], use_cache=False).logits[0].float() for ids in sequences]
    got = packed_logits(model, sequences, PagedCache(model.spec, len(sequences)).step)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    assert (model.spec.state_layers is None) == (model_type in NO_STATES)
    if model_type not in NO_STATES:
        check_states(model, reference)
    if model_type in EXPERTS:
        check_experts(model, reference)


@pytest.mark.field("return_hidden_states", "return_routed_experts")
@pytest.mark.parametrize("model_type", TYPES)
def test_type_equals_eager(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


def test_at_least_twenty_types_including_common_ones() -> None:
    assert len(set(TYPES)) >= 20
    assert {"gemma2", "gemma3_text", "gpt_oss", "phi3", "olmo2", "mixtral", "qwen3_moe"} <= set(TYPES)


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "modernbert-decoder"])
def test_types_of_other_computations_with_attention_alone(model_type: str, tmp_path: Path) -> None:
    """The layers of the configuration decide, not the name of the type."""
    check(model_type, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", HYBRID_TYPES)
def test_hybrid_types_with_attention_alone(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_ropes_that_the_native_decoder_lacks(model_type: str, tmp_path: Path) -> None:
    rope = {"rope_type": "proportional", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "factor": 2.0}
    check(model_type, tmp_path, "auto", rope_parameters=rope)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MORE_TYPES)
def test_more_types_equal_eager(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "gpt_oss", "olmo3", "cohere2", "mistral", "mixtral"])
def test_windows_of_the_tiny_types_are_short(model_type: str) -> None:
    """Otherwise the comparison with eager would not detect an ignored window."""
    assert tiny_config(model_type).sliding_window == WINDOW


def test_logits_are_spread() -> None:
    """Otherwise an equal argmax would be a weak test."""
    model = tiny_model("llama")
    with torch.no_grad():
        logits = model(input_ids=random_sequences(256)[4][None]).logits[0]
    assert logits.std() > 1


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_moe", "youtu"])
def test_bfloat16_is_as_close_to_float32_as_eager_bfloat16(model_type: str, tmp_path: Path) -> None:
    save_tiny(model_type, tmp_path, dtype=torch.bfloat16)
    model = load_model(tmp_path, implementation="transformers", dtype="bfloat16", device="cpu")
    rounded = tiny_model(model_type).bfloat16()
    sequences = random_sequences(model.spec.vocab_size)
    got = torch.cat(packed_logits(model, sequences, DenseCache().step))
    with torch.no_grad():
        plain = torch.cat([rounded(input_ids=ids[None]).logits[0].float() for ids in sequences])
        exact = torch.cat([rounded.float()(input_ids=ids[None]).logits[0] for ids in sequences])
    assert (got - exact).norm() <= 2 * (plain - exact).norm()


SCALED_POSITIONS = {"attn_temperature_tuning": True, "floor_scale": 3, "attn_scale": 0.8, "no_rope_layers": [1, 0, 1]}


@pytest.mark.parametrize("floor", [3, 20])
def test_positions_that_a_module_counts_itself(floor: int, tmp_path: Path) -> None:
    """Llama 4 counts the positions of some layers from the call's shape, and scales its queries by them."""
    values = SCALED_POSITIONS | {"floor_scale": floor}
    save_tiny("llama4_text", tmp_path, **values)
    model = load_model(tmp_path, dtype="float32", device="cpu")
    reference = tiny_model("llama4_text", **values)
    sequences = random_sequences(model.spec.vocab_size, lengths=(3, 19, 26))
    with torch.no_grad():
        expected = [reference(input_ids=ids[None], use_cache=False).logits[0].float() for ids in sequences]
    for ours, theirs in zip(packed_logits(model, sequences, DenseCache().step), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)
