"""Helpers of `batchgen verify`: choice of rows to replay, and comparison of two outputs of a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.types as pat

from batchgen.data.read.selection import smallest_hashes
from batchgen.data.results_file import StoredTable, open_parquet
from batchgen.data.schema import ASKED, SCHEMA

Row = Mapping[str, Any]

_NOT_COMPARED = {
    *("id", "row_index", "cached_tokens", "cached_tokens_details", "dedup_of"),
    *("request_hash", "prompt", "prompt_ids", "extra"),
}
"""Columns that depend on the job rather than on the row's result."""
_FIELDS = (*SCHEMA, ASKED["embedding"])
_COMPARED = tuple(field.name for field in _FIELDS if field.name not in _NOT_COMPARED and field.name != "output_ids")
_TYPES = {field.name: field.type.value_type if pat.is_list(field.type) else field.type for field in _FIELDS}
_NUMERIC = frozenset(name for name, kind in _TYPES.items() if pat.is_floating(kind))


def choose_rows(file: Path, count: int, seed: int) -> list[int]:
    """Choose at most `count` rows without a failed prompt, by `seed`; in ascending order."""
    best = np.zeros(0, np.int64)
    with open_parquet(file) as stored:
        # A first pass finds all failed rows: a row may fail in its last prompt, after finished samples.
        failed = np.concatenate([best, *(rows for _, rows in _ok_and_failed_rows(stored))])
        for good, _ in _ok_and_failed_rows(stored):
            best = smallest_hashes(np.union1d(best, np.setdiff1d(good, failed)), count, seed)
    return [int(row) for row in np.sort(best)]


def _ok_and_failed_rows(stored: StoredTable) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """(row indexes of good samples, row indexes of failed samples) of each batch."""
    for batch in stored.groups(["row_index", "status"]):
        rows = batch["row_index"].to_numpy()
        good = pc.equal(batch["status"], "ok").to_numpy()
        yield rows[good], rows[~good]


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences of a replayed row from the recorded one."""

    columns: tuple[str, ...]
    """Names of the columns that differ."""
    sample: tuple[int, int] | None = None
    """(prompt_index, sample_index) of the first sample whose tokens differ."""
    position: int | None = None
    """Position of the first differing token in that sample."""
    tokens: tuple[int | None, int | None] = (None, None)
    """(recorded, replayed) token id at that position; None after the end."""
    logprob: float = 0.0
    """Largest absolute difference of two numbers at the same position, over samples with equal tokens."""


def compare(recorded: Sequence[Row], replayed: Sequence[Row]) -> Difference | None:
    """Compare all samples of a row exactly; None if they are equal."""
    keys = [_key(row) for row in recorded]
    if keys != [_key(row) for row in replayed]:
        return Difference(("sample_index",))
    columns: dict[str, None] = {}
    first_token: dict[str, Any] = {}
    largest = 0.0
    for key, old, new in zip(keys, recorded, replayed, strict=True):
        position = _first_difference(old["output_ids"] or (), new["output_ids"] or ())
        if position is not None:
            columns["output_ids"] = None
            pair = (_at(old["output_ids"], position), _at(new["output_ids"], position))
            first_token = first_token or {"sample": key, "position": position, "tokens": pair}
        for name in _COMPARED:
            if old.get(name) != new.get(name):
                columns[name] = None
                # After a different token the numbers are those of another text.
                if name in _NUMERIC and position is None:
                    largest = max(largest, _max_difference(old[name], new[name]))
    return Difference(tuple(columns), logprob=largest, **first_token) if columns else None


def _key(row: Row) -> tuple[int, int]:
    return row["prompt_index"], row["sample_index"]


def _at(ids: Sequence[int] | None, position: int) -> int | None:
    return ids[position] if ids is not None and position < len(ids) else None


def _first_difference(old: Sequence[int], new: Sequence[int]) -> int | None:
    if list(old) == list(new):
        return None
    shared = min(len(old), len(new))
    return next((i for i in range(shared) if old[i] != new[i]), shared)


def _max_difference(old: Any, new: Any) -> float:
    """Largest absolute difference of two numbers or lists of numbers; infinite if one is missing."""
    if not isinstance(old, list) or not isinstance(new, list):
        old, new = [old], [new]
    if len(old) != len(new) or any((a is None) != (b is None) for a, b in zip(old, new, strict=True)):
        return float("inf")
    return max((abs(a - b) for a, b in zip(old, new, strict=True) if a != b and a is not None), default=0.0)
