"""Scoring rows and prompt logprobs through files: the output's columns, resuming, and the estimates of `check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen.text.tokens.tokenizer import Tokenizer
from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import run

SCORING = pytest.mark.field("completion", "completions")
F32 = ["--dtype", "float32"]


@SCORING
def test_columns_of_scoring_rows(model: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "one", "text": "The quick", "completion": " brown fox", "label": 1},
        {"id": "more", "text": ["The quick", "Hello there"], "completions": [" brown fox", [7, 8], " how"]},
        {"id": "chat", "messages": [{"role": "user", "content": "Hi"}], "completion": " you"},
        {"id": "ids", "input_ids": [5, 6], "completion": [7]},
        {"id": "plain", "text": "The quick", "temperature": 0, "max_new_tokens": 3},
        {"id": "bad", "text": "The quick", "completion": " brown", "n": 2},
        {"id": "long", "input_ids": [5] * 200, "completion": [6] * 100},
    ]
    write_lines(tmp_path / "in.jsonl", rows)
    arguments = ["run", "in.jsonl", "-o", "out.parquet", "--model", model, *F32, "--report", "-"]
    report = run([*arguments, "--include-prompt", "--include-prompt-ids", "--n", "2"], tmp_path).report
    found = rows_of(tmp_path / "out.parquet")
    keys = [(row["id"], row["prompt_index"], row["sample_index"]) for row in found]
    assert keys == [
        *(("one", 0, 0), ("more", 0, 0), ("more", 1, 0), ("chat", 0, 0), ("ids", 0, 0)),
        *(("plain", 0, 0), ("plain", 0, 1), ("bad", 0, 0), ("long", 0, 0)),
    ]
    scored, (bad, long) = found[:5], found[-2:]
    assert (bad["error"]["code"], bad["error"]["param"]) == ("invalid_field", "n")
    assert long["error"]["code"] == "context_length_exceeded"
    assert json.loads(scored[0]["extra"]) == {"label": 1}
    for row in scored:
        assert (row["status"], row["finish_reason"], row["completion_tokens"]) == ("ok", "length", 0)
        assert row["text"] is row["output_ids"] is row["output_logprobs"] is row["seed"] is row["dedup_of"] is None
        assert len(row["score_logprobs"]) == sum(score["tokens"] for score in row["scores"])
        assert len(row["prompt_ids"]) == row["prompt_tokens"]
        for score in row["scores"]:
            assert score["mean"] == pytest.approx(score["sum"] / score["tokens"])
    assert [row["prompt"] for row in scored[:3]] == ["<s>The quick", "<s>The quick", "<s>Hello there"]
    assert scored[0]["scores"][0] == pytest.approx(scored[1]["scores"][0])
    (whole,) = Tokenizer.load(model).encode(["The quick brown fox"])
    assert scored[0]["prompt_ids"] == whole
    assert [score["tokens"] for score in scored[4]["scores"]] == [1]
    assert found[5]["scores"] is found[5]["score_logprobs"] is None
    done = [row for row in found if row["status"] == "ok"]
    assert (
        sum(row["prompt_tokens"] - row["cached_tokens"] for row in done if not row["sample_index"])
        == (report["distinct_prompt_tokens"])
    )


def test_a_row_is_done_once_all_texts_of_its_prompts_are_scored(model: Path, tmp_path: Path) -> None:
    texts = [" and", " on", [7, 8]]
    rows: list[dict[str, Any]] = [{"text": f"The quick {i}", "completions": texts} for i in range(10)]
    rows += [{"text": [f"The quick {i}", "Hello there"], "completions": texts} for i in range(10)]
    write_lines(tmp_path / "in.jsonl", rows)
    done = run(["run", "in.jsonl", "--model", model, *F32, "--progress", "json"], tmp_path)
    states = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"phase')]
    assert (states[-1]["rows"], states[-1]["rows_done"]) == (20, 20)


@SCORING
def test_check_counts_the_tokens_and_bytes_of_scoring_rows(model: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"input_ids": [5] * 40, "completions": [[6] * 10, [7] * 5]},
        {"input_ids": [5] * 40, "temperature": 0, "max_new_tokens": 2, "return_logprob": True, "logprob_start_len": 0},
    ]
    source = write_lines(tmp_path / "in.jsonl", rows)
    report = json.loads(run(["check", source, "--model", model, "--json"], tmp_path).stdout)
    assert (report["rows_ok"], report["max_completion_tokens"]) == (2, 2)
    assert report["prompt_tokens"] == 50 + 45 + 40
    assert report["distinct_prompt_tokens"] == 40 + 10 + 5
    without = write_lines(tmp_path / "less.jsonl", [{**rows[0], "completions": [[7] * 5]}, rows[1]])
    less = json.loads(run(["check", without, "--model", model, "--json"], tmp_path).stdout)
    assert report["estimated_output_bytes"] - less["estimated_output_bytes"] == 21 + 4 * 10
