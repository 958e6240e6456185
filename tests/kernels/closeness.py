"""Comparison of a kernel's result with PyTorch's and with float64."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def assert_as_close(
    got: Tensor, plain: Tensor, exact: Tensor, tolerance: float = 1e-5, roundings: float = 0.0, where: str = ""
) -> None:
    """Check that a kernel's error is at most twice PyTorch's, in float32 plus a tolerance.

    Args:
        got: the kernel's result.
        plain: PyTorch's result for the same inputs.
        exact: the result in float64; infinite values must be equal.
        tolerance: for float32, relative to each value and to the largest of all.
        roundings: further allowance, in units of the dtype's precision relative to the largest value.
        where: what is compared, for the message.
    """
    assert got.shape == plain.shape == exact.shape, where
    assert got.dtype == plain.dtype, where
    assert exact.dtype == torch.float64, where
    finite = exact.isfinite()
    assert torch.equal(got[~finite].double(), exact[~finite]), where
    got, plain, exact = got[finite], plain[finite], exact[finite]
    if not got.numel():
        return
    largest = float(exact.abs().max())
    spare = roundings * torch.finfo(got.dtype).eps * largest
    error, allowed = (got.double() - exact).abs(), (plain.double() - exact).abs()
    if got.dtype == torch.float32:
        # In addition to the tolerance, twice PyTorch's error: formulas with cancellation have it in both.
        assert bool((error <= tolerance * (exact.abs() + largest) + 2 * allowed.max() + spare).all()), where
        return
    least = 1e-6 * largest
    assert float(error.max()) <= 2 * float(allowed.max()) + spare + least, where
    assert float(error.norm()) <= 2 * float(allowed.norm()) + spare * error.numel() ** 0.5 + least, where
