"""Rows of Parquet and Arrow files as plain dicts of JSON values; `tables.arrow_values` has the rules of the types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen.data.read.pieces import RowFilter
from batchgen.errors import ErrorCode, ErrorInfo, InputError
from batchgen.request.fields.named_columns import UNNAMED, NamedColumns
from batchgen.request.rows.raw_row import RawRow, UnreadableRow
from batchgen.request.rows.row_memory import ROW_MEMORY
from batchgen.tables.arrow_values import JSON_EXTENSION, Value, columns_of_text, read_rows
from batchgen.tables.text_fields import TextFields

_ARROW_FILE = b"ARROW1"
"""First bytes of Arrow's file format; its stream format has none."""
_NOT_UTF_8 = "{}: the name of a column is not UTF-8; write the file with other names."
_BATCH_ROWS = 1024
_LARGE_BATCH_ROWS = 16
"""Rows per batch for a file with embeddings."""
BATCH_BYTES = 1 << 25
"""Bytes of a batch's columns, if a row is not larger."""
_COSTS = (40, 232)
"""Bytes of memory of an element of a list, and of an object."""


def parquet_schema(stream: BinaryIO, source: str) -> pa.Schema | None:
    """Names and types of the columns; None if the file has no readable footer.

    Raises:
        InputError: two columns, or two fields of a struct, have the same name, a name is not UTF-8, or pyarrow cannot
            read the file's types.
    """
    try:
        file = pq.ParquetFile(stream)
        schema = file.schema_arrow
    except pa.ArrowNotImplementedError as error:
        raise InputError(f"{source} cannot be read by pyarrow {pa.__version__}: {_first_line(error)}") from None
    except UnicodeDecodeError:
        raise InputError(_NOT_UTF_8.format(source)) from None
    except Exception as error:  # of a damaged footer pyarrow raises many types
        _raise_machine(error)
        return None
    _check_names(schema, source)
    _check_json_columns(file, source)
    return schema


def arrow_schema(stream: BinaryIO, source: str) -> pa.Schema | None:
    """As `parquet_schema`, of an Arrow file."""
    try:
        schema, _ = _open_arrow(stream)
        _check_names(schema, source)
    except UnicodeDecodeError:
        raise InputError(_NOT_UTF_8.format(source)) from None
    except Exception as error:
        if isinstance(error, InputError):
            raise
        _raise_machine(error)
        return None
    return schema


class _Within:
    """A seekable stream for Arrow that is not asked for more than there is: a damaged file may name any length."""

    closed = False

    def __init__(self, stream: BinaryIO) -> None:
        self._size = stream.seek(0, 2)
        stream.seek(0)
        self._stream, self.seek, self.tell = stream, stream.seek, stream.tell

    def read(self, size: int) -> bytes:
        return self._stream.read(min(size, max(0, self._size - self.tell())))


def _open_arrow(file: BinaryIO) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The schema and the batches of a file in Arrow's stream or file format."""
    stream = _Within(file)
    start = stream.read(len(_ARROW_FILE))
    stream.seek(0)
    if start != _ARROW_FILE:
        reader = pa.ipc.open_stream(stream)
        return reader.schema, iter(reader)
    batches = pa.ipc.open_file(stream)
    return batches.schema, map(batches.get_batch, range(batches.num_record_batches))


def _check_names(schema: pa.Schema, source: str) -> None:
    if twice := named_twice(schema.names):
        raise InputError(f"{source}: two columns are named {twice!r}; rename one of them.")
    for field in schema:
        if twice := _field_named_twice(field.type):
            raise InputError(f"{source}: two fields in column {field.name!r} are named {twice!r}; rename one of them.")


def _check_json_columns(file: pq.ParquetFile, source: str) -> None:
    """Refuse columns of JSON for which pyarrow has no type: their text would be taken for plain text."""
    leaves = [file.schema.column(i) for i in range(len(file.schema))]
    column = next((leaf.path for leaf in leaves if leaf.logical_type.type == "JSON"), None)
    if column is not None and JSON_EXTENSION not in file.schema_arrow.to_string(truncate_metadata=False):
        raise InputError(f"{source}: pyarrow {pa.__version__} has no type for the JSON of {column}; upgrade pyarrow.")


def named_twice(names: Sequence[str]) -> str | None:
    """The first name that occurs twice."""
    return next((name for name in names if names.count(name) > 1), None)


def _field_named_twice(kind: pa.DataType) -> str | None:
    """Name shared by two fields of one struct, at any depth; a dict would lose one of them."""
    inner = [kind.field(i) for i in range(kind.num_fields)]
    twice = named_twice([field.name for field in inner])
    return twice or next(filter(None, (_field_named_twice(field.type) for field in inner)), None)


def parquet_rows(
    stream: BinaryIO, source: str, first_index: int = 0, keep: RowFilter | None = None, columns: NamedColumns = UNNAMED
) -> Iterator[RawRow | None]:
    """Rows of a Parquet file, as a `RowsOfStream`, read in bounded batches from a seekable stream.

    A file without a readable footer, or with one that contradicts itself, gives one `truncated_input` row; a damaged
    row group gives one for each row that cannot be read. What pyarrow cannot do is `unsupported_field`, never damage.
    """
    rows = _Rows(source, first_index, keep, columns)
    try:
        file = pq.ParquetFile(stream, pre_buffer=False, page_checksum_verification=True)
        names = file.schema_arrow.names
        _check_counts(file.metadata)
    except Exception as error:
        _raise_machine(error)
        problem = f"the Parquet file is cut or damaged and none of its rows can be read ({_first_line(error)})"
        yield rows.failed(0, ErrorCode.TRUNCATED_INPUT, problem)
        return
    size = _LARGE_BATCH_ROWS if "input_embeds" in names else _BATCH_ROWS
    row = 0
    for group in range(file.metadata.num_row_groups):
        end = row + file.metadata.row_group(group).num_rows
        batches = _batches(file, group, size)
        while row < end:
            try:
                batch = next(batches)
            except Exception as error:
                code, problem = _unreadable(group, error)
                for each in range(row, end):
                    yield rows.failed(each, code, problem)
                row = end
                break
            yield from rows.of(batch, row)
            row += batch.num_rows


def arrow_rows(
    stream: BinaryIO, source: str, first_index: int = 0, keep: RowFilter | None = None, columns: NamedColumns = UNNAMED
) -> Iterator[RawRow | None]:
    """Rows of an Arrow file, in the stream or the file format, as a `RowsOfStream`; damage ends it with one row."""
    rows, row = _Rows(source, first_index, keep, columns), 0
    try:
        schema, batches = _open_arrow(stream)
        for whole in batches:
            whole.validate(full=True)  # offsets of a damaged file lead out of its memory
            for batch in _slices(whole, _LARGE_BATCH_ROWS if "input_embeds" in schema.names else _BATCH_ROWS):
                yield from rows.of(batch, row)
                row += batch.num_rows
    except Exception as error:
        _raise_machine(error)
        problem = f"the Arrow file is cut or damaged ({_first_line(error)}); rows from here on are missing"
        yield rows.failed(row, ErrorCode.TRUNCATED_INPUT, problem)


@dataclass(frozen=True, slots=True)
class _Rows:
    """What makes the rows of one file of its batches."""

    source: str
    first_index: int
    keep: RowFilter | None
    columns: NamedColumns

    def failed(self, row: int, code: ErrorCode, problem: str) -> RawRow | None:
        """Row `row` of the file as an error; None if it is not wanted."""
        index = self.first_index + row
        raw = RawRow(index, self.source, row + 1, unit="row")
        return raw.with_error(code, problem) if self.keep is None or self.keep(index) else None

    def of(self, batch: pa.RecordBatch, row: int) -> Iterator[RawRow | None]:
        """The rows of a batch that `row` rows of the file are before."""
        fields = TextFields(columns_of_text(batch.schema), named=self.columns.fields())
        read = partial(_read, fields=fields, columns=self.columns)
        indexes = range(self.first_index + row, self.first_index + row + batch.num_rows)
        for index, value in zip(indexes, _wanted(batch, indexes, self.keep, read), strict=True):
            row += 1
            if value is None:
                yield None
            elif isinstance(value, UnreadableRow):
                raw = RawRow(index, self.source, row, unit="row")
                yield raw.with_error(value.info.code, value.info.message).with_readable(value.readable)
            else:
                yield RawRow(index, self.source, row, value, unit="row")


def _check_counts(metadata: pq.FileMetaData) -> None:
    """Raise `ArrowInvalid` unless the row groups have as many rows as the file: rows would be missing, or too many."""
    counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    if sum(counts) != metadata.num_rows or min(counts, default=0) < 0:
        raise pa.ArrowInvalid(f"its footer counts {metadata.num_rows} rows, and {sum(counts)} in its row groups")


def _read(batch: pa.RecordBatch, fields: TextFields, columns: NamedColumns) -> list[Value]:
    """As `read_rows`; a row whose values would take more than `ROW_MEMORY` has an error."""
    if batch.num_rows == 1 and batch.nbytes > ROW_MEMORY >> 5 and (size := _memory(batch.columns)) > ROW_MEMORY:
        problem = f"the row's values take about {size >> 20} MiB; at most {ROW_MEMORY >> 20} MiB are allowed"
        return [UnreadableRow(ErrorInfo(ErrorCode.INVALID_FIELD, f"{problem}: split the row"), {})]
    return read_rows(batch, fields, columns)


def _batches(file: pq.ParquetFile, group: int, size: int) -> Iterator[pa.RecordBatch]:
    """Batches of a row group of at most `size` rows, and of fewer if they are large."""
    whole = file.metadata.row_group(group)
    average = whole.total_byte_size // max(1, whole.num_rows)
    rows = max(1, min(size, BATCH_BYTES // max(1, average)))
    for batch in file.iter_batches(rows, row_groups=[group], use_threads=False):
        yield from _slices(batch, rows)


def _slices(batch: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    """Parts of a batch of at most `size` rows, and of fewer if they are large."""
    step = min(size, max(1, batch.num_rows * BATCH_BYTES // max(BATCH_BYTES, batch.nbytes)))
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)


def _memory(arrays: Sequence[pa.Array]) -> int:
    """Bytes of memory that the values of arrays take as Python's."""
    size = 0
    for array in arrays:
        kind = array.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            wide = 1 if pc.all(pc.string_is_ascii(array)).as_py() is not False else 4
            size += len(array) * _COSTS[0] + wide * (pc.sum(pc.utf8_length(array)).as_py() or 0)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            size += len(array) * _COSTS[0] + _memory([array.flatten()])
        elif pa.types.is_struct(kind):
            size += len(array) * _COSTS[1] + _memory(array.flatten())
        else:
            size += len(array) * _COSTS[0] + array.nbytes
    return size


def _unreadable(group: int, error: Exception) -> tuple[ErrorCode, str]:
    """Error of the rows of a row group that cannot be read, unless memory is short."""
    _raise_machine(error)
    if isinstance(error, pa.ArrowNotImplementedError):
        remedy = f"pyarrow {pa.__version__} cannot read it ({_first_line(error)}); write the file with other types"
        return ErrorCode.UNSUPPORTED_FIELD, f"row group {group}: {remedy}, or in smaller row groups"
    return ErrorCode.TRUNCATED_INPUT, f"row group {group} cannot be read ({_first_line(error)})"


def _raise_machine(error: Exception) -> None:
    """Raise an error that is about this machine's memory, a disk or a network, and not about the file."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
        raise error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _wanted(
    batch: pa.RecordBatch, indexes: range, keep: RowFilter | None, read: Callable[[pa.RecordBatch], list[Value]]
) -> Iterator[Value | None]:
    """Value or error of each row; None for one that is not wanted."""
    if keep is None:
        yield from read(batch)
        return
    wanted = [keep(index) for index in indexes]
    try:
        values = iter(read(batch if all(wanted) else batch.filter(pa.array(wanted))))
    except pa.ArrowException:  # some types have no kernel that filters
        values = chain.from_iterable(read(batch.slice(i, 1)) for i, is_wanted in enumerate(wanted) if is_wanted)
    for is_wanted in wanted:
        yield next(values) if is_wanted else None
