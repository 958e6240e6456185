"""`Selection`: rows of the input that a run processes; row indexes stay global."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchgen.errors import UsageError

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Selection:
    """A window of the input rows, a random sample of the window, and a shard of the sample.

    Row `i` belongs to shard `(index, count)` if `i % count == index`: a shard need not know the length of the input,
    and rows of a file sorted by length are spread evenly.

    Raises:
        UsageError: a value is out of its range.
    """

    offset: int = 0
    limit: int | None = None
    sample: int | None = None
    """Number of rows to sample from the window (all if it has fewer), chosen by `sample_seed` and row index."""
    sample_seed: int = 0
    shard: tuple[int, int] | None = None
    """(0-based index, count)."""

    def __post_init__(self) -> None:
        for name, value in (("offset", self.offset), ("limit", self.limit), ("sample", self.sample)):
            if value is not None and value < 0:
                raise UsageError(f"--{name} must not be negative, got {value}.")
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            index, count = self.shard
            raise UsageError(f"--shard {index}/{count}: the index must be between 0 and {count - 1}.")

    @property
    def selects_all(self) -> bool:
        """Whether every row is selected."""
        return self.offset == 0 and self.limit is None and self.sample is None and self.shard in (None, (0, 1))

    @property
    def stop(self) -> int | None:
        """First row index past the window; None if the window has no end."""
        return None if self.limit is None else self.offset + self.limit

    def row_filter(self, count_rows: Callable[[], int]) -> Callable[[int], bool] | None:
        """Predicate of row indexes; None if every row is selected. `count_rows` is called only for a sample."""
        if self.selects_all:
            return None
        start, stop = self.offset, self.stop
        index, count = self.shard or (0, 1)
        if self.sample is None:
            return lambda i: i >= start and (stop is None or i < stop) and i % count == index
        total = count_rows()
        end = total if stop is None else min(stop, total)
        chosen = _sample(start, end, self.sample, self.sample_seed)
        flags = bytearray(max(end, 0))
        for i in chosen.tolist():
            flags[i] = 1
        return lambda i: i < end and flags[i] == 1 and i % count == index


def _sample(start: int, end: int, size: int, seed: int) -> npt.NDArray[np.int64]:
    """The `size` indexes of [start, end) with the smallest hashes; independent of machine and library version."""
    best = np.zeros(0, np.int64)
    for low in range(start, end, _CHUNK):
        indexes = np.arange(low, min(low + _CHUNK, end), dtype=np.int64)
        best = smallest_hashes(np.concatenate([best, indexes]), size, seed)
    return np.sort(best)


def smallest_hashes(indexes: npt.NDArray[np.int64], size: int, seed: int) -> npt.NDArray[np.int64]:
    """Up to `size` of `indexes` [N] with the smallest hashes under `seed`, in the order of their hashes."""
    order = np.lexsort((indexes, _hash(indexes, seed)))
    smallest: npt.NDArray[np.int64] = indexes[order[:size]]
    return smallest


def _hash(indexes: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea and Flood 2014) of index and seed, modulo 2^64."""
    mixed = np.uint64(seed % (1 << 64)) * np.ones_like(indexes, np.uint64)
    for values in (indexes.astype(np.uint64), np.zeros_like(indexes, np.uint64)):
        mixed = (mixed ^ values) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed
