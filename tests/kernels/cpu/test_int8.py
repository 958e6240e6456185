"""Compiled products over int8 weights against the PyTorch version, and that against the exact product."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from batchgen.kernels.cpu.library import loaded
from batchgen.kernels.cpu.matmul import PackedWeight, matmul, methods, pack, pack_int8, unpack_int8
from batchgen.kernels.quantization import INT8, grouped_linear, groups_of, quantise_weight
from tests.kernels.cpu.products import Problem, assert_same_bits_in_every_batch, problems, randn, with_threads

DTYPES = (torch.float32, torch.bfloat16)
here = pytest.mark.skipif(
    not loaded() or "int8" not in methods(torch.float32), reason="this processor has no int8 dot instruction"
)


def packed(weight: Tensor) -> PackedWeight:
    return pack_int8(quantise_weight(weight, INT8), weight.dtype)


def assert_same(got: Tensor, want: Tensor, terms: Tensor) -> None:
    """Equal except for the rounding of group sums and of the dtype."""
    step = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-8}[got.dtype]
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert bool(((got.double() - want.double()).abs() <= step * terms + 1e-30).all())


@pytest.mark.parametrize("inner", [1, 127, 128, 129, 576, 1000])
def test_groups_and_their_errors(inner: int) -> None:
    weight = randn(20, inner) * torch.logspace(-3, 3, inner)
    made = quantise_weight(weight, INT8)
    assert groups_of(inner, INT8) == made.numbers.shape[1:]
    assert made.numbers.dtype == torch.int8
    assert made.numbers.shape[2] <= 128
    assert made.numbers.shape[2] % 4 == 0
    assert made.numbers.abs().amax() == 127
    scales = made.scales.repeat_interleave(made.numbers.shape[2], 1)[:, :inner]
    assert bool(((made.dense() - weight).abs() <= scales * 0.5001).all())


def test_the_pytorch_version_is_near_the_exact_product() -> None:
    x, weight, bias = randn(50, 576), randn(300, 576, seed=1), randn(300, seed=2)
    exact = x @ weight.T + bias
    made = quantise_weight(weight, INT8)
    error = (grouped_linear(x, made, bias) - exact).norm() / exact.norm()
    assert error < 0.015
    assert torch.equal(grouped_linear(x[:, None], made), grouped_linear(x, made)[:, None])


@here
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=80, deadline=None)
@given(problem=problems())
def test_compiled_equals_pytorch(dtype: torch.dtype, problem: Problem) -> None:
    x, weight, bias = problem.tensors(dtype)
    with with_threads(problem.threads):
        got = matmul(x, packed(weight), bias, "int8")
    assert_same(got, grouped_linear(x, quantise_weight(weight, INT8), bias), problem.terms(dtype))


@here
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    weight = packed(randn(130, 577, dtype=dtype, seed=1))
    assert_same_bits_in_every_batch(lambda x: matmul(x, weight, None, "int8"), randn(150, 577, dtype=dtype))


@here
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_nan_and_infinity(dtype: torch.dtype) -> None:
    x, weight = randn(20, 300, dtype=dtype), randn(50, 300, dtype=dtype, seed=1)
    x[2], x[5, :100] = 0, 1e-40
    weight[7] = 0
    clean = matmul(x, packed(weight), None, "int8")
    assert clean[2].eq(0).all()
    assert clean[:, 7].eq(0).all()
    x[3, 299], x[11, 0] = math.inf, math.nan
    got = matmul(x, packed(weight), None, "int8")
    others = [i for i in range(20) if i not in (3, 11)]
    assert torch.equal(got[others], clean[others])
    assert not got[[3, 11]][:, [0, 6, 8, 49]].isfinite().any()


@here
@pytest.mark.parametrize(("outer", "inner"), [(1, 1), (48, 128), (50, 577), (5, 0)])
def test_packing_keeps_every_number(outer: int, inner: int) -> None:
    made = quantise_weight(randn(outer, inner), INT8)
    back = unpack_int8(pack_int8(made, torch.bfloat16))
    assert torch.equal(back.numbers, made.numbers)
    assert torch.equal(back.scales, made.scales)
    assert torch.equal(back.dense(), made.dense())


@here
@pytest.mark.parametrize("inner", [300, 128])
def test_large_weights_are_quantised_and_packed_a_block_at_a_time(inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = randn(500, inner)
    whole, at_once = quantise_weight(weight, INT8), packed(weight)
    monkeypatch.setattr("batchgen.kernels.quantization._BLOCK", 1000)
    monkeypatch.setattr("batchgen.kernels.cpu.matmul._BLOCK", 1 << 16)
    blocks = quantise_weight(weight, INT8)
    assert torch.equal(blocks.numbers, whole.numbers)
    assert torch.equal(blocks.scales, whole.scales)
    assert torch.equal(packed(weight).data, at_once.data)


@here
def test_a_layout_of_another_method_is_refused() -> None:
    x, weight = randn(2, 8), randn(3, 8)
    with pytest.raises(ValueError, match="not packed"):
        matmul(x, packed(weight), None, "widened")
    with pytest.raises(ValueError, match="not packed"):
        matmul(x, pack(weight), None, "int8")
