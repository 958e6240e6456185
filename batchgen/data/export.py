"""Export of finished results as JSON lines: OpenAI's batch output and error files, or one object per sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from batchgen.data.openai_bodies import PieceLookup, batch_line
from batchgen.data.row_shapes import RowShape, RowShapes
from batchgen.data.view import Results, open_results
from batchgen.data.write.durable_files import refuse_existing, write_durably
from batchgen.errors import InputError

__all__ = [
    "ExportCounts",
    "errors_path",
    "export_jsonl",
    "export_openai",
    "finished_results",
    "stream_jsonl",
    "stream_openai",
]


@dataclass(slots=True)
class ExportCounts:
    """Number of lines written, and of those that are errors."""

    lines: int = 0
    errors: int = 0


def finished_results(out: Path) -> Results:
    """Open the results of one finished job.

    Raises:
        InputError: the results are missing, unfinished or in shards.
        UsageError: a folder without results.
    """
    results = open_results(out, finished=True)
    if not results.complete:
        raise InputError(f"{out} is not finished. Run its command again first.")
    if out.is_dir():
        raise InputError(f"{out} holds shards. Join them first: batchgen merge {out} -o all.parquet")
    return results


def errors_path(target: Path) -> Path:
    """`results.openai.jsonl` -> `results.openai.errors.jsonl`."""
    return target.with_name(f"{target.stem}.errors{target.suffix}")


def export_openai(results: Results, target: Path, piece: PieceLookup, overwrite: bool) -> ExportCounts:
    """Write the output file and the errors file, which may be empty. The errors file is written first.

    Raises:
        OutputError: a file exists, or cannot be written.
    """
    errors_target = errors_path(target)
    for path in (target, errors_target):
        refuse_existing(path, overwrite)
    counts = ExportCounts()

    def write(output: BinaryIO) -> None:
        write_durably(errors_target, lambda errors: _write_openai(results, piece, output, errors, counts))

    write_durably(target, write)
    return counts


def stream_openai(results: Results, stream: BinaryIO, piece: PieceLookup) -> ExportCounts:
    """Write the lines of all rows, failed ones too, in input order."""
    counts = ExportCounts()
    _write_openai(results, piece, stream, stream, counts)
    return counts


def _write_openai(
    results: Results, piece: PieceLookup, output: BinaryIO, errors: BinaryIO, counts: ExportCounts
) -> None:
    run = results.footer
    assert run is not None
    if "row_shapes" not in run:
        raise InputError("the file was written by a version without `export`. Run its command again.")
    shapes = iter(RowShapes.decode(run["row_shapes"]))
    for rows in _by_row(results):
        good, line = batch_line(rows, next(shapes, RowShape(False, False)), run, piece)
        (output if good else errors).write(orjson.dumps(line) + b"\n")
        counts.lines += 1
        counts.errors += not good


def _by_row(results: Results) -> Iterator[list[dict[str, Any]]]:
    """The output rows of each input row."""
    for _, rows in groupby(results.rows(), itemgetter("row_index")):
        yield list(rows)


def export_jsonl(results: Results, target: Path, overwrite: bool) -> ExportCounts:
    """Write one object per sample, failed ones too.

    Raises:
        OutputError: the file exists, or cannot be written.
    """
    refuse_existing(target, overwrite)
    counts = ExportCounts()

    def write(stream: BinaryIO) -> None:
        nonlocal counts
        counts = stream_jsonl(results, stream)

    write_durably(target, write)
    return counts


def stream_jsonl(results: Results, stream: BinaryIO) -> ExportCounts:
    """Write one object per sample, without null columns; carried fields are an object, NaN and infinity are null."""
    counts = ExportCounts()
    for row in results.rows():
        present = {name: value for name, value in row.items() if value is not None}
        if "extra" in present:
            present["extra"] = orjson.Fragment(present["extra"])
        stream.write(orjson.dumps(present) + b"\n")
        counts.lines += 1
        counts.errors += row["status"] == "error"
    return counts
