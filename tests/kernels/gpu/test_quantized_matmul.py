"""Products over weights in eight and four bits, in Triton's interpreter, against the dequantised weight's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchgen.kernels.gpu import quantized_matmul as gpu
from batchgen.kernels.quantization import INT8, GroupedWeight, in_four_bits
from tests.kernels.closeness import DTYPES, assert_as_close
from tests.kernels.cpu.products import randn
from tests.kernels.references import dequantised_linear
from tests.kernels.stored_weights import KINDS, grouped

SIZES = [(33, 256, 128), (40, 300, 320), (37, 1000, 64), (5, 63, 64)]
"""Outputs, inputs, size of a group."""
ALL = [(kind, size, torch.float32) for kind in KINDS for size in SIZES]
ALL += [(kind, SIZES[0], dtype) for kind in KINDS for dtype in DTYPES[1:]]


@pytest.mark.parametrize(("kind", "sizes", "dtype"), ALL)
def test_products_are_those_of_the_dequantised_weight(
    kind: str, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    outer, inner, size = sizes
    weight = grouped(kind, outer, inner, size)
    assert gpu.is_supported(weight)
    dense = weight.dense()
    assert torch.equal(gpu.dequantised(weight, dtype), dense.to(dtype))
    for rows, bias in ((1, None), (19, randn(outer, dtype=dtype)), (65, None)):
        x = randn(rows, inner, dtype=dtype, seed=rows)
        exact = x.double() @ dense.double().T + (0.0 if bias is None else bias.double())
        assert_as_close(gpu.linear(x, weight, bias), dequantised_linear(x, weight, bias), exact)
    x, bias = randn(gpu.FEW_ROWS + 2, inner, dtype=dtype), randn(outer, dtype=dtype)
    torch.testing.assert_close(gpu.linear(x, weight, bias), torch.nn.functional.linear(x, dense.to(dtype), bias))


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_any_strides(kind: str) -> None:
    weight = grouped(kind, 24, 64, 32)
    wide = randn(9, 200)
    for x in (wide[::2, 8:72], wide[:, :64], wide.T[:64].T, randn(2, 3, 5, 64), randn(0, 64)):
        torch.testing.assert_close(gpu.linear(x, weight), dequantised_linear(x, weight), rtol=1e-5, atol=1e-5)


def test_groups_that_steps_would_cross_are_not_supported() -> None:
    assert not gpu.is_supported(grouped("int8", 8, 96, 24))
    assert not gpu.is_supported(grouped("fp8", 8, 400, 200))
    assert gpu.is_supported(grouped("fp8", 8, 384, 192))


def test_four_bits_hold_sixteen_codes() -> None:
    def found(numbers: Tensor) -> GroupedWeight | None:
        return in_four_bits(GroupedWeight(numbers, torch.ones(1, 1), 32, INT8))

    ramp = torch.arange(32, dtype=torch.int8)[None, None]
    assert found(ramp) is None
    assert found(ramp // 2 + 1) is None  # its zero would be negative
    assert found(ramp // 2 - 20) is None
    for low in (-15, -8, -1, 0):
        numbers = ramp // 2 + low
        weight = found(numbers)
        assert weight is not None
        assert torch.equal(weight.dense(), numbers[0].float())
    assert in_four_bits(GroupedWeight(ramp[..., :20] // 2, torch.ones(1, 1), 20, INT8)) is None
