"""Many rows with bad ones of every kind: each has an error row in the output."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.e2e.model import CONTEXT
from tests.e2e.rows import prompts, rows_of, write_lines
from tests.e2e.runner import run

ROWS, BAD = 200, 24


@dataclass(frozen=True)
class Kind:
    """A kind of bad row: `make(id, text)` and the error of its output row."""

    code: str
    make: Callable[[str, str], bytes | dict[str, Any]]
    param: str | None
    message: str
    """Part of the error message."""
    keeps_id: bool = True
    """Whether the output row has the row's id."""
    text_id: str | None = None
    """The id in a line that is not JSON."""


KINDS = [
    Kind("invalid_json", lambda i, t: b'{"id": "x", "text": "a" "b"}', None, "column", False, "x"),
    Kind("invalid_unicode", lambda i, t: b'{"text": "caf\xe9"}', None, "byte 14", keeps_id=False),
    Kind("missing_prompt", lambda i, t: {"id": i, "txt": t}, None, "give it `text`"),
    Kind("ambiguous_prompt", lambda i, t: {"id": i, "text": t, "input_ids": [5, 6]}, "input_ids", "keep one of them"),
    Kind("empty_prompt", lambda i, t: {"id": i, "input_ids": []}, "input_ids", "give at least one"),
    Kind("invalid_field", lambda i, t: {"id": i, "text": t, "top_p": 1.5}, "top_p", "must be in (0, 1]"),
    Kind("unknown_field", lambda i, t: {"id": i, "text": t, "sampling_params": {"top_q": 1}}, "top_q", "did you mean"),
    Kind("unsupported_field", lambda i, t: {"id": i, "text": t, "image_data": "a.png"}, "image_data", "leave it out"),
    Kind("duplicate_id", lambda i, t: {"id": "the first", "text": t}, "id", "--on-duplicate-id suffix", keeps_id=False),
    Kind("token_out_of_range", lambda i, t: {"id": i, "input_ids": [5, 10**6]}, "input_ids", "vocabulary ends at"),
    Kind("context_length_exceeded", lambda i, t: {"id": i, "input_ids": [7] * CONTEXT}, None, "--truncate left"),
    Kind("unknown_adapter", lambda i, t: {"id": i, "text": t, "model": "*:french"}, "model", "--lora NAME=PATH"),
]
GOOD = {"temperature": 0, "max_new_tokens": 4}


def lines(rng: Random) -> tuple[list[bytes | dict[str, Any]], dict[int, Kind]]:
    """(the input's lines, index of each bad row -> its kind)"""
    bad = dict(zip(sorted(rng.sample(range(1, ROWS - 1), BAD - 1)), KINDS * 3, strict=False))
    texts = prompts(ROWS, 1)
    made: list[bytes | dict[str, Any]] = []
    for i in range(ROWS):
        name = f'id {i} ✓ \u2028 "x"'
        if i in bad:
            made.append(bad[i].make(name, texts[i]))
        else:
            made.append({"id": name, "text": texts[i], **GOOD, "where": {"line": i, "tags": ["ä", None, 1.5]}})
    made[0] = {"id": "the first", "text": texts[0], **GOOD, "where": {"line": 0, "tags": []}}
    return made, bad


def test_bad_rows_of_every_kind(model: Path, tmp_path: Path) -> None:
    rows, bad = lines(Random(50))
    source = write_lines(tmp_path / "in.jsonl", rows)
    whole = source.read_bytes()
    cut = json.dumps({"id": "last", "text": "cut off here"}).encode()[:-9]
    source.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]) + cut)
    bad[ROWS - 1] = Kind("truncated_input", lambda i, t: b"", None, "ends", False, "last")
    assert len(bad) == BAD
    assert {kind.code for kind in bad.values()} == {"truncated_input", *(kind.code for kind in KINDS)}

    done = run(["run", source, "-o", "out.parquet", "--model", model, "--dtype", "float32", "--report", "-"], tmp_path)

    output = rows_of(tmp_path / "out.parquet")
    assert [row["row_index"] for row in output] == list(range(ROWS))
    for i, row in enumerate(output):
        if i in bad:
            assert_bad(row, bad[i], rows[i], f"{source}, line {i + 1}: ")
        else:
            given = rows[i]
            assert isinstance(given, dict)
            assert row["status"] == "ok", row
            assert row["error"] is None
            assert row["id"] == given["id"]
            assert json.loads(row["extra"]) == {"where": given["where"]}
            assert 1 <= len(row["output_ids"]) == row["completion_tokens"] <= 4
    counts = {code: sum(kind.code == code for kind in bad.values()) for code in {k.code for k in bad.values()}}
    assert done.report["errors"] == counts
    assert (done.report["rows"], done.report["rows_ok"], done.report["rows_error"]) == (ROWS, ROWS - BAD, BAD)
    assert "Traceback" not in done.stderr
    assert "quick brown" not in done.stderr, "prompts are never logged"


def assert_bad(row: dict[str, Any], kind: Kind, given: bytes | dict[str, Any], place: str) -> None:
    assert row["status"] == "error"
    error = row["error"]
    assert (error["code"], error["param"]) == (kind.code, kind.param), error
    assert error["message"].startswith(place), error
    assert kind.message in error["message"], error
    if kind.param is not None:
        assert f"`{kind.param}`" in error["message"] or kind.param == "id", error
    if kind.keeps_id:
        assert isinstance(given, dict)
        assert row["id"] == given["id"]
    elif kind.code != "duplicate_id":
        assert row["id"] == kind.text_id or (kind.text_id is None and row["id"] == f"row-{row['row_index']}")
    empty = [name for name in row if row[name] is not None]
    assert set(empty) <= {"id", "row_index", "prompt_index", "sample_index", "status", "error", "extra"}


@pytest.mark.parametrize("policy", ["error", "allow"])
def test_merged_shards_with_skipped_rows_and_duplicate_ids(model: Path, tmp_path: Path, policy: str) -> None:
    rows = [{"id": f"r{i % 7}", ("txt" if i % 3 else "text"): "a", **GOOD} for i in range(8)]
    job = ["run", write_lines(tmp_path / "in.jsonl", rows), "--model", model, "--on-bad-row", "skip"]
    job += ["--on-duplicate-id", policy]
    for shard in ("0/2", "1/2"):
        run([*job, "-o", "shards", "--shard", shard], tmp_path)
    run(["merge", "shards", "-o", "joined.parquet"], tmp_path)
    report = run([*job, "-o", "joined.parquet", "--report", "-"], tmp_path).report
    assert [report[f"rows{name}"] for name in ("", "_ok", "_error", "_skipped")] == [8, 3, 0, 5]
    write_lines(tmp_path / "in.jsonl", [{"id": name, "text": "a", **GOOD} for name in ("a", "b", "c", "a")])
    for shard in ("0/2", "1/2"):
        run([*job, "-o", "twice", "--shard", shard], tmp_path)
    code = 2 if policy == "error" else 0
    done = run(["merge", "twice", "-o", "twice.parquet"], tmp_path, expect=code)
    if code:
        files = [f"twice/part-0000{i}-of-00002.parquet" for i in range(2)]
        assert f"id 'a' is used by row 0 in {files[0]} and by row 3 in {files[1]}" in done.stderr
        run(["merge", "twice", "-o", "twice.parquet", "--allow-duplicate-ids"], tmp_path)
    assert [row["id"] for row in rows_of(tmp_path / "twice.parquet")] == ["a", "b", "c", "a"]


def test_check_reports_rows_that_will_be_skipped(model: Path, tmp_path: Path) -> None:
    """`--on-bad-row skip` leaves rows out of the output, but reports them."""
    rows: list[bytes | dict[str, Any]] = [{"id": f"r{i}", "text": "a", **GOOD} for i in range(4)]
    rows += [{"id": "empty", "txt": "a"}, b"[1, 2]", {"id": "hot", "text": "a", "top_p": 1.5}]
    rows += [{"id": f"e{i}", "txt": "a"} for i in range(20)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    skip = [source, "--model", model, "--on-bad-row", "skip"]
    report = json.loads(run(["check", *skip, "--json"], tmp_path).stdout)
    assert [report[f"rows{name}"] for name in ("", "_ok", "_error", "_skipped")] == [27, 4, 0, 23]
    assert report["errors"] == {"missing_prompt": 21, "invalid_json": 1, "invalid_field": 1}
    assert report["row_errors"][0]["message"].startswith(f"{source}, line 5: ")
    text = run(["check", *skip], tmp_path).stdout
    assert text.startswith("rows            27 (ok 4, errors 0, skipped 23)\n")
    assert f"row 6 (id 'hot'): invalid_field: {source}, line 7: " in text
    assert f"  21 rows (4, 7, 8, 9, 10, ...), the first with id 'empty': missing_prompt: {source}, line 5: " in text
    assert text.count("missing_prompt: ") == 1, "one sentence"
    assert [(cause["code"], cause["row"], cause["rows"]) for cause in report["error_causes"]] == [
        ("missing_prompt", 4, 21),
        ("invalid_json", 5, 1),
        ("invalid_field", 6, 1),
    ]
    done = run(["run", *skip, "--report", "-"], tmp_path).report
    assert [done[f"rows{name}"] for name in ("", "_ok", "_error", "_skipped")] == [27, 4, 0, 23]
    again = run(["run", *skip, "--report", "-"], tmp_path)
    assert again.report["already_done"]
    assert [again.report[f"rows{name}"] for name in ("", "_ok", "_error", "_skipped")] == [27, 4, 0, 23]
    assert "is complete: 27 rows, nothing to do" in again.stderr
    errors = json.loads(run(["check", source, "--model", model, "--json"], tmp_path).stdout)
    assert (errors["rows_error"], errors["rows_skipped"], errors["errors"]) == (23, 0, report["errors"])
