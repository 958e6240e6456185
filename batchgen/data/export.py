"""Export of finished results as JSON lines: OpenAI's batch output and error files, or one object per sample."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

import orjson

from batchgen.data.openai_bodies import PieceLookup, batch_line
from batchgen.data.row_shapes import RowShape, RowShapes
from batchgen.data.view import Results, open_results
from batchgen.errors import InputError


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


def write_openai(results: Results, output: BinaryIO, errors: BinaryIO, piece: PieceLookup) -> ExportCounts:
    """Write the line of each row in input order: of good rows to `output`, of failed ones to `errors`."""
    run = results.footer
    assert run is not None
    if "row_shapes" not in run:
        raise InputError("the file was written by a version without `export`. Run its command again.")
    counts = ExportCounts()
    shapes = iter(RowShapes.decode(run["row_shapes"]))
    for _, rows in groupby(results.rows(), itemgetter("row_index")):
        good, line = batch_line(list(rows), next(shapes, RowShape(False, False)), run, piece)
        (output if good else errors).write(orjson.dumps(line) + b"\n")
        counts.lines += 1
        counts.errors += not good
    return counts


def write_jsonl(results: Results, stream: BinaryIO) -> ExportCounts:
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
