"""The 2 x rule: a kernel may be at most twice as wrong as the plain low-precision operation, both against float64.

    error(kernel) <= 2 * error(plain) + allowance,  by the largest difference and by the root of the mean square

The allowance covers operations whose plain form happens to be exact: some ulps of the largest true value.
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

__all__ = ["Verdict", "judge", "judge_equal", "not_waiting", "poisoned"]

_ULPS = {torch.float32: 16.0, torch.float16: 0.125, torch.bfloat16: 1.0 if INTERPRETED else 0.125}
"""Allowance in units of the epsilon. float32 has more: two good orders of a long sum differ by some ulps. Triton's
interpreter cuts float32 off to bfloat16 instead of rounding it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One comparison. `error` and `plain` are largest differences from the truth, absolute."""

    passed: bool
    error: float
    plain: float
    bound: float
    note: str = ""


def judge(got: Tensor, plain: Tensor, truth: Tensor, dtype: torch.dtype) -> Verdict:
    """Hold `got` to the 2 x rule.

    Args:
        got: the kernel's result; infinities must stand where the truth has them, and no not-a-number anywhere.
        plain: the plain operation's result in `dtype`, of the same shape.
        truth: the same in float64.
        dtype: whose rounding the kernel is allowed.
    """
    if got.shape != truth.shape:
        return Verdict(False, float("inf"), 0.0, 0.0, f"shape {tuple(got.shape)}, not {tuple(truth.shape)}")
    got, plain, truth = (x.detach().double() for x in (got, plain.to(got.device), truth.to(got.device)))
    finite = torch.isfinite(truth)
    if not torch.equal(got[~finite], truth[~finite]) or not bool(torch.isfinite(got[finite]).all()):
        return Verdict(False, float("inf"), 0.0, 0.0, _strangers(got, truth))
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
    """Hold `got` to be `want`, number by number; the error is how many differ."""
    if got.shape != want.shape:
        return Verdict(False, float("inf"), 0.0, 0.0, f"shape {tuple(got.shape)}, not {tuple(want.shape)}")
    wrong = got != want.to(got.device)
    count = int(wrong.sum())
    note = f"{count} of {wrong.numel()} differ, first at {wrong.nonzero()[0].tolist()}" if count else ""
    return Verdict(not count, float(count), 0.0, 0.0, note)


def _strangers(got: Tensor, truth: Tensor) -> str:
    nans = int(got.isnan().sum())
    other = int((torch.isfinite(got) != torch.isfinite(truth)).sum())
    return f"{nans} not-a-numbers, {other} of {got.numel()} finite or infinite where the truth is not"


@contextmanager
def poisoned(*, may_wait: bool = False) -> Iterator[None]:
    """How kernels are called: on buffers that show what is left unwritten, and forbidden to wait for the device.

    `torch.empty` and its kin give not-a-numbers and huge integers. What reads a tensor on the host raises RuntimeError
    on a CUDA device, unless it `may_wait`.
    """

    def filling(make: Any) -> Any:
        def filled(*args: Any, **kwargs: Any) -> Tensor:
            return _poison(make(*args, **kwargs))

        return filled

    with (
        mock.patch.object(torch, "empty", filling(torch.empty)),
        mock.patch.object(torch, "empty_like", filling(torch.empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", filling(torch.Tensor.new_empty)),
        nullcontext() if may_wait else not_waiting(),
    ):
        yield


@contextmanager
def not_waiting() -> Iterator[None]:
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
