"""The 2 x rule: a kernel's error may be at most twice that of the plain low-precision operation, both against float64.

    error(kernel) <= 2 * error(plain) + allowance,  by the largest difference and by the root mean square

The allowance, some ulps of the largest true value, covers operations whose plain form happens to be exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from batchgen.kernels.gpu.launch import INTERPRETED

_ULPS = {torch.float32: 16.0, torch.float16: 0.125, torch.bfloat16: 1.0 if INTERPRETED else 0.125}
"""Allowance by dtype in units of its epsilon. float32 has more: two orders of a long sum differ by some ulps. Triton's
interpreter truncates float32 to bfloat16 instead of rounding it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one comparison. `error` and `plain` are the largest absolute differences from the true values."""

    passed: bool
    error: float
    plain: float
    bound: float
    note: str = ""


def judge(got: Tensor, plain: Tensor, truth: Tensor, dtype: torch.dtype) -> Verdict:
    """Compare `got` with `truth` by the 2 x rule.

    Args:
        got: the kernel's result; it must have infinities exactly where `truth` has them, and no NaN.
        plain: the plain operation's result in `dtype`, of the same shape.
        truth: the same in float64.
        dtype: dtype whose rounding the kernel is allowed.
    """
    if got.shape != truth.shape:
        return Verdict(False, float("inf"), 0.0, 0.0, f"shape {tuple(got.shape)}, not {tuple(truth.shape)}")
    got, plain, truth = (x.detach().double() for x in (got, plain.to(got.device), truth.to(got.device)))
    finite = torch.isfinite(truth)
    if not torch.equal(got[~finite], truth[~finite]) or not bool(torch.isfinite(got[finite]).all()):
        return Verdict(False, float("inf"), 0.0, 0.0, _non_finite_note(got, truth))
    if not bool(finite.any()):
        return Verdict(True, 0.0, 0.0, 0.0, "no finite value")
    got, plain, truth = got[finite], plain[finite], truth[finite]
    slack = _ULPS[dtype] * torch.finfo(dtype).eps * float(truth.abs().max())
    error, low = (got - truth).abs(), (plain - truth).abs()
    largest, bound = float(error.max()), 2 * float(low.max()) + slack
    spread, spread_bound = float(error.square().mean().sqrt()), 2 * float(low.square().mean().sqrt()) + slack
    note = "" if spread <= spread_bound else f"root mean square {spread:.3g} above {spread_bound:.3g}"
    return Verdict(largest <= bound and not note, largest, float(low.max()), bound, note)


def judge_equal(got: Tensor, want: Tensor) -> Verdict:
    """Compare two tensors exactly; the error is the number of elements that differ."""
    if got.shape != want.shape:
        return Verdict(False, float("inf"), 0.0, 0.0, f"shape {tuple(got.shape)}, not {tuple(want.shape)}")
    wrong = got != want.to(got.device)
    count = int(wrong.sum())
    note = f"{count} of {wrong.numel()} differ, first at {wrong.nonzero()[0].tolist()}" if count else ""
    return Verdict(not count, float(count), 0.0, 0.0, note)


def _non_finite_note(got: Tensor, truth: Tensor) -> str:
    nans = int(got.isnan().sum())
    other = int((torch.isfinite(got) != torch.isfinite(truth)).sum())
    return f"{nans} NaN, {other} of {got.numel()} finite where the truth is not, or not finite where it is"


@contextmanager
def poisoned(*, allow_sync: bool = False) -> Iterator[None]:
    """Inside, new buffers are filled with poison values, and waiting for the device is an error.

    `torch.empty`, `empty_like` and `new_empty` give NaN and huge integers, so that unwritten elements show. Reading a
    CUDA tensor on the host raises RuntimeError, unless `allow_sync`.
    """

    def filling(make: Any) -> Any:
        def filled(*args: Any, **kwargs: Any) -> Tensor:
            return _poison(make(*args, **kwargs))

        return filled

    with (
        mock.patch.object(torch, "empty", filling(torch.empty)),
        mock.patch.object(torch, "empty_like", filling(torch.empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", filling(torch.Tensor.new_empty)),
        nullcontext() if allow_sync else forbid_sync(),
    ):
        yield


@contextmanager
def forbid_sync() -> Iterator[None]:
    """Inside, torch raises RuntimeError where the host would wait for a CUDA device."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _poison(x: Tensor) -> Tensor:
    if x.device.type == "meta":
        return x
    if x.is_floating_point():
        return x.fill_(torch.nan)
    return x.fill_(True) if x.dtype == torch.bool else x.fill_(torch.iinfo(x.dtype).max // 2)
