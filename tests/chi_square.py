"""Counts of draws compared with the distribution that they are drawn from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def excess(observed: npt.NDArray[np.int64], exact: npt.NDArray[np.float64]) -> float:
    """Standard deviations by which the chi-square statistic of [V] counts exceeds its mean.

    Cells with an expected count below five are merged. Draws of probability 0 may be one in ten thousand: rounding at a
    filter's threshold may add a token of negligible probability.
    """
    draws = observed.sum()
    assert observed[exact == 0].sum() <= 1e-4 * draws
    cells = exact * draws >= 5
    rest = ~cells & (exact > 0)
    wanted = np.append(exact[cells], exact[rest].sum()) * draws
    counted = np.append(observed[cells], observed[rest].sum())
    if wanted[-1] < 5:
        at = int(np.argmin(wanted[:-1]))
        for numbers in (wanted, counted):
            numbers[at] += numbers[-1]
        wanted, counted = wanted[:-1], counted[:-1]
    free = len(wanted) - 1
    assert free > 1
    return float((((counted - wanted) ** 2 / wanted).sum() - free) / np.sqrt(2 * free))
