"""How close a kernel must come to the truth."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DTYPES", "assert_as_close"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def assert_as_close(got: Tensor, plain: Tensor, exact: Tensor, tolerance: float = 1e-5) -> None:
    """Hold a kernel's result to the truth: to a tolerance in float32, in low precision to twice the twin's error.

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
    if got.dtype == torch.float32:
        torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance * largest)
        return
    error, allowed = (got.double() - exact).abs(), (plain.double() - exact).abs()
    spare = 1e-6 * largest
    assert float(error.max()) <= 2 * float(allowed.max()) + spare
    assert float(error.norm()) <= 2 * float(allowed.norm()) + spare
