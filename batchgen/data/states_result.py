"""Writer of `OUT.hidden.parquet`: the hidden-state parts merged into one file, in key order, in bounded memory.

Only the indexes of the parts are in memory as a whole. Records are read in key order and encoded in row groups of at
most 8 MiB, several at once in threads; a single larger record is a separate group.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.data.durable_files import part_errors, write_durably
from batchgen.data.files import open_own
from batchgen.data.joined_groups import EncodedGroup
from batchgen.data.results_file import DamagedFile, TableWriter, open_parquet, states_group
from batchgen.data.schema import STATES_CONTENTS, with_footer
from batchgen.data.states import INDEX_DTYPE, Index, StateRecord, read_index, read_record
from batchgen.errors import BatchgenError
from batchgen.library_settings import processors
from batchgen.request.completion import StateBlock

STATES_SCHEMA: Final = pa.schema(
    [
        ("id", pa.string()),
        ("row_index", pa.int64()),
        ("prompt_index", pa.int32()),
        ("sample_index", pa.int32()),
        ("layer", pa.int32()),
        ("span", pa.string()),
        ("token_start", pa.int32()),
        ("shape", pa.list_(pa.int32())),
        ("dtype", pa.string()),
        ("values", pa.list_(pa.float32())),
    ]
)

GROUP_BYTES: Final = 8 << 20
"""Most bytes of records of a row group, in the model's dtype."""
_MAX_THREADS: Final = 8
GROUP_ROWS: Final = 10_000
_OPEN_FILES: Final = 64
"""Most parts that are open at once, in all threads."""
_KEYS: Final = ("row_index", "prompt_index", "sample_index", "layer")


def write_states_result(
    path: Path, parts: Sequence[Path], footer: Mapping[str, Any], threads: int | None = None
) -> int:
    """Write the records of `parts` to `path` in key order, and return their number.

    Row groups are encoded in so many `threads`, on which the bytes do not depend; None: one for each processor.

    Raises:
        OutputError: the disk is full, or a part cannot be read now.
        DamagedFile: a part is damaged, or the file that was written.
        BatchgenError: two records have the same key.
    """
    threads = min(_MAX_THREADS, processors()) if threads is None else threads
    indexes = [_checked_index(part) for part in parts]
    files = np.repeat(np.arange(len(parts)), [len(index) for index in indexes])
    index = np.concatenate([np.zeros(0, INDEX_DTYPE), *indexes])
    order = _key_order(index)
    run = {**footer, "contents": STATES_CONTENTS, "rows": len(index)}

    def encoded(rows: npt.NDArray[np.int64]) -> EncodedGroup:
        with _OpenParts(parts, max(1, _OPEN_FILES // threads)) as open_parts:
            records = [open_parts.record(file, at) for file, at in zip(files[rows].tolist(), index[rows], strict=True)]
        return states_group(_table(records))

    def write(stream: BinaryIO) -> None:
        lengths = index["length"][order]
        groups = _groups(lengths)
        with (
            TableWriter(stream, with_footer(run, STATES_SCHEMA)) as writer,
            ThreadPoolExecutor(threads, thread_name_prefix="states") as pool,
        ):
            ahead: deque[tuple[int, Future[EncodedGroup]]] = deque()
            held = 0
            for rows in groups:
                size = int(lengths[rows].sum())
                while ahead and held + size > threads * GROUP_BYTES:  # a large record is alone
                    nbytes, oldest = ahead.popleft()
                    writer.write_group(oldest.result())
                    held -= nbytes
                ahead.append((size, pool.submit(encoded, order[rows])))
                held += size
            for _, group in ahead:
                writer.write_group(group.result())

    write_durably(path, write)
    _read_back(path, index[order])
    return len(index)


def _groups(lengths: npt.NDArray[np.int64]) -> Iterator[slice]:
    """The records of each row group, of records with so many bytes."""
    ends = np.cumsum(lengths)
    start = 0
    while start < len(lengths):
        before = ends[start] - lengths[start]
        end = int(np.searchsorted(ends, before + GROUP_BYTES, "right"))
        end = max(start + 1, min(end, start + GROUP_ROWS))
        yield slice(start, end)
        start = end


def _checked_index(part: Path) -> Index:
    try:
        with part_errors(part):
            return read_index(part)
    except OSError as error:
        raise DamagedFile(part, str(error)) from error


def _read_back(path: Path, index: Index) -> None:
    """Raise `DamagedFile` unless a file holds the records of an index, in that order, with every byte as written."""
    with open_parquet(path) as table:
        table.check()
        keys = table.read(_KEYS)
    if any(not np.array_equal(keys[name].to_numpy(), index[name]) for name in _KEYS):
        raise DamagedFile(path, "its keys are not those that were written")


def _key_order(index: Index) -> npt.NDArray[np.int64]:
    """[records] int64: the indexes of the records in key order."""
    order: npt.NDArray[np.int64] = np.lexsort([index[name] for name in reversed(_KEYS)])
    rows = index[order]
    same = np.ones(max(len(rows) - 1, 0), np.bool_)
    for name in _KEYS:
        same &= rows[name][1:] == rows[name][:-1]
    if same.any():
        key = [int(rows[name][same.argmax()]) for name in _KEYS]
        raise BatchgenError(
            f"hidden states of row {key[0]}, prompt {key[1]}, sample {key[2]}, layer {key[3]} are committed twice, "
            "which is a bug of batchgen. Nothing was replaced."
        )
    return order


class _OpenParts:
    """Reader of records from many parts, with a limited number of open files (least recently used are closed)."""

    def __init__(self, parts: Sequence[Path], most: int) -> None:
        """`most`: open files."""
        self._parts = parts
        self._most = most
        self._streams: OrderedDict[int, BinaryIO] = OrderedDict()

    def record(self, file: int, entry: np.void) -> StateRecord:
        """Read a record of part number `file`.

        Raises:
            DamagedFile: the record is damaged.
        """
        try:
            with part_errors(self._parts[file]):
                if file not in self._streams:
                    if len(self._streams) == self._most:
                        self._streams.popitem(last=False)[1].close()
                    self._streams[file] = open_own(self._parts[file])
                self._streams.move_to_end(file)
                return read_record(self._streams[file], entry)
        except OSError as error:
            raise DamagedFile(self._parts[file], str(error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams.values():
            stream.close()


def _table(records: Sequence[StateRecord]) -> pa.Table:
    """A table in `STATES_SCHEMA` of the records."""
    schema = STATES_SCHEMA
    blocks = [record.block for record in records]
    columns = {
        "id": [record.id for record in records],
        **{name: [record.key[i] for record in records] for i, name in enumerate(_KEYS[:3])},
        **{name: [getattr(block, name) for block in blocks] for name in ("layer", "span", "token_start", "dtype")},
        "shape": [[*block.values.shape] for block in blocks],
    }
    offsets = np.cumsum([0, *(block.values.size for block in blocks)]).astype(np.int32)
    values = np.concatenate([block.values.reshape(-1) for block in blocks])
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=schema.field("values").type)
    arrays = [lists if field.name == "values" else pa.array(columns[field.name], field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def records_of_result(result: Path) -> Iterator[StateRecord]:
    """The records of a finished hidden-states file, in its order, a row group in memory at a time.

    Raises:
        DamagedFile: the file is damaged.
        OSError: the file cannot be read.
    """
    with open_parquet(result) as table:
        for group in table.groups():
            yield from _records(group)


def _records(table: pa.Table) -> Iterator[StateRecord]:
    values = table["values"].combine_chunks()
    offsets = values.offsets.to_numpy()
    flat = values.values.to_numpy()
    for i, row in enumerate(table.drop_columns("values").to_pylist()):
        states = flat[offsets[i] : offsets[i + 1]].reshape(row["shape"])
        block = StateBlock(row["layer"], row["span"], row["token_start"], states, row["dtype"])
        yield StateRecord((row["row_index"], row["prompt_index"], row["sample_index"]), row["id"], block)
