"""When samples are expected to end. Limits are known; of samples that may end before, those of a kind tell the others.

The share of its limit after which a sample ends is taken to be exponential, so that samples still under way count for
as far as they have come, and those that met their limit are no ends. How far lengths really spread is learnt, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import expm1, log1p

import numpy as np
import numpy.typing as npt

__all__ = ["EXACT", "Ends"]

EXACT = -1
"""Kind of the samples that run to their limit."""
_GOLDEN = 0.6180339887498949
"""Steps of this, modulo 1, fill the unit interval evenly from the first few on."""
_ENOUGH = 8
"""Samples that tell how far lengths spread."""
_UNKNOWN = 512
"""Tokens that a sample of an unknown kind is expected to have, if its limit is higher."""


@dataclass(slots=True)
class _Kind:
    """What is known of the samples of one kind, in shares of their limits."""

    ends: int = 0
    """Samples that ended before their limit."""
    shares: float = 0.0
    """Of all that have ended."""
    squares: float = 0.0
    finished: int = 0
    rate: float = 0.0
    """Sum of 1 / limit over those under way ..."""
    begun: float = 0.0
    """... and of step / limit for the steps in which they began."""


class Ends:
    """Expected lengths.

    Args:
        limits: [N] most tokens of a sample, by request.
        kinds: [N] samples of one kind are expected to end alike; `EXACT` for those that run to their limit. None: all
            are of one kind.
    """

    def __init__(self, limits: npt.NDArray[np.int32], kinds: npt.NDArray[np.int32] | None = None) -> None:
        self._limits = limits.data
        self._of = (np.zeros(len(limits), np.int32) if kinds is None else kinds).data
        self._all = _Kind()
        self._kinds: dict[int, _Kind] = {}
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

    def unsure(self, request: int) -> bool:
        """Whether samples of a request may end before their limit."""
        return self._of[request] != EXACT

    def begin(self, sequence: int, request: int, step: int) -> None:
        """A sample begins in `step`."""
        if self._of[request] == EXACT:
            return
        share = 1.0 / self._limits[request]
        for kind in (self._all, self._kinds.setdefault(self._of[request], _Kind())):
            kind.rate += share
            kind.begun += step * share
        self._under_way[sequence] = (request, step)

    def end(self, sequences: Iterable[int], step: int) -> None:
        """Samples have ended with their draw of `step`."""
        for sequence in sequences:
            request, begun = self._under_way.pop(sequence, (-1, 0))
            if request < 0:
                continue
            limit = self._limits[request]
            share = min(1.0, (step - begun + 1) / limit)
            for kind in (self._all, self._kinds[self._of[request]]):
                kind.rate -= 1.0 / limit
                kind.begun -= begun / limit
                kind.ends += share < 1.0
                kind.finished += 1
                kind.shares += share
                kind.squares += share * share

    def remaining(self, sequence: int, request: int, made: int, step: int) -> int:
        """Tokens that a sample with `made` tokens is expected to draw yet, at least one.

        Samples of a kind end one after the other, not all at the mean: each has a quantile of its own by its number.
        """
        limit, of = self._limits[request], self._of[request]
        left = max(1, limit - made)
        if of == EXACT:
            return left
        kind = self._kinds.get(of) or _Kind()
        # What is known of all samples counts for one of the kind.
        mean = _mean(kind, limit, step, _mean(self._all, limit, step, min(limit, _UNKNOWN)))
        spread = _spread(kind if kind.finished >= _ENOUGH else self._all)
        memoryless = -mean * log1p(-(sequence * _GOLDEN % 1.0))
        sharp = -mean * expm1(-limit / mean) - made
        return min(left, max(1, round(spread * memoryless + (1.0 - spread) * max(0.0, sharp))))


def _mean(kind: _Kind, limit: int, step: int, before: float) -> float:
    """Expected tokens, were there no limit; `before` counts for one sample that has ended."""
    seen = kind.shares + max(0.0, step * kind.rate - kind.begun)
    return (limit * seen + before) / (kind.ends + 1)


def _spread(kind: _Kind) -> float:
    """Squared coefficient of variation, 1 at most: 0 where all end alike, 1 where the past tells nothing."""
    if kind.finished < _ENOUGH:
        return 1.0
    mean = kind.shares / kind.finished
    return min(1.0, max(0.0, kind.squares / kind.finished / (mean * mean) - 1.0))
