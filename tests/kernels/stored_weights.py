"""Random weights in eight and four bits."""

from __future__ import annotations

from dataclasses import replace

import torch

from batchgen.kernels.quantization import FP8, INT8, GroupedWeight, in_four_bits

KINDS = ("fp8", "int8", "int4")


def grouped(kind: str, outer: int, inner: int, size: int) -> GroupedWeight:
    """Random numbers of a kind, all codes among them, in groups of `size`."""
    generator = torch.Generator().manual_seed(inner)
    count = -(-inner // size)
    shape = (outer, count, size)
    scales = torch.rand(outer, count, generator=generator) * 0.02 + 0.001
    if kind == "fp8":
        codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        codes = torch.where(codes & 0x7F == 0x7F, 0, codes)  # not-a-number
        return GroupedWeight(codes.view(FP8.dtype), scales, inner, replace(FP8, group=size))
    low, high = (-128, 128) if kind == "int8" else (-8, 8)
    numbers = torch.randint(low, high, shape, generator=generator, dtype=torch.int8)
    if kind == "int8":
        return GroupedWeight(numbers, scales, inner, replace(INT8, group=size))
    numbers[: outer // 2] += 6  # another zero
    found = in_four_bits(GroupedWeight(numbers, scales, inner, replace(INT8, group=size)))
    assert found is not None
    torch.testing.assert_close(found.dense(), (numbers * scales[..., None]).flatten(1)[:, :inner], rtol=0, atol=0)
    return found
