"""Expected output lengths of samples, learnt per kind of request from the samples that have ended.

The fraction of its limit after which a sample ends is modelled as exponential: running samples count with the tokens
they have so far, and samples that reached their limit count as censored. The spread of the lengths is learnt, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from math import exp, expm1, log1p, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]

EXACT = -1
"""Kind of samples that always run to their limit."""
_GOLDEN_RATIO = 0.6180339887498949
"""Multiples of this, modulo 1, fill the unit interval evenly."""
_MIN_FINISHED = 8
"""Number of ended samples from which on the spread of lengths is used."""
_DEVIATIONS = 1.64
"""Standard deviations on either side of an expectation: nine of ten values lie between them."""
_DEFAULT_LENGTH = 512
"""Expected tokens of a sample before any has ended, if its limit is higher."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many tokens samples generated that might end before their limit, as shares of it."""

    finished: float
    """Number of samples that have ended."""
    ends: float
    """Number of those that ended before their limit."""
    shares: float
    """Sum of their shares."""
    squares: float
    """Sum of the squares of these."""


class _Column:
    """Float column: `one` (an `array`) is fast for single elements, `all` (numpy, same memory) for many."""

    __slots__ = ("all", "one")

    def __init__(self, value: float, count: int) -> None:
        self.one = array("d", [value]) * count
        self.all = np.frombuffer(self.one)


class _Kinds:
    """Length statistics per kind, as fractions of the limits; the last kind counts every sample."""

    def __init__(self, count: int) -> None:
        self.all_kinds = count
        """Index of the kind that counts every sample."""
        self.ends = _Column(0.0, count + 1)
        """Number of samples that ended before their limit."""
        self.finished = _Column(0.0, count + 1)
        """Number of samples that have ended."""
        self.shares = _Column(0.0, count + 1)
        """Sum of the fractions of their limits that ended samples used."""
        self.squares = _Column(0.0, count + 1)
        """Sum of the squares of these fractions."""
        self.rate = _Column(0.0, count + 1)
        """Sum of 1 / limit over running samples."""
        self.begun = _Column(0.0, count + 1)
        """Sum of (first step) / limit over running samples."""
        self.spread = _Column(1.0, count + 1)
        """Squared coefficient of variation of the lengths, at most 1: 0 if all are equal, 1 for an exponential."""

    def assume(self, seen: Lengths) -> None:
        """Count samples of another job among those of all kinds."""
        every = self.all_kinds
        for column, value in zip((self.finished, self.ends, self.shares, self.squares), astuple(seen), strict=True):
            column.one[every] += value
        self._learn_spread(every)

    def begin(self, kind: int, limit: int, step: int) -> None:
        """Record that a sample begins."""
        self.rate.one[kind] += 1.0 / limit
        self.begun.one[kind] += step / limit

    def end(self, kind: int, limit: int, begun: int, share: float) -> None:
        """Record that a sample that began in step `begun` ended after the fraction `share` of its limit."""
        self.rate.one[kind] -= 1.0 / limit
        self.begun.one[kind] -= begun / limit
        self.ends.one[kind] += share < 1.0
        self.finished.one[kind] += 1
        self.shares.one[kind] += share
        self.squares.one[kind] += share * share
        self._learn_spread(kind)

    def _learn_spread(self, kind: int) -> None:
        if (finished := self.finished.one[kind]) >= _MIN_FINISHED:
            mean = self.shares.one[kind] / finished
            self.spread.one[kind] = min(1.0, max(0.0, self.squares.one[kind] / finished / (mean * mean) - 1.0))

    def mean(self, kind: int, limit: int, step: int) -> float:
        """Expected tokens without a limit. The mean over all kinds weighs as much as one ended sample of the kind."""
        before = (limit * self._seen(self.all_kinds, step) + min(limit, _DEFAULT_LENGTH)) / (
            self.ends.one[self.all_kinds] + 1
        )
        return (limit * self._seen(kind, step) + before) / (self.ends.one[kind] + 1)

    def means(self, kinds: Int64s, limits: Int64s, step: int) -> Float64s:
        """[R] `mean` of each row."""
        before = limits * self._seen(self.all_kinds, step) + np.minimum(limits, _DEFAULT_LENGTH)
        before /= self.ends.one[self.all_kinds] + 1
        seen = self.shares.all[kinds]
        seen += np.maximum(0.0, step * self.rate.all[kinds] - self.begun.all[kinds])
        return np.asarray((limits * seen + before) / (self.ends.all[kinds] + 1))

    def spread_of(self, kind: int) -> float:
        """Spread of a kind's lengths; that of all samples until enough of the kind have ended."""
        return self.spread.one[kind if self.finished.one[kind] >= _MIN_FINISHED else self.all_kinds]

    def spreads_of(self, kinds: Int64s) -> Float64s:
        """[R] `spread_of` of each row."""
        return np.where(
            self.finished.all[kinds] >= _MIN_FINISHED, self.spread.all[kinds], self.spread.one[self.all_kinds]
        )

    def _seen(self, kind: int, step: int) -> float:
        return self.shares.one[kind] + max(0.0, step * self.rate.one[kind] - self.begun.one[kind])


class LengthPredictor:
    """Predictor of the tokens that samples have yet to generate.

    Args:
        limits: [N] maximum tokens of a sample of each request.
        kinds: [N] kind of each request, from 0: samples of one kind are expected to have similar lengths. `EXACT` for
            requests whose samples run to their limit. None: all are of one kind.
        seen: samples of another job that ended.
    """

    def __init__(
        self,
        limits: npt.NDArray[np.int32],
        kinds: npt.NDArray[np.int32] | None = None,
        seen: Lengths | None = None,
    ) -> None:
        self._limits = limits.data
        self._kind_of = (np.zeros(len(limits), np.int32) if kinds is None else kinds).data
        self._kinds = _Kinds(1 + int(np.max(self._kind_of, initial=EXACT)))
        if seen is not None:
            self._kinds.assume(seen)
        self.limits, self._kind_column = np.asarray(self._limits), np.asarray(self._kind_of)
        self._running: dict[int, tuple[int, int]] = {}
        self._begun = tuple(_Column(0.0, self._kinds.all_kinds + 1) for _ in range(2))
        self._limit_means: Float64s | None = None

    @property
    def seen(self) -> Lengths:
        """The samples that have ended, without those that always run to their limit."""
        kinds, every = self._kinds, self._kinds.all_kinds
        return Lengths(*(c.one[every] for c in (kinds.finished, kinds.ends, kinds.shares, kinds.squares)))

    @property
    def begun(self) -> Float64s:
        """[2, K + 1] limits of all samples that have begun, and their number, by kind, `EXACT` last."""
        return np.stack([column.all for column in self._begun])

    def by_kind(self, requests: slice, *columns: npt.NDArray[np.integer]) -> Float64s:
        """[columns, K + 1] sums of the values of some requests, by kind, `EXACT` last."""
        count, kinds = self._kinds.all_kinds + 1, self._kind_column[requests]
        places = np.where(kinds == EXACT, count - 1, kinds)
        return np.stack([np.bincount(places, column, count) for column in columns])

    def shares(self, step: int) -> Float64s:
        """[K + 1] expected share of its limit that a sample generates, by kind, `EXACT` last."""
        if self._limit_means is None:
            sums, counts = self.by_kind(slice(None), self.limits, np.ones_like(self.limits))
            self._limit_means = np.maximum(1.0, sums / np.maximum(1.0, counts))[:-1]
        limits: Any = self._limit_means
        means = self._kinds.means(np.arange(len(limits)), limits, step)
        return np.append(-means * np.expm1(-limits / means) / limits, 1.0)

    @property
    def expected(self) -> npt.NDArray[np.int32]:
        """[N] expected tokens of a sample before any has ended."""
        limits = self.limits
        if self._kinds.finished.one[self._kinds.all_kinds]:  # of another job
            own = np.arange(len(limits))
            return self.remaining_of(own, own, np.zeros(len(limits), np.int64), 0).astype(np.int32)
        if limits.max(initial=0) <= _DEFAULT_LENGTH:
            return limits
        return np.where(self._kind_column == EXACT, limits, np.minimum(limits, _DEFAULT_LENGTH))

    def uncertain(self, requests: Int64s) -> npt.NDArray[np.bool_]:
        """[R] `is_uncertain` of each request."""
        return np.asarray(self._kind_column[requests] != EXACT)

    def error_factors(self, samples: int) -> tuple[float, float]:
        """Factors between which the tokens of `samples` uncertain samples lie, relative to the expected ones.

        The mean length is known the better the more samples have ended, the less it depends on the length that was
        expected before; and few samples differ from the mean.
        """
        every = self._kinds.all_kinds
        ended, shares = self._kinds.finished.one[every], self._kinds.shares.one[every]
        before = float(np.minimum(1.0, _DEFAULT_LENGTH / np.maximum(self.limits, 1)).mean())
        variance = self._kinds.spread.one[every] * (1.0 / (ended + 0.5) + 1.0 / max(1, samples))
        factor = exp(_DEVIATIONS * sqrt(variance + (before / (before + shares)) ** 2))
        return 1.0 / factor, factor

    @property
    def all_exact(self) -> bool:
        """Whether all samples run to their limit."""
        return bool((self._kind_column == EXACT).all())

    @property
    def uncertain_count(self) -> int:
        """Number of running samples that may end before their limit."""
        return len(self._running)

    def is_uncertain(self, request: int) -> bool:
        """Whether samples of a request may end before their limit."""
        return self._kind_of[request] != EXACT

    def begin(self, sequence: int, request: int, step: int) -> None:
        """Record that a sample begins in `step`."""
        for column, value in zip(self._begun, (self._limits[request], 1), strict=True):
            column.one[self._kind_of[request]] += value  # `EXACT`, which is -1, is the last
        if self._kind_of[request] == EXACT:
            return
        for kind in (self._kinds.all_kinds, self._kind_of[request]):
            self._kinds.begin(kind, self._limits[request], step)
        self._running[sequence] = (request, step)

    def end(self, sequences: Iterable[int], step: int) -> None:
        """Record that samples have ended with the token of `step`."""
        for sequence in sequences:
            request, begun = self._running.pop(sequence, (-1, 0))
            if request < 0:
                continue
            limit = self._limits[request]
            share = min(1.0, (step - begun + 1) / limit)
            for kind in (self._kinds.all_kinds, self._kind_of[request]):
                self._kinds.end(kind, limit, begun, share)

    def remaining(self, sequence: int, request: int, generated: int, step: int) -> int:
        """Tokens that a sample with `generated` tokens is expected to generate yet, at least 1.

        Each sample has its own quantile, derived from its id, so that samples of a kind do not all end at the mean.
        """
        limit, of, kinds = self._limits[request], self._kind_of[request], self._kinds
        left = max(1, limit - generated)
        if of == EXACT:
            return left
        mean, spread = kinds.mean(of, limit, step), kinds.spread_of(of)
        memoryless = min(left, -mean * log1p(-(sequence * _GOLDEN_RATIO % 1.0)))
        typical = -mean * expm1(-limit / mean) - generated
        return min(left, max(1, round(spread * memoryless + (1.0 - spread) * max(0.0, typical))))

    def remaining_of(self, sequences: Int64s, requests: Int64s, generated: Int64s, step: int) -> Int64s:
        """[R] `remaining` of each row."""
        limits, of = self.limits[requests], self._kind_column[requests]
        left = np.maximum(1, limits - generated)
        exact = of == EXACT
        if exact.all():
            return left
        mean, spread = self._kinds.means(of, limits, step), self._kinds.spreads_of(of)
        memoryless = np.minimum(left, -mean * np.log1p(-(sequences * _GOLDEN_RATIO % 1.0)))
        typical = -mean * np.expm1(-limits / mean) - generated
        predicted = np.rint(spread * memoryless + (1.0 - spread) * np.maximum(0.0, typical))
        return np.asarray(np.where(exact, left, np.minimum(left, np.maximum(1.0, predicted))), np.int64)
