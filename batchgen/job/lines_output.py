"""`-o x.jsonl`: a job's results as JSON lines, written when all rows are committed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from batchgen.data.export import ExportCounts, row_shapes, write_as_given
from batchgen.data.openai_bodies import TokenPiece
from batchgen.data.view import Results, Totals, read_totals
from batchgen.data.write.committed import Committed
from batchgen.data.write.durable_files import read_footer
from batchgen.data.write.lines import errors_path
from batchgen.data.write.output_budget import OutputBudget
from batchgen.errors import BatchgenError
from batchgen.job.export import write_files
from batchgen.job.ingest import Ingested
from batchgen.job.reuse import RequestHashes
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

        write_files(files, write, overwrite=True)
        if not lines:
            errors_path(self._path).unlink(missing_ok=True)
        self.totals = read_totals(whole)

    def _pieces(self) -> Any:
        tokenizer = self._setup.front_end.tokenizer
        pieces = cache(lambda: TokenBytes(tokenizer))  # made for the first row with logprobs
        return lambda token: TokenPiece(pieces()[token], token in tokenizer.special_ids)


def holds_rows(path: Path, rows: Ingested, hashes: RequestHashes) -> bool:
    """Whether a file of native JSON lines holds exactly the finished rows of a job, by their requests and fields."""
    keys: list[tuple[int, int, int, bool]] = []
    try:
        with path.open("rb") as stream:
            for line in stream:
                row = orjson.loads(line)
                key = row["row_index"], row["prompt_index"], row["sample_index"]
                keys.append((*key, row["status"] == "error"))
                if row["status"] == "ok" and not _is_same(row, rows, hashes):
                    return False
        table = np.array(keys, _KEYS)
        rows.expected.check_complete(Committed.of(*(table[name] for name in _KEYS.names or ())))
    except (OSError, ValueError, KeyError, TypeError, IndexError, BatchgenError):
        return False
    return True


_KEYS = np.dtype([("row", np.int64), ("prompt", np.int32), ("sample", np.int32), ("is_error", np.bool_)])


def _is_same(line: dict[str, Any], rows: Ingested, hashes: RequestHashes) -> bool:
    row, prompt = line["row_index"], line["prompt_index"]
    row_id, extra, prompts = rows.texts[row]
    expected = row_id, None if extra is None else orjson.loads(extra), prompts[prompt] if prompts else None
    found = line["id"], line.get("extra"), line.get("prompt")
    return bool(line["request_hash"] == hashes.of(row, prompt) and found == expected)
