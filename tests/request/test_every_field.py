"""Wrong values of every sampling field through every entrance: each is refused, and the message names the field."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.config.engine_config import EngineConfig
from batchgen.config.resolve import resolve_config
from batchgen.config.run_config import BY_NAME
from batchgen.data.read.jsonl import json_line_rows
from batchgen.data.read.parquet import parquet_rows
from batchgen.errors import ErrorCode, RowError, UsageError
from batchgen.request.fields.declared import FIELDS, Field
from batchgen.request.fields.params import SAMPLING_FIELDS, SamplingParams
from tests.cases import each
from tests.request.wrong_values import wrong_texts, wrong_values
from tests.rows import CHAT, COMPLETIONS, line, parse, text

SAMPLING = [field for field in FIELDS if "params" in field.places]
BODIES = [field for field in FIELDS if "completions" in field.places and field.name in {f.name for f in SAMPLING}]
OPTIONS = [field for field in SAMPLING if field.name in BY_NAME and BY_NAME[field.name].target == "sampling"]
CODES = {ErrorCode.INVALID_FIELD, ErrorCode.TOKEN_OUT_OF_RANGE}


def assert_refused(name: str, value: Any, parse_value: Callable[[], Any]) -> None:
    shown = repr(value)[:80] if not isinstance(value, int) else hex(value)[:80]
    with pytest.raises(RowError) as caught:
        pytest.fail(f"{name} = {shown} is accepted as {parse_value()}")
    info = caught.value.info
    assert (info.code in CODES, info.param) == (True, name), f"{shown}: {info}"
    assert f"`{name}`" in info.message
    assert len(info.message) < 400
    info.message.encode()  # it is written to the output


@pytest.mark.field("sampling_params", "method", "url", "body")
@each("field", SAMPLING)
def test_rows(field: Field) -> None:
    for value in wrong_values(field):
        for name in field.spellings:
            assert_refused(name, value, lambda name=name, value=value: parse(text(**{name: value})))
            nested = text(sampling_params={"seed": 1, name: value} if name != "seed" else {name: value})
            assert_refused(name, value, lambda nested=nested: parse(nested))


@each("field", BODIES)
def test_bodies(field: Field) -> None:
    for value in wrong_values(field):
        for place, url in (("completions", COMPLETIONS), ("chat", CHAT)):
            if place in field.places:
                for name in field.spellings:
                    assert_refused(name, value, lambda n=name, v=value, url=url: parse(line(url, **{n: v})))


@each("field", SAMPLING)
def test_lines_and_cells(field: Field) -> None:
    """What a file reader makes of a value is refused, too; a value that the format lacks is the reader's error."""
    for value in wrong_values(field):
        for row in (*_through_jsonl(field.name, value), *_through_parquet(field.name, value)):
            # Parquet has no nulls inside an object.
            if json.dumps(row.get(field.name)) == json.dumps(value):
                assert_refused(field.name, value, lambda row=row: parse(row))


def _through_jsonl(name: str, value: Any) -> Iterator[dict[str, Any]]:
    try:
        data = json.dumps(text(**{name: value})).encode() + b"\n"
    except ValueError:  # an integer too long to print
        return
    yield from (
        row.value for row in json_line_rows(io.BytesIO(data), "in.jsonl") if row is not None and row.error is None
    )


def _through_parquet(name: str, value: Any) -> Iterator[dict[str, Any]]:
    stream = io.BytesIO()
    try:
        pq.write_table(pa.table({"text": ["a"], name: [value]}), stream)
    except (pa.ArrowException, OverflowError):
        return
    yield from (row.value for row in parquet_rows(stream, "in.parquet") if row is not None and row.error is None)


@each("field", SAMPLING_FIELDS)
def test_python(field: Field) -> None:
    if "params" not in field.places:
        return
    for value in [*wrong_values(field), object(), 1.5j, {"a": object()}, [object()], b"a", [[1.5]]]:
        assert_refused(field.name, value, lambda value=value: SamplingParams(**{field.name: value}))


@each("field", OPTIONS)
def test_options(field: Field, tmp_path: Path) -> None:
    """Flags, variables, TOML files with text or TOML values, and a name that is not UTF-8."""
    option = BY_NAME[field.name]
    given = {"inputs": ("a.jsonl",)}
    for value in wrong_texts(field):
        with pytest.raises(UsageError, match=f"^`{option.flag}`"):
            pytest.fail(f"{value!r} is accepted: {resolve_config({**given, field.name: value}, {}, tmp_path)}")
        if value:
            with pytest.raises(UsageError, match=f"^`({option.env}|{option.flag})`"):
                resolve_config(given, {option.env: value}, tmp_path)
    with pytest.raises(UsageError, match=f"`{option.flag}`"):
        resolve_config({**given, field.name: "\udce9"}, {}, tmp_path)


def test_engine_options_are_not_fields() -> None:
    # A row's `dtype` is the oldest form of a constraint, the engine's the number format of the weights.
    assert {field.name for field in SAMPLING} & set(EngineConfig.__dataclass_fields__) == {"seed", "dtype"}
