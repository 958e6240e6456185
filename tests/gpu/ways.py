"""One operation three ways: by its kernel, by its plain version, and by that in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.gpu.compare import poisoned
from tests.gpu.under_test import kernel, twin

__all__ = ["Ways", "three_ways"]


@dataclass(frozen=True, slots=True)
class Ways:
    """Results, and the arguments as each call left them: operations may write to them."""

    got: Any
    plain: Any
    truth: Any
    got_args: list[Any]
    plain_args: list[Any]
    truth_args: list[Any]

    def args(self, index: int) -> tuple[Any, Any, Any]:
        """One argument, all three ways."""
        return self.got_args[index], self.plain_args[index], self.truth_args[index]


def three_ways(name: str, *args: Any) -> Ways:
    """Call the operation `name` on copies of `args`; the kernel's new outputs are poisoned.

    Copies keep strides, but a view's copy holds nothing beside it. What is no tensor is handed on as it is.
    """
    operation, plainly = kernel(name), twin(name)
    own, plain, wide = ([_copied(x, widen) for x in args] for widen in (False, False, True))
    with poisoned():
        got = operation(*own)
    return Ways(got, plainly(*plain), plainly(*wide), own, plain, wide)


def _copied(x: Any, widen: bool) -> Any:
    if not isinstance(x, Tensor):
        return x
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
    return copy.double() if widen and x.is_floating_point() else copy
