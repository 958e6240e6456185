"""Merge of several results files into one, in key order, in bounded memory.

Small results are sorted in memory. Larger ones are split into buckets on disk by their position in the final order;
then one bucket after the other is sorted in memory and written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pat

from batchgen.data.write.committed import Committed
from batchgen.data.write.durable_files import open_parquet

MEMORY_BYTES = 128 << 20
"""Results that are estimated larger than this are sorted on disk."""
ROW_GROUP_ROWS = 10_000
ROW_GROUP_BYTES = 60 << 20
"""Most bytes of values of a row group in memory; encoded, it is then smaller than the documented limit of 64 MiB."""

_MOST_BUCKETS = 256
_BLOCK_ROWS = 1 << 16
"""Number of rows assigned to buckets at once."""
_ROW_OVERHEAD = 256
"""Bytes of a row in memory in addition to its values: offsets and validity of 39 columns."""
_RANK = "rank"


class ResultWriter:
    """Writer of rows in the order given. Row groups depend on the rows alone, not on how they are batched."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
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
                self._end_group()

    def _end_group(self) -> None:
        if self._pending:
            group = pa.concat_tables(self._pending).combine_chunks()
            group = group.replace_schema_metadata(self._writer.schema.metadata)
            self._writer.write_table(group, row_group_size=len(group))
        self._pending, self._rows, self._bytes = [], 0, 0

    def flush(self) -> None:
        """Write the pending rows as the last row group."""
        self._end_group()


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
    paths: Sequence[Path],
    keys: Committed,
    writer: ResultWriter,
    scratch: Path,
    memory_bytes: int = MEMORY_BYTES,
) -> None:
    """Write all rows of the files in key order.

    Args:
        paths: the results files that `keys` was read from, in that order.
        keys: keys of all their rows.
        writer: receives the rows.
        scratch: an existing folder for bucket files, each removed after use.
        memory_bytes: approximate bytes of rows in memory.

    Raises:
        OSError, pa.ArrowException: a file is damaged, or the disk is full.
    """
    sizes = [_size(path) for path in paths]
    if sum(size for _, size in sizes) <= memory_bytes:
        tables = [table for path in paths for table in _row_groups(path, writer.schema)]
        if tables:
            _write_sorted(pa.concat_tables(tables), keys.order, writer)
        return
    buckets = _assign_buckets(keys.order, sizes, memory_bytes)
    files = _write_buckets(paths, writer.schema, keys.order, buckets, scratch)
    for file in files:
        _write_bucket(file, writer)
        file.unlink()


def _size(path: Path) -> tuple[int, int]:
    """(number of rows, estimated bytes in memory) of a file."""
    with open_parquet(path) as file:
        metadata = file.metadata
    encoded = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    return metadata.num_rows, encoded + metadata.num_rows * _ROW_OVERHEAD


def _row_groups(path: Path, schema: pa.Schema) -> Iterator[pa.Table]:
    with path.open("rb") as stream:
        file = pq.ParquetFile(stream, pre_buffer=False, page_checksum_verification=True)
        for group in range(file.num_row_groups):
            yield _cast_to_schema(file.read_row_group(group, use_threads=False).replace_schema_metadata(None), schema)


def _cast_to_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with the columns of `schema`: parts written before a change of `--carry` may lack some."""
    if table.schema.equals(schema):
        return table
    columns = [
        table[field.name].cast(field.type) if field.name in table.schema.names else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


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


def _write_buckets(
    paths: Sequence[Path],
    schema: pa.Schema,
    order: npt.NDArray[np.int64],
    buckets: npt.NDArray[np.uint8],
    scratch: Path,
) -> list[Path]:
    """Write each row, with its position in the final order, to its bucket's Arrow file. Returns the files in order."""
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    files = [scratch / f"bucket-{bucket:03d}.arrow" for bucket in range(int(buckets.max()) + 1)]
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with ExitStack() as stack:
        writers: dict[int, pa.RecordBatchStreamWriter] = {}
        start = 0
        for path in paths:
            for table in _row_groups(path, schema):
                table = table.append_column(_RANK, pa.array(ranks[start : start + len(table)]))
                for bucket, rows in _bucket_slices(table, buckets[start : start + len(table)]):
                    if bucket not in writers:
                        stream = stack.enter_context(files[bucket].open("wb"))
                        writers[bucket] = stack.enter_context(pa.ipc.new_stream(stream, table.schema, options=options))
                    writers[bucket].write_table(rows)
                start += len(table)
    return [files[bucket] for bucket in sorted(writers)]


def _bucket_slices(table: pa.Table, buckets: npt.NDArray[np.uint8]) -> Iterator[tuple[int, pa.Table]]:
    order = np.argsort(buckets, kind="stable")
    table = table.take(pa.array(order))
    found, starts = np.unique(buckets[order], return_index=True)
    ends = np.append(starts[1:], len(buckets))
    for bucket, start, end in zip(found.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield bucket, table.slice(start, end - start)


def _write_bucket(file: Path, writer: ResultWriter) -> None:
    with file.open("rb") as stream, pa.ipc.open_stream(stream) as reader:
        table = reader.read_all()
    order = np.argsort(table[_RANK].to_numpy())
    _write_sorted(table.drop_columns(_RANK), order, writer)
