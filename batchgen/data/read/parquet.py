"""Rows of a Parquet file as plain dicts of JSON values.

Nulls are absent fields, also inside structs. Maps become dicts, dates and times ISO strings, decimals floats, or
integers if their type has no fraction. Binary values become text if they are UTF-8, else base64; in a prompt or id
column they must be UTF-8.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pat

from batchgen.data.read.jsonl import RowFilter
from batchgen.data.read.temporal import temporal_to_text
from batchgen.errors import ErrorCode, InputError, RowError
from batchgen.request.fields import ID_NAMES
from batchgen.request.raw_row import RawRow

Convert = Callable[[Any], Any]
Value = dict[str, Any] | RowError

_BATCH_ROWS = 1024
_LARGE_BATCH_ROWS = 16
"""Rows per batch for a file with embeddings."""
_TEXT_COLUMNS = frozenset({"text", "prompt", *ID_NAMES})


def parquet_schema(stream: BinaryIO, source: str) -> pa.Schema | None:
    """Names and types of the columns; None if the file has no readable footer.

    Raises:
        InputError: two columns, or two fields of a struct, have the same name.
    """
    try:
        schema = pq.ParquetFile(stream).schema_arrow
    except (pa.ArrowException, OSError):
        return None
    if twice := _named_twice(schema.names):
        raise InputError(f"{source}: two columns are named {twice!r}; rename one of them.")
    for field in schema:
        if twice := _field_named_twice(field.type):
            raise InputError(f"{source}: two fields in column {field.name!r} are named {twice!r}; rename one of them.")
    return schema


def _named_twice(names: Sequence[str]) -> str | None:
    return next((name for name in names if names.count(name) > 1), None)


def _field_named_twice(kind: pa.DataType) -> str | None:
    """Name shared by two fields of one struct, at any depth; a dict would lose one of them."""
    inner = [kind.field(i) for i in range(kind.num_fields)]
    twice = _named_twice([field.name for field in inner])
    return twice or next(filter(None, (_field_named_twice(field.type) for field in inner)), None)


def parquet_rows(
    stream: BinaryIO,
    source: str,
    first_index: int = 0,
    keep: RowFilter | None = None,
    text_columns: frozenset[str] = frozenset(),
) -> Iterator[RawRow | None]:
    """Rows of a Parquet file, read in bounded batches; None for a row that `keep` rejects.

    A file without a readable footer gives one `truncated_input` row; a damaged row group gives one for each row that
    cannot be read.

    Args:
        stream: the file, seekable.
        source: name of the file in messages.
        first_index: index of the file's first row.
        keep: predicate of wanted row indexes; None for all rows.
        text_columns: further columns in which binary values must be UTF-8.
    """
    try:
        file = pq.ParquetFile(stream, pre_buffer=False, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        problem = f"the Parquet file is cut or damaged and none of its rows can be read ({_first_line(error)})"
        wanted = keep is None or keep(first_index)
        yield RawRow.failed(first_index, source, 1, ErrorCode.TRUNCATED_INPUT, problem) if wanted else None
        return
    strict = _TEXT_COLUMNS | text_columns
    names = file.schema_arrow.names
    converts = [_converter(field.type, field.name, field.name in strict) for field in file.schema_arrow]
    rows = _LARGE_BATCH_ROWS if "input_embeds" in names else _BATCH_ROWS
    row = 0
    for group in range(file.metadata.num_row_groups):
        end = row + file.metadata.row_group(group).num_rows
        try:
            for batch in file.iter_batches(rows, row_groups=[group], use_threads=False):
                for item in _batch_rows(batch, names, converts, source, first_index, row, keep):
                    row += 1
                    yield item
        except (pa.ArrowException, OSError) as error:
            problem = f"row group {group} cannot be read ({_first_line(error)})"
            while row < end:
                row += 1
                wanted = keep is None or keep(first_index + row - 1)
                index = first_index + row - 1
                yield RawRow.failed(index, source, row, ErrorCode.TRUNCATED_INPUT, problem) if wanted else None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _batch_rows(
    batch: pa.RecordBatch,
    names: Sequence[str],
    converts: Sequence[Convert | None],
    source: str,
    first_index: int,
    first_row: int,
    keep: RowFilter | None,
) -> Iterator[RawRow | None]:
    rows = range(first_row, first_row + batch.num_rows)
    wanted = [keep is None or keep(first_index + row) for row in rows]
    values = iter(_values(batch if all(wanted) else batch.filter(pa.array(wanted)), names, converts))
    for row, is_wanted in zip(rows, wanted, strict=True):
        if not is_wanted:
            yield None
            continue
        value = next(values)
        if isinstance(value, RowError):
            yield RawRow.failed(first_index + row, source, row + 1, value.info.code, value.info.message)
        else:
            yield RawRow(first_index + row, source, row + 1, value)


def _values(batch: pa.RecordBatch, names: Sequence[str], converts: Sequence[Convert | None]) -> list[Value]:
    """Each row's dict or error; if the batch cannot be converted as a whole, it is converted row by row."""
    try:
        return [*_dicts(batch, names, converts)]
    except (RowError, UnicodeDecodeError):
        return [_value(batch.slice(i, 1), names, converts) for i in range(batch.num_rows)]


def _value(batch: pa.RecordBatch, names: Sequence[str], converts: Sequence[Convert | None]) -> Value:
    try:
        return _dicts(batch, names, converts)[0]
    except RowError as error:
        return error
    except UnicodeDecodeError:
        return RowError(ErrorCode.INVALID_UNICODE, "a string of this row is not UTF-8")


def _dicts(batch: pa.RecordBatch, names: Sequence[str], converts: Sequence[Convert | None]) -> list[dict[str, Any]]:
    columns = [
        values if convert is None else [None if v is None else convert(v) for v in values]
        for values, convert in zip(map(_column_values, batch.columns), converts, strict=True)
    ]
    if not columns:
        return [{} for _ in range(batch.num_rows)]
    pairs = zip(*columns, strict=True)
    return [{name: v for name, v in zip(names, row, strict=True) if v is not None} for row in pairs]


def _column_values(column: pa.Array) -> list[Any]:
    """Values of a column as by `to_pylist`; lists of numbers (token ids) go through numpy, which is faster."""
    kind = column.type
    if pat.is_list(kind) and (pat.is_integer(kind.value_type) or pat.is_floating(kind.value_type)):
        offsets = column.offsets.to_numpy()
        flat = column.values.slice(offsets[0], offsets[-1] - offsets[0]) if len(column) else column.values
        if flat.null_count == 0 and len(column):
            numbers = flat.to_numpy(zero_copy_only=False).tolist()
            ends = (offsets - offsets[0]).tolist()
            valid = column.is_valid().to_pylist()
            return [numbers[ends[i] : ends[i + 1]] if ok else None for i, ok in enumerate(valid)]
    values: list[Any] = temporal_to_text(column).to_pylist()
    return values


def _converter(kind: pa.DataType, name: str, strict_text: bool) -> Convert | None:
    """Function that converts a column's non-null values to JSON values; None if they need no conversion.

    It is built once per column from the column's type.
    """
    if pat.is_dictionary(kind):
        return _converter(kind.value_type, name, strict_text)
    if pat.is_struct(kind):
        return _struct_converter({field.name: _converter(field.type, field.name, False) for field in kind})
    if pat.is_map(kind):
        return _map_converter(_converter(kind.key_type, "", False), _converter(kind.item_type, "", False))
    if pat.is_list(kind) or pat.is_large_list(kind) or pat.is_fixed_size_list(kind):
        return _list_converter(_converter(kind.value_type, name, strict_text))
    if pat.is_binary(kind) or pat.is_large_binary(kind) or pat.is_fixed_size_binary(kind):
        return _strict_text if strict_text else _text_or_base64
    if pat.is_decimal(kind) and kind.scale == 0:
        return int
    if pat.is_decimal(kind):
        return float
    if isinstance(kind, pa.BaseExtensionType):
        return _extension_value
    return None


def _struct_converter(converts: dict[str, Convert | None]) -> Convert:
    def convert(value: dict[str, Any]) -> dict[str, Any]:
        result = {}
        for key, item in value.items():
            if item is not None:
                inner = converts[key]
                result[key] = item if inner is None else inner(item)
        return result

    return convert


def _map_converter(of_keys: Convert | None, inner: Convert | None) -> Convert:
    def convert(value: list[tuple[Any, Any]]) -> dict[str, Any]:
        pairs = [
            (str(key if of_keys is None else of_keys(key)), item if inner is None else inner(item))
            for key, item in value
            if item is not None
        ]
        result = dict(pairs)
        if len(result) != len(pairs):
            raise RowError(ErrorCode.INVALID_FIELD, "a map holds the same key twice")
        return result

    return convert


def _list_converter(inner: Convert | None) -> Convert | None:
    if inner is None:
        return None
    return lambda values: [None if value is None else inner(value) for value in values]


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


def _extension_value(value: Any) -> Any:
    if isinstance(value, uuid.UUID):
        return str(value)
    return _text_or_base64(value) if isinstance(value, bytes) else value
