"""CSV and TSV: quoting, line ends, what becomes of values, malformed and cut files, memory."""

from __future__ import annotations

import csv
import gzip
import io
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data.read import delimited
from batchgen.data.read.delimited import TAB, delimited_rows, delimited_schema
from batchgen.data.read.input_files import find_inputs
from batchgen.data.read.input_set import open_inputs
from batchgen.data.read.selection import Selection
from batchgen.errors import ErrorCode, InputError
from batchgen.request.fields.named_columns import NamedColumns
from batchgen.request.rows.raw_row import RawRow


def read(data: str | bytes, **options: Any) -> list[RawRow]:
    content = data if isinstance(data, bytes) else data.encode()
    return [row for row in delimited_rows(io.BytesIO(content), "in.csv", **options) if row is not None]


def values(data: str | bytes, **options: Any) -> list[Any]:
    return [row.error.code if row.error else row.value for row in read(data, **options)]


FORMS = {
    "plain": "id,text\n1,Hello\n2,Bye\n",
    "no last line end": "id,text\n1,Hello\n2,Bye",
    "carriage returns and line feeds": "id,text\r\n1,Hello\r\n2,Bye\r\n",
    "carriage returns": "id,text\r1,Hello\r2,Bye\r",
    "byte order mark": "\ufeffid,text\n1,Hello\n2,Bye\n",
    "files that were joined": '\ufeff"id","text"\n1,Hello\n\ufeff"2",Bye\n',
    "quotes": '"id","text"\n"1","Hello"\n"2","Bye"\n',
    "blank lines": "\nid,text\n\n1,Hello\n\n\n2,Bye\n\n",
    "blanks around names": "id , text\n1,Hello\n2,Bye\n",
    "semicolons": "id;text\n1;Hello\n2;Bye\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    assert values(FORMS[name]) == [{"id": "1", "text": "Hello"}, {"id": "2", "text": "Bye"}]


def test_cells_with_separators_quotes_and_line_ends() -> None:
    data = 'text,note\n"a ""b"", c\nd\r\n\ne",x\n  f ,y\n'
    rows = read(data)
    assert [row.value for row in rows] == [
        {"text": 'a "b", c\nd\r\n\ne', "note": "x"},
        {"text": "  f ", "note": "y"},
    ]
    assert [row.line for row in rows] == [2, 6]
    assert values('text\tnote\n"a\tb"\tc,d\n', delimiter=TAB) == [{"text": "a\tb", "note": "c,d"}]


READ_AS = {
    "max_new_tokens": [("8", 8), ("8.0", 8), ("x", "x"), ("NaN", "NaN")],
    "temperature": [("0", 0), ("0.5", 0.5), ("1e-3", 0.001)],
    "ignore_eos": [("true", True), ("False", False), ("yes", "yes")],
    "seed": [("18446744073709551616", 1 << 64)],
    "messages": [('[{"role": "user", "content": "a"}]', [{"role": "user", "content": "a"}])],
    "sampling_params": [('{"top_k": 5}', {"top_k": 5})],
    "logit_bias": [('{"7": -1}', {"7": -1})],
    "id": [("007", "007"), ("1.0", "1.0"), ("true", "true")],
    "text": [("12", "12"), ("null", "null"), ('{"a": 1}', '{"a": 1}')],
    "stop": [("3", "3"), ("END", "END"), ('["a"]', ErrorCode.INVALID_FIELD)],
    "regex": [("[0-9]+", "[0-9]+"), ("7", "7")],
    "json_schema": [('{"type": "object"}', '{"type": "object"}')],
    "lang": [("12", "12"), ("[1]", "[1]"), ("true", "true")],
}


@pytest.mark.parametrize("name", READ_AS)
def test_values_are_text_but_in_fields_of_numbers_booleans_lists_and_objects(name: str) -> None:
    for text, value in READ_AS[name]:
        buffer = io.StringIO()
        csv.writer(buffer).writerows([[name, "other"], [text, ""]])
        (found,) = values(buffer.getvalue())
        assert (found, type(found.get(name))) == ({name: value}, type(value)) if name in found else found == value


MALFORMED: dict[str, tuple[str | bytes, list[Any], str]] = {
    "too few cells": ("a,b\n1\n2,3\n", [ErrorCode.INVALID_JSON, {"a": "2", "b": "3"}], "1 cells for 2 columns"),
    "too many cells": ("a,b\n1,2,3\n", [ErrorCode.INVALID_JSON], "3 cells for 2 columns"),
    "text after a quote": ('a,b\n"x"y,1\n2,3\n', [ErrorCode.INVALID_JSON, {"a": "2", "b": "3"}], "RFC 4180"),
    "not UTF-8": (b"a\ncaf\xe9\nb\n", [ErrorCode.INVALID_UNICODE, {"a": "b"}], "not UTF-8"),
    "ends in a quote": ('a,b\n1,2\n3,"4\n', [{"a": "1", "b": "2"}, ErrorCode.TRUNCATED_INPUT], "quotation mark"),
    "ends in a row": ("a,b,c\n1,2,3\n4,5", [{"a": "1", "b": "2", "c": "3"}, ErrorCode.TRUNCATED_INPUT], "ends inside"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_rows_are_error_rows(name: str) -> None:
    data, expected, part = MALFORMED[name]
    assert values(data) == expected
    error = next(row.error for row in read(data) if row.error is not None)
    assert part in error.message
    assert error.message.startswith("in.csv, line ")


BROKEN: dict[str, tuple[str, dict[str, str]]] = {
    "in the first cell": ('id,text\n"7"x,a\n', {}),
    "in the second cell": ('id,text,n\n7,"a"b,3\n', {"id": "7"}),
    "after a quoted cell": ('id,text,n\n"7","a"b,3\n', {"id": "7"}),
    "after quotation marks": ('note,id,text\n"a ""b"", c",7,"a"b\n', {"note": 'a "b", c', "id": "7"}),
    "after line ends": ('note,id,text\n"a\n\nb\r\n",7,"a"b\n', {"note": "a\n\nb\r\n", "id": "7"}),
    "after a mark in a plain cell": ('note,id,text\na "b",7,"a"b\n', {"note": 'a "b"', "id": "7"}),
    "after an empty cell": ('note,other,id,text\n,"",7,"a"b\n', {"id": "7"}),
    "between semicolons": ('id;text\n"7";"a"b\n', {"id": "7"}),
    "before the id": ('text,id\n"a"b,7\n', {}),
    "by the end of the file": ('note,id,text\nx,7,"a\nb', {"note": "x", "id": "7"}),
    "in the next row": ('id,text\n7,"a\n8,"b"\n', {"id": "7"}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_row_with_a_broken_quote_keeps_the_cells_before_it(name: str) -> None:
    data, found = BROKEN[name]
    (row,) = read(data)
    assert row.error is not None
    assert (row.readable, row.id) == (found, found.get("id"))


def test_a_row_with_a_broken_quote_keeps_its_named_id(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text('uid,id,text\n7,1,"a"b\n8,2,c\n')
    first, second = open_inputs(find_inputs([str(tmp_path / "in.csv")])).rows(NamedColumns(id="uid"))
    assert first.error is not None
    assert [first.id, second.value] == ["7", {"id": "8", "text": "c"}]


def test_columns() -> None:
    assert delimited_schema(io.BytesIO(b"a,b\n"), "in.csv").names == ["a", "b"]
    assert delimited_schema(io.BytesIO(b""), "in.csv").names == []
    assert values("") == values("a,b\n") == []
    assert values(",text\n0,Hello\n") == [{"": "0", "text": "Hello"}], "the index that pandas writes"
    with pytest.raises(InputError, match="two columns are named 'a'"):
        delimited_schema(io.BytesIO(b"a,b,a\n"), "in.csv")


@given(
    rows=st.lists(st.lists(st.text(), min_size=2, max_size=2), min_size=1, max_size=6),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_round_trip(rows: list[list[str]], end: str) -> None:
    buffer = io.StringIO(newline="")
    csv.writer(buffer, quoting=csv.QUOTE_ALL, lineterminator=end).writerows([["a", "b"], *rows])
    data = buffer.getvalue().encode(errors="surrogatepass")
    expected = [
        {name: cell for name, cell in zip("ab", row, strict=True) if cell}
        if not any("\ud800" <= c <= "\udfff" for c in "".join(row))
        else ErrorCode.INVALID_UNICODE
        for row in rows
    ]
    assert values(data) == expected


@given(st.binary(max_size=100))
def test_no_bytes_crash_the_reader(data: bytes) -> None:
    with suppress(InputError):  # of the header
        read(data)


def test_a_missing_quote_does_not_fill_the_memory() -> None:
    big = b'a,b\n1,"' + (b"x" * 1000 + b"\n") * 100_000
    tracemalloc.start()
    rows = read(big)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows[0].error is not None
    assert peak < len(big) + (400 << 20)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_files_with_selections_and_named_columns(pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = {bytes: "a.csv", gzip.compress: "a.csv.gz"}.get(pack, "a.csv.zst")
    Path(name).write_bytes(pack(b"q,uid\n" + b"".join(b'"line\n%d",%d\n' % (i, i) for i in range(50))))
    inputs = open_inputs(find_inputs([name]))
    rows = [*inputs.rows(NamedColumns("q", "uid"))]
    assert [row.value for row in rows] == [{"text": f"line\n{i}", "id": str(i)} for i in range(50)]
    assert inputs.count() == 50
    for selection in (Selection(offset=7, limit=9), Selection(sample=5), Selection(shard=(1, 3))):
        keep = selection.row_filter(lambda: 50)
        assert keep is not None
        assert [*inputs.rows(NamedColumns("q", "uid"), selection)] == [row for row in rows if keep(row.index)]
    assert [row.line for row in inputs.rows_at([3, 4])] == [8, 10]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_cut_compressed_file_ends_in_one_error(pack: Any, tmp_path: Path) -> None:
    data = b"text\n" + b"".join(b"row %d %d\n" % (i, i * i * 7919) for i in range(5000))
    path = tmp_path / ("a.csv.gz" if pack is gzip.compress else "a.csv.zst")
    path.write_bytes(pack(data)[:-200])
    rows = [*open_inputs(find_inputs([str(path)])).rows()]
    assert [row.value for row in rows[:-1]] == [{"text": f"row {i} {i * i * 7919}"} for i in range(len(rows) - 1)]
    assert rows[-1].error is not None
    assert rows[-1].error.code == ErrorCode.TRUNCATED_INPUT


def test_a_row_has_a_longest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a row of many lines, as of a quotation mark without its other half."""
    monkeypatch.setattr(delimited, "MAX_ROW_CHARACTERS", 20)
    assert values("a,b\n" + "1" * 17 + ",2\n") == [{"a": "1" * 17, "b": "2"}]
    after = {"a": "x", "b": "y"}
    assert values("a,b\n" + "1" * 18 + ",2\nx,y\n") == [ErrorCode.INVALID_JSON, after]
    assert values("a,b\n" + "1" * 5_000_000 + ",2\nx,y\n") == [ErrorCode.INVALID_JSON, after]
    assert values('a,b\n1,"' + "\n12345678" * 2 + "\nx,y\n") == [ErrorCode.INVALID_JSON, after]
    assert "longer than 20 characters" in str(read("a,b\n" + "1" * 30 + ",2\n")[0].error)
