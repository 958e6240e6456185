"""Layers with multi-head latent attention: what they store, and their logits against the library's expanded form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from batchgen.kernels.cpu.library import loaded
from batchgen.kernels.types import LayerKV
from tests.models.adapters import adapted_logits, save_adapter
from tests.models.loading import inspect_model, load_model
from tests.models.packed import PagedCache, packed_logits, random_sequences
from tests.models.tiny import VOCAB, save_tiny, tiny_model
from tests.models.tiny_packed import save_packed

RUN = {
    "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
    "hy_v4", "kimi_linear", "longcat_flash", "minicpm3", "mistral4", "youtu",
}  # fmt: skip
"""Folders of the library whose modules expand a latent. Hybrids run if all of their layers are attention."""
OTHERS = {"dots3_note", "glm5_next", "hy_v4_vl", "mistral_large4"}
"""The same of models whose layers differ in size, that have no small text decoder alone, or that are refused."""
PACKED = {"mistral4", "kimi_k25"}
COMMON = {"deepseek_v2", "glm4_moe_lite", "kimi_k25"}
"""Types that every run of the tests covers."""
LATENT = LayerKV(1, 16 + 8, 16, latent=True)


def test_every_module_of_the_library_with_a_latent_is_listed() -> None:
    models = Path(transformers.__file__).parent / "models"
    found = {path.parent.name for path in models.glob("*/modeling_*.py") if "def expand_kv(" in path.read_text("utf-8")}
    assert found <= RUN | OTHERS
    assert {"deepseek_v2", "deepseek_v3", "glm4_moe_lite"} <= found


@pytest.mark.parametrize(
    "model_type",
    [
        name if name in COMMON else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted({*RUN, *PACKED, "sarvam_mla"})
    ],
)
def test_a_layer_stores_the_latent_and_the_rotated_key(model_type: str, tmp_path: Path) -> None:
    """16 + 8 numbers; the keys and values of four heads would take 4 x (24 + 12)."""
    (save_packed if model_type in PACKED else save_tiny)(model_type, tmp_path)
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        spec = inspect_model(tmp_path, dtype=dtype, device="cpu")
        assert set(spec.kv_layers) == {LATENT}
        assert spec.kv_bytes_per_token == (16 + 8) * spec.num_layers * width


@pytest.mark.skipif(not loaded(), reason="no C++ compiler here")
@pytest.mark.parametrize("overrides", [{}, {"q_lora_rank": None}, {"num_attention_heads": 8, "num_key_value_heads": 8}])
def test_compiled_attention_equals_eager(overrides: dict[str, Any], tmp_path: Path) -> None:
    """Few and many query rows of one key head; queries with and without a latent."""
    save_tiny("deepseek_v3", tmp_path, **overrides)
    model, reference = load_model(tmp_path, dtype="float32", device="cpu"), tiny_model("deepseek_v3", **overrides)
    sequences = random_sequences(VOCAB)
    got = packed_logits(model, sequences, PagedCache(model.spec, len(sequences)).compiled_step)
    with torch.no_grad():
        expected = [reference(ids[None], use_cache=False).logits[0] for ids in sequences]
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_adapters_of_the_projections(tmp_path: Path) -> None:
    """Of all of them, of the folded one in some layers, and of those around it, in one batch."""
    base = save_tiny("deepseek_v3", tmp_path / "base")
    kinds: list[dict[str, Any]] = [
        {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"], "r": 3},
        {"target_modules": ["kv_b_proj"], "layers_to_transform": [0, 2], "r": 5},
        {"target_modules": ["q_b_proj", "kv_a_proj_with_mqa", "o_proj"]},
    ]
    paths = [save_adapter(base, tmp_path / f"a{i}", seed=i, **kind) for i, kind in enumerate(kinds)]
    named = [(path.name, str(path)) for path in paths]
    model = load_model(base, dtype="float32", device="cpu", lora=named)
    assert set(model.spec.kv_layers) == {LATENT}
    sequences = random_sequences(VOCAB, lengths=(3, 19, 11, 26))
    got = packed_logits(model, sequences, PagedCache(model.spec, 4).step, adapters=[2, 1, 0, -1])
    plain = adapted_logits(base, None, sequences)
    torch.testing.assert_close(got[3], plain[3], atol=1e-4, rtol=1e-4)
    for i, path in enumerate(reversed(paths)):
        adapted = adapted_logits(base, path, [sequences[i]])[0]
        torch.testing.assert_close(got[i], adapted, atol=1e-4, rtol=1e-4)
        assert (adapted - plain[i]).abs().max() > 0.1, "the adapter has no effect"
