"""Native decoders that several ranks compute equal those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.kernels.ranks import Ranks
from batchgen.models.base import Model
from tests.kernels.thread_ranks import in_ranks
from tests.models.adapters import KINDS, save_adapter
from tests.models.loading import load_model
from tests.models.packed import PagedCache, packed_logits, random_sequences
from tests.models.quantised import CASES, save_quantised
from tests.models.tiny import VOCAB, save_tiny

torch.set_num_threads(1)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": False}),
    "one key head": ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
    "odd sizes": ("mistral", {"intermediate_size": 150, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "head norms": ("qwen3", {"use_sliding_window": False, "head_dim": 32}),
}


def logits(model: Model, ranks: Ranks, adapters: list[int] | None = None) -> list[Tensor]:
    sequences = random_sequences(VOCAB)
    own = packed_logits(model, sequences, PagedCache(model.spec, len(sequences)).step, adapters=adapters)
    return [ranks.whole(each, model.spec.vocab_size, 32) for each in own]


def assert_equal_to_one(
    folder: Path, count: int, adapters: list[int] | None = None, atol: float = 1e-4, **options: Any
) -> list[Model]:
    options = {"implementation": "native", "dtype": "float32", "device": "cpu", **options}
    expected = logits(load_model(folder, **options), Ranks(), adapters)

    def run(ranks: Ranks) -> tuple[Model, list[Tensor]]:
        model = load_model(folder, **options, ranks=ranks)
        return model, logits(model, ranks, adapters)

    results = in_ranks(count, run)
    for _, got in results:
        for one, whole in zip(got, expected, strict=True):
            torch.testing.assert_close(one, whole, atol=atol, rtol=1e-4)
    return [model for model, _ in results]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name: str, count: int, tmp_path: Path) -> None:
    model_type, config = CONFIGS[name]
    folder = save_tiny(model_type, tmp_path, **config)
    models = assert_equal_to_one(folder, count)
    whole = load_model(folder, dtype="float32", device="cpu").spec
    held = sum(model.spec.parameters for model in models)
    norms = whole.hidden_size * (2 * whole.num_layers + 1)
    assert held - whole.parameters < count * (norms + 2 * whole.num_layers * whole.hidden_size * 80)
    assert all(model.spec.kv_bytes_per_token <= whole.kv_bytes_per_token for model in models)


def test_a_rank_reads_no_other_weights(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path, hidden_size=256, intermediate_size=1024, num_hidden_layers=2)
    load_model(folder, dtype="float32", device="cpu")  # files of modules are read at the first use

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar

    for rank in range(4):
        before = bytes_read()
        spec = load_model(folder, dtype="float32", device="cpu", ranks=Ranks(rank, 4)).spec
        weights = spec.parameters * 4
        assert weights <= bytes_read() - before < weights + (1 << 17)


@pytest.mark.parametrize("count", [2, 3])
def test_adapters(count: int, tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base", attention_bias=True)
    kinds = [
        KINDS["all"],
        {"use_dora": True, "target_modules": "all-linear"},
        {"r": 2, "target_modules": ["embed_tokens", "lm_head", "o_proj"]},
        {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ]
    paths = [save_adapter(base, tmp_path / f"a{i}", seed=i, **kind) for i, kind in enumerate(kinds)]
    adapters = [i % (len(paths) + 1) - 1 for i in range(len(random_sequences(VOCAB)))]
    lora = [(f"a{i}", str(path)) for i, path in enumerate(paths)]
    assert_equal_to_one(base, count, adapters, lora=lora)


@pytest.mark.parametrize("name", CASES)
def test_quantised_checkpoints(name: str, tmp_path: Path) -> None:
    quantised, _ = save_quantised(CASES[name], "llama", tmp_path, num_hidden_layers=1)
    assert_equal_to_one(quantised, 2)


def test_stored_integers(tmp_path: Path) -> None:
    name = next(name for name in CASES if "int8" in name.lower())
    quantised, _ = save_quantised(CASES[name], "llama", tmp_path, num_hidden_layers=1)
    # Each rank rounds its inputs of a product that is summed by their own largest.
    assert_equal_to_one(quantised, 2, atol=0.15, form="integers")
