"""Runs an operation in three ways: the kernel, the plain version, and the plain version in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchgen.kernels.heads import HeadNorms
from tests.gpu.compare import poisoned
from tests.gpu.under_test import kernel, reference

__all__ = ["OpResults", "three_ways"]


@dataclass(frozen=True, slots=True)
class OpResults:
    """Results and arguments of the three calls. Operations may write to their arguments."""

    got: Any
    plain: Any
    truth: Any
    got_args: list[Any]
    plain_args: list[Any]
    truth_args: list[Any]

    def args(self, index: int) -> tuple[Any, Any, Any]:
        """One argument after the three calls."""
        return self.got_args[index], self.plain_args[index], self.truth_args[index]


def three_ways(name: str, *args: Any) -> OpResults:
    """Call the operation `name` on copies of `args`, the kernel with poisoned output buffers.

    Copies keep their strides. Arguments without tensors, and other structures, are passed as they are.
    """
    operation, plain = kernel(name), reference(name)
    got_args, plain_args, truth_args = ([_copied(x, widen) for x in args] for widen in (False, False, True))
    with poisoned():
        got = operation(*got_args)
    return OpResults(got, plain(*plain_args), plain(*truth_args), got_args, plain_args, truth_args)


def _copied(x: Any, widen: bool) -> Any:
    if isinstance(x, tuple):
        copies = [_copied(one, widen) for one in x]
        return type(x)(*copies) if hasattr(x, "_fields") else tuple(copies)
    if isinstance(x, HeadNorms):
        return HeadNorms(_copied(x.query, widen), _copied(x.key, widen), x.eps)
    if not isinstance(x, Tensor):
        return x
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
    return copy.double() if widen and x.is_floating_point() else copy
