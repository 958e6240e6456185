"""Weights quantised in groups, for products y = x W^T + b.

`cpu/src/int8.cpp` and `cpu/src/bfp.cpp` quantise x, too; `gpu/quantized_matmul.py` does not. Where x is quantised, the
inputs of a product are divided into groups. A group of a row of W has one scale, computed once; a group of a row of x
has one, computed at each call: the group's largest magnitude becomes the scheme's largest integer. A group's sum is an
exact sum of integers; groups are added in float32, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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


FP8: Final = Scheme(torch.float8_e4m3fn, 448, 128, 1)
"""Floats of eight bits, E4M3."""
INT4: Final = Scheme(torch.uint8, 15, 128, 32)
"""Codes of four bits, from which a group's zero is taken. A byte holds two: of every 32 inputs, number i is in the low
half of byte i, and number 16 + i in its high half."""
_PAIR: Final = 16
"""Distance of the two inputs of a byte."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """W [O, I] in groups of S inputs: (number - zero) x scale."""

    numbers: Tensor
    """[O, G, S] of the scheme's dtype, [O, G, S / 2] of `INT4`; anything beyond I."""
    scales: Tensor
    """[O, G] float32"""
    inner: int
    """I, number of inputs."""
    scheme: Scheme
    zeros: Tensor | None = None
    """[O, G] uint8, of `INT4` alone."""

    @property
    def size(self) -> int:
        """S, inputs of a group; the last one may use fewer."""
        return self.numbers.shape[2] * (1 if self.zeros is None else 2)

    def dense(self) -> Tensor:
        """The dequantised weight, [O, I] float32."""
        numbers = self.numbers.float()
        if self.zeros is not None:
            numbers = _unpaired(self.numbers).float() - self.zeros[..., None].float()
        return (numbers * self.scales[..., None]).flatten(1)[:, : self.inner]

    def to(self, device: torch.device) -> GroupedWeight:
        """The weight on another device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(self, numbers=self.numbers.to(device), scales=self.scales.to(device), zeros=zeros)


def _unpaired(pairs: Tensor) -> Tensor:
    """Codes [O, G, S] of the bytes [O, G, S / 2] of `INT4`."""
    runs = pairs.reshape(*pairs.shape[:2], -1, 1, _PAIR)
    return torch.cat([runs & 15, runs >> 4], 3).flatten(2)


def in_four_bits(weight: GroupedWeight) -> GroupedWeight | None:
    """The same weight in `INT4`, of integers in int8; None if those of a group span more than four bits."""
    numbers = weight.numbers
    if numbers.shape[2] % INT4.multiple:
        return None
    least = numbers.amin(2)  # [O, G]
    # A zero of 8 in most formats; any that makes all codes at least 0 does.
    zeros = torch.clamp(-least.short(), min=0)
    if bool((numbers.amax(2).short() + zeros > INT4.most).any()) or bool((zeros > INT4.most).any()):
        return None
    codes = (numbers + zeros[..., None].to(torch.int8)).to(torch.uint8)
    runs = codes.view(*codes.shape[:2], -1, 2, _PAIR)
    pairs = (runs[..., 0, :] | runs[..., 1, :] << 4).flatten(2)
    return GroupedWeight(pairs, weight.scales, weight.inner, replace(INT4, group=weight.size), zeros.to(torch.uint8))


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
        numbers[rows], scales[rows] = quantised(padded.view(len(padded), count, size), scheme.most)
    return GroupedWeight(numbers, scales, inner, scheme)


def quantised(groups: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Quantise groups [..., S] float32: integers from -most to most as float32, and scales [...]."""
    largest = groups.abs().amax(-1) if groups.shape[-1] else groups.new_zeros(groups.shape[:-1])
    inverse = torch.full_like(largest, most) / largest  # torch would multiply a Python scalar by the reciprocal
    usable = inverse.isfinite() & largest.isfinite()
    numbers = (groups * inverse[..., None]).round()
    scales = torch.where(usable, largest / most, torch.where(largest.isfinite(), 0, torch.nan))
    return torch.where(usable[..., None], numbers, 0), scales
