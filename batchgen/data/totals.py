"""Sums over a results file, read in bounded memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.compute as pc

from batchgen.data.files import open_parquet

__all__ = ["Totals", "read_totals"]

_COLUMNS = ["row_index", "status", "error.code", "completion_tokens", "cached_tokens", "dropped_tokens"]


@dataclass(slots=True)
class Totals:
    """Counts of one file. A row with several prompts or samples is one row, in error if any of them is."""

    rows: int = 0
    rows_error: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Error code -> output rows."""
    completion_tokens: int = 0
    cached_tokens: int = 0
    dropped_tokens: int = 0
    """Of the samples that `best_of` did not keep."""


def read_totals(path: Path) -> Totals:
    """Count a results file whose rows stand in input order."""
    totals = Totals()
    last_row = last_error = -1
    with open_parquet(path) as file:
        for batch in file.iter_batches(columns=_COLUMNS):
            rows = batch["row_index"]
            failed = rows.filter(pc.equal(batch["status"], "error"))
            totals.rows += _new(rows.unique().to_pylist(), last_row)
            totals.rows_error += _new(failed.unique().to_pylist(), last_error)
            last_row = rows[-1].as_py() if len(rows) else last_row
            last_error = failed[-1].as_py() if len(failed) else last_error
            codes = pc.struct_field(batch["error"], "code").drop_null()
            totals.errors.update({str(c["values"]): c["counts"] for c in codes.value_counts().to_pylist()})
            totals.completion_tokens += pc.sum(batch["completion_tokens"]).as_py() or 0
            totals.cached_tokens += pc.sum(batch["cached_tokens"]).as_py() or 0
            totals.dropped_tokens += pc.sum(batch["dropped_tokens"]).as_py() or 0
    return totals


def _new(rows: list[int], last: int) -> int:
    """How many of the distinct `rows` the previous batch did not end with."""
    return len(rows) - (1 if rows and rows[0] == last else 0)
