"""The chi-square test of counted tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["p_value"]


def p_value(counts: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> float:
    """Probability of a larger deviation of [V] counts from [V] expected counts; cells below five are merged."""
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    if wanted[-1] < 5:
        at = int(np.argmin(wanted[:-1]))
        observed[at] += observed[-1]
        wanted[at] += wanted[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    assert len(wanted) > 2
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))
