"""`--columns`: the output has these columns in this order, equal to those of the whole output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.e2e.rows import write_lines
from tests.e2e.runner import run

ROWS = [
    {"id": "a", "text": "One", "lang": "de", "n": 2},
    {"id": "b", "text": "Two", "note": "x"},
    {"id": "c", "text": 7},
]
COLUMNS = ["text", "lang", "id", "error"]


def job(model: Path, folder: Path, out: str = "out.parquet", columns: list[str] | None = None) -> list[Any]:
    source = write_lines(folder / "in.jsonl", ROWS)
    words = ["run", source, "-o", out, "--model", model, "--dtype", "float32", "--max-new-tokens", "3"]
    return [*words, "--columns", ",".join(columns or COLUMNS)]


def test_parquet(model: Path, tmp_path: Path) -> None:
    words = job(model, tmp_path)
    first = run(words, tmp_path)
    run([*words[:-2], "-o", "whole.parquet", "--carry", "lang"], tmp_path)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.schema.names == COLUMNS
    assert table.to_pylist() == pq.read_table(tmp_path / "whole.parquet", columns=COLUMNS).select(COLUMNS).to_pylist()
    assert "ok 2, errors 1" in first.stderr
    again = run([*words, "--report", "report.json"], tmp_path)
    assert "nothing to do" in again.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["rows_ok"], report["rows_error"], report["completion_tokens"]) == (2, 1, 9)
    assert run(["verify", "--file", "out.parquet"], tmp_path).code == 0


def test_json_lines(model: Path, tmp_path: Path) -> None:
    words = job(model, tmp_path, "out.jsonl")
    run(words, tmp_path)
    run([*words[:-2], "-o", "whole.jsonl", "--carry", "lang"], tmp_path)
    texts = ((tmp_path / name).read_text() for name in ("out.jsonl", "whole.jsonl"))
    lines, whole = ([json.loads(line) for line in text.splitlines()] for text in texts)
    kept = [{name: line[name] for name in COLUMNS if name in line} for line in whole]
    assert [{name: value for name, value in line.items() if name != "batchgen"} for line in lines] == kept
    assert "nothing to do" in run(words, tmp_path).stderr


def test_rows_cannot_be_read_back(model: Path, tmp_path: Path) -> None:
    words = job(model, tmp_path)
    run(words, tmp_path)
    before = (tmp_path / "out.parquet").read_bytes()
    for command in (
        ["show", "out.parquet"],
        ["export", "out.parquet", "-o", "x.jsonl", "--format", "jsonl"],
        ["merge", "out.parquet", "-o", "m.parquet"],
        [*words[:3], "new.parquet", *words[4:-2], "--reuse", "out.parquet"],
    ):
        assert (
            "only the columns that --columns named (text, lang, id, error)"
            in run(command, tmp_path, expect=None).stderr
        )
    assert "whose errors cannot be retried" in run([*words, "--retry-errors"], tmp_path, expect=2).stderr
    other = [*words[:-1], "id,text"]
    assert "--columns was" in run(other, tmp_path, expect=2).stderr
    assert (tmp_path / "out.parquet").read_bytes() == before
    run([*other, "--overwrite"], tmp_path)
    assert pq.read_schema(tmp_path / "out.parquet").names == ["id", "text"]


REFUSED = {
    "a misspelt one": (["id", "txet"], [], "no field `txet`, which --columns names"),
    "one twice": (["id", "text", "id"], [], "names a column twice"),
    "a prompt that is not kept": (["id", "prompt"], [], "--include-prompt"),
    "shards": (["id"], ["--shard", "0/2"], "leave out --columns"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_columns_of_no_use_are_refused(model: Path, tmp_path: Path, case: str) -> None:
    columns, options, problem = REFUSED[case]
    assert problem in run([*job(model, tmp_path, columns=columns), *options], tmp_path, expect=2).stderr
    assert not (tmp_path / "out.parquet").exists()


def test_openai_lines_are_answered_whole(model: Path, tmp_path: Path) -> None:
    body = {"model": "*", "prompt": "Hi", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    words = job(model, tmp_path, "out.jsonl")
    write_lines(tmp_path / "in.jsonl", [line])
    assert "leave out --columns" in run(words, tmp_path, expect=2).stderr
