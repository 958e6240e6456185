"""Inverse frequencies against transformers, and the rotation against its definition."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from batchgen.errors import ModelError
from batchgen.kernels.rope import apply_rope, inverse_frequencies, rope_tables
from batchgen.models.architectures import choose_implementation
from batchgen.models.checkpoint.folder import ModelFolder
from batchgen.models.library.text import read_transformers_config
from batchgen.models.native.config import NativeUnsupported, parse_native_config
from tests.cases import examples

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 4096,
}
LONG = {"short_factor": [1.0 + 0.01 * i for i in range(64)], "long_factor": [1.0 + 0.3 * i for i in range(64)]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 1_000_000},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.5},
    {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 1024, "rope_theta": 500_000.0},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 4, "rope_theta": 1_000_000},
    {"rope_type": "yarn", "factor": 32.0, "attention_factor": 1.25, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 32.0, "mscale": 0.7, "mscale_all_dim": 0.3, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "truncate": False},
    {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 1024, **LONG},
    {"rope_type": "longrope", "original_max_position_embeddings": 1024, **LONG},
    {"rope_type": "longrope", "attention_factor": 1.3, "original_max_position_embeddings": 1024, **LONG},
]


@pytest.mark.parametrize("rope", CASES, ids=lambda c: json.dumps({k: v for k, v in c.items() if "_factor" not in k}))
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_frequencies_equal_the_library_bit_for_bit(rope: dict[str, Any], spelling: str) -> None:
    if spelling == "rope_parameters":
        raw = {**BASE, "rope_parameters": rope}
    else:
        theta = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
        raw = {**BASE, **theta, "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"}}
    library = LlamaConfig(**{k: (dict(v) if isinstance(v, dict) else v) for k, v in raw.items() if k != "model_type"})
    parsed = parse_native_config(raw).rope
    if rope["rope_type"] == "default":
        expected, scale = LlamaRotaryEmbedding.compute_default_rope_parameters(library)
    else:
        function = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
        expected, scale = function(library, torch.device("cpu"), seq_len=4096)
    ours, our_scale = inverse_frequencies(parsed, 4096)
    assert torch.equal(ours, expected)
    assert our_scale == scale
    if rope["rope_type"] in ("longrope", "dynamic"):
        for length in (1024, 1025, 5000, 9000):
            expected, _ = function(library, torch.device("cpu"), seq_len=length)
            assert torch.equal(inverse_frequencies(parsed, length)[0], expected), length


SCALED: list[tuple[dict[str, Any], int, int]] = [
    # (settings with a `max_position_embeddings` of 4096, context, longest context that can be asked for)
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384, 16384),
    ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 4096}, 16384, 16384),
    ({"rope_type": "yarn", "factor": 2.0}, 8192, 8192),
    # the scaled one is named
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096, 4096),
    ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}, 4096, 4096),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 4096, 32768),
    ({"rope_type": "linear", "factor": 2.5}, 10240, 10240),
    ({"rope_type": "dynamic", "factor": 2.5}, 4096, 10240),
    ({"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 1024}, 4096, 8192),
    ({"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 4096}, 4096, 32768),
    ({"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 4096, **LONG}, 4096, 16384),
    ({"rope_type": "longrope", "original_max_position_embeddings": 1024, **LONG}, 4096, 4096),
    ({"rope_type": "default"}, 4096, 4096),
]


@pytest.mark.parametrize(("rope", "context", "longest"), SCALED, ids=str)
def test_the_context_is_the_scaled_one(tmp_path: Path, rope: dict[str, Any], context: int, longest: int) -> None:
    """On both paths: the native decoder's, and that of the library's own configuration."""
    for spelling in ("rope_parameters", "rope_scaling"):
        raw = {**BASE, "rope_theta": 10_000.0, spelling: dict(rope)}
        contexts = parse_native_config(raw).contexts
        assert (contexts.default, contexts.longest) == (context, longest)
        (tmp_path / "config.json").write_text(json.dumps(raw))
        folder = ModelFolder(tmp_path, raw, (), {}, "", {})
        for asked, found in ((None, context), (longest, longest), (9, 9)):
            assert contexts.chosen(asked) == found
            assert read_transformers_config(folder, asked)[1] == found
        problem = rf"past the model's context of {longest}\. Give less, or scale it: --rope-scaling '.*yarn.*{longest}"
        with pytest.raises(ModelError, match=problem):
            contexts.chosen(longest + 1)
        with pytest.raises(ModelError, match=problem):
            read_transformers_config(folder, longest + 1)


def test_top_level_original_context_has_precedence() -> None:
    rope = {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 9}
    raw = {**BASE, "rope_parameters": rope, "original_max_position_embeddings": 2048}
    assert parse_native_config(raw).rope.original_positions == 2048


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "longrope", "factor": 8.0, "short_factor": [1.0], "long_factor": [1.0]}, "short_factor"),
        ({"rope_type": "yarn", "factor": "wide"}, "yarn"),
    ],
)
def test_error_names_invalid_settings(rope: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        parse_native_config({**BASE, "rope_scaling": rope})
    assert not isinstance(caught.value, NativeUnsupported)


@pytest.mark.parametrize("rope", [{"rope_type": "spiral"}, {"type": "su"}])
def test_the_library_decides_on_other_types(rope: dict[str, Any], tmp_path: Path) -> None:
    raw = {**BASE, "rope_scaling": rope}
    assert choose_implementation(raw, "auto") == "transformers"
    with pytest.raises(ModelError, match=r"does not have the rope type '\w+'. Use --model-impl transformers"):
        choose_implementation(raw, "native")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=r"rope type '\w+' is not supported. Supported: default, .*proportional"):
        read_transformers_config(ModelFolder(tmp_path, raw, (), {}, "", {}), None)


@pytest.mark.parametrize("extra", [{"partial_rotary_factor": 0.5}, {"hidden_act": "laurel"}])
def test_features_of_the_library_path_are_not_native(extra: dict[str, Any]) -> None:
    with pytest.raises(NativeUnsupported):
        parse_native_config({**BASE, **extra})


@examples(40)
@given(
    tokens=st.integers(1, 9),
    heads=st.integers(1, 5),
    half=st.integers(1, 33),
    scale=st.floats(0.5, 2),
    seed=st.integers(0, 99),
)
def test_rotation_is_complex_multiplication(tokens: int, heads: int, half: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads, 2 * half, generator=generator, dtype=torch.float64)
    positions = torch.randint(0, 1000, (tokens,), generator=generator)
    inv_freq = torch.rand(half, generator=generator)
    cos, sin = rope_tables(inv_freq, scale, positions, torch.float64)
    angles = (positions[:, None].float() * inv_freq).double()[:, None]  # float32 products, as in transformers
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.full_like(angles, scale), angles)
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(apply_rope(x, cos, sin), expected, atol=1e-5, rtol=1e-5)


def test_rotation_accepts_slices_and_does_not_change_its_input() -> None:
    x = torch.randn(5, 7, 16)
    before = x.clone()
    tables = rope_tables(torch.rand(8), 1.0, torch.arange(5), torch.float32)
    part = apply_rope(x[:, 2:6], *tables)
    assert part.is_contiguous()
    assert torch.equal(x, before)
    assert torch.equal(part, apply_rope(x[:, 2:6].contiguous(), *tables))
    assert math.isclose(float(part[0].norm()), float(x[0, 2:6].norm()), rel_tol=1e-6)
