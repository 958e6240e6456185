"""A job's output, written when all rows are committed: one Parquet file, or JSON lines (`-o x.jsonl`)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from batchgen.data.files import is_file, remove_file, sync_folder
from batchgen.data.lines import errors_path, has_only_marks, is_lines
from batchgen.data.out.export import ExportCounts, row_shapes, write_as_given
from batchgen.data.out.finish import finish
from batchgen.data.out.openai_bodies import TokenPiece
from batchgen.data.out.view import Results, Totals, read_totals
from batchgen.data.results_file import read_footer
from batchgen.data.store.output_budget import OutputBudget
from batchgen.data.store.work_folder import WorkFolder
from batchgen.job.clock import clock_record
from batchgen.job.results.export import write_files
from batchgen.job.rows.ingest import Ingested
from batchgen.job.setup import Setup
from batchgen.text.tokens.detokenize import TokenBytes


def write_output(work: WorkFolder, rows: Ingested, record: Mapping[str, Any], setup: Setup) -> Totals:
    """Merge all committed rows into the output; returns its totals.

    Args:
        work: the work folder of the job, with all its rows.
        rows: the rows of the input.
        record: the entries of the footer that are known when the job begins, and its kernels.
        setup: the job's setup.

    Raises:
        OutputError: the disk is full, or the output exceeds `--max-output-bytes`.
    """
    result = work.paths.result
    made = {
        **record,
        "input_rows": rows.rows,
        "rows_skipped": rows.skipped,
        "row_shapes": rows.shapes.encode(),
        "grammar_backends": sorted(rows.grammar_backends),
        "created": int(time.time()),
        **clock_record(setup),
        "layer_ids": [*setup.spec.moe_layers] or None,
        "experts_per_token": setup.spec.experts_per_token or None,
    }
    most = setup.config.max_output_bytes
    if not is_lines(result):
        finish(work, rows.expected, made, max_bytes=most)
        return read_totals(result)
    totals = Totals()

    def publish(whole: Path) -> None:
        nonlocal totals
        totals = _publish_lines(setup, result, whole)

    finish(work, rows.expected, made, max_bytes=most, publish=publish)
    return totals


def _publish_lines(setup: Setup, path: Path, whole: Path) -> Totals:
    """Write the lines of a complete results file, with the failed batch lines in a separate file, atomically.

    Returns:
        The totals of the results.

    Raises:
        OutputError: the disk is full, or the files exceed `--max-output-bytes`; nothing was replaced.
    """
    results = Results([whole], True, read_footer(whole))
    lines = any(shape.line for shape in row_shapes(results))
    errors = errors_path(path)
    budget = OutputBudget(setup.config.max_output_bytes)
    tokenizer = setup.front_end.tokenizer
    pieces = cache(lambda: TokenBytes(tokenizer))  # made for the first row with logprobs

    def piece(token: int) -> TokenPiece:
        return TokenPiece(pieces()[token], token in tokenizer.special_ids)

    def write(streams: Sequence[BinaryIO]) -> ExportCounts:
        counts = write_as_given(results, streams[0], streams[1] if lines else None, piece)
        budget.check(sum(stream.tell() for stream in streams))
        return counts

    write_files([path, errors] if lines else [path], write, True, lambda file: whole.with_name(file.name))
    if not lines and is_file(errors) and has_only_marks(errors):
        remove_file(errors)  # of the output that was replaced
        sync_folder(errors.parent)
    return read_totals(whole)
