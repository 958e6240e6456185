"""One rule for numbers in every layout: a whole float is an integer. `test_every_field` has what is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.read.jsonl import json_line_rows
from batchgen.data.read.parquet import parquet_rows
from batchgen.errors import RowError
from batchgen.request.fields.params import SamplingParams
from batchgen.request.table.request_table import ParsedRow
from tests.rows import CHAT, COMPLETIONS, line, parse, text

Layout = Callable[[dict[str, Any]], dict[str, Any]]


def through_jsonl(row: dict[str, Any]) -> dict[str, Any]:
    (found,) = json_line_rows(io.BytesIO(json.dumps(row).encode() + b"\n"), "in.jsonl")
    assert found is not None
    assert found.value is not None
    return dict(found.value)


def through_parquet(row: dict[str, Any]) -> dict[str, Any]:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([row]), stream)
    (found,) = parquet_rows(stream, "in.parquet")
    assert found is not None
    assert found.value is not None
    return dict(found.value)


SHAPES: dict[str, Layout] = {
    "native": lambda fields: text(**fields),
    "sampling_params": lambda fields: text(sampling_params=fields),
    "completions": lambda fields: line(COMPLETIONS, **fields),
    "chat": lambda fields: line(CHAT, **fields),
}
FILES: dict[str, Layout] = {"Python": dict, "JSON lines": through_jsonl, "Parquet": through_parquet}
INTEGERS = ["max_new_tokens", "max_tokens", "n", "seed", "top_k", "min_tokens", "best_of"]


def parsed(shape: str, file: str, fields: dict[str, Any]) -> ParsedRow:
    return parse(FILES[file](SHAPES[shape](fields)))


@pytest.mark.field("max_new_tokens", "n", "seed", "top_k", "min_new_tokens", "best_of")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("file", FILES)
def test_integers_and_numbers(shape: str, file: str) -> None:
    for name in INTEGERS:
        row = parsed(shape, file, {name: 8.0})
        assert row == parsed(shape, file, {name: 8})
        assert type(row.seed if name == "seed" else row.params.max_new_tokens or 8) is int
    for name in ("temperature", "top_p"):
        assert parsed(shape, file, {name: 1}) == parsed(shape, file, {name: 1.0})


@pytest.mark.parametrize("file", FILES)
def test_lists_of_ids(file: str) -> None:
    for name in ("input_ids", "stop_token_ids", "allowed_token_ids"):
        row = {"text": "a"} if name != "input_ids" else {}
        assert parse(FILES[file](row | {name: [1.0, 2.0]})) == parse(row | {name: [1, 2]})
        with pytest.raises(RowError, match=r"1\.5"):
            parse(FILES[file](row | {name: [1.0, 1.5]}))
    assert parse(FILES[file](line(prompt=[1.0, 2.0]))).prompts == parse(line(prompt=[1, 2])).prompts


def test_python_parameters() -> None:
    assert SamplingParams(max_new_tokens=8.0, seed=-0.0) == SamplingParams(max_new_tokens=8, seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("file", FILES)
def test_ids_of_rows(file: str) -> None:
    for value, expected in ((17, "17"), (17.0, "17"), ("17", "17"), (-3, "-3")):
        for name in ("id", "custom_id"):
            assert parse(FILES[file](text(**{name: value}))).id == expected
    for wrong in (True, 1.5, 2.0**60):
        with pytest.raises(RowError, match="`id`"):
            parse(FILES[file](text(id=wrong)))
