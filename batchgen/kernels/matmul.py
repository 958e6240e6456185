"""The reference of the batch-invariant products of `gpu.matmul`, y = x W^T + b.

A product is *batch-invariant* if the bits of a row of y depend only on that row of x, on W and on b: not on the number
of rows, the other rows, or the row's index. Libraries choose tiles and splits of the sum by the number of rows, and so
round a row differently in batches of different sizes; the kernels of `gpu.matmul` do not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product y [..., O] = x [..., I] W [O, I]^T + b [O], with float32 sums and one rounding to x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)


def batched_matmul(a: Tensor, b: Tensor) -> Tensor:
    """The products c [B, T, O] = a [B, T, I] b [B, I, O], with float32 sums and one rounding to a's dtype."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return torch.bmm(a.to(wide), b.to(wide)).to(a.dtype)
