"""Time of steps as a sum over their work, learnt from the steps that have run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final

import numpy as np
import numpy.typing as npt

from batchgen.plan.work import Work

Float64s = npt.NDArray[np.float64]

_DOUBT: Final = 1.0
"""Standard deviation of a cost before any step was timed, relative to the cost."""
_NOISE_SECONDS: Final = 0.0005
"""Least variance of a second of steps, in seconds: time also depends on what `Work` does not tell."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Estimated seconds with their standard deviation."""

    mean: float
    deviation: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of the quantities of `Work` relative to expected ones, as they were fitted."""

    factors: Sequence[float]
    """[6]"""
    covariance: Sequence[Sequence[float]]
    """[6, 6] of the factors."""

    def parts(self, work: Work, prior: Sequence[float]) -> Float64s:
        """[6] seconds that each quantity of `work` takes at the expected costs `prior`."""
        return _quantities(work) * prior * self.factors

    def estimate(self, work: Work, prior: Sequence[float]) -> Seconds:
        """Seconds that `work` takes at the expected costs `prior`."""
        units = _quantities(work) * prior
        variance = float(units @ np.asarray(self.covariance) @ units)
        return Seconds(float(units @ np.asarray(self.factors)), sqrt(max(0.0, variance)))


class StepCosts:
    """Seconds per unit of each quantity of `Work`, none negative.

    Bayesian linear regression: the more differing work has been timed, the less the costs depend on the given ones. Of
    these only the ratios matter. Uses running sums.

    Args:
        prior: expected seconds, above 0, of a step, of any token computed, of a position that a prompt token attends
            to, of a decoded token in addition, of a position that it attends to, and of one that is read for that.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = np.array(prior, np.float64)
        count = len(self._prior)
        self._squares = np.zeros((count, count))
        self._sums = np.zeros(count)
        self._seconds = 0.0
        self._observed = 0
        self._fit: Costs | None = None

    def observe(self, seconds: float, work: Work) -> None:
        """Record that `work` has taken `seconds`; time without work is left out."""
        if seconds <= 0.0 or not any(work):
            return
        # The variance of a time grows with the time.
        units = _quantities(work) * self._prior
        self._squares += np.outer(units, units) / seconds
        self._sums += units
        self._seconds += seconds
        self._observed += 1
        self._fit = None

    def estimate(self, work: Work) -> Seconds | None:
        """Seconds that `work` will take; None if nothing was timed."""
        costs = self.fitted()
        return None if costs is None else costs.estimate(work, self._prior.tolist())

    def fitted(self) -> Costs | None:
        """The costs as they fit what was timed; None if nothing was."""
        if self._fit is None and self._observed:
            self._fit = self._solve()
        return self._fit

    def _solve(self) -> Costs:
        count = len(self._prior)
        ones = np.ones(count)
        scale = float(ones @ self._sums) / float(ones @ self._squares @ ones)
        noise = _NOISE_SECONDS
        costs: Float64s = scale * ones
        covariance = np.eye(count)
        for _ in range(3):  # the costs and the noise depend on each other
            doubt = noise / (scale * _DOUBT) ** 2
            matrix = self._squares + doubt * np.eye(count)
            costs = _nonnegative(matrix, self._sums + doubt * scale * ones)
            residual = self._seconds - 2.0 * float(costs @ self._sums) + float(costs @ self._squares @ costs)
            noise = max(_NOISE_SECONDS, residual / max(1, self._observed - count))
            covariance = np.asarray(noise * np.linalg.inv(matrix), np.float64)
        return Costs(costs.tolist(), covariance.tolist())


def _quantities(work: Work) -> Float64s:
    """[6] the quantities that have costs: of a decoded token, that of any token, and what it costs in addition."""
    return np.array(work._replace(prompt_tokens=work.prompt_tokens + work.decode_tokens), np.float64)


def _nonnegative(matrix: Float64s, right: Float64s) -> Float64s:
    """The solution of `matrix @ x = right`, with negative values set to 0 one after the other."""
    used = np.ones(len(right), np.bool_)
    while True:
        solution = np.zeros(len(right))
        solution[used] = np.linalg.solve(matrix[np.ix_(used, used)], right[used])
        if solution.min() >= 0.0:
            return solution
        used[int(solution.argmin())] = False
