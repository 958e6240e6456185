"""Compiled products in block floating point against the PyTorch version, and their error against bfloat16 rounding."""

from __future__ import annotations

import ctypes
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from batchgen.kernels.cpu.library import library, loaded
from batchgen.kernels.cpu.matmul import METHODS, MatmulCall, matmul, methods, pack, pack_bfp, unpack_bfp
from batchgen.kernels.quantization import BFP, grouped_linear, groups_of, quantise_weight
from tests.kernels.cpu.products import Problem, assert_same_bits_in_every_batch, problems, with_threads
from tests.kernels.cpu.products import randn as any_randn

here = pytest.mark.skipif(
    not loaded() or "bfp" not in methods(torch.bfloat16),
    reason="16-bit integers are not faster than float32 here",
)


randn = partial(any_randn, dtype=torch.bfloat16)


def assert_same(got: Tensor, want: Tensor, terms: Tensor) -> None:
    """Equal except for the rounding of group sums, and the final rounding to bfloat16."""
    assert (got.dtype, want.dtype) == (torch.bfloat16, torch.float32)
    assert got.shape == want.shape
    bound = 2.0**-21 * terms + 2.0**-8 * want.double().abs() + 1e-30
    assert bool(((got.double() - want.double()).abs() <= bound).all())


@pytest.mark.parametrize("inner", [0, 1, 2, 95, 96, 97, 192, 193, 576, 1000])
def test_groups(inner: int) -> None:
    count, size = groups_of(inner, BFP)
    assert count * size >= inner
    assert size % 2 == 0
    assert size <= 96
    assert count * size - inner < max(2 * count, 1)


def test_sums_of_a_group_fit_32_bits() -> None:
    assert BFP.group * BFP.most**2 < 2**31
    assert BFP.group * (BFP.most + 1) ** 2 > 2**31


@pytest.mark.parametrize(
    ("of_inputs", "of_weights", "share"), [(1, 1, 0.12), (30, 1, 0.3), (1000, 1, 0.3), (1, 30, 0.3), (100, 10, 0.5)]
)
@pytest.mark.parametrize("inner", [64, 576, 1536])
def test_the_error_is_a_fraction_of_bfloat16_rounding(
    inner: int, of_inputs: int, of_weights: int, share: float
) -> None:
    """float32 numbers, so that both formats lose precision; some may be many times larger than others."""
    x, weight = randn(200, inner, dtype=torch.float32), randn(100, inner, dtype=torch.float32, seed=1)
    x[:, ::97] *= of_inputs
    weight[:, 5::89] *= of_weights
    exact = x.double() @ weight.double().T
    rounded = x.bfloat16().double() @ weight.bfloat16().double().T
    blocks = grouped_linear(x, quantise_weight(weight, BFP)).double()
    assert (blocks - exact).norm() < share * (rounded - exact).norm()


@here
@settings(max_examples=150, deadline=None)
@given(problems())
def test_compiled_equals_pytorch(problem: Problem) -> None:
    x, weight, bias = problem.tensors(torch.bfloat16)
    with with_threads(problem.threads):
        got = matmul(x, pack_bfp(weight), bias, "bfp")
    assert_same(got, grouped_linear(x.float(), quantise_weight(weight, BFP), bias), problem.terms(torch.bfloat16))


@here
@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 1, 1), (5, 96, 16), (64, 576, 80), (131, 577, 33)])
def test_float32_inputs_give_the_same_bits(rows: int, inner: int, outer: int) -> None:
    """The decoder passes the results of its norms as float32 numbers with bfloat16 values."""
    x, packed = randn(rows, inner), pack_bfp(randn(outer, inner, seed=1))
    wide, out = x.float(), torch.empty(rows, outer, dtype=torch.bfloat16)
    scratch = torch.empty(packed.scratch + 64, dtype=torch.uint8)
    call = MatmulCall(
        x=wide.data_ptr(),
        weight=packed.data.data_ptr(),
        out=out.data_ptr(),
        rows=rows,
        inner=inner,
        outer=outer,
        x_stride=inner,
        out_stride=outer,
        method=METHODS[torch.bfloat16, "bfp"],
        scratch=-(-scratch.data_ptr() // 64) * 64,
        x_wide=1,
    )
    library().bg_matmul(ctypes.byref(call), 1)
    assert torch.equal(out, matmul(x, packed, None, "bfp"))


@here
@pytest.mark.parametrize("inner", [576, 1001])
def test_a_row_has_the_same_bits_in_every_batch(inner: int) -> None:
    weight = pack_bfp(randn(130, inner, seed=1))
    assert_same_bits_in_every_batch(lambda x: matmul(x, weight, None, "bfp"), randn(150, inner))


@here
@pytest.mark.parametrize("inner", [1, 40, 96, 300, 960])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_are_exact(inner: int, sign: int) -> None:
    x = torch.full((9, inner), 3.0, dtype=torch.bfloat16)
    got = matmul(x, pack_bfp(torch.full((20, inner), sign * 2.0, dtype=torch.bfloat16)), None, "bfp")
    assert torch.equal(got, torch.full((9, 20), sign * 6.0 * inner, dtype=torch.bfloat16))


@here
def test_rows_of_zeros_nan_and_infinity() -> None:
    x, weight = randn(20, 300), randn(50, 300, seed=1)
    x[2], x[5, :100] = 0, 1e-40
    weight[7] = 0
    clean = matmul(x, pack_bfp(weight), None, "bfp")
    assert clean[2].eq(0).all()
    assert clean[:, 7].eq(0).all()
    assert clean[5].isfinite().all()
    for at, none in ((299, math.inf), (0, math.nan), (98, -math.inf), (150, -math.nan)):
        damaged = x.clone()
        damaged[3, at] = none
        got = matmul(damaged, pack_bfp(weight), None, "bfp")
        others = [i for i in range(20) if i != 3]
        assert torch.equal(got[others], clean[others])
        assert not got[3].isfinite().any()
    weight[8, 4] = math.nan
    got = matmul(x, pack_bfp(weight), None, "bfp")
    assert not got[:, 8].isfinite().any()
    assert torch.equal(got[:, :8], clean[:, :8])


@here
def test_strides_and_dimensions() -> None:
    wide, weight = randn(2, 3, 90), randn(80, 120, seed=1)[::2, :60]
    packed = pack_bfp(weight)
    for x in (wide[..., 7:67], wide[:, 1, 10:70], wide[:, ::2, :60], randn(5, 120)[:, ::2]):
        got = matmul(x, packed, None, "bfp")
        assert torch.equal(got, matmul(x.contiguous(), pack_bfp(weight.contiguous()), None, "bfp"))
        assert got.shape == (*x.shape[:-1], 40)


@here
@pytest.mark.parametrize(("outer", "inner"), [(1, 1), (16, 96), (17, 97), (50, 577), (5, 0), (0, 5)])
def test_packed_weights_equal_the_pytorch_version(outer: int, inner: int) -> None:
    for scale in (1e-36, 1.0, 1e36):
        weight = (randn(outer, inner, dtype=torch.float32) * scale).bfloat16()
        made, back = quantise_weight(weight, BFP), unpack_bfp(pack_bfp(weight))
        assert torch.equal(back.numbers, made.numbers)
        assert torch.equal(back.scales, made.scales)
        assert torch.equal(back.dense(), made.dense())


@here
def test_a_layout_of_another_method_is_refused() -> None:
    x, weight = randn(2, 8), randn(3, 8)
    for packed, method in ((pack_bfp(weight), "widened"), (pack_bfp(weight), "int8"), (pack(weight), "bfp")):
        with pytest.raises(ValueError, match="not packed"):
            matmul(x, packed, None, method)  # type: ignore[arg-type]
