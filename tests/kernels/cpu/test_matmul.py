"""Compiled products against float64 sums: odd sizes, strides, bias, NaN and infinity, and rows alone."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from batchgen.kernels.cpu.library import loaded, missing
from batchgen.kernels.cpu.matmul import METHODS, Method, matmul, methods, pack, unpack
from tests.kernels.cpu.products import Problem, assert_same_bits_in_every_batch, problems, randn, with_threads

pytestmark = pytest.mark.skipif(not loaded(), reason=missing() or "")

DTYPES = (torch.float32, torch.bfloat16)
KINDS = [(d, name) for d in DTYPES for name in (methods(d) if loaded() else ()) if name in ("widened", "dot")]
kinds = pytest.mark.parametrize(("dtype", "method"), KINDS)


def assert_product(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Compare with exact sums, within the error of float32 sums and one rounding to the dtype."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    terms = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    rounding = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}[x.dtype]
    bound = exact.abs() * rounding + terms * 2.0**-24 * math.sqrt(x.shape[-1] + 4) * 2 + 1e-30
    assert got.dtype == x.dtype
    assert got.shape == exact.shape
    assert bool(((got.double() - exact).abs() <= bound).all())


SIZES = [  # M, K, N: around every block size of the kernels
    (0, 5, 7), (1, 1, 1), (1, 576, 960), (2, 191, 47), (3, 192, 48), (5, 193, 49), (7, 2, 96), (8, 384, 50),
    (9, 385, 95), (16, 386, 97), (17, 64, 16), (24, 63, 17), (25, 1000, 15), (63, 100, 48), (64, 576, 64),
    (65, 577, 65), (130, 300, 33), (200, 31, 100), (3, 4097, 50), (66, 2049, 96),
    (66, 2049, 80), (9, 4097, 16),
]  # fmt: skip


@kinds
@pytest.mark.parametrize(("rows", "inner", "outer"), SIZES)
def test_sizes(dtype: torch.dtype, method: Method, rows: int, inner: int, outer: int) -> None:
    x, weight = randn(rows, inner, dtype=dtype), randn(outer, inner, dtype=dtype, seed=1)
    bias = randn(outer, dtype=torch.float32, seed=2)
    packed = pack(weight)
    assert_product(matmul(x, packed, None, method), x, weight)
    assert_product(matmul(x, packed, bias, method), x, weight, bias)
    assert torch.equal(unpack(packed), weight)


@kinds
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_random_products(dtype: torch.dtype, method: Method, problem: Problem) -> None:
    x, weight, bias = problem.tensors(dtype)
    with with_threads(problem.threads):
        got = matmul(x, pack(weight), bias, method)
    assert_product(got, x, weight, bias)


@kinds
@pytest.mark.parametrize("inner", [576, 1001])
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, method: Method, inner: int) -> None:
    packed = pack(randn(130, inner, dtype=dtype, seed=1))
    assert_same_bits_in_every_batch(lambda x: matmul(x, packed, None, method), randn(150, inner, dtype=dtype))


@kinds
def test_strides_and_dimensions(dtype: torch.dtype, method: Method) -> None:
    wide = randn(2, 3, 90, dtype=dtype)
    weight = randn(40, 60, dtype=dtype, seed=1)
    packed = pack(randn(80, 120, dtype=dtype, seed=1)[::2, :60])
    cut = unpack(packed)
    for x in (wide[..., 7:67], wide[:, 1, 10:70], wide[:, ::2, :60]):
        got = matmul(x, packed, None, method)
        assert got.shape == (*x.shape[:-1], 40)
        assert_product(got.reshape(-1, 40), x.reshape(-1, 60), cut)
    spread = randn(5, 120, dtype=dtype)[:, ::2]  # strided columns
    assert_product(matmul(spread, pack(weight), None, method), spread, weight)
    assert torch.equal(unpack(pack(weight.T)), weight.T)


@kinds
@pytest.mark.parametrize("inner", [1, 63, 64, 401])
def test_nan_and_infinity_stay_in_their_row(dtype: torch.dtype, method: Method, inner: int) -> None:
    x, weight = randn(20, inner, dtype=dtype), randn(50, inner, dtype=dtype, seed=1)
    clean = matmul(x, pack(weight), None, method)
    x[3, inner - 1], x[11, 0] = math.inf, math.nan
    got = matmul(x, pack(weight), None, method)
    others = [i for i in range(20) if i not in (3, 11)]
    assert torch.equal(got[others], clean[others])
    assert torch.equal(got[3], math.inf * weight[:, inner - 1].sign())
    assert got[11].isnan().all()
    weight[7, 0] = -math.inf
    got = matmul(x[:3], pack(weight), None, method)
    assert torch.equal(got[:, 7], -math.inf * x[:3, 0].sign())
    assert got[:, [0, 6, 8, 49]].isfinite().all()


@kinds
def test_sums_that_overflow_are_infinite(dtype: torch.dtype, method: Method) -> None:
    x = torch.full((9, 70), 3e38, dtype=dtype)
    got = matmul(x, pack(torch.ones(3, 70, dtype=dtype)), None, method)
    assert bool((got == math.inf).all())


def test_widened_products_are_float32_products() -> None:
    """bfloat16 weights are widened exactly: the sums equal those over float32 weights, rounded once."""
    x, weight = randn(33, 500, dtype=torch.bfloat16), randn(70, 500, dtype=torch.bfloat16, seed=1)
    wide = matmul(x.float(), pack(weight.float()))
    assert torch.equal(matmul(x, pack(weight)), wide.bfloat16())


def test_wrong_dtypes_and_sizes_are_refused() -> None:
    with pytest.raises(TypeError, match="float16"):
        pack(torch.ones(2, 2, dtype=torch.float16))
    packed = pack(torch.ones(3, 4))
    for x, bias in ((torch.ones(2, 4).bfloat16(), None), (torch.ones(2, 4), torch.ones(3).bfloat16())):
        with pytest.raises(TypeError):
            matmul(x, packed, bias)
    for x, bias in ((torch.ones(2, 5), None), (torch.ones(2, 4), torch.ones(4))):
        with pytest.raises(ValueError, match="does not fit"):
            matmul(x, packed, bias)
    assert methods(torch.float16) == ()
    assert set(KINDS) <= set(METHODS)


def test_python_threads_have_separate_workspaces() -> None:
    x, packed = randn(64, 300, dtype=torch.bfloat16), pack(randn(100, 300, dtype=torch.bfloat16, seed=1))
    whole = matmul(x, packed)
    wrong: list[int] = []

    def work() -> None:
        wrong.extend(i for i in range(50) if not torch.equal(matmul(x, packed), whole))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
