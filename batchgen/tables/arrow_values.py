"""Values of Arrow columns as JSON values, for every Arrow type, column by column at every depth.

Nulls are absent fields, also inside structs. No compute kernel of Arrow is needed but casts to text, so a type for
which a kernel is missing is read like any other.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from itertools import repeat
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.types as pat

from batchgen.errors import ErrorCode, ErrorInfo, InputError, RowError, UsageError, row_error
from batchgen.request.fields.declared import ID_NAMES, LOOKUP
from batchgen.request.fields.media import MEDIA_FIELDS
from batchgen.request.fields.named_columns import UNNAMED, NamedColumns
from batchgen.request.json_text import parse_json
from batchgen.request.rows.raw_row import UnreadableRow
from batchgen.tables.temporal import temporal_to_text
from batchgen.tables.text_fields import TextFields

_BATCH_ROWS = 1024
_BATCH_BYTES = 1 << 25
"""Bytes of the rows of a table that are read at once, if one is not larger."""
_FLOAT_DIGITS = 15
"""Decimal digits that every double holds."""
_TEXT_COLUMNS = frozenset({"text", "prompt", *ID_NAMES})
_MEDIA = frozenset(MEDIA_FIELDS.values())
_MEDIA_KEYS = frozenset({"image", "audio", "bytes"})
"""Keys within known fields, such as of parts of messages, whose binary values are encoded items."""
_KNOWN = frozenset({*LOOKUP["row"], "sampling_params", "body"})
JSON_EXTENSION = "arrow.json"
"""Name of the extension type of text that is JSON."""


class _Place(NamedTuple):
    """Place of values in a row."""

    name: str
    """The field's own name."""
    known: bool
    """Whether they are part of a field of batchgen, in which a decimal is a number."""
    strict_text: bool = False
    """Whether binary values must be UTF-8."""
    media: bool = False
    """Whether binary values are encoded images or sounds, which stay bytes."""


_Values = list[Any]
Value = dict[str, Any] | UnreadableRow
"""A row, or why it cannot be read."""

_BAD_NAME = ErrorInfo(
    ErrorCode.INVALID_UNICODE,
    "a name in the type of a column, such as that of a time zone, is not UTF-8; write the file with another type",
)


def read_rows(batch: pa.RecordBatch, fields: TextFields, columns: NamedColumns = UNNAMED) -> list[Value]:
    """The rows of a batch as dicts of JSON values, or the error of a row.

    A row has an error for text that is not UTF-8, or not the JSON that its type promises, for a map that repeats a key,
    for text that a field refuses, and for whatever else its conversion raises.

    Args:
        batch: the rows.
        fields: the columns that hold fields as text.
        columns: the fields that options name.

    Raises:
        InputError: a column has a type that has no JSON form.
    """
    try:
        return [fields.read(row) for row in _dicts(batch, columns)]
    except Exception as error:
        is_name = isinstance(error, UnicodeDecodeError)  # of a type: values are looked at one by one
        info = _BAD_NAME if is_name else row_error(error, "reading the row's columns")
        if batch.num_rows == 1:
            return [UnreadableRow(info, _readable(batch, columns))]
    return [read_rows(batch.slice(i, 1), fields, columns)[0] for i in range(batch.num_rows)]


def _readable(row: pa.RecordBatch, columns: NamedColumns) -> dict[str, Any]:
    """The values of a row's columns that can be read."""
    values: dict[str, Any] = {}
    for place in range(row.num_columns):
        with suppress(Exception):
            values |= _dicts(row.select([place]), columns)[0]
    return values


def table_items(table: Any) -> Iterator[Any]:
    """The rows of an object that exports itself as an Arrow stream or array: those of a Parquet file of the same table.

    A row is a dict or an `UnreadableRow`. An object with a single column gives its values, as a list of them would.

    Raises:
        UsageError: it cannot be exported, such as a data frame with a column of values of several types.
    """
    if not hasattr(table, "__arrow_c_stream__"):
        table = pa.chunked_array([pa.array(table)])
    try:
        reader = pa.RecordBatchReader.from_stream(table)
    except pa.ArrowException as error:
        with suppress(pa.ArrowException):
            yield from pa.chunked_array(table).to_pylist()
            return
        kind, problem = type(table).__name__, (str(error).splitlines() or [""])[0]
        remedy = 'give its rows as dictionaries, such as table.to_dict("records")'
        raise UsageError(f"the {kind} cannot be read as an Arrow table ({problem}); {remedy}") from None
    fields = TextFields(columns_of_text(reader.schema))
    for batch in reader:
        step = max(1, min(_BATCH_ROWS, batch.num_rows * _BATCH_BYTES // max(1, batch.nbytes)))
        for start in range(0, batch.num_rows, step):
            yield from read_rows(batch.slice(start, step), fields)


def columns_of_text(schema: pa.Schema) -> list[str]:
    """Names of the columns whose values may be text, or objects with text in them."""
    return [
        field.name
        for field in schema
        if not pat.is_primitive(field.type) and not any(is_kind(field.type) for is_kind in _IS_LIST)
    ]


def _dicts(batch: pa.RecordBatch, columns: NamedColumns) -> list[dict[str, Any]]:
    names, read_as = batch.schema.names, columns.fields()
    values = [
        _json_values(column, _Place(name, field in _KNOWN, not field or field in _TEXT_COLUMNS, field in _MEDIA))
        for name, column in zip(names, batch.columns, strict=True)
        for field in [read_as.get(name, name)]
    ]
    if not values:
        return [{} for _ in range(batch.num_rows)]
    return [
        {name: value for name, value in zip(names, row, strict=True) if value is not None}
        for row in zip(*values, strict=True)
    ]


def _json_values(array: pa.Array, place: _Place) -> _Values:
    kind = array.type
    for is_kind, convert in _CONVERSIONS:
        if is_kind(kind):
            return convert(array, place)
    raise InputError(f"the column {place.name!r} has the type {kind}, which batchgen cannot read; leave it out")


def _plain(array: pa.Array, place: _Place) -> _Values:
    values: _Values = array.to_pylist() if array.null_count else array.to_numpy(zero_copy_only=False).tolist()
    return values


def _valid(array: pa.Array) -> Iterable[bool]:
    """Whether each value is not null."""
    return array.is_valid().to_pylist() if array.null_count else repeat(True, len(array))


def _text(array: pa.Array, place: _Place) -> _Values:
    try:
        return list(array.to_pylist())
    except UnicodeDecodeError:
        raise RowError(ErrorCode.INVALID_UNICODE, "a string of this row is not UTF-8") from None


def _each(values: _Values, convert: Callable[[Any], Any]) -> _Values:
    return [None if value is None else convert(value) for value in values]


def _integer_or_float(value: Decimal) -> int | float:
    """Number of a known field: every digit of an integer is kept."""
    return int(value) if value == value.to_integral_value() else float(value)


def _decimals(array: pa.Array, place: _Place) -> _Values:
    values = array.to_pylist()
    if array.type.scale <= 0:
        return _each(values, int)
    if place.known:
        return _each(values, _integer_or_float)
    return _each(values, float if array.type.precision <= _FLOAT_DIGITS else "{:f}".format)


def _binary(array: pa.Array, place: _Place) -> _Values:
    if place.media:
        return list(array.to_pylist())
    return _each(array.to_pylist(), _strict_text if place.strict_text else _text_or_base64)


def _strict_text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise RowError(ErrorCode.INVALID_UNICODE, "the binary prompt or id of this row is not UTF-8") from None


def _text_or_base64(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


def _structs(array: pa.Array, place: _Place) -> _Values:
    names = [field.name for field in array.type]
    columns = [
        _json_values(child, _Place(name, place.known, media=place.media or (place.known and name in _MEDIA_KEYS)))
        for name, child in zip(names, array.flatten(), strict=True)
    ]
    rows = zip(*columns, strict=True) if columns else repeat((), len(array))
    return [
        {name: value for name, value in zip(names, row, strict=True) if value is not None} if ok else None
        for row, ok in zip(rows, _valid(array), strict=True)
    ]


def _spans(array: pa.Array) -> tuple[list[int], list[int]]:
    """Beginning and end of each list among the child's values."""
    if pat.is_fixed_size_list(array.type):
        size = array.type.list_size
        starts = [(array.offset + i) * size for i in range(len(array))]
        return starts, [start + size for start in starts]
    offsets = array.offsets.to_pylist()
    if pat.is_list_view(array.type) or pat.is_large_list_view(array.type):
        return offsets, [start + size for start, size in zip(offsets, array.sizes.to_pylist(), strict=True)]
    return offsets[:-1], offsets[1:]


def _child_values(array: pa.Array, child: pa.Array, place: _Place) -> tuple[list[tuple[int, int] | None], _Values]:
    """The span of each list, None for a null, and the values that the spans are of."""
    spans = [(start, end) if ok else None for start, end, ok in zip(*_spans(array), _valid(array), strict=True)]
    used = [span for span in spans if span is not None]
    low, high = min((start for start, _ in used), default=0), max((end for _, end in used), default=0)
    moved = [None if span is None else (span[0] - low, span[1] - low) for span in spans]
    return moved, _json_values(child.slice(low, high - low), place)


def _lists(array: pa.Array, place: _Place) -> _Values:
    spans, flat = _child_values(array, array.values, place)
    return [None if span is None else flat[span[0] : span[1]] for span in spans]


def _maps(array: pa.Array, place: _Place) -> _Values:
    spans, keys = _child_values(array, array.keys, _Place("", False))
    items = _child_values(array, array.items, _Place(place.name, place.known, media=place.media))[1]
    return [None if span is None else _map(keys[slice(*span)], items[slice(*span)]) for span in spans]


def _map(keys: Sequence[Any], items: Sequence[Any]) -> dict[str, Any]:
    pairs = [(str(key), item) for key, item in zip(keys, items, strict=True) if item is not None]
    values = dict(pairs)
    if len(values) != len(pairs):
        raise RowError(ErrorCode.INVALID_FIELD, "a map holds the same key twice")
    return values


def _dictionaries(array: pa.Array, place: _Place) -> _Values:
    indices = array.indices.to_pylist()
    entries = array.dictionary
    if len(entries) <= len(array):
        values = _json_values(entries, place)
        return [None if index is None else values[index] for index in indices]
    # A batch of a few rows may bring the dictionary of a whole file.
    used = {index: _json_values(entries.slice(index, 1), place)[0] for index in set(indices) - {None}}
    return [used.get(index) for index in indices]


def _runs(array: pa.Array, place: _Place) -> _Values:
    values: _Values = []
    for end, value in zip(array.run_ends.to_pylist(), _json_values(array.values, place), strict=True):
        values += repeat(value, max(0, min(end - array.offset, len(array)) - len(values)))
    return values


def _extension(array: pa.Array, place: _Place) -> _Values:
    name = array.type.extension_name
    if name == "arrow.uuid":
        return _each(array.storage.to_pylist(), lambda value: str(uuid.UUID(bytes=value)))
    values = _json_values(array.storage, place)
    if name == JSON_EXTENSION:
        return _each(values, lambda text: _parsed(text, place.name))
    return _each(values, bool) if name == "arrow.bool8" else values


def _parsed(text: str, name: str) -> Any:
    try:
        return parse_json(text.encode())
    except RowError as error:
        problem = f"`{name}` has the type JSON, but its text is not JSON ({error.info.message})"
        raise RowError(error.info.code, problem, name) from None


_IS_LIST = (pat.is_list, pat.is_large_list, pat.is_fixed_size_list, pat.is_list_view, pat.is_large_list_view)
_CONVERSIONS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array, _Place], _Values]], ...] = (
    (lambda kind: isinstance(kind, pa.BaseExtensionType), _extension),
    (lambda kind: pat.is_string(kind) or pat.is_large_string(kind) or pat.is_string_view(kind), _text),
    (pat.is_float16, lambda array, place: _each(array.to_pylist(), float)),  # pyarrow 18 gives numbers of numpy
    (lambda kind: pat.is_integer(kind) or pat.is_floating(kind) or pat.is_boolean(kind), _plain),
    (pat.is_null, lambda array, place: [None] * len(array)),
    (pat.is_struct, _structs),
    (lambda kind: any(is_kind(kind) for is_kind in _IS_LIST), _lists),
    (pat.is_map, _maps),
    (pat.is_dictionary, _dictionaries),
    (pat.is_decimal, _decimals),
    (pat.is_temporal, lambda array, place: list(temporal_to_text(array).to_pylist())),
    (lambda kind: pat.is_binary(kind) or pat.is_large_binary(kind) or pat.is_binary_view(kind), _binary),
    (pat.is_fixed_size_binary, _binary),
    (pat.is_run_end_encoded, _runs),
)
"""Test of a type, and the function that gives the values of its arrays; the first that fits counts."""
