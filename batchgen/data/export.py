"""Finished results as lines of JSON: OpenAI's batch output and error files, or one object a sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from batchgen.data.files import refuse_existing, write_durably
from batchgen.data.openai_bodies import Pieces, batch_line
from batchgen.data.row_shapes import RowShape, RowShapes
from batchgen.data.view import Results, open_results
from batchgen.errors import InputError

__all__ = [
    "Exported",
    "errors_path",
    "export_jsonl",
    "export_openai",
    "finished_results",
    "stream_jsonl",
    "stream_openai",
]


@dataclass(slots=True)
class Exported:
    """What was written."""

    lines: int = 0
    errors: int = 0


def finished_results(out: Path) -> Results:
    """The results of one finished job.

    Raises:
        InputError: there are none, they are unfinished or in shards.
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


def export_openai(results: Results, target: Path, piece: Pieces, overwrite: bool) -> Exported:
    """Write the output file, and the errors file beside it, which may be empty. Where one stands, so does the other.

    Raises:
        OutputError: a file exists, or cannot be written.
    """
    beside = errors_path(target)
    for path in (target, beside):
        refuse_existing(path, overwrite)
    done = Exported()

    def write(output: BinaryIO) -> None:
        write_durably(beside, lambda errors: _write_openai(results, piece, output, errors, done))

    write_durably(target, write)
    return done


def stream_openai(results: Results, stream: BinaryIO, piece: Pieces) -> Exported:
    """Write all lines, those of failed rows too, in input order: each says its status."""
    done = Exported()
    _write_openai(results, piece, stream, stream, done)
    return done


def _write_openai(results: Results, piece: Pieces, output: BinaryIO, errors: BinaryIO, done: Exported) -> None:
    run = results.footer
    assert run is not None
    if "row_shapes" not in run:
        raise InputError("the file was written by a version that could not export yet. Run its command again.")
    shapes = iter(RowShapes.decode(run["row_shapes"]))
    for rows in _by_row(results):
        good, line = batch_line(rows, next(shapes, RowShape(False, False)), run, piece)
        (output if good else errors).write(orjson.dumps(line) + b"\n")
        done.lines += 1
        done.errors += not good


def _by_row(results: Results) -> Iterator[list[dict[str, Any]]]:
    """The output rows of each input row."""
    for _, rows in groupby(results.rows(), itemgetter("row_index")):
        yield list(rows)


def export_jsonl(results: Results, target: Path, overwrite: bool) -> Exported:
    """Write one object a sample, errors among them.

    Raises:
        OutputError: the file exists, or cannot be written.
    """
    refuse_existing(target, overwrite)
    done = Exported()

    def write(stream: BinaryIO) -> None:
        nonlocal done
        done = stream_jsonl(results, stream)

    write_durably(target, write)
    return done


def stream_jsonl(results: Results, stream: BinaryIO) -> Exported:
    """Columns that are null are left out, carried fields stand as an object, numbers that JSON lacks are null."""
    done = Exported()
    for row in results.rows():
        present = {name: value for name, value in row.items() if value is not None}
        if "extra" in present:
            present["extra"] = orjson.Fragment(present["extra"])
        stream.write(orjson.dumps(present) + b"\n")
        done.lines += 1
        done.errors += row["status"] == "error"
    return done
