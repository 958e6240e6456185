"""Native decoder against transformers' eager attention, over configurations of its four families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchgen.kernels.types import LayerKV
from tests.models.dense_attention import DenseCache
from tests.models.loading import inspect_model, load_model
from tests.models.packed import LENGTHS, PagedCache, packed_logits, random_sequences
from tests.models.tiny import VOCAB, WINDOW, save_tiny

torch.set_num_threads(1)

LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 10000.0}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "beta_fast": 4.0, "beta_slow": 0.5}
YARN |= {"original_max_position_embeddings": 16, "mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False}
LONG: dict[str, Any] = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 10000.0, "short_factor": [1.0] * 8}
LONG |= {"original_max_position_embeddings": 8, "long_factor": [1.0 + 0.5 * i for i in range(8)]}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 0.1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4, "hidden_size": 60, "num_attention_heads": 4}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "mistral-no-window": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen2-tied-window": ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": True, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"use_sliding_window": False, "head_dim": 32}),
    "qwen3-bias-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-layer-types": (
        "qwen3",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "use_sliding_window": True},
    ),
}
"""Frequencies of all rope types: `test_rope`."""


def eager(folder: Path, dtype: torch.dtype, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        return [model(input_ids=ids[None]).logits[0].float() for ids in sequences]


def assert_equals_eager(folder: Path, **options: Any) -> None:
    model = load_model(folder, implementation="native", dtype="float32", device="cpu", **options)
    assert model.spec.implementation == "native"
    assert inspect_model(folder, dtype="float32", device="cpu", **options) == model.spec
    sequences = random_sequences(VOCAB)
    expected = eager(folder, torch.float32, sequences)
    got = packed_logits(model, sequences, PagedCache(model.spec, len(sequences)).step)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_equals_eager(name: str, tmp_path: Path) -> None:
    model_type, overrides = CONFIGS[name]
    save_tiny(model_type, tmp_path, seed=len(name), **overrides)
    assert_equals_eager(tmp_path)


@pytest.mark.parametrize("name", ["llama-biases", "llama-yarn", "mistral-window", "qwen3"])
def test_bfloat16_is_as_close_to_float32_as_eager_bfloat16(name: str, tmp_path: Path) -> None:
    """error(ours) <= 2 * error(eager bfloat16), both against float32."""
    model_type, overrides = CONFIGS[name]
    save_tiny(model_type, tmp_path, dtype=torch.bfloat16, **overrides)
    model = load_model(tmp_path, implementation="native", dtype="bfloat16", device="cpu")
    sequences = random_sequences(VOCAB)
    exact = torch.cat(eager(tmp_path, torch.float32, sequences))
    plain = torch.cat(eager(tmp_path, torch.bfloat16, sequences))
    got = torch.cat(packed_logits(model, sequences, PagedCache(model.spec, len(sequences)).step))
    assert (got - exact).norm() <= 2 * (plain - exact).norm()


def test_old_spellings_of_a_configuration(tmp_path: Path) -> None:
    """`rope_theta`, `rope_scaling` with `type`, and windows by `max_window_layers` only."""
    overrides = {"rope_parameters": YARN, "use_sliding_window": True, "max_window_layers": 1}
    save_tiny("qwen2", tmp_path, **overrides)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_types"]
    settings = config.pop("rope_parameters")
    config["rope_theta"] = settings.pop("rope_theta")
    config["rope_scaling"] = {"type": settings.pop("rope_type"), **settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_equals_eager(tmp_path)


def test_longrope_factors_depend_on_the_context_length(tmp_path: Path) -> None:
    """All rows use one set: the library's for a sequence past the original context, or the one within it."""
    save_tiny("llama", tmp_path, rope_parameters=LONG)
    sequences = random_sequences(VOCAB)
    expected = eager(tmp_path, torch.float32, sequences)
    long = load_model(tmp_path, dtype="float32", device="cpu")
    short = load_model(tmp_path, dtype="float32", device="cpu", max_model_len=8)
    long_logits = packed_logits(long, sequences, DenseCache().step)
    short_logits = packed_logits(short, sequences, DenseCache().step)
    for i, length in enumerate(LENGTHS):
        ours, other = (long_logits[i], short_logits[i]) if length > 8 else (short_logits[i], long_logits[i])
        torch.testing.assert_close(ours, expected[i], atol=1e-4, rtol=0)
        assert length == 1 or not torch.allclose(other, expected[i], atol=1e-2)


def test_longrope_of_the_transformers_path_is_equal(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, rope_parameters=LONG)
    for context, lengths in ((None, LENGTHS), (None, (3, 8, 1, 5)), (8, (3, 8, 1, 5))):
        sequences = random_sequences(VOCAB, lengths=lengths)
        native, library = (
            load_model(tmp_path, implementation=path, dtype="float32", device="cpu", max_model_len=context)
            for path in ("native", "transformers")
        )
        for ours, theirs in zip(
            packed_logits(native, sequences, DenseCache().step),
            packed_logits(library, sequences, DenseCache().step),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_spec(tmp_path: Path) -> None:
    save_tiny("qwen2", tmp_path)
    spec = load_model(tmp_path, dtype="float32", device="cpu").spec
    assert (spec.name, spec.implementation) == ("qwen2", "native")
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers, spec.context_length) == (VOCAB, 64, 3, 512)
    assert spec.kv_layers == (LayerKV(2, 16, 16),) * 3
    library = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert spec.parameters == sum(p.numel() for p in library.parameters())
