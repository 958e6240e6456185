"""Shared prompt tokens are computed once: the engine's counts, compared with a brute-force trie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen.text.tokens.tokenizer import Tokenizer
from tests.e2e.rows import prompts, rows_of, write_lines
from tests.e2e.runner import run


def trie_nodes(sequences: list[list[int]]) -> int:
    """Number of distinct non-empty prefixes."""
    return len({tuple(ids[:end]) for ids in sequences for end in range(1, len(ids) + 1)})


def distinct_rows() -> list[dict[str, Any]]:
    """Rows with distinct prompts that share prefixes."""
    texts = list(dict.fromkeys(prompts(300, 6)))
    return [{"id": str(i), "text": text, "temperature": 0, "max_new_tokens": 6} for i, text in enumerate(texts)]


@pytest.mark.field("text")
def test_the_job_computes_the_distinct_tokens(model: Path, tmp_path: Path) -> None:
    rows = distinct_rows()
    source = write_lines(tmp_path / "in.jsonl", rows)
    arguments = ["run", source, "-o", "out.parquet", "--model", model, "--dtype", "float32", "--report", "-"]
    report = run([*arguments, "--include-prompt-ids"], tmp_path).report
    assert list(report["seconds"]) == ["starting", "reading", "loading", "planning", "generating", "writing"]
    output = rows_of(tmp_path / "out.parquet")
    encoded = Tokenizer.load(model).encode([row["text"] for row in rows])
    assert [row["prompt_ids"] for row in output] == encoded
    nodes = trie_nodes(encoded)
    assert nodes < report["prompt_tokens"] / 3, "these prompts share much"
    assert report["prompt_tokens"] == sum(map(len, encoded)) == sum(row["prompt_tokens"] for row in output)
    assert report["distinct_prompt_tokens"] == nodes
    assert report["engine"]["prompt_tokens"] == nodes
    assert report["engine"]["recomputed_tokens"] == 0
    assert report["engine"]["writer_stalls"] == 0 < report["engine"]["writer_peak_bytes"]
    assert report["computed_prompt_tokens"] == nodes + report["engine"]["recomputed_last_tokens"]
    assert sum(row["prompt_tokens"] - row["cached_tokens"] for row in output) == nodes
    assert report["cached_tokens"] == report["prompt_tokens"] - nodes


def test_identical_greedy_rows_are_generated_once(model: Path, tmp_path: Path) -> None:
    same: dict[str, Any] = {"text": "The quick brown fox", "temperature": 0, "max_new_tokens": 10}
    rows = [
        {"id": "a", **same},
        {"id": "drawn", **same, "temperature": 1.0},
        {"id": "b", **same, "note": "carried"},
        {"id": "shorter", **same, "max_new_tokens": 9},
        {"id": "c", **same, "seed": 5},
        {"id": "logprobs", **same, "return_logprob": True},
        {"id": "d", **same},
    ]
    source = write_lines(tmp_path / "in.jsonl", rows)
    arguments = ["run", source, "--model", model, "--dtype", "float32", "--report", "-"]
    report = run([*arguments, "-o", "out.parquet"], tmp_path).report
    output = {row["id"]: row for row in rows_of(tmp_path / "out.parquet")}
    assert {name: row["dedup_of"] for name, row in output.items() if row["dedup_of"] is not None} == dict.fromkeys(
        "bcd", 0
    )
    for name in "bcd":
        assert output[name]["output_ids"] == output["a"]["output_ids"]
        assert output[name]["text"] == output["a"]["text"]
    assert json.loads(output["b"]["extra"]) == {"note": "carried"}
    assert output["c"]["seed"] == 5
    copied = sum(output[name]["completion_tokens"] for name in "bcd")
    assert report["engine"]["sampled_tokens"] == report["completion_tokens"] - copied
    plain = run([*arguments, "-o", "plain.parquet", "--no-dedup"], tmp_path).report
    assert plain["engine"]["sampled_tokens"] == plain["completion_tokens"] == report["completion_tokens"]
    assert [row["dedup_of"] for row in rows_of(tmp_path / "plain.parquet")] == [None] * len(rows)
