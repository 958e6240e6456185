"""`-o x.jsonl`: a job's results as JSON lines, written when all rows are committed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from batchgen.data.export import ExportCounts, row_shapes, write_as_given
from batchgen.data.files import is_file, remove_file, sync_folder
from batchgen.data.openai_bodies import TokenPiece
from batchgen.data.view import Results, Totals, read_totals
from batchgen.data.write.durable_files import read_footer
from batchgen.data.write.lines import errors_path, has_only_marks
from batchgen.data.write.output_budget import OutputBudget
from batchgen.job.export import write_files
from batchgen.job.setup import Setup
from batchgen.text.token_bytes import TokenBytes


class LinesOutput:
    """Writer of the lines of one job."""

    def __init__(self, setup: Setup, path: Path) -> None:
        self._setup = setup
        self._path = path
        self.totals = Totals()
        """Totals of the results that were published."""

    def publish(self, whole: Path) -> None:
        """Write the lines of a complete results file, with the failed batch lines in a separate file, atomically.

        Raises:
            OutputError: the disk is full, or the files exceed `--max-output-bytes`; nothing was replaced.
        """
        results = Results([whole], True, read_footer(whole))
        lines = any(shape.line for shape in row_shapes(results))
        files = [self._path, errors_path(self._path)] if lines else [self._path]
        budget = OutputBudget(self._setup.config.max_output_bytes)

        def write(streams: Sequence[BinaryIO]) -> ExportCounts:
            counts = write_as_given(results, streams[0], streams[1] if lines else None, self._pieces())
            budget.check(sum(stream.tell() for stream in streams))
            return counts

        write_files(files, write, True, lambda path: whole.with_name(path.name))
        errors = errors_path(self._path)
        if not lines and is_file(errors) and has_only_marks(errors):
            remove_file(errors)  # of the output that was replaced
            sync_folder(errors.parent)
        self.totals = read_totals(whole)

    def _pieces(self) -> Any:
        tokenizer = self._setup.front_end.tokenizer
        pieces = cache(lambda: TokenBytes(tokenizer))  # made for the first row with logprobs
        return lambda token: TokenPiece(pieces()[token], token in tokenizer.special_ids)
