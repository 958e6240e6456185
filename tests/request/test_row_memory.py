"""Estimated memory of a line of JSON: at least what its values take, and refused beyond the limit unparsed."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from batchgen.errors import ErrorCode, RowError
from batchgen.request.rows import row_memory
from batchgen.request.rows.row_memory import ROW_MEMORY, estimated_memory, line_is_cut, parse_cell, parse_line

LINES: dict[str, str] = {
    "empty lists": '{"x": [' + ",".join(["[]"] * 5000) + "]}",
    "lists in lists": '{"x": ' + "[" * 150 + "]" * 150 + "}",
    "empty objects": '{"x": [' + ",".join(["{}"] * 5000) + "]}",
    "objects": '{"x": [' + ",".join(['{"a":1}'] * 5000) + "]}",
    "keys": "{" + ",".join(f'"k{i}":{i}' for i in range(5000)) + "}",
    "strings": '{"x": [' + ",".join(['"ab"'] * 5000) + "]}",
    "integers": '{"x": [' + ",".join(map(str, range(1000, 6000))) + "]}",
    "floats": '{"x": [' + ",".join(f"0.{i}" for i in range(5000)) + "]}",
    "text": json.dumps({"text": "word " * 5000}),
    "wide text": json.dumps({"text": "東京" * 5000}, ensure_ascii=False),
    "one wide character": json.dumps({"text": "word " * 5000 + "😀"}, ensure_ascii=False),
    "one escaped character": json.dumps({"text": "word " * 5000 + "é東"}),
    "one escaped pair": json.dumps({"text": "word " * 5000 + "😀"}),
    "escapes": json.dumps({"text": "\0" * 5000}),
}


def memory(value: Any) -> int:
    """Bytes of a value and everything in it; small integers and equal strings are counted each time."""
    found = sys.getsizeof(value)
    if isinstance(value, dict):
        return found + sum(memory(key) + memory(item) for key, item in value.items())
    return found + sum(map(memory, value)) if isinstance(value, list) else found


@pytest.mark.parametrize("name", LINES)
def test_the_estimate_is_at_least_what_the_values_take(name: str) -> None:
    line = LINES[name].encode()
    assert estimated_memory(line) >= memory(json.loads(line)) - 1000


def test_a_line_is_refused_beyond_the_limit_and_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    line = LINES["empty lists"].encode()
    monkeypatch.setattr(row_memory, "ROW_MEMORY", estimated_memory(line))
    assert len(parse_line(line)["x"]) == len(parse_cell(line)["x"]) == 5000
    monkeypatch.setattr(row_memory, "ROW_MEMORY", estimated_memory(line[:-2]) - 1)
    for parse in (parse_line, parse_cell):
        with pytest.raises(RowError, match=r"take about 0 MiB; at most 0 MiB are allowed: split the row") as caught:
            parse(line)
        assert caught.value.info.code == ErrorCode.INVALID_JSON
    assert not line_is_cut(line[:-2])
    monkeypatch.setattr(row_memory, "ROW_MEMORY", ROW_MEMORY)
    assert line_is_cut(line[:-2])
