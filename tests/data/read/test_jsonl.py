"""JSON lines: malformed lines give the right error, valid ones the exact value."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data.read import pieces
from batchgen.data.read.json_elements import ElementScanner
from batchgen.data.read.jsonl import json_document_rows, json_line_rows, json_rows, prompt_line_rows, text_rows
from batchgen.data.read.pieces import RowsOfStream
from batchgen.data.read.streams import decompressed
from batchgen.errors import ErrorCode, RowError
from batchgen.request import json_text
from batchgen.request.foreign_text import count_of, has_long_integer
from batchgen.request.json_text import MAX_DEPTH, parse_json, parse_json_object
from batchgen.request.rows.raw_row import RawRow
from tests.cases import each, examples

BAD_JSON = ErrorCode.INVALID_JSON
BAD_TEXT = ErrorCode.INVALID_UNICODE


def nested(depth: int, inside: str = "1") -> bytes:
    return ('{"a":' * depth + inside + "}" * depth).encode()


ACCEPTED: dict[str, tuple[bytes, Any]] = {
    "plain": (b'{"text":"a"}', {"text": "a"}),
    "empty object": (b"{}", {}),
    "space around": (b'  \t{"text":"a"}  ', {"text": "a"}),
    "line separator U+2028 in a string": ('{"text":"a\u2028b"}'.encode(), {"text": "a\u2028b"}),
    "U+2029 and U+0085 in a string": ('{"text":"a\u2029b\u0085c"}'.encode(), {"text": "a\u2029b\u0085c"}),
    "escaped NUL": (b'{"text":"a\\u0000b"}', {"text": "a\0b"}),
    "escaped newline": (b'{"text":"a\\nb"}', {"text": "a\nb"}),
    "carriage return at the end": (b'{"text":"a"}\r', {"text": "a"}),
    "surrogate pair escaped": (b'{"text":"\\ud83d\\ude00"}', {"text": "\U0001f600"}),
    "astral plane raw": ('{"text":"\U0001f600"}'.encode(), {"text": "\U0001f600"}),
    "escaped backslash before u": (b'{"text":"\\\\ud800"}', {"text": "\\ud800"}),
    "unescaped delete character": (b'{"text":"\x7f"}', {"text": "\x7f"}),
    "integer past 64 bits": (b'{"seed":18446744073709551616}', {"seed": 1 << 64}),
    "integer of 4,000 digits": (b'{"x":' + b"9" * 4000 + b"}", {"x": int("9" * 4000)}),
    "tiny number underflows to zero": (b'{"x":1e-999}', {"x": 0.0}),
    "negative zero": (b'{"x":-0.0}', {"x": -0.0}),
    "same key in different objects": (b'{"a":{"k":1},"b":{"k":2}}', {"a": {"k": 1}, "b": {"k": 2}}),
    "colons and braces in strings": (b'{"text":"{\\"a\\":1,\\"a\\":2}"}', {"text": '{"a":1,"a":2}'}),
    "keys that differ by case": (b'{"a":1,"A":2}', {"a": 1, "A": 2}),
    "keys that differ by normalisation": ('{"é":1,"e\u0301":2}'.encode(), {"é": 1, "e\u0301": 2}),
    "empty key": (b'{"":1}', {"": 1}),
    "deep enough": (nested(MAX_DEPTH), json.loads(nested(MAX_DEPTH))),
    "many brackets, none deep": (b'{"a":[' + b"[]," * 500 + b"[]]}", {"a": [[]] * 501}),
    "brackets in a string": (b'{"a":"' + b"[" * 1000 + b'"}', {"a": "[" * 1000}),
}

REFUSED: dict[str, tuple[bytes, ErrorCode, str]] = {
    "NaN": (b'{"a":null,"x":NaN}', BAD_JSON, "`x` is NaN, which is not JSON; write null, or leave it out"),
    "Infinity": (b'{"x":Infinity}', BAD_JSON, "`x` is Infinity"),
    "-Infinity": (b'{"x":[-Infinity]}', BAD_JSON, "`x[0]` is -Infinity"),
    "NaN deep down": (b'{"a":[{},[1,2]],"body":{"logit_bias":{"5":NaN}},"z":NaN}', BAD_JSON, "`body.logit_bias.5` is"),
    "NaN with a long key": (b'{"' + b"x" * 500 + b'":NaN}', BAD_JSON, "x` is NaN"),
    "NaN before another fault": (b'{"x":NaN,}', BAD_JSON, "a value is NaN"),
    "NaN alone": (b"NaN", BAD_JSON, "the row is NaN"),
    "number overflows": (b'{"x":1e999}', BAD_JSON, "`x` is a number too large"),
    "negative number overflows": (b'{"x":[{"y":-1e400}]}', BAD_JSON, "`x[0].y` is a number too large"),
    "integer of 5,000 digits": (b'{"x":' + b"9" * 5000 + b"}", BAD_JSON, "digits"),
    "duplicate key": (b'{"a":1,"a":2}', BAD_JSON, "'a' occurs twice"),
    "duplicate key, equal values": (b'{"a":1,"a":1}', BAD_JSON, "'a' occurs twice"),
    "duplicate key nested": (b'{"a":{"b":[{"c":1,"c":2}]}}', BAD_JSON, "'c' occurs twice"),
    "duplicate key, once escaped": (b'{"a":1,"\\u0061":2}', BAD_JSON, "'a' occurs twice"),
    "duplicate key not the first": (b'{"x":1,"a":1,"b":2,"a":3}', BAD_JSON, "'a' occurs twice"),
    "array": (b"[1,2]", BAD_JSON, "an array"),
    "string": (b'"text"', BAD_JSON, "a string"),
    "number": (b"1", BAD_JSON, "a number"),
    "null": (b"null", BAD_JSON, "null"),
    "boolean": (b"true", BAD_JSON, "a boolean"),
    "bare words": (b"hello world", BAD_JSON, "column 1"),
    "two objects": (b'{"a":1}{"b":2}', BAD_JSON, "column 8"),
    "trailing comma": (b'{"a":1,}', BAD_JSON, "column 8"),
    "single quotes": (b"{'a':1}", BAD_JSON, "column 2"),
    "unquoted key": (b"{a:1}", BAD_JSON, "column 2"),
    "comment": (b'{"a":1} // note', BAD_JSON, "column 9"),
    "cut in a string": (b'{"text":"abc', BAD_JSON, "column 9"),
    "cut after a key": (b'{"text"', BAD_JSON, "column 8"),
    "raw NUL": (b'{"text":"a\x00b"}', BAD_JSON, "control character"),
    "raw tab in a string": (b'{"text":"a\tb"}', BAD_JSON, "control character"),
    "raw carriage return in a string": (b'{"text":"a\rb"}', BAD_JSON, "control character"),
    "bad escape": (b'{"text":"\\x41"}', BAD_JSON, "column"),
    "short unicode escape": (b'{"text":"\\u12"}', BAD_JSON, "column"),
    "leading zero": (b'{"a":012}', BAD_JSON, "column"),
    "plus sign": (b'{"a":+1}', BAD_JSON, "column"),
    "bare point": (b'{"a":.5}', BAD_JSON, "column"),
    "hexadecimal": (b'{"a":0x10}', BAD_JSON, "column"),
    "only NULs": (b"\x00\x00\x00", BAD_JSON, "column 1"),
    "byte order mark inside a line": (b'{"a":1}\xef\xbb\xbf{"a":2}', BAD_JSON, "several objects are run together"),
    "no-break space around": ('\u00a0{"a":1}'.encode(), BAD_JSON, "column 1"),
    "a little too deep": (nested(MAX_DEPTH + 1), BAD_JSON, "deep"),
    "arrays a little too deep": (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", BAD_JSON, "deep"),
    "deeper than can be written again": (nested(300), BAD_JSON, "deep"),
    "100,000 deep": (nested(100_000), BAD_JSON, "deep"),
    "100,000 deep and cut": (b'{"a":' + b"[" * 100_000, BAD_JSON, ""),
    "lone high surrogate": (b'{"text":"\\ud800"}', BAD_TEXT, "surrogate"),
    "lone low surrogate": (b'{"text":"a\\uDFFFb"}', BAD_TEXT, "surrogate"),
    "surrogates in the wrong order": (b'{"text":"\\ude00\\ud83d"}', BAD_TEXT, "surrogate"),
    "lone surrogate in a key": (b'{"\\ud800":1}', BAD_TEXT, "surrogate"),
    "lone surrogate deep down": (b'{"a":[{"b":["\\udbff"]}]}', BAD_TEXT, "surrogate"),
    "invalid byte": (b'{"text":"a\xffb"}', BAD_TEXT, "byte 11"),
    "latin-1": ('{"text":"caf\u00e9"}'.encode("latin-1"), BAD_TEXT, "not UTF-8"),
    "overlong slash": (b'{"text":"\xc0\xaf"}', BAD_TEXT, "not UTF-8"),
    "surrogate as bytes": (b'{"text":"\xed\xa0\x80"}', BAD_TEXT, "not UTF-8"),
    "past U+10FFFF": (b'{"text":"\xf4\x90\x80\x80"}', BAD_TEXT, "not UTF-8"),
    "character cut": (b'{"text":"\xe2\x82"}', BAD_TEXT, "not UTF-8"),
}


@each("name", ACCEPTED)
def test_accepted_lines(name: str) -> None:
    line, value = ACCEPTED[name]
    assert parse_json_object(line) == value


@each("name", REFUSED)
def test_refused_lines(name: str) -> None:
    line, code, part = REFUSED[name]
    with pytest.raises(RowError) as caught:
        parse_json_object(line)
    assert caught.value.info.code == code
    assert part in caught.value.info.message
    assert len(caught.value.info.message) < 300, "a message never contains the row"
    rows = read(b'{"text":"before"}\n' + line + b'\n{"text":"after"}\n')
    assert [row.value for row in rows] == [{"text": "before"}, None, {"text": "after"}]
    assert rows[1].error is not None
    assert rows[1].error.code == code
    assert rows[1].error.message.startswith("in.jsonl, line 2: ")


def read(data: bytes) -> list[RawRow]:
    rows = [*json_line_rows(io.BytesIO(data), "in.jsonl")]
    assert all(row is not None for row in rows)
    found = [row for row in rows if row is not None]
    assert [row.index for row in found] == [*range(len(found))]
    return found


def values(data: bytes) -> list[Any]:
    return [row.value for row in read(data)]


def test_lines_end_at_newlines_only() -> None:
    data = b'{"a":"x\xe2\x80\xa8y"}\r\n\r\n  \t \n{"a":2}\n\n{"a":3}'
    rows = read(data)
    assert [row.value for row in rows] == [{"a": "x\u2028y"}, {"a": 2}, {"a": 3}]
    assert [row.line for row in rows] == [1, 4, 6]


def test_a_carriage_return_alone_does_not_end_a_line() -> None:
    assert [row.error and row.error.code for row in read(b'{"a":1}\r{"a":2}\n')] == [BAD_JSON]


def test_byte_order_mark_on_the_first_line() -> None:
    assert values(b'\xef\xbb\xbf{"a":1}\n{"a":2}\n') == [{"a": 1}, {"a": 2}]
    assert values(b"\xef\xbb\xbf\n") == []
    assert values(b"\xef\xbb\xbf") == []


def test_byte_order_marks_between_files_that_were_joined() -> None:
    assert values(b'{"a":1}\n\xef\xbb\xbf{"a":"\xef\xbb\xbf"}\n\xef\xbb\xbf\n') == [{"a": 1}, {"a": "\ufeff"}]
    for text in ('[{"a":1}]\n\ufeff[{"a":2}]', '{"a":1}\ufeff{\n"a":2}', '\ufeff[{"a":1}]\ufeff[{"a":2}]'):
        assert [row and row.value for row in json_document_rows(io.BytesIO(text.encode()), "x")] == [{"a": 1}, {"a": 2}]
    rows = text_rows(io.BytesIO(b"one\n\xef\xbb\xbftwo\n"), "x")
    assert [row and row.value for row in rows] == [{"text": "one"}, {"text": "two"}]


@pytest.mark.parametrize("data", [b"", b"\n", b"\r\n\r\n", b"   ", b"\t\n \n"])
def test_blank_input_has_no_rows(data: bytes) -> None:
    assert values(data) == []


def test_a_last_line_without_line_end() -> None:
    assert values(b'{"a":1}\n{"a":2}') == [{"a": 1}, {"a": 2}]
    for cut in (b'{"a":2', b'{"a":"\xe2\x82'):
        last = read(b'{"a":1}\n' + cut)[-1]
        assert last.error is not None
        assert last.error.code == ErrorCode.TRUNCATED_INPUT
        assert (last.index, last.line) == (1, 2)


def test_a_line_over_the_limit_is_an_error_row_and_the_next_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MAX_LINE_BYTES", 1 << 20)
    long = b'{"text":"' + b"x" * (5 << 20) + b'"}'
    rows = read(b'{"a":1}\n' + long + b'\n{"a":2}\n' + long)
    assert [row.value for row in rows] == [{"a": 1}, None, {"a": 2}, None]
    assert all(row.error.code == BAD_JSON for row in rows if row.error is not None)
    assert [row.line for row in rows] == [1, 2, 3, 4]


def test_rejected_rows_are_counted_and_not_parsed() -> None:
    data = b'{"a":0}\nbroken\n{"a":2}\n'
    rows = [*json_line_rows(io.BytesIO(data), "x", first_index=10, keep=lambda index: index == 12)]
    assert [row and (row.index, row.value) for row in rows] == [None, None, (12, {"a": 2})]


def test_text_lines() -> None:
    data = "\ufeffone \r\n\n  two\u2028\n\x00\n".encode() + b"\xff\nlast"
    rows = [row for row in text_rows(io.BytesIO(data), "in.txt") if row is not None]
    assert [row.value for row in rows] == [
        {"text": "one "},
        {"text": "  two\u2028"},
        {"text": "\0"},
        None,
        {"text": "last"},
    ]
    assert rows[3].error is not None
    assert rows[3].error.code == BAD_TEXT
    assert [row.line for row in rows] == [1, 3, 4, 5, 6]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(
    rows=st.lists(st.dictionaries(st.text(), JSON_VALUES, max_size=4), max_size=8),
    ascii_only=st.booleans(),
    end=st.sampled_from(["\n", "\r\n", "\n\n"]),
    last=st.booleans(),
)
def test_round_trip(rows: list[dict[str, Any]], ascii_only: bool, end: str, last: bool) -> None:
    text = end.join(json.dumps(row, ensure_ascii=ascii_only) for row in rows) + (end if last else "")
    assert values(text.encode()) == rows


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(data: bytes) -> None:
    content = data.removeprefix(b"\xef\xbb\xbf")
    lines = [line for line in content.split(b"\n") if line.removeprefix(b"\xef\xbb\xbf").strip(b" \t\r")]
    if not content.lstrip().startswith(b"["):
        assert len(read(data)) == len(lines)
    assert [*json_rows(io.BytesIO(data), "x")] or not content.strip(b" \t\r\n,[]")


@st.composite
def json_texts(draw: st.DrawFn, depth: int = 3) -> str:
    """JSON text with few distinct keys, so that some repeat, and with colons in strings, plain and escaped."""
    scalars = ['""', '":"', '"a:b"', '"\\u003a"', '"\\\\u003A:"', '"\\ud83d\\ude00"', '"\\ud83d"', "1", "-0", "0.5"]
    scalars += ["1e999", "null", "true", "NaN", "9" * 18, "9" * 19]
    scalars += [str(1 << 63), str((1 << 64) - 1), str(1 << 64), str(-(1 << 63)), str(-(1 << 63) - 1), "0." + "1" * 30]
    kind = draw(st.sampled_from(["scalar", "list", "object", "object"])) if depth else "scalar"
    if kind == "scalar":
        return draw(st.sampled_from(scalars))
    items = draw(st.lists(json_texts(depth - 1), max_size=3))
    if kind == "list":
        return f"[{','.join(items)}]"
    keys = ['"a"', '"b"', '":"', '"\\u003A"', '"\\u0061"']
    return "{" + ", ".join(f"{draw(st.sampled_from(keys))} : {item}" for item in items) + "}"


def verdict(parse: Callable[[bytes], Any], line: bytes) -> Any:
    try:
        return json.dumps(parse(line))  # distinguishes int from float and the order of keys
    except RowError as error:
        return error.info


@given(text=json_texts())
def test_the_quick_parser_equals_the_strict_parser(text: str) -> None:
    assert verdict(parse_json, text.encode()) == verdict(json_text._parse_strictly, text.encode())


A, B = {"a": "x}],{"}, {"b": [1, {"c": '\\"'}]}
DOCUMENTS = {
    "an array in one line": f"[{json.dumps(A)}, {json.dumps(B)}]",
    "an array over lines": f"[\n  {json.dumps(A)},\n  {json.dumps(B)}\n]\n",
    "a pretty array": json.dumps([A, B], indent=2),
    "run together": json.dumps(A) + json.dumps(B),
    "bare carriage returns": json.dumps(A) + "\r" + json.dumps(B) + "\r",
    "commas between lines": json.dumps(A) + ",\n" + json.dumps(B) + ",\n",
    "pretty objects": json.dumps(A, indent=2) + "\n" + json.dumps(B, indent=2),
    "JSON lines": json.dumps(A) + "\n" + json.dumps(B) + "\n",
    "two arrays": json.dumps([A]) + "\n" + json.dumps([B]) + "\n",
    "a byte order mark": "\ufeff" + json.dumps([A, B]),
    "an array, then an object": json.dumps([A]) + "\n" + json.dumps(B),
    "an empty array, then objects": "[]\n" + json.dumps(A) + json.dumps(B),
    "an array, an object a line": f"[{json.dumps(A)},\n{json.dumps(B)}]",
    "an array with commas in front": f"[{json.dumps(A)}\n,{json.dumps(B)}]",
    "run together in lines": json.dumps(A) + "\n" + json.dumps(B) + "\n",
    "two objects, then one": json.dumps(A) + json.dumps(B) + "\n\n",
}


@each("name", DOCUMENTS)
def test_documents_are_rows_whatever_their_form(name: str) -> None:
    data = DOCUMENTS[name].encode()
    readers: tuple[RowsOfStream, ...] = (json_rows, json_document_rows)
    for read_rows in readers:
        assert [row and row.value for row in read_rows(io.BytesIO(data), "in")] == [A, B]
    if data.removeprefix(b"\xef\xbb\xbf").startswith(b"["):
        assert values(data) == [A, B], "an array is known by its beginning"


@given(
    rows=st.lists(st.dictionaries(st.text(), JSON_VALUES, max_size=3), max_size=5),
    indent=st.sampled_from([None, 1]),
    array=st.booleans(),
    chunk=st.integers(1, 9),
)
def test_documents_read_in_pieces_of_any_size(rows: list[Any], indent: int | None, array: bool, chunk: int) -> None:
    texts = [json.dumps(row, indent=indent) for row in rows]
    stream = io.BytesIO((f"[{', '.join(texts)}]" if array else "".join(texts)).encode())
    scanner = ElementScanner(lambda size: stream.read(chunk), b"", 1, 1 << 20)
    assert [json.loads(piece.text) for piece in scanner.pieces()] == rows


def test_an_element_over_the_limit_is_cut_and_the_next_line_is_read() -> None:
    data = b'[{"a":1},\n{"text":"' + b"x" * 5000 + b'"},\n{"b":2}]'
    stream = io.BytesIO(data)
    pieces = [*ElementScanner(lambda size: stream.read(100), b"", 1, 1000).pieces()]
    assert [piece.line for piece in pieces] == [1, 2, 3]
    assert [piece.text for piece in pieces[::2]] == [b'{"a":1}', b'{"b":2}']
    assert len(pieces[1].text) == 1000


BROKEN_FIRST_LINES = (b'["x', b'["x"]', b"[1, 2]", b'["a", {"b": 1}', b'[{"a": "x', b'[{"a": 1}', b"[x", b'[["a"]]')
"""First lines that begin with `[` and are not arrays of objects."""
CUT_OBJECTS = (b'{"a": "x', b'{"a": 1', b'{"a": [1, 2', b'{"a": nul', b"words")


@each("end", [b"\n", b"\r\n", b"\n\n"])
@each("first", BROKEN_FIRST_LINES)
def test_a_broken_first_line_spoils_no_other_line(first: bytes, end: bytes) -> None:
    data = end.join([first, json.dumps(A).encode(), json.dumps(B).encode(), b""])
    for begin in (b"", b"\xef\xbb\xbf", b"\n \n"):
        assert values(begin + data) == [None, A, B]


@pytest.mark.parametrize("first", [*BROKEN_FIRST_LINES[4:6], *CUT_OBJECTS])
def test_a_first_line_that_breaks_off_spoils_no_other_line_of_json(first: bytes) -> None:
    data = b"\n".join([first, json.dumps(A).encode(), json.dumps(B).encode()])
    rows = [*json_document_rows(io.BytesIO(data), "in.json")]
    assert [row and row.value for row in rows] == [None, A, B]


def test_a_broken_first_line_of_a_cut_file() -> None:
    data = gzip.compress(b'["x\n' + b"".join(b'{"a":%d}\n' % i for i in range(50_000)))
    rows = [*json_line_rows(decompressed(io.BytesIO(data[: len(data) // 2]), "gzip"), "in.jsonl.gz")]
    codes = [row and row.error and row.error.code for row in rows]
    assert codes[0] == BAD_JSON
    assert codes[-1] == ErrorCode.TRUNCATED_INPUT
    assert codes[1:-1] == [None] * (len(codes) - 2)
    assert len(codes) > 10_000


BROKEN: dict[str, tuple[RowsOfStream, bytes, list[Any]]] = {
    "array cut inside a row": (json_rows, b'[{"a":1},{"a"', [{"a": 1}, ErrorCode.TRUNCATED_INPUT]),
    "array cut after a row": (json_rows, b'[{"a":1}', [{"a": 1}, ErrorCode.TRUNCATED_INPUT]),
    "array cut after a comma": (json_rows, b'[{"a":1},\n', [{"a": 1}, ErrorCode.TRUNCATED_INPUT]),
    "object cut": (json_rows, b'{"a":1}{"b":"', [{"a": 1}, ErrorCode.TRUNCATED_INPUT]),
    "values other than objects": (json_rows, b'[1, "x", {"a":1}]', [BAD_JSON, BAD_JSON, {"a": 1}]),
    "a line end in a string": (json_rows, b'[{"a":"x\n"},\n{"a":1}]', [BAD_JSON, BAD_JSON, {"a": 1}]),
    "words between": (json_rows, b'{"a":1}\nwords\n{"a":2}', [{"a": 1}, BAD_JSON, {"a": 2}]),
    "a bad line of .json": (json_document_rows, b'{"a":1}\n{"a":{\n{"a":2}\n', [{"a": 1}, BAD_JSON, {"a": 2}]),
    "last line malformed": (json_line_rows, b'{"a":1}\n{"a":1,}', [{"a": 1}, BAD_JSON]),
    "last line no object": (json_line_rows, b"hello", [BAD_JSON]),
    "last line cut in a word": (json_line_rows, b'{"a":tru', [ErrorCode.TRUNCATED_INPUT]),
    "last line cut in an escape": (json_line_rows, b'{"a":"\\u00', [ErrorCode.TRUNCATED_INPUT]),
    "last line cut in a number": (json_line_rows, b'{"a":1.', [ErrorCode.TRUNCATED_INPUT]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_truncated_is_only_where_the_text_ended(name: str) -> None:
    read_rows, data, expected = BROKEN[name]
    rows = [row for row in read_rows(io.BytesIO(data), "in") if row is not None]
    assert [row.error.code if row.error else row.value for row in rows] == expected


@given(JSON_VALUES.map(lambda value: json.dumps({"text": value}).encode()), st.data())
def test_every_beginning_of_a_row_is_truncated(line: bytes, data: st.DataObject) -> None:
    cut = line[: data.draw(st.integers(1, len(line) - 1))]
    (row,) = read(cut)
    assert row.error is not None
    assert row.error.code == ErrorCode.TRUNCATED_INPUT


NAMED = {
    "run together": (b'{"a":1} {"a":2}', "several objects are run together.*--input-format json"),
    "bare carriage returns": (b'{"a":1}\r{"a":2}\r', "carriage return only.*--input-format json"),
    "an array in a later line": (b'{"a":0}\n[{"a":1},{"a":2}]', "an array of 2 objects.*--input-format json"),
    "a pretty object": (b'{\n "a": 1\n}\n', "the line ends inside the object.*--input-format json"),
}


@pytest.mark.parametrize("name", NAMED)
def test_other_forms_in_json_lines_are_named_with_the_remedy_that_runs_them(name: str) -> None:
    data, pattern = NAMED[name]
    error = next(row.error for row in read(data) if row.error is not None)
    assert error.code == BAD_JSON
    assert re.search(pattern, error.message)
    assert all(row and row.value for row in json_rows(io.BytesIO(data), "in"))


def test_objects_in_a_text_file_are_refused_unless_it_is_named_as_text() -> None:
    data = b'{"text": "a"}\n{not JSON}\nplain\n ["a"]\n'
    rows = [row for row in prompt_line_rows(io.BytesIO(data), "in.txt") if row is not None]
    assert [row.value and row.value["text"] for row in rows] == [None, "{not JSON}", "plain", ' ["a"]']
    assert rows[0].error is not None
    assert "line 1: the line is a JSON object" in rows[0].error.message
    assert "--input-format jsonl" in rows[0].error.message
    named = [row.value for row in text_rows(io.BytesIO(data), "in.txt") if row is not None]
    assert named[0] == {"text": '{"text": "a"}'}


@examples(100)
@given(st.lists(st.text("0123456789,-[:{ a", max_size=40), max_size=200), st.booleans())
def test_long_texts_are_looked_through_as_short_ones(parts: list[str], long: bool) -> None:
    text = "".join(parts).encode() + b" " * 2048 * long
    assert has_long_integer(text) == (re.search(rb"\d{19}", text) is not None)
    assert count_of(text, b"[{:") == sum(text.count(sign) for sign in (b"[", b"{", b":"))
