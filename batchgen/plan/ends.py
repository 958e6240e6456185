"""When samples are expected to end. Limits are known; of samples that may end before, those of a kind tell the others.

The share of its limit after which a sample ends is taken to be exponential, so that samples still under way count for
as far as they have come, and those that met their limit are no ends. How far lengths really spread is learnt, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from math import expm1, log1p

import numpy as np
import numpy.typing as npt

__all__ = ["EXACT", "Ends"]

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]

EXACT = -1
"""Kind of the samples that run to their limit."""
_GOLDEN = 0.6180339887498949
"""Steps of this, modulo 1, fill the unit interval evenly from the first few on."""
_ENOUGH = 8
"""Samples that tell how far lengths spread."""
_UNKNOWN = 512
"""Tokens that a sample of an unknown kind is expected to have, if its limit is higher."""


class _Column:
    """Numbers that are written one at a time and read as a whole: `array` is quick at the one, numpy, over the same
    memory, at the other.
    """

    __slots__ = ("all", "one")

    def __init__(self, value: float, count: int) -> None:
        self.one = array("d", [value]) * count
        self.all = np.frombuffer(self.one)


class _Kinds:
    """What is known of the samples of each kind, in shares of their limits; the last kind has every sample."""

    def __init__(self, count: int) -> None:
        self.every = count
        """Number of the last."""
        self.ends = _Column(0.0, count + 1)
        """Samples that ended before their limit."""
        self.finished = _Column(0.0, count + 1)
        """Samples that have ended ..."""
        self.shares = _Column(0.0, count + 1)
        """... the sum of their shares ..."""
        self.squares = _Column(0.0, count + 1)
        """... and of the shares' squares."""
        self.rate = _Column(0.0, count + 1)
        """Sum of 1 / limit over those under way ..."""
        self.begun = _Column(0.0, count + 1)
        """... and of step / limit for the steps in which they began."""
        self.spread = _Column(1.0, count + 1)
        """Squared coefficient of variation, 1 at most: 0 where all end alike, 1 where the past tells nothing."""

    def begin(self, kind: int, limit: int, step: int) -> None:
        """A sample begins."""
        self.rate.one[kind] += 1.0 / limit
        self.begun.one[kind] += step / limit

    def end(self, kind: int, limit: int, begun: int, share: float) -> None:
        """A sample that began in step `begun` has ended after `share` of its limit."""
        self.rate.one[kind] -= 1.0 / limit
        self.begun.one[kind] -= begun / limit
        self.ends.one[kind] += share < 1.0
        self.finished.one[kind] += 1
        self.shares.one[kind] += share
        self.squares.one[kind] += share * share
        if (finished := self.finished.one[kind]) >= _ENOUGH:
            mean = self.shares.one[kind] / finished
            self.spread.one[kind] = min(1.0, max(0.0, self.squares.one[kind] / finished / (mean * mean) - 1.0))

    def mean(self, kind: int, limit: int, step: int) -> float:
        """Expected tokens, were there no limit. What is known of all samples counts for one of the kind."""
        before = (limit * self._seen(self.every, step) + min(limit, _UNKNOWN)) / (self.ends.one[self.every] + 1)
        return (limit * self._seen(kind, step) + before) / (self.ends.one[kind] + 1)

    def means(self, kinds: Int64s, limits: Int64s, step: int) -> Float64s:
        """[R] `mean` of columns."""
        before = limits * self._seen(self.every, step) + np.minimum(limits, _UNKNOWN)
        before /= self.ends.one[self.every] + 1
        seen = self.shares.all[kinds]
        seen += np.maximum(0.0, step * self.rate.all[kinds] - self.begun.all[kinds])
        return np.asarray((limits * seen + before) / (self.ends.all[kinds] + 1))

    def spread_of(self, kind: int) -> float:
        """How far lengths of a kind spread; of one of which little is known, as those of all."""
        return self.spread.one[kind if self.finished.one[kind] >= _ENOUGH else self.every]

    def spreads_of(self, kinds: Int64s) -> Float64s:
        """[R] `spread_of` of a column."""
        return np.where(self.finished.all[kinds] >= _ENOUGH, self.spread.all[kinds], self.spread.one[self.every])

    def _seen(self, kind: int, step: int) -> float:
        return self.shares.one[kind] + max(0.0, step * self.rate.one[kind] - self.begun.one[kind])


class Ends:
    """Expected lengths.

    Args:
        limits: [N] most tokens of a sample, by request.
        kinds: [N] samples of one kind, numbered from 0, are expected to end alike; `EXACT` for those that run to their
            limit. None: all are of one kind.
    """

    def __init__(self, limits: npt.NDArray[np.int32], kinds: npt.NDArray[np.int32] | None = None) -> None:
        self._limits = limits.data
        self._of = (np.zeros(len(limits), np.int32) if kinds is None else kinds).data
        self._kinds = _Kinds(1 + int(np.max(self._of, initial=EXACT)))
        self._limit_column, self._of_column = np.asarray(self._limits), np.asarray(self._of)
        self._under_way: dict[int, tuple[int, int]] = {}

    @property
    def expected(self) -> npt.NDArray[np.int32]:
        """[N] tokens of a sample, as far as anybody knows before the first has ended."""
        limits = np.asarray(self._limits)
        return np.where(np.asarray(self._of) == EXACT, limits, np.minimum(limits, _UNKNOWN))

    @property
    def known(self) -> bool:
        """Whether all samples run to their limit."""
        return bool((np.asarray(self._of) == EXACT).all())

    @property
    def unsure_count(self) -> int:
        """Samples under way that may end before their limit."""
        return len(self._under_way)

    def unsure(self, request: int) -> bool:
        """Whether samples of a request may end before their limit."""
        return self._of[request] != EXACT

    def begin(self, sequence: int, request: int, step: int) -> None:
        """A sample begins in `step`."""
        if self._of[request] == EXACT:
            return
        for kind in (self._kinds.every, self._of[request]):
            self._kinds.begin(kind, self._limits[request], step)
        self._under_way[sequence] = (request, step)

    def end(self, sequences: Iterable[int], step: int) -> None:
        """Samples have ended with their draw of `step`."""
        for sequence in sequences:
            request, begun = self._under_way.pop(sequence, (-1, 0))
            if request < 0:
                continue
            limit = self._limits[request]
            share = min(1.0, (step - begun + 1) / limit)
            for kind in (self._kinds.every, self._of[request]):
                self._kinds.end(kind, limit, begun, share)

    def remaining(self, sequence: int, request: int, made: int, step: int) -> int:
        """Tokens that a sample with `made` tokens is expected to draw yet, at least one.

        Samples of a kind end one after the other, not all at the mean: each has a quantile of its own by its number.
        """
        limit, of, kinds = self._limits[request], self._of[request], self._kinds
        left = max(1, limit - made)
        if of == EXACT:
            return left
        mean, spread = kinds.mean(of, limit, step), kinds.spread_of(of)
        memoryless = -mean * log1p(-(sequence * _GOLDEN % 1.0))
        sharp = -mean * expm1(-limit / mean) - made
        return min(left, max(1, round(spread * memoryless + (1.0 - spread) * max(0.0, sharp))))

    def remaining_of(self, sequences: Int64s, requests: Int64s, made: Int64s, step: int) -> Int64s:
        """`remaining` of columns, [R] each."""
        limits, of = self._limit_column[requests], self._of_column[requests]
        left = np.maximum(1, limits - made)
        exact = of == EXACT
        if exact.all():
            return left
        mean, spread = self._kinds.means(of, limits, step), self._kinds.spreads_of(of)
        memoryless = -mean * np.log1p(-(sequences * _GOLDEN % 1.0))
        sharp = -mean * np.expm1(-limits / mean) - made
        drawn = np.rint(spread * memoryless + (1.0 - spread) * np.maximum(0.0, sharp))
        return np.asarray(np.where(exact, left, np.minimum(left, np.maximum(1.0, drawn))), np.int64)
