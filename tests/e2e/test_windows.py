"""`check` and `run` of a model with sliding windows: bytes of keys and values by kind of layers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.rows import write_lines
from tests.e2e.runner import run
from tests.engine.reference import save_with_words, save_word_tokenizer, shared_prefix_prompts
from tests.models.tiny import VOCAB, save_tiny

PAGE_BYTES = 4 * 2 * 2 * 16 * 4
"""Of a layer: 4 positions, keys and values of 2 heads of 16 float32 numbers."""


@pytest.mark.parametrize(("model_type", "full", "windowed"), [("qwen2", 1, 2), ("mistral", 0, 3), ("llama", 3, 0)])
def test_the_memory_of_both_kinds_of_layers(model_type: str, full: int, windowed: int, tmp_path: Path) -> None:
    folder = save_with_words(model_type, tmp_path / "model")
    rows = [
        {"input_ids": prompt, "max_new_tokens": 12, "ignore_eos": True}
        for prompt in shared_prefix_prompts(8, VOCAB, seed=1)
    ]
    write_lines(tmp_path / "in.jsonl", rows)
    options = ["in.jsonl", "--model", folder, "--dtype", "float32", "--page-size", 4, "--max-tokens-per-step", 8]
    planned = run(["check", *options, "--max-num-seqs", 4, "--json"], tmp_path).report
    done = run(["run", *options, "--max-num-seqs", 4, "-o", "out.parquet", "--report", "-"], tmp_path)
    kinds = [kind for kind, layers in (("full", full), ("window", windowed)) if layers]
    for report in (planned, done.report):
        by_group = report["kv_peak_bytes_by_group"]
        assert list(by_group) == kinds
        assert sum(by_group.values()) == report["kv_peak_bytes"]
    engine, by_group = done.report["engine"], done.report["kv_peak_bytes_by_group"]
    if full:
        assert by_group["full"] == engine["peak_pages"] * full * PAGE_BYTES
    if windowed:
        assert by_group["window"] == engine["peak_window_pages"] * windowed * PAGE_BYTES
        assert planned["kv_peak_bytes_by_group"] == by_group
        assert engine["peak_window_pages"] < engine["peak_pages"]
    assert ("(full " in done.stderr) == bool(full and windowed)


@pytest.mark.parametrize(("model_type", "seed"), [("qwen2", 0), ("mistral", 1), ("llama4_text", 2)])
def test_the_planned_peak_is_what_a_run_uses(model_type: str, seed: int, tmp_path: Path) -> None:
    """Prompts that are longer than the window and than a chunk, shared prefixes, several samples."""
    chunk = {"attention_chunk_size": 16, "no_rope_layers": [1, 0, 1]} if model_type == "llama4_text" else {}
    folder, rng = save_tiny(model_type, tmp_path / "model", **chunk), random.Random(seed)
    save_word_tokenizer(folder, VOCAB)
    root = rng.choices(range(5, VOCAB), k=60)
    rows = [
        {
            "input_ids": root[: rng.choice([0, 20, 60])] + rng.choices(range(5, VOCAB), k=rng.randint(1, 70)),
            "sampling_params": {"max_new_tokens": rng.randint(1, 12), "ignore_eos": True, "n": rng.choice([1, 1, 3])},
        }
        for _ in range(12)
    ]
    write_lines(tmp_path / "in.jsonl", rows)
    limits = {"--page-size": [4, 16], "--max-tokens-per-step": [16, 64, 512], "--max-num-seqs": [2, 5, 9]}
    options = [word for name, values in limits.items() for word in (name, rng.choice(values))]
    command = ["in.jsonl", "--model", folder, "--attention", "torch", *options]
    planned = run(["check", *command, "--json"], tmp_path).report
    used = run(["run", *command, "-o", "out.parquet", "--report", "-"], tmp_path).report
    assert used["kv_peak_bytes"] > 0
    for key in ("kv_peak_bytes", "kv_peak_bytes_by_group"):
        assert planned[key] == used[key]
