"""Lines that are not valid rows keep their ids."""

from __future__ import annotations

import io

import pytest

from batchgen.data.read.jsonl import json_line_rows, json_rows
from tests.cases import each

LINES: list[tuple[bytes, str | None]] = [
    (b'{"id": "a", "score": NaN}', "a"),
    (b'{"score": -Infinity, "custom_id": 17}', "17"),
    (b'{"score": 1, "score": 2, "rid": "a\\"b"}', 'a"b'),
    (b'{"id": "a", "text": "never ends', "a"),
    (b'  { "custom_id" : 5 , "body": {]', "5"),
    (b'{"id": "a", "text": "\xff"}', "a"),
    (b'{"text": "\\ud800", "id": "\xc3\xa9"}', "\xe9"),
    (b'{"id": "a", "id": "b"}', None),
    (b'{"id": "a", "custom_id": "b", "x": NaN}', None),
    (b'{"id": true, "x": NaN}', None),
    (b'{"id": "\\ud800", "x": NaN}', None),
    (b'{"id": "\xff", "x": 1}', None),
    (b'{"id": "a\\q", "x": ', None),
    (b'{"text": "the key comes late', None),
    (b'{"text": {"id": "inner"}, "x": NaN}', None),
    (b'["id", "a"]', None),
    (b'"id"', None),
    (b"{}}", None),
    (b"[" * 5000, None),
    (b'{"id": ' + b"9" * 5000 + b"}", None),
]


@pytest.mark.field("id")
@each("line, expected", LINES)
def test_ids(line: bytes, expected: str | None) -> None:
    for end in (b"\n", b""):
        _, row = json_line_rows(io.BytesIO(b"{}\n" + line + end), "in.jsonl")
        assert row is not None
        assert row.error is not None
        assert row.id == expected


@pytest.mark.parametrize("form", [b"[%s]", b"[\n  %s\n, {}]", b"%s {}"])
@pytest.mark.parametrize("element", [b'{"id": "a",\n "score": NaN}', b'{"score": 1, "custom_id": "a", "score": 2}'])
def test_elements_of_documents_keep_their_ids_too(form: bytes, element: bytes) -> None:
    row = next(json_rows(io.BytesIO(form % element), "in.json"))
    assert row is not None
    assert row.error is not None
    assert row.id == "a"
