"""y = x W^T + b with W in int8 and x in int8 on the way: the plain version of `cpu/src/int8.cpp`.

The inputs of a product are cut into groups of at most 128. A group of a row of W has one scale, found once, and a group
of a row of x one of its own, found as it comes: the largest magnitude is 127. A group's sum is one of integers, exact;
groups are added up in float32, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Int8Weight", "groups_of", "int8_linear", "quantise_weight"]

_GROUP: Final = 128
"""Most inputs of a group."""
_BLOCK: Final = 1 << 22
"""Numbers that are quantised at once: what is computed of them takes many times the memory of the result."""


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """W [O, I] by groups: numbers [O, G, S] int8, zeros beyond I, and scales [O, G] float32."""

    numbers: Tensor
    scales: Tensor
    inner: int
    """I."""

    def dense(self) -> Tensor:
        """[O, I] float32: what the numbers stand for."""
        return (self.numbers * self.scales[..., None]).flatten(1)[:, : self.inner]


def groups_of(inner: int) -> tuple[int, int]:
    """How many groups `inner` inputs are cut into, and how large they are: as even as multiples of 4 can be."""
    count = -(-inner // _GROUP)
    return count, 4 * -(-inner // (4 * count)) if count else 0


def quantise_weight(weight: Tensor) -> Int8Weight:
    """W [O, I] in eight bits, each group of a row with the scale of its largest number."""
    outer, inner = weight.shape
    count, size = groups_of(inner)
    numbers, scales = torch.empty(outer, count, size, dtype=torch.int8), torch.empty(outer, count)
    step = max(1, _BLOCK // max(1, inner))
    for begin in range(0, outer, step):
        rows = slice(begin, begin + step)
        padded = F.pad(weight[rows].float(), (0, count * size - inner))
        numbers[rows], scales[rows] = _quantised(padded.view(len(padded), count, size))
    return Int8Weight(numbers, scales, inner)


def _quantised(groups: Tensor) -> tuple[Tensor, Tensor]:
    """[..., S] float32 -> whole numbers from -127 to 127 as float32, and scales [...]."""
    largest = groups.abs().amax(-1) if groups.shape[-1] else groups.new_zeros(groups.shape[:-1])
    inverse = 127 / largest
    usable = inverse.isfinite()
    numbers = (groups * inverse[..., None]).round()
    return torch.where(usable[..., None], numbers, 0), torch.where(usable | largest.isnan(), largest / 127, 0)


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """The product y [..., O] = x [..., I] W^T + b in x's dtype."""
    count, size = weight.numbers.shape[1:]
    padded = F.pad(x.float(), (0, count * size - weight.inner)).view(*x.shape[:-1], count, size)
    numbers, scales = _quantised(padded)
    # Sums of at most 128 products below 2^14 are whole numbers that float32 holds.
    sums = torch.einsum("...gs,ogs->...og", numbers, weight.numbers.float())  # [..., O, G]
    out = (sums * weight.scales * scales[..., None, :]).sum(-1)
    return (out if bias is None else out + bias.float()).to(x.dtype)
