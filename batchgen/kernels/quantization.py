"""Group-quantised product y = x W^T + b: the reference of `cpu/src/int8.cpp` and `cpu/src/bfp.cpp`.

The inputs of a product are divided into groups. A group of a row of W has one scale, computed once; a group of a row of
x has one, computed at each call: the group's largest magnitude becomes the scheme's largest integer. A group's sum is
an exact sum of integers; groups are added in float32, in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK: Final = 1 << 22
"""Elements quantised at once: intermediate results take many times the memory of the result."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """Integer format of a quantisation."""

    dtype: torch.dtype
    most: int
    """Largest magnitude of an integer."""
    group: int
    """Most inputs per group."""
    multiple: int
    """The group size is a multiple of this."""


INT8: Final = Scheme(torch.int8, 127, 128, 4)
BFP: Final = Scheme(torch.int16, 4729, 96, 2)
"""Block floating point: 13 bits and a sign for a group's largest magnitude. Sums of 96 products stay below 2^31."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """W [O, I] in groups: integers [O, G, S] of the scheme's dtype, zeros beyond I, and scales [O, G] float32."""

    numbers: Tensor
    scales: Tensor
    inner: int
    """I, number of inputs."""
    scheme: Scheme

    def dense(self) -> Tensor:
        """The dequantised weight, [O, I] float32."""
        return (self.numbers * self.scales[..., None]).flatten(1)[:, : self.inner]


def groups_of(inner: int, scheme: Scheme) -> tuple[int, int]:
    """Number and size of the groups of `inner` inputs, as even as the scheme allows."""
    count = -(-inner // scheme.group)
    return count, scheme.multiple * -(-inner // (scheme.multiple * count)) if count else 0


def quantise_weight(weight: Tensor, scheme: Scheme) -> GroupedWeight:
    """Quantise W [O, I]: each group of a row has the scale of its largest magnitude."""
    outer, inner = weight.shape
    count, size = groups_of(inner, scheme)
    numbers, scales = torch.empty(outer, count, size, dtype=scheme.dtype), torch.empty(outer, count)
    step = max(1, _BLOCK // max(1, inner))
    for begin in range(0, outer, step):
        rows = slice(begin, begin + step)
        padded = F.pad(weight[rows].float(), (0, count * size - inner))
        numbers[rows], scales[rows] = _quantised(padded.view(len(padded), count, size), scheme.most)
    return GroupedWeight(numbers, scales, inner, scheme)


def _quantised(groups: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Quantise groups [..., S] float32: integers from -most to most as float32, and scales [...]."""
    largest = groups.abs().amax(-1) if groups.shape[-1] else groups.new_zeros(groups.shape[:-1])
    inverse = torch.full_like(largest, most) / largest  # torch would multiply a Python scalar by the reciprocal
    usable = inverse.isfinite() & largest.isfinite()
    numbers = (groups * inverse[..., None]).round()
    scales = torch.where(usable, largest / most, torch.where(largest.isfinite(), 0, torch.nan))
    return torch.where(usable[..., None], numbers, 0), scales


def grouped_linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """The product y [..., O] = x [..., I] W^T + b, in x's dtype."""
    count, size = weight.numbers.shape[1:]
    padded = F.pad(x.float(), (0, count * size - weight.inner)).view(*x.shape[:-1], count, size)
    numbers, scales = _quantised(padded, weight.scheme.most)
    # Integers below 2^31, exact in float64.
    sums = torch.einsum("...gs,ogs->...og", numbers.double(), weight.numbers.double()).float()  # [..., O, G]
    out = (sums * weight.scales * scales[..., None, :]).sum(-1)
    return (out if bias is None else out + bias.float()).to(x.dtype)
