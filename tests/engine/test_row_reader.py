"""`RowReader`: many rows with the same id, and what refused rows keep."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.read.input_files import find_inputs
from batchgen.data.read.input_set import open_inputs
from batchgen.engine.row_reader import ProcessedRow, RowReader, python_rows
from batchgen.request.fields.named_columns import NamedColumns
from batchgen.request.rows.raw_row import RawRow
from batchgen.request.rows.values import RowDefaults
from batchgen.request.table.request_table import RequestTable
from batchgen.text.encode import Encoder
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.engine.reference import save_word_tokenizer
from tests.models.tiny import VOCAB


def test_duplicate_ids_get_the_first_free_number_at_a_constant_cost(tmp_path: Path) -> None:
    save_word_tokenizer(tmp_path, VOCAB)
    encoder = Encoder(Tokenizer.load(tmp_path), VOCAB, 64)

    def read(copies: int) -> int:
        """The number of Python calls that rows with the same id take."""
        names = ["a-3", *["a"] * copies, "b", "a-2", "b", *["a"] * copies]
        rows = (RawRow(i, value={"id": name, "input_ids": [5]}) for i, name in enumerate(names))
        events: list[str] = []
        before = sys.getprofile()
        sys.setprofile(lambda _, event, __: events.append(event))
        try:
            ids = [row.id for row in RowReader(RequestTable(), encoder, RowDefaults(), "suffix").read(rows)]
        finally:
            sys.setprofile(before)
        assert len(set(ids)) == len(names)
        assert ids[:4] == ["a-3", "a", "a-2", "a-4"]
        return events.count("call")

    read(4)
    assert read(600) < 2.2 * read(300)


def test_each_repeated_id_is_found_among_many(tmp_path: Path) -> None:
    names = [f"row {number}" for number in range(3000)]
    rows = read_all((RawRow(i, value={"id": name, "input_ids": [5]}) for i, name in enumerate(names * 2)), tmp_path)
    assert [row.error is None for row in rows] == [True] * 3000 + [False] * 3000


def read_all(rows: Iterable[RawRow], tmp_path: Path) -> list[ProcessedRow]:
    save_word_tokenizer(tmp_path, VOCAB)
    return [*RowReader(RequestTable(), Encoder(Tokenizer.load(tmp_path), VOCAB, 64), RowDefaults()).read(rows)]


def parquet(**columns: Any) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table(columns), stream)
    return stream.getvalue()


BAD_MAP = pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int32()))
SOURCE, KEY = {"include_source": True}, {"columns": NamedColumns(id="key")}
FROM = {"source_file": "a.jsonl", "source_line": 1, "k": 1}
REFUSED: dict[str, tuple[str, bytes, dict[str, Any], str, dict[str, Any]]] = {
    "csv: too many cells": ("a.csv", b"id,text,k\na,x,1,2\n", {}, "a", {}),
    "csv: too few cells": ("a.csv", b"k,id,text\n1,a\n", {}, "row-0", {"k": "1"}),  # `a` may be the text
    "csv: the file ends in a row": ("a.csv", b"k,id,text,note\n1,a,x", {}, "a", {"k": "1"}),
    "csv: the file ends in the id": ("a.csv", b"k,id,text\n1,a", {}, "row-0", {"k": "1"}),
    "csv: not UTF-8": ("a.csv", b"text,k,id\n\xff,1,a\n", {}, "a", {"k": "1"}),
    "csv: broken JSON": ("a.csv", b"text,k,logit_bias,id\nx,1,{,a\n", {}, "a", {"k": "1"}),
    "csv: named columns": ("a.csv", b"key,q,id\na,x,1,2\n", {"columns": NamedColumns("q", "key")}, "a", {}),
    "csv: not the named id": ("a.csv", b"id,key,q\n1,a,x,2\n", KEY, "row-0", {"id": "1"}),
    "parquet: a bad field": ("a.parquet", parquet(id=["a"], text=["x"], stop=['["x"]'], k=[1]), {}, "a", {"k": 1}),
    "parquet: a bad column": ("a.parquet", parquet(bad=BAD_MAP, rid=[7], text=["x"], k=[1]), {}, "7", {"k": 1}),
    "parquet: a named id": ("a.parquet", parquet(bad=BAD_MAP, id=[1], key=["a"], text=["x"]), KEY, "a", {"id": 1}),
    "a folder of another value": ("k=2/j=3/a.jsonl", b'{"id":"a","text":"x","k":1}', {}, "a", {"k": 1, "j": "3"}),
    "a folder, and a named id": ("k=2/a.jsonl", b'{"key":"a","text":"x","k":1}', KEY, "a", {"k": 1}),
    "a field of the name of a source": ("a.jsonl", b'{"id":"a","text":"x","k":1,"source_line":"9"}', SOURCE, "a", FROM),
    "a line, and a named id": ("a.jsonl", b'{"id":"a","score":NaN}', KEY, "row-0", {}),
    "a field of a wrong type": ("a.jsonl", b'{"id":"a","text":5,"k":1}', {}, "a", {"k": 1}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_row_keeps_its_id_and_carried_fields(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, content, options, row_id, carried = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_bytes(content)
    named = {key: value for key, value in options.items() if key != "include_source"}
    inputs = open_inputs(find_inputs([file]), include_source="include_source" in options)
    (row,) = read_all(inputs.rows(**named), tmp_path)
    assert row.error is not None
    assert (row.id, {**row.raw.displaced, **row.extra}) == (row_id, carried)


def test_a_refused_row_of_a_table_keeps_its_id(tmp_path: Path) -> None:
    (row,) = read_all(python_rows(pa.table({"bad": BAD_MAP, "id": ["a"], "k": [1]})), tmp_path)
    assert row.error is not None
    assert (row.id, row.extra) == ("a", {"k": 1})


LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
BODY = {"messages": [{"role": "user", "content": "x"}], "temperature": -1}


@pytest.mark.parametrize(
    ("value", "is_line"),
    [
        ({**LINE, "body": BODY}, True),
        ({**LINE, "body": "str"}, True),
        ({"custom_id": "a", "body": BODY}, True),
        ({"id": "a", "text": 5, "body": {"x": 1}}, False),
        ({"id": "a", "text": "x", "temperature": -1, "body": "str"}, False),
        ({"id": "a", "text": 5}, False),
        (["a"], False),
    ],
)
def test_a_refused_row_is_answered_as_a_batch_line_if_it_would_be_read_as_one(
    value: Any, is_line: bool, tmp_path: Path
) -> None:
    (row,) = read_all([RawRow(0, value=value)], tmp_path)
    assert row.error is not None
    assert row.is_line == is_line
