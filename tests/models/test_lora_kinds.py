"""Adapters that change more than linear layers by low rank, on both paths against peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.models.load import load_model
from tests.models.adapters import KINDS, adapted_logits, save_adapter
from tests.models.dense_attention import DenseCache
from tests.models.packed import packed_logits, random_sequences
from tests.models.tiny import VOCAB, save_tiny

QV = ["q_proj", "v_proj"]
MORE: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True, "r": 3, "lora_alpha": 7, "target_modules": [*QV, "o_proj", "up_proj", "down_proj"]},
    "dora all": {"use_dora": True, "target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"k_proj": 2}},
    "ends": {"r": 4, "lora_alpha": 9, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "dora ends": {"r": 4, "use_dora": True, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "saved": {"r": 2, "target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]},
    "saved head": {"r": 2, "target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": QV, "trainable_token_indices": [3, 17, 200, *range(30, 90)]},
    "tokens of each": {
        "target_modules": QV,
        "trainable_token_indices": {"embed_tokens": [*range(9, 80)], "lm_head": [4]},
    },
}
CASES = [
    *((name, path, {}) for name in ("llama", "qwen2") for path in ("native", "transformers")),
    *(("llama", path, {"tie_word_embeddings": True}) for path in ("native", "transformers")),
    ("gemma3_text", "transformers", {}),
]


def check(base: Path, implementation: Any, kinds: dict[str, dict[str, Any]], folder: Path) -> None:
    """Sequences of every adapter, and one without, in packed steps."""
    paths = [save_adapter(base, folder / f"a{i}", seed=i, **kind) for i, kind in enumerate(kinds.values())]
    lora = [(name, str(path)) for name, path in zip(kinds, paths, strict=True)]
    model = load_model(base, implementation=implementation, dtype="float32", device="cpu", lora=lora)
    adapters = [-1, *range(len(paths)), -1]
    sequences = random_sequences(VOCAB, lengths=tuple(5 + 3 * (i % 4) for i in range(len(adapters))))
    got = packed_logits(model, sequences, DenseCache().step, adapters=adapters)
    plain = adapted_logits(base, None, sequences)
    for i, adapter in enumerate(adapters):
        expected = plain[i] if adapter < 0 else adapted_logits(base, paths[adapter], [sequences[i]])[0]
        torch.testing.assert_close(
            got[i], expected, atol=2e-4, rtol=1e-4, msg=lambda m, i=i: f"{lora[adapters[i]]}: {m}"
        )
        assert adapter < 0 or (expected - plain[i]).abs().max() > 0.05, "the adapter has no effect"
    without = packed_logits(model, sequences, DenseCache().step)
    for ours, theirs in zip(without, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.field("lora_path")
@pytest.mark.parametrize(("model_type", "implementation", "options"), CASES, ids=str)
def test_logits_equal_peft(tmp_path: Path, model_type: str, implementation: Any, options: dict[str, Any]) -> None:
    base = save_tiny(model_type, tmp_path / "base", **options)
    check(base, implementation, {**MORE, "plain": KINDS["two"]}, tmp_path)


def test_any_module_of_a_library_model_may_be_replaced(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base")
    kinds = {
        "norms": {"target_modules": QV, "modules_to_save": ["norm", "input_layernorm"]},
        "blocks": {"target_modules": QV, "modules_to_save": ["mlp", "o_proj"]},
    }
    check(base, "auto", kinds, tmp_path)
