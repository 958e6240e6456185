"""Read results back, finished or not, without loading them: for `batchgen show`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen.data.files import read_footer
from batchgen.data.schema import SCHEMA_VERSION, STATES_CONTENTS, VERSION_KEY
from batchgen.data.work import output_paths, part_files
from batchgen.errors import InputError

__all__ = ["Results", "open_results"]


@dataclass(frozen=True, slots=True)
class Results:
    """Rows of a finished output, of a folder of shards, or of the parts of a job that is not finished."""

    files: Sequence[Path]
    complete: bool
    footer: dict[str, Any] | None
    """Of the first file, when finished."""

    def __len__(self) -> int:
        return sum(pq.read_metadata(file).num_rows for file in self.files)

    def rows(
        self, row: int | None = None, errors: bool = False, columns: Sequence[str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield rows as dicts in the order they are stored: input order in a finished file, else that of completion.

        Args:
            row: only the output rows of this `row_index`.
            errors: only rows with status `error`.
            columns: only these, in the schema's order; all when None.

        Raises:
            InputError: a file is damaged.
        """
        for file in self.files:
            try:
                yield from _file_rows(file, row, errors, columns)
            except (pa.ArrowException, OSError) as error:
                raise _unreadable(file, error) from error


def open_results(out: Path) -> Results:
    """Find what `out` holds: itself, the shards in it, or its work folder.

    Raises:
        InputError: there are no results, or they are not batchgen's.
    """
    if out.is_file():
        footer = read_footer(out)
        if footer is None and read_footer(out, STATES_CONTENTS) is not None:
            raise InputError(f"{out} holds hidden states, which are numbers alone. Name the results beside it.")
        if footer is None:
            raise InputError(f"{out} is not a batchgen output, or is damaged.")
        return Results([out], True, footer)
    if out.is_dir():
        parts = sorted(out.glob("part-*.parquet")) or _work_parts(out)
        if parts:
            footer = read_footer(parts[0])
            return Results(parts, footer is not None, footer)
    parts = _work_parts(output_paths(out).work)
    if not parts:
        raise InputError(f"{out} does not exist, and no unfinished work for it. Check the name.")
    return Results(parts, False, None)


def _unreadable(file: Path, error: BaseException) -> InputError:
    return InputError(f"{file} cannot be read ({error}). Check where it came from.")


def _work_parts(work: Path) -> list[Path]:
    """Readable parts in a work folder or in those of its shards. A part just being replaced is no error."""
    folders = [work, *sorted(folder for folder in work.glob("part-*") if folder.is_dir())]
    return [part for folder in folders for part in part_files(folder) if _is_results(part)]


def _is_results(part: Path) -> bool:
    try:
        metadata = pq.read_metadata(part).metadata or {}
    except (pa.ArrowException, OSError):
        return False
    return bool(metadata.get(VERSION_KEY) == SCHEMA_VERSION.encode())


def _file_rows(file: Path, row: int | None, errors: bool, columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    with file.open("rb") as stream:
        parquet = pq.ParquetFile(stream, pre_buffer=False)
        wanted = None if columns is None else [name for name in parquet.schema_arrow.names if name in columns]
        for group in range(parquet.num_row_groups):
            if row is not None and not _may_hold(parquet.metadata.row_group(group), row):
                continue
            picked = _picked(parquet, group, row, errors)
            if picked is not None and not len(picked):
                continue
            table = parquet.read_row_group(group, columns=wanted, use_threads=False)
            for batch in (table if picked is None else table.take(picked)).to_batches(256):
                yield from batch.to_pylist()


def _may_hold(group: pq.RowGroupMetaData, row: int) -> bool:
    for i in range(group.num_columns):
        column = group.column(i)
        if column.path_in_schema == "row_index" and column.statistics is not None and column.statistics.has_min_max:
            return bool(column.statistics.min <= row <= column.statistics.max)
    return True


def _picked(parquet: pq.ParquetFile, group: int, row: int | None, errors: bool) -> pa.Array | None:
    """Places of the wanted rows in a row group, found from two columns; None for all of them."""
    if row is None and not errors:
        return None
    keys = parquet.read_row_group(group, columns=["row_index", "status"], use_threads=False)
    mask = pa.chunked_array([pa.array([True] * len(keys))])
    if row is not None:
        mask = pc.and_(mask, pc.equal(keys["row_index"], row))
    if errors:
        mask = pc.and_(mask, pc.equal(keys["status"], "error"))
    return pc.indices_nonzero(mask)
