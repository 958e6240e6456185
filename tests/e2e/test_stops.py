"""Stops of every kind through the engine, compared with a brute-force search over the full output."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from batchgen import Engine, SamplingParams
from tests.e2e.engines import generate, outcomes
from tests.e2e.rows import prompts, rows_of, write_lines
from tests.e2e.runner import run
from tests.text.test_stops import brute_force

STRINGS = ["a", "th", "e ", "\n", "ó", "|", "<|im_end|>", "ing"]
PATTERNS = [r"[0-9]+", r"a.*e", r"[^\x00-\x7f]", r"\bth", r"(?i)[a-z]{3,}", r"\s\S+\s", r"(?<=o)[a-z]", r"\W$", "never"]
SLOW = {"stop_regex": "(?=.)" + "[^\ue000]+" * 4 + "[\ue000\ue001]", "ignore_eos": True}
"""A pattern that never matches, whose search takes some milliseconds."""


def stopping_rows(count: int) -> list[dict[str, Any]]:
    """Rows with random combinations of stops; `id` and `seed` make their noise independent of the stops."""
    rng = Random(3)
    rows = []
    for i, text in enumerate(prompts(count, 8)):
        row: dict[str, Any] = {"id": str(i), "text": text, "temperature": 1.3, "top_k": -1, "top_p": 1.0, "seed": i}
        row |= {"max_new_tokens": rng.randint(1, 70), "n": rng.choice([1, 1, 2])}
        stops = {
            "stop": rng.sample(STRINGS, rng.choice([0, 0, 1, 3])),
            "stop_regex": rng.sample(PATTERNS, rng.choice([0, 1, 2])),
            "stop_token_ids": rng.sample(range(360), rng.choice([0, 0, 20])),
            "min_new_tokens": rng.choice([0, 0, 4]) if row["max_new_tokens"] > 4 else 0,
            "ignore_eos": rng.random() < 0.5,
            "no_stop_trim": rng.random() < 0.5,
            "skip_special_tokens": rng.random() < 0.5,
            "spaces_between_special_tokens": rng.random() < 0.5,
        }
        rows.append({**row, **stops})
    return rows


@pytest.mark.field("stop_regex")
def test_an_incomplete_character_is_searched_at_the_end_of_a_row(engine: Engine) -> None:
    pieces = engine.tokenizer.vocab_bytes
    assert pieces is not None
    half = next(token for token in range(engine.tokenizer.vocab_size) if pieces[token] == b"\xc3")
    row = {"text": "a", "allowed_token_ids": [half], "stop_regex": r"[^\w\s]"}
    for limit, tokens in ((1, 1), (2, 2), (9, 2)):
        (done,) = generate(engine, [{**row, "max_new_tokens": limit}])
        assert (len(done.output_ids or ()), done.stop_kind, done.matched_text) == (tokens, "regex", "\ufffd")


@pytest.mark.field(
    "stop", "stop_regex", "stop_token_ids", "min_new_tokens", "ignore_eos", "no_stop_trim", "skip_special_tokens",
    "spaces_between_special_tokens", "n",
)  # fmt: skip
def test_stops_equal_a_brute_force_search_of_the_full_output(engine: Engine) -> None:
    rows = stopping_rows(90)
    # Stop ids are masked until min_new_tokens: a row with both samples other tokens, so compare it with its own output.
    unstopped = [
        {**row, "stop": [], "stop_regex": [], "stop_token_ids": [], "min_new_tokens": 0, "ignore_eos": True}
        for row in rows
    ]
    kinds = set()
    for whole, done in zip(generate(engine, unstopped), generate(engine, rows), strict=True):
        row = rows[done.row_index]
        names = set(SamplingParams.__dataclass_fields__) & row.keys()
        params = SamplingParams(**{name: row[name] for name in names})
        masked = params.min_new_tokens and not (params.ignore_eos and not params.stop_token_ids)
        ids = list((done if masked else whole).output_ids or [])
        limit = row["max_new_tokens"]
        count, expected = brute_force(engine.tokenizer, ids, params, engine.tokenizer.eos_ids, limit)
        assert (done.text, done.finish_reason, done.stop_kind, done.matched_stop, done.matched_text) == (
            expected.text, expected.finish_reason, expected.stop_kind, expected.matched_stop, expected.matched_text,
        )  # fmt: skip
        assert list(done.output_ids or []) == ids[:count]
        kinds.add(done.stop_kind)
    assert kinds == {None, "eos", "token", "string", "regex"}


@pytest.mark.field("stop_regex")
def test_a_pattern_that_times_out_fails_only_its_row(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.text.stops.search.SEARCH_SECONDS", 0.05)
    monkeypatch.setattr("batchgen.text.stops.search.SEARCH_SECONDS_PER_TOKEN", 0.0)
    rows = stopping_rows(12)
    expected = generate(engine, rows)
    rows[5] |= {"stop": [], "stop_token_ids": [], "min_new_tokens": 0, "max_new_tokens": 200, "n": 2, **SLOW}
    done = generate(engine, rows)
    (failed,) = (c for c in done if c.row_index == 5)
    assert failed.error is not None
    assert (failed.error.code, failed.error.param, failed.sample_index) == ("invalid_field", "stop_regex", 0)
    assert "takes too long" in failed.error.message
    assert outcomes([c for c in done if c.row_index != 5]) == outcomes([c for c in expected if c.row_index != 5])


@pytest.mark.field("stop_regex")
def test_run_wide_and_invalid_patterns(model: Path, tmp_path: Path) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True}
    rows = [
        {"id": "run-wide", "text": "Hello", **greedy},
        {"id": "own", "text": "Hello", **greedy, "stop_regex": "zzz"},
        {"id": "wrong", "text": "Hello", **greedy, "stop_regex": ["a", "(b"]},
        {"id": "empty", "text": "Hello", "sampling_params": {**greedy, "stop_regex": "b*"}},
    ]
    source = write_lines(tmp_path / "in.jsonl", rows)
    command = ["run", source, "--model", model, "--dtype", "float32", "-o", "out.parquet"]
    run([*command, "--stop-regex", r"\S", "--stop-regex", r"\s"], tmp_path)
    found = {row["id"]: row for row in rows_of(tmp_path / "out.parquet")}
    assert found["run-wide"]["stop_kind"] == "regex"
    assert found["run-wide"]["matched_stop"] in (r"\S", r"\s")
    assert found["run-wide"]["completion_tokens"] == 1
    assert found["own"]["finish_reason"] == "length"
    assert found["wrong"]["error"]["code"] == found["empty"]["error"]["code"] == "invalid_field"
    assert "missing ) at position 2" in found["wrong"]["error"]["message"]
    assert "empty text" in found["empty"]["error"]["message"]
    refused = run([*command, "--overwrite", "--stop-regex", "(b"], tmp_path, expect=2).stderr
    assert "--stop-regex" in refused
    assert "position 2" in refused
