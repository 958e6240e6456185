"""Export of finished results as JSON lines: OpenAI's batch output and error files, or one object per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson

from batchgen.data.files import is_folder, open_named
from batchgen.data.lines import JOB_KEY, job_mark, line_files
from batchgen.data.out.openai_bodies import PieceLookup, batch_line, finish_reason
from batchgen.data.out.view import Results, Totals, open_results, read_errors
from batchgen.data.results_file import DamagedFile
from batchgen.data.row_shapes import RowShape, RowShapes
from batchgen.errors import ErrorCode, InputError
from batchgen.request.foreign_text import read_json, typed

_UNREADABLE: Final = frozenset({ErrorCode.INVALID_JSON, ErrorCode.TRUNCATED_INPUT, ErrorCode.INVALID_UNICODE})
"""Errors of rows of which nothing is known."""


@dataclass(slots=True)
class ExportCounts:
    """Number of lines written, and of those that are errors."""

    lines: int = 0
    errors: int = 0
    left_out: int = 0
    """Samples without what the format holds."""


def finished_results(out: Path) -> Results:
    """Open the results of one finished job.

    Raises:
        InputError: the results are missing, unfinished or in shards.
        UsageError: a folder without results.
    """
    results = open_results(out, finished=True)
    if not results.complete:
        raise InputError(f"{out} is not finished. Run its command again first.")
    if is_folder(out):
        raise InputError(f"{out} holds shards. Join them first: batchgen merge {out} -o all.parquet")
    return results


def write_openai(results: Results, output: BinaryIO, errors: BinaryIO, piece: PieceLookup) -> ExportCounts:
    """Write the line of each row in input order: of good rows to `output`, of failed ones to `errors`."""
    run = results.footer
    assert run is not None
    counts = ExportCounts()
    shapes = iter(row_shapes(results))
    for _, rows in groupby(results.rows(), itemgetter("row_index")):
        good, line = batch_line(list(rows), next(shapes, RowShape(False, False)), run, piece)
        (output if good else errors).write(orjson.dumps(line) + b"\n")
        counts.lines += 1
        counts.errors += not good
    return counts


def write_as_given(
    results: Results, output: BinaryIO, errors: BinaryIO | None, piece: PieceLookup, columns: Sequence[str] = ()
) -> ExportCounts:
    """Answer each row in its own format: batch lines as `write_openai`, other rows as `write_jsonl`.

    Lines also name their job under `JOB_KEY`. Batch lines, whose ids name it, do so only if there are hidden states.
    The lines of the first row name the kernels too, unless it is a batch line.

    Args:
        results: the results of a job.
        output: receives the lines, in input order.
        errors: receives the lines of batch lines that failed; None if no row is a batch line.
        piece: token id -> piece; called only for batch lines with logprobs.
        columns: the keys of lines of other rows, in order; empty for all.
    """
    run = results.footer
    assert run is not None
    counts = ExportCounts()
    mark = {JOB_KEY: job_mark(run)}
    line_mark = mark if run.get("states") else {}
    first_mark = {JOB_KEY: job_mark(run, first=True)}
    shapes = iter(row_shapes(results))
    for _, rows in groupby(results.rows(), itemgetter("row_index")):
        samples, shape = list(rows), next(shapes, RowShape(False, False))
        first_error = samples[0]["error"]
        good = all(row["error"] is None for row in samples)
        # What cannot be read may have been either, and is answered as the job's other rows.
        if errors is not None and (shape.line or (first_error is not None and first_error["code"] in _UNREADABLE)):
            _, line = batch_line(samples, shape, run, piece)
            (output if good else errors).write(orjson.dumps(line | line_mark) + b"\n")
        else:
            for row in samples:
                kept = {name: row[name] for name in columns} if columns else row
                output.write(_jsonl_line(kept | (mark if counts.lines else first_mark)))
        counts.lines += 1
        counts.errors += not good
    return counts


def row_shapes(results: Results) -> list[RowShape]:
    """The request shapes of the rows of a finished output, in order.

    Raises:
        InputError: an older version wrote it, or they are damaged.
    """
    run = results.footer
    assert run is not None
    if "row_shapes" not in run:
        raise InputError("the file was written by a version without `export`. Run its command again.")
    return RowShapes.decode(run["row_shapes"])


def write_jsonl(results: Results, stream: BinaryIO) -> ExportCounts:
    """Write one object per sample, without null columns; carried fields are an object, NaN and infinity are null."""
    counts = ExportCounts()
    for row in results.rows():
        stream.write(_jsonl_line(row))
        counts.lines += 1
        counts.errors += row["status"] == "error"
    return counts


def _jsonl_line(row: Mapping[str, Any]) -> bytes:
    present = {name: value for name, value in row.items() if value is not None}
    if "extra" in present:
        present["extra"] = orjson.Fragment(present["extra"])
    return orjson.dumps(present) + b"\n"


def read_line_totals(path: Path) -> Totals:
    """Totals of an output of JSON lines, `-o x.jsonl`, with its errors file; tokens of batch lines are counted.

    Raises:
        InputError: a line is not one of batchgen's.
    """
    totals = Totals()
    failed: set[int] = set()
    rows: set[int] = set()
    for file in line_files(path):
        try:
            with read_errors(file), open_named(file) as stream:
                for line in stream:
                    _count_line(typed(read_json(line), {}), totals, rows, failed)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFile(file, f"a line is not whole: {error}") from error
    totals.rows += len(rows)
    totals.rows_error += len(failed)
    return totals


def _count_line(line: Mapping[str, Any], totals: Totals, rows: set[int], failed: set[int]) -> None:
    if "custom_id" in line and "response" in line:
        _count_batch_line(line["response"]["body"], totals)
        return
    rows.add(line["row_index"])
    if line["status"] == "error":
        failed.add(line["row_index"])
        totals.errors[line["error"]["code"]] += 1
    for name in ("completion_tokens", "cached_tokens", "dropped_tokens"):
        setattr(totals, name, getattr(totals, name) + (line.get(name) or 0))
    if "dedup_of" in line:
        totals.copied_tokens += line.get("completion_tokens") or 0
    if "finish_reason" in line:
        _count_answer(totals, line["finish_reason"], line.get("text"), line.get("constraint_ok"))


def _count_batch_line(body: Mapping[str, Any], totals: Totals) -> None:
    totals.rows += 1
    if "error" in body:
        totals.rows_error += 1
        totals.errors[body["error"]["code"]] += 1
        return
    usage = {"completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}} | body["usage"]
    details = usage.get("completion_tokens_details", {})
    dropped = details.get("dropped_tokens", 0)
    totals.completion_tokens += usage["completion_tokens"] - dropped
    totals.dropped_tokens += dropped
    totals.copied_tokens += details.get("copied_tokens", 0)
    totals.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
    for choice in body.get("choices", ()):
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        scored = "scores" in choice
        _count_answer(totals, finish_reason(choice), None if scored else text, choice.get("constraint_ok"))


def _count_answer(totals: Totals, reason: str, text: str | None, constraint_ok: bool | None) -> None:
    totals.add(text, reason)
    if constraint_ok is not None:
        totals.constraints["met" if constraint_ok else "failed"] += 1
