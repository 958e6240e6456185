"""y = x W^T + b with the weight in the layout that the device multiplies fastest.

On CPUs the weight is repacked once for oneDNN. Measured on two AVX512-BF16 cores with T = 64 rows and the shapes of a
135M Llama: bfloat16 680-830 GFLOP/s against 530-600 of `F.linear`, float32 365-440 against 165-175 (MKL). One row is
no slower. Elsewhere, and where oneDNN does not take the dtype, the weight stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Linear", "Product", "can_pack", "forms"]

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [..., I], W [O, I] and b [O] or None -> [..., O]."""

_PACK_ROWS: Final = 64
"""The batch size that the packed layout is chosen for; other sizes run through the same layout."""


def _works(dtype: torch.dtype) -> bool:
    """Whether this build's oneDNN multiplies `dtype` with a packed weight, found out by doing it."""
    weight, x = torch.ones(16, 16, dtype=dtype), torch.ones(2, 16, dtype=dtype)
    try:
        out = _packed_linear(x, torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS), None)
    except (RuntimeError, AttributeError, TypeError):
        return False
    return bool((out == 16).all())


_packable: Final[dict[torch.dtype, bool]] = {}


def can_pack(dtype: torch.dtype) -> bool:
    """Whether `Linear` packs CPU weights of `dtype` here. The answer is a fact of the machine, found once."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch._C._has_mkldnn:
        return False
    if dtype not in _packable:
        _packable[dtype] = _works(dtype)
    return _packable[dtype]


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


class Linear:
    """x [..., I] -> [..., O] for `weight` [O, I] and `bias` [O].

    Takes the weight over: on a CPU it is repacked, and the caller should drop its own reference, or both stay in
    memory. The result has `x`'s dtype, which must be the weight's; sums are float32. A `product` that is given computes
    it, on the weight as it is; `gpu.matmul.linear` is one whose rows never know of each other.
    """

    __slots__ = ("_apply", "bias", "in_features", "out_features", "packed", "weight")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = True, product: Product | None = None
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = pack and product is None and weight.device.type == "cpu" and can_pack(weight.dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS) if self.packed else weight
        self._apply: Product = product or (_packed_linear if self.packed else F.linear)

    def dense_weight(self) -> Tensor:
        """The weight [O, I] in the ordinary layout: a copy where it is packed."""
        return self.weight.to_dense() if self.packed else self.weight

    def with_product(self, product: Product) -> Linear:
        """The same layer, computed by `product`."""
        return Linear(self.dense_weight(), self.bias, product=product)

    def __call__(self, x: Tensor) -> Tensor:
        """The product, [..., O]."""
        return self._apply(x, self.weight, self.bias)


def forms(weight: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Every way that this machine has to compute x W^T for `weight` [O, I]: name -> x [T, I] -> [T, O].

    Which one is the fastest at which sizes says what the machine can do, whatever `Linear` takes.
    """
    found: dict[str, Callable[[Tensor], Tensor]] = {"plain": Linear(weight, pack=False)}
    if weight.device.type == "cpu" and can_pack(weight.dtype):
        found["oneDNN"] = Linear(weight)
    return found
