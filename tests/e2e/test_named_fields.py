"""Options that name fields of the rows: what a name that no row has leads to, in every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from tests.e2e.rows import write_lines
from tests.e2e.runner import run

F32 = ["--dtype", "float32"]
FIELDS = [{"text": "Hi", "ticket": "a", "lang": "de"}, {"text": "Ho", "ticket": "b"}]
CASES = [
    *(("--carry", form) for form in ("in.jsonl", "in.json", "in.csv", "in.parquet", "key=7/in.jsonl")),
    *(("--id-column", form) for form in ("in.json", "in.parquet")),
    *(("--image-column", "in.csv"), ("--audio-column", "key=7/in.jsonl")),
]


def save(folder: Path, name: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    table = pa.Table.from_pylist(FIELDS)
    if name.endswith(".jsonl"):
        write_lines(path, FIELDS)
    elif name.endswith(".json"):
        path.write_text(json.dumps(FIELDS))
    elif name.endswith(".csv"):
        pacsv.write_csv(table, path)
    else:
        pq.write_table(table, path)
    return path


@pytest.mark.parametrize(("option", "form"), CASES)
def test_a_field_that_no_row_has_is_named(model: Path, tmp_path: Path, option: str, form: str) -> None:
    source = save(tmp_path, form)
    words = [source, "--model", model, *F32, "--max-new-tokens", "1", option]
    has_columns = form.endswith((".csv", ".parquet"))
    code = 2 if option != "--carry" or has_columns else 0
    for command in (["check", *words], ["run", "-o", "out.parquet", *words]):
        lines = run([*command, "tiket"], tmp_path, expect=code).stderr.splitlines()
        (line,) = [line for line in lines if "tiket" in line]
        assert option in line
        assert all(name in line for name in FIELDS[0])
    assert (tmp_path / "out.parquet").exists() == (code == 0)
    assert not (tmp_path / "out.parquet.work").exists()
    assert "names" not in run(["check", *words, "ticket"], tmp_path, expect=None).stderr


def test_a_text_file_has_only_text(model: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("Hi\n")
    for option, code in (("--id-column", 2), ("--prompt-column", 2), ("--carry", 0)):
        lines = run(["check", "in.txt", "--model", model, *F32, option, "ticket"], tmp_path, expect=code).stderr
        assert option in lines


FOUND = {
    "in a later row": [{"text": "Hi"}, {"text": "Ho", "ticket": "b"}],
    "null": [{"text": "Hi", "ticket": None}],
    "in a row with an error": [{"text": "Hi", "top_p": 7, "ticket": "a"}, {"text": "Ho"}],
    "in no row that can be read": [b'{"text": "Hi", ', b'{"text": '],
    "in none of no rows": [],
}


@pytest.mark.parametrize("rows", FOUND.values(), ids=FOUND)
def test_a_field_that_a_row_has_may_be_named(model: Path, tmp_path: Path, rows: list[Any]) -> None:
    source = write_lines(tmp_path / "in.jsonl", rows)
    for option in ("--id-column", "--carry"):
        checked = run(["check", source, "--model", model, *F32, option, "ticket"], tmp_path, expect=None)
        assert checked.code != 2
        assert "names" not in checked.stderr


def test_a_selection_without_a_named_field_is_noted(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [*FIELDS[1:], *FIELDS[:1]])
    words = ["--model", model, *F32, "--id-column", "lang"]
    note = "the selection of rows has no field `lang`, which --id-column names; it has `text`, `ticket`"
    for options in (["--limit", "1"], ["--shard", "0/2"]):
        assert note in run(["check", source, *words, *options], tmp_path).stderr
    one = ["run", source, *words, "-o", "out.parquet", "--limit", "1"]
    assert note in run([*one, "--max-time", "0"], tmp_path, expect=75).stderr
    assert note in run(one, tmp_path).stderr, "a run that resumes reads the rows from the cache"
    assert note not in run(["check", source, *words], tmp_path).stderr
