"""Read results back, finished or not, without loading them: for `batchgen show`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen.data.files import open_parquet, read_footer
from batchgen.data.schema import SCHEMA_VERSION, STATES_CONTENTS, VERSION_KEY
from batchgen.data.times import times_as_text
from batchgen.data.work import output_paths, part_files
from batchgen.errors import InputError, UsageError

__all__ = ["Results", "open_results"]

_SHARD = re.compile(r"part-\d{5,}-of-(\d{5,})")


@dataclass(frozen=True, slots=True)
class Results:
    """Rows of a finished output, of a folder of shards, or of the parts of a job that is not finished."""

    files: Sequence[Path]
    complete: bool
    footer: dict[str, Any] | None
    """Of the first file, when finished."""
    note: str | None = None
    """Which results these are, where others stand beside them or shards are missing."""

    def __len__(self) -> int:
        return sum(_metadata(file).num_rows for file in self.files)

    def rows(
        self, row: int | None = None, errors: bool = False, columns: Sequence[str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield rows as dicts in the order they are stored: input order in a finished file, else that of completion.

        Carried dates and timestamps are strings, as in `extra`.

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


def open_results(out: Path, *, finished: bool = False) -> Results:
    """Find what `out` holds: itself, the shards in it, or its work folder.

    Work that was committed after a finished output was written, by a run that is to replace it, stands for it.

    Args:
        out: a finished output or the name of one to be, of a whole job or a shard; a folder of shards; a work folder.
        finished: finished output alone, whatever work stands beside it.

    Raises:
        InputError: there are no results, or they are not batchgen's.
        UsageError: a folder that is none of them.
    """
    return _folder(out, finished) if out.is_dir() else _single(out, finished)


def _single(out: Path, finished: bool) -> Results:
    parts = _work_parts(_work_of(out))
    if not out.is_file():
        if not parts:
            raise InputError(f"{out} does not exist, and no unfinished work for it. Check the name.")
        return _unfinished(out, parts, finished)
    if not finished and _is_newer(parts, out):
        return Results(parts, False, None, "newer, unfinished work over a finished file; --finished shows that file")
    return Results([out], True, _footer(out))


def _unfinished(out: Path, parts: Sequence[Path], finished: bool) -> Results:
    """What stands of a job that has no output yet."""
    if finished:
        raise InputError(f"{out} is not finished. Run its command again first.")
    return Results(parts, False, None)


def _folder(out: Path, finished: bool) -> Results:
    """The shards in a folder, each finished or the work on it; or the parts in a work folder."""
    shards = {file.stem: [file] for file in sorted(out.glob("part-*.parquet"))}
    footers = [_footer(file) for (file,) in shards.values()]
    work = _work_of(out)
    under_way = {folder.name: _work_parts(folder) for folder in ([] if work is None else _shard_folders(work))}
    again = 0
    for name, parts in under_way.items():
        file = out / f"{name}.parquet"
        if parts and not finished and (name not in shards or _is_newer(parts, file)):
            again += name in shards
            shards[name] = parts
    if not shards:
        parts = _work_parts(out) or _work_parts(work)
        if not parts:
            raise UsageError(f"{out} is a folder without results. Name a result file, or a folder of shards.")
        return _unfinished(out, parts, finished)
    return _of_shards(shards, footers, again)


def _of_shards(shards: dict[str, list[Path]], footers: list[dict[str, Any]], again: int) -> Results:
    """Rows of all shards that are there; complete when every one is, and none is computed again."""
    files = [file for name in sorted(shards) for file in shards[name]]
    counts = [int(found[1]) for name in shards if (found := _SHARD.fullmatch(name))]
    whole, count = len(footers) - again, max(counts, default=len(footers))
    notes = [] if whole >= count else [f"{whole} of {count} shards are finished"]
    if again:
        notes.append(f"{again} computed anew: unfinished work is shown, with --finished the finished files")
    complete = not notes and len(shards) == len(footers)
    return Results(files, complete, footers[0] if footers else None, ", ".join(notes) or None)


def _work_of(out: Path) -> Path | None:
    """Where the work on an output stands, be it a job's or that of one shard; None for a place that has no name."""
    place = _named(out)
    if not place.name:
        return None
    if _SHARD.fullmatch(place.stem) and (folder := _named(place.parent)).name:
        work = output_paths(folder).work / place.stem
        if work.is_dir():
            return work
    return output_paths(place).work


def _named(path: Path) -> Path:
    """`.` and the like under their names."""
    return path if path.name not in ("", "..") else Path(os.path.abspath(path))  # noqa: PTH100 - keeps links


def _footer(file: Path) -> dict[str, Any]:
    footer = read_footer(file)
    if footer is None and read_footer(file, STATES_CONTENTS) is not None:
        raise InputError(f"{file} holds hidden states, which are numbers alone. Name the results beside it.")
    if footer is None:
        raise InputError(f"{file} is not a batchgen output, or is damaged.")
    return footer


def _is_newer(parts: Sequence[Path], out: Path) -> bool:
    """Whether any of the parts was committed after the output was written.

    Parts that a killed run left behind when it had put its output in place are older.
    """
    try:
        return any(part.stat().st_mtime_ns > out.stat().st_mtime_ns for part in parts)
    except FileNotFoundError:
        return False  # a moment ago the output took the place of its work


def _unreadable(file: Path, error: BaseException) -> InputError:
    return InputError(f"{file} cannot be read ({error}). Check where it came from.")


def _shard_folders(work: Path) -> list[Path]:
    return sorted(folder for folder in work.glob("part-*") if folder.is_dir())


def _work_parts(work: Path | None) -> list[Path]:
    """Readable parts in a work folder or in those of its shards. A part just being replaced is no error."""
    folders = [] if work is None else [work, *_shard_folders(work)]
    return [part for folder in folders for part in part_files(folder) if _is_results(part)]


def _is_results(part: Path) -> bool:
    try:
        metadata = _metadata(part).metadata or {}
    except (pa.ArrowException, OSError):
        return False
    return bool(metadata.get(VERSION_KEY) == SCHEMA_VERSION.encode())


def _metadata(file: Path) -> pq.FileMetaData:
    with open_parquet(file) as parquet:
        return parquet.metadata


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
            for batch in _spelled(table if picked is None else table.take(picked)).to_batches(256):
                yield from batch.to_pylist()


def _spelled(table: pa.Table) -> pa.Table:
    """With carried dates and timestamps as strings: JSON has none, and Python's have no nanoseconds."""
    return pa.table([times_as_text(column) for column in table.columns], names=table.schema.names)


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
