"""What a report counts over all samples of an output, and those that it shows: one pass in bounded memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.data.out.view import read_errors
from batchgen.data.results_file import open_parquet
from batchgen.data.schema import KEY_COLUMNS

_LENGTHS: Final = ("prompt_tokens", "completion_tokens")
_COLUMNS: Final = (*KEY_COLUMNS, *_LENGTHS, "status", "cached_tokens", "constraint_ok")
_MOST: Final = {"error": 400, "constraint failed": 200, "slow": 100, "longest": 40, "": 2000}
"""Reason for which a sample is chosen -> most of them, the most telling reasons first; the last are any."""
_BINS: Final = 40
_LONGEST: Final = 1 << 22
"""Tokens beyond which lengths count as one."""
_Ranked = tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]
"""Ranks of samples, and their places."""


@dataclass(slots=True)
class Figures:
    """Counts over all samples of an output."""

    samples: int = 0
    prompt_tokens: int = 0
    """Tokens of all prompts: those of several samples count once."""
    distinct_tokens: int = 0
    """Those that remain when every shared prefix counts once."""
    lengths: dict[str, npt.NDArray[np.int64]] = field(
        default_factory=lambda: dict.fromkeys(_LENGTHS, np.zeros(1, np.int64))
    )
    """`prompt_tokens`, `completion_tokens` -> [length] number of samples without an error."""
    chosen: dict[int, str] = field(default_factory=dict)
    """Place of a sample among all -> the reason for which it is shown, in the order of these."""

    def histogram(self, name: str) -> list[tuple[int, int, int]]:
        """Bins of lengths: (first length, length after the last one, samples)."""
        counts = self.lengths[name]
        widths = (digit * 10**power for power in range(9) for digit in (1, 2, 5))
        width = next(width for width in widths if width * _BINS >= len(counts))
        starts = range(0, len(counts), width)
        return [(start, start + width, int(counts[start : start + width].sum())) for start in starts]


def read_figures(files: Sequence[Path], slow: Collection[int]) -> Figures:
    """Count what all files hold, and choose samples: the same ones whenever the files are the same.

    Args:
        files: of an output, finished or not.
        slow: rows known to have taken long.

    Raises:
        InputError: a file is damaged or cannot be read.
    """
    figures, slow_rows = Figures(), np.array([*slow], np.int64)
    best: dict[str, _Ranked] = dict.fromkeys(_MOST, (np.zeros(0, np.uint64), np.zeros(0, np.int64)))
    for file in files:
        with read_errors(file), open_parquet(file) as stored:
            for table in stored.groups(_COLUMNS):
                _add(figures, best, table, slow_rows)
    for reason, (_, places) in best.items():
        figures.chosen |= {place: reason for place in places.tolist() if place not in figures.chosen}
    return figures


def _add(figures: Figures, best: dict[str, _Ranked], table: pa.Table, slow: npt.NDArray[np.int64]) -> None:
    numbers = {name: _numbers(table, name) for name in (*KEY_COLUMNS, *_LENGTHS, "cached_tokens")}
    good = pc.equal(table["status"], "ok").to_numpy()
    for name in _LENGTHS:
        counts, before = np.bincount(np.clip(numbers[name][good], 0, _LONGEST)), figures.lengths[name]
        size = max(len(counts), len(before))
        figures.lengths[name] = np.pad(before, (0, size - len(before))) + np.pad(counts, (0, size - len(counts)))
    hashes, order = _hashes(*(numbers[name] for name in KEY_COLUMNS)), np.arange(len(table)) + figures.samples
    for reason, wanted, ranks in (
        ("error", ~good, order),
        ("constraint failed", pc.fill_null(pc.invert(table["constraint_ok"]), False).to_numpy(), hashes),
        ("slow", np.isin(numbers["row_index"], slow), order),
        ("longest", good, (1 << 40) - numbers["completion_tokens"]),
        ("", np.ones(len(table), np.bool_), hashes),
    ):
        new = (ranks[wanted].astype(np.uint64), order[wanted])
        all_ranks, places = (np.concatenate(pair) for pair in zip(best[reason], new, strict=True))
        kept = np.argsort(all_ranks, kind="stable")[: _MOST[reason]]
        best[reason] = all_ranks[kept], places[kept]
    figures.samples += len(table)
    figures.prompt_tokens += int(numbers["prompt_tokens"][numbers["sample_index"] == 0].sum())
    figures.distinct_tokens += int((numbers["prompt_tokens"] - numbers["cached_tokens"]).sum())


def _numbers(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    numbers: npt.NDArray[np.int64] = pc.fill_null(table[name], 0).to_numpy().astype(np.int64)
    return numbers


def _hashes(*keys: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """A number for each key that looks random (the finalizer of SplitMix64)."""
    mixed = np.zeros(len(keys[0]), np.uint64)
    for key in keys:
        mixed += key.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    return mixed


def rows_at(
    files: Sequence[Path], places: Collection[int], columns: Collection[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The samples at these places, in order, with these columns; one that a file lacks is None.

    Raises:
        InputError: a file is damaged or cannot be read.
    """
    wanted, start = np.array(sorted(places), np.int64), 0
    for file in files:
        with read_errors(file), open_parquet(file) as stored:
            there = [name for name in stored.schema.names if name in columns]
            for number in range(stored.metadata.num_row_groups):
                end = start + stored.metadata.row_group(number).num_rows
                here = wanted[(wanted >= start) & (wanted < end)]
                if len(here):
                    rows = stored.group(number, there).take(here - start).to_pylist()
                    yield from zip(here.tolist(), (dict.fromkeys(columns) | row for row in rows), strict=True)
                start = end
