"""How close a kernel must come to the truth."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DTYPES", "assert_as_close"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def assert_as_close(got: Tensor, plain: Tensor, exact: Tensor, tolerance: float = 1e-5) -> None:
    """Hold a kernel's result to the truth: to twice the twin's error, in float32 with a tolerance.

    Args:
        got: the kernel's.
        plain: the twin's, of the same inputs.
        exact: float64.
        tolerance: in float32, relative to each number and to the largest of all.
    """
    assert got.shape == plain.shape == exact.shape
    assert got.dtype == plain.dtype
    assert exact.dtype == torch.float64
    if not got.numel():
        return
    largest = float(exact.abs().max())
    error, allowed = (got.double() - exact).abs(), (plain.double() - exact).abs()
    if got.dtype == torch.float32:
        # Beside the tolerance, as much again as the twin: formulas that cancel do so in both.
        assert bool((error <= tolerance * (exact.abs() + largest) + 2 * allowed.max()).all())
        return
    spare = 1e-6 * largest
    assert float(error.max()) <= 2 * float(allowed.max()) + spare
    assert float(error.norm()) <= 2 * float(allowed.norm()) + spare
