"""What `batchgen verify` needs of finished results: rows to replay, and how two outputs of a row differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pat

from batchgen.data.files import open_parquet
from batchgen.data.schema import SCHEMA
from batchgen.data.select import smallest_hashes

__all__ = ["Difference", "choose_rows", "compare"]

Row = Mapping[str, Any]

_OF_THE_JOB = frozenset({"id", "row_index", "cached_tokens", "dedup_of", "prompt", "prompt_ids", "extra"})
"""Columns that say nothing of the row's own result."""


def _is_number(kind: pa.DataType) -> bool:
    return bool(pat.is_floating(kind.value_type if pat.is_list(kind) else kind))


_COMPARED = tuple(field.name for field in SCHEMA if field.name not in _OF_THE_JOB and field.name != "output_ids")
_NUMBERS = frozenset(field.name for field in SCHEMA if _is_number(field.type))


def choose_rows(file: Path, count: int, seed: int) -> list[int]:
    """At most `count` of the rows of which no prompt failed, the same for the same seed, in rising order."""
    best = np.zeros(0, np.int64)
    with open_parquet(file) as parquet:
        # Found first: a row may fail in its last prompt, behind samples that are finished.
        failed = np.concatenate([best, *(rows for _, rows in _good_and_failed(parquet))])
        for good, _ in _good_and_failed(parquet):
            best = smallest_hashes(np.union1d(best, np.setdiff1d(good, failed)), count, seed)
    return [int(row) for row in np.sort(best)]


def _good_and_failed(parquet: pq.ParquetFile) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Of each batch the row indexes of samples that are good, and of those that failed."""
    for batch in parquet.iter_batches(columns=["row_index", "status"]):
        rows = batch["row_index"].to_numpy()
        good = pc.equal(batch["status"], "ok").to_numpy(zero_copy_only=False)
        yield rows[good], rows[~good]


@dataclass(frozen=True, slots=True)
class Difference:
    """How a replayed row differs from the recorded one."""

    columns: tuple[str, ...]
    """Those that are not equal."""
    sample: tuple[int, int] | None = None
    """(prompt_index, sample_index) of the first sample whose tokens differ."""
    position: int | None = None
    """The first token of it that differs."""
    tokens: tuple[int | None, int | None] = (None, None)
    """Recorded and replayed; None past the end."""
    logprob: float = 0.0
    """Largest distance of two numbers at the same place, where the tokens before it are equal."""


def compare(recorded: Sequence[Row], replayed: Sequence[Row]) -> Difference | None:
    """Compare all samples of a row bit by bit; None where everything is equal."""
    keys = [_key(row) for row in recorded]
    if keys != [_key(row) for row in replayed]:
        return Difference(("sample_index",))
    columns: dict[str, None] = {}
    token: dict[str, Any] = {}
    furthest = 0.0
    for key, old, new in zip(keys, recorded, replayed, strict=True):
        position = _first_difference(old["output_ids"] or (), new["output_ids"] or ())
        if position is not None:
            columns["output_ids"] = None
            pair = (_at(old["output_ids"], position), _at(new["output_ids"], position))
            token = token or {"sample": key, "position": position, "tokens": pair}
        for name in _COMPARED:
            if old[name] != new[name]:
                columns[name] = None
                # Behind another token everything differs, which says nothing of the numbers.
                if name in _NUMBERS and position is None:
                    furthest = max(furthest, _distance(old[name], new[name]))
    return Difference(tuple(columns), logprob=furthest, **token) if columns else None


def _key(row: Row) -> tuple[int, int]:
    return row["prompt_index"], row["sample_index"]


def _at(ids: Sequence[int] | None, position: int) -> int | None:
    return ids[position] if ids is not None and position < len(ids) else None


def _first_difference(old: Sequence[int], new: Sequence[int]) -> int | None:
    if list(old) == list(new):
        return None
    shared = min(len(old), len(new))
    return next((i for i in range(shared) if old[i] != new[i]), shared)


def _distance(old: Any, new: Any) -> float:
    """Of two numbers, or of two lists of them; infinite where only one of them is there."""
    if not isinstance(old, list) or not isinstance(new, list):
        old, new = [old], [new]
    if len(old) != len(new) or any((a is None) != (b is None) for a, b in zip(old, new, strict=True)):
        return float("inf")
    return max((abs(a - b) for a, b in zip(old, new, strict=True) if a != b and a is not None), default=0.0)
