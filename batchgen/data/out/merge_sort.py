"""Merge of several results files into one, in key order, in bounded memory.

Small results are sorted in memory. Larger ones are split into buckets on disk by their position in the final order;
then one bucket after the other is sorted in memory and written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from batchgen.data.checksums import CrcStream, crc_of
from batchgen.data.durable_files import part_errors
from batchgen.data.files import open_new, open_own, remove_file
from batchgen.data.results_file import DamagedFile, TableWriter, open_parquet
from batchgen.data.schema import SCHEMA
from batchgen.data.store.committed import Committed
from batchgen.errors import OutputError

MEMORY_BYTES = 128 << 20
"""Results that are estimated larger than this are sorted on disk."""
ROW_GROUP_ROWS = 10_000
ROW_GROUP_BYTES = 60 << 20
"""Most bytes of values of a row group in memory; encoded, it is then smaller than the documented limit of 64 MiB."""

_MOST_BUCKETS = 256
_BLOCK_ROWS = 1 << 16
"""Number of rows assigned to buckets, and most rows written to them, at once."""
_ROW_OVERHEAD = 256
"""Bytes of a row in memory in addition to its values: offsets and validity of 39 columns."""
_RANK = "rank"


class ResultWriter:
    """Writer of rows in the order given. Row groups depend on the rows alone, not on how they are batched."""

    def __init__(self, writer: TableWriter) -> None:
        self._writer = writer
        self._pending: list[pa.Table] = []
        self._rows = 0
        self._bytes = 0

    @property
    def schema(self) -> pa.Schema:
        """Schema of the rows, without the footer."""
        return self._writer.schema.remove_metadata()

    def write(self, table: pa.Table) -> None:
        """Append the rows of a table."""
        row_bytes = _row_bytes(table)
        start = 0
        while start < len(table):
            ends = np.cumsum(row_bytes[start : start + ROW_GROUP_ROWS - self._rows])
            fit = int(np.searchsorted(ends, ROW_GROUP_BYTES - self._bytes, side="right"))
            if fit == 0 and self._rows == 0:
                fit = 1
            if fit:
                self._pending.append(table.slice(start, fit))
                self._rows += fit
                self._bytes += int(ends[fit - 1])
                start += fit
            if self._rows == ROW_GROUP_ROWS or start < len(table):
                self.flush()

    def flush(self) -> None:
        """End the row group and write it, if it has rows."""
        if self._pending:
            group = pa.concat_tables(self._pending).combine_chunks()
            self._writer.write_table(group)
        self._pending, self._rows, self._bytes = [], 0, 0


def _row_bytes(table: pa.Table) -> npt.NDArray[np.int64]:
    """[rows] int64: approximate bytes of each row in memory."""
    total = np.full(len(table), _ROW_OVERHEAD, np.int64)
    for column in table.columns:
        if column.null_count < len(column):
            total += _value_bytes(column)
    return total


def _value_bytes(column: pa.ChunkedArray) -> npt.NDArray[np.int64] | int:
    kind = column.type
    if pat.is_string(kind):
        lengths, unit = pc.binary_length(column), 1
    elif pat.is_list(kind):
        lengths = pc.list_value_length(column)
        unit = kind.value_type.byte_width if pat.is_primitive(kind.value_type) else 24
    elif pat.is_struct(kind):
        lengths, unit = pc.if_else(column.is_valid(), 100, 0), 1
    else:
        return 8
    values: npt.NDArray[np.int64] = lengths.fill_null(0).to_numpy().astype(np.int64) * unit
    return values


def merge_sort(
    paths: Sequence[Path], keys: Committed, writer: ResultWriter, scratch: Path, memory_bytes: int = MEMORY_BYTES
) -> Counter[str]:
    """Write all rows of the files in key order; returns how many nulls each column of theirs has.

    Args:
        paths: the results files that `keys` was read from, in that order.
        keys: keys of all their rows.
        writer: receives the rows.
        scratch: an existing folder for bucket files, each removed after use.
        memory_bytes: approximate bytes of rows in memory.

    Raises:
        DamagedFile: a file is damaged.
        OSError, pa.ArrowException: a file cannot be read, or the disk is full.
    """
    nulls: Counter[str] = Counter()
    sizes = [_size(path) for path in paths]
    if sum(size for _, size in sizes) <= memory_bytes:
        tables = [*_all_rows(paths, writer.schema, nulls)]
        if tables:
            _write_sorted(pa.concat_tables(tables), keys.order, writer)
        return nulls
    buckets = _assign_buckets(keys.order, sizes, memory_bytes)
    joined = _joined(_all_rows(paths, writer.schema, nulls), memory_bytes // 4)
    for bucket in _write_buckets(joined, keys.order, buckets, scratch):
        _write_bucket(bucket, writer)
        remove_file(bucket.file)
    return nulls


def _size(path: Path) -> tuple[int, int]:
    """(number of rows, estimated bytes in memory) of a file."""
    with open_parquet(path) as file:
        groups = range(file.metadata.num_row_groups)
        encoded = sum(file.metadata.row_group(group).total_byte_size for group in groups)
        return len(file), encoded + len(file) * _ROW_OVERHEAD


def _all_rows(paths: Iterable[Path], schema: pa.Schema, merged: Counter[str]) -> Iterator[pa.Table]:
    return (table for path in paths for table in _row_groups(path, schema, merged))


def _joined(tables: Iterable[pa.Table], most_bytes: int) -> Iterator[pa.Table]:
    """The rows in larger tables, of which each bucket gets a part: many small parts would take longer to write."""
    pending: list[pa.Table] = []
    rows = size = 0
    for table in tables:
        if pending and (rows + len(table) > _BLOCK_ROWS or size + table.nbytes > most_bytes):
            yield pa.concat_tables(pending)
            pending, rows, size = [], 0, 0
        pending.append(table)
        rows, size = rows + len(table), size + table.nbytes
    if pending:
        yield pa.concat_tables(pending)


def _row_groups(path: Path, schema: pa.Schema, merged: Counter[str]) -> Iterator[pa.Table]:
    """The rows of a file, whose nulls are those that were written; they are added to `merged`, by column."""
    nulls: Counter[str] = Counter()
    with part_errors(path), open_parquet(path) as file:
        missing = [name for name in schema.names if name in SCHEMA.names and name not in file.schema.names]
        if missing:
            raise DamagedFile(path, f"it has no column {missing[0]}")
        for group in file.groups():
            nulls.update({name: group[name].null_count for name in file.schema.names})
            yield _cast_to_schema(group.replace_schema_metadata(None), schema)
        written = file.nulls if file.has_checksums else None
        merged.update({name: nulls.get(name, len(file)) for name in schema.names})
    if written is not None and nulls != written:
        raise DamagedFile(path, "its columns do not have the nulls that were written")


def _cast_to_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with the columns of `schema`: parts written before a change of `--carry` may lack carried ones."""
    if table.schema.equals(schema):
        return table
    return pa.Table.from_arrays([column_as(table, field) for field in schema], schema=schema)


def column_as(table: pa.Table, field: pa.Field) -> pa.ChunkedArray | pa.Array:
    """The column of a field, null where the table lacks it or has only nulls."""
    column = table[field.name] if field.name in table.schema.names else None
    if column is None or column.null_count == len(column):
        return pa.nulls(len(table), field.type)
    return column.cast(field.type)


def _write_sorted(table: pa.Table, order: npt.NDArray[np.int64], writer: ResultWriter) -> None:
    table = table.combine_chunks()
    for start in range(0, len(order), ROW_GROUP_ROWS):
        writer.write(table.take(pa.array(order[start : start + ROW_GROUP_ROWS])))


def _assign_buckets(
    order: npt.NDArray[np.int64], sizes: Sequence[tuple[int, int]], memory_bytes: int
) -> npt.NDArray[np.uint8]:
    """[N] uint8: bucket of each row as read. A bucket is a range of the final order; all have about equal bytes."""
    row_bytes = np.array([size / max(rows, 1) for rows, size in sizes])
    file_ends = np.cumsum([rows for rows, _ in sizes])
    total = sum(size for rows, size in sizes if rows)
    # A bucket is in memory twice while it is sorted.
    count = int(np.clip(np.ceil(2 * total / memory_bytes), 1, _MOST_BUCKETS))
    buckets, before = np.empty(len(order), np.uint8), 0.0
    for start in range(0, len(order), _BLOCK_ROWS):
        rows = order[start : start + _BLOCK_ROWS]
        each = row_bytes[np.searchsorted(file_ends, rows, side="right")]
        ends = before + np.cumsum(each)
        buckets[rows] = np.minimum((ends - each) * count / total, count - 1)
        before = float(ends[-1])
    return buckets


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A file of rows that are next to each other in the final order, and its CRC-32."""

    file: Path
    crc: int


def _write_buckets(
    tables: Iterable[pa.Table], order: npt.NDArray[np.int64], buckets: npt.NDArray[np.uint8], scratch: Path
) -> list[_Bucket]:
    """Write each row, with its position in the final order, to its bucket's Arrow file. Returns them in order."""
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    files = [scratch / f"bucket-{bucket:03d}.arrow" for bucket in range(int(buckets.max()) + 1)]
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with ExitStack() as stack:
        writers: dict[int, pa.RecordBatchStreamWriter] = {}
        streams: dict[int, CrcStream] = {}
        start = 0
        for table in tables:
            table = table.append_column(_RANK, pa.array(ranks[start : start + len(table)]))
            for bucket, rows in _bucket_slices(table, buckets[start : start + len(table)]):
                if bucket not in writers:
                    streams[bucket] = CrcStream(stack.enter_context(open_new(files[bucket])))
                    stream = pa.ipc.new_stream(streams[bucket], table.schema, options=options)
                    writers[bucket] = stack.enter_context(stream)
                writers[bucket].write_table(rows)
            start += len(table)
    return [_Bucket(files[bucket], streams[bucket].crc) for bucket in sorted(writers)]


def _bucket_slices(table: pa.Table, buckets: npt.NDArray[np.uint8]) -> Iterator[tuple[int, pa.Table]]:
    order = np.argsort(buckets, kind="stable")
    table = table.take(pa.array(order))
    present, starts = np.unique(buckets[order], return_index=True)
    ends = np.append(starts[1:], len(buckets))
    for bucket, start, end in zip(present.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield bucket, table.slice(start, end - start)


def _write_bucket(bucket: _Bucket, writer: ResultWriter) -> None:
    with open_own(bucket.file) as stream:
        if crc_of(stream) != bucket.crc:
            raise OutputError(
                f"{bucket.file} was read back, and is not what was written. Nothing was replaced. Check the disk and "
                "the memory, and run the same command again: committed rows are kept."
            )
        stream.seek(0)
        with pa.ipc.open_stream(stream) as reader:
            table = reader.read_all()
    order = np.argsort(table[_RANK].to_numpy())
    _write_sorted(table.drop_columns(_RANK), order, writer)
