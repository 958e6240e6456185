"""Compiled products by every method of this processor: against float64 sums, or PyTorch's over the same integers."""

from __future__ import annotations

import ctypes
import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.cpu.library import library, loaded
from batchgen.kernels.cpu.matmul import (
    METHODS,
    MatmulCall,
    Method,
    PackedWeight,
    matmul,
    methods,
    pack,
    pack_bfp,
    pack_int8,
    unpack,
    unpack_bfp,
    unpack_int8,
)
from batchgen.kernels.quantization import BFP, INT8, Scheme, groups_of, quantise_weight
from tests.cases import examples
from tests.kernels.cpu.products import randn, with_threads
from tests.kernels.references import grouped_linear

BF16 = torch.bfloat16
KINDS = [(dtype, name) for dtype in (torch.float32, BF16) for name in (methods(dtype) if loaded() else ())]
kinds = pytest.mark.parametrize(("dtype", "method"), KINDS)
float_kinds = pytest.mark.parametrize(("dtype", "method"), [k for k in KINDS if k[1] in ("widened", "dot")])
needs_bfp = pytest.mark.skipif((BF16, "bfp") not in KINDS, reason="16-bit integers are not faster than float32 here")
needs_int8 = pytest.mark.skipif((BF16, "int8") not in KINDS, reason="this processor has no int8 dot instruction")


def packed_for(method: Method, weight: Tensor) -> PackedWeight:
    if method == "bfp":
        return pack_bfp(weight)
    return pack_int8(quantise_weight(weight, INT8), weight.dtype) if method == "int8" else pack(weight)


def product(method: Method, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return matmul(x, packed_for(method, weight), bias, method)


def assert_product(method: Method, got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Compare within the error of float32 sums, of groups for integers, and one rounding to the dtype."""
    terms = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    if method == "bfp":
        want = grouped_linear(x.float(), quantise_weight(weight, BFP), bias).double()
        bound = 2.0**-21 * terms + 2.0**-8 * want.abs()
    elif method == "int8":
        want = grouped_linear(x, quantise_weight(weight, INT8), bias).double()
        bound = terms * {torch.float32: 2.0**-21, BF16: 2.0**-8}[x.dtype]
    else:
        want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        rounding = {torch.float32: 2.0**-24, BF16: 2.0**-8}[x.dtype]
        bound = want.abs() * rounding + terms * 2.0**-24 * math.sqrt(x.shape[-1] + 4) * 2
    assert got.dtype == x.dtype
    assert got.shape == want.shape
    assert bool(((got.double() - want).abs() <= bound + 1e-30).all())


@kinds
@examples(150)
@given(
    rows=st.integers(0, 80) | st.integers(81, 300),
    inner=st.integers(1, 450),
    outer=st.integers(1, 120),
    biased=st.booleans(),
    threads=st.integers(1, 9),
    scale=st.sampled_from([1e-12, 1.0, 1e12]),
    seed=st.integers(0, 99),
)
def test_random_products(
    dtype: torch.dtype,
    method: Method,
    rows: int,
    inner: int,
    outer: int,
    biased: bool,
    threads: int,
    scale: float,
    seed: int,
) -> None:
    x, weight = (randn(rows, inner, seed=seed) * scale).to(dtype), randn(outer, inner, dtype=dtype, seed=seed + 1)
    bias = randn(outer, seed=seed + 2) * scale if biased else None
    with with_threads(threads):
        got = product(method, x, weight, bias)
    assert_product(method, got, x, weight, bias)


@float_kinds
@pytest.mark.parametrize(
    ("rows", "inner", "outer"),
    [(1, 576, 960), (25, 1000, 15), (64, 576, 64), (65, 577, 65), (3, 4097, 50), (66, 2049, 96), (66, 2049, 80),
     (9, 4097, 16)],
)  # fmt: skip
def test_long_products(dtype: torch.dtype, method: Method, rows: int, inner: int, outer: int) -> None:
    """Sums of several blocks."""
    x, weight, bias = randn(rows, inner, dtype=dtype), randn(outer, inner, dtype=dtype, seed=1), randn(outer, seed=2)
    assert_product(method, product(method, x, weight, bias), x, weight, bias)
    assert torch.equal(unpack(pack(weight)), weight)


@kinds
@pytest.mark.parametrize("inner", [576, 1001])
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, method: Method, inner: int) -> None:
    """Alone, in batches around every block size of the kernels, and by 1 to 33 threads."""
    packed, x = packed_for(method, randn(130, inner, dtype=dtype, seed=1)), randn(150, inner, dtype=dtype)
    whole = matmul(x, packed, None, method)
    for begin, end in [(0, 1), (3, 5), (1, 8), (0, 8), (2, 11), (7, 23), (70, 95), (5, 69), (9, 90), (149, 150)]:
        assert torch.equal(matmul(x[begin:end], packed, None, method), whole[begin:end])
    for threads in (1, 2, 3, 7, 33):
        with with_threads(threads):
            assert torch.equal(matmul(x, packed, None, method), whole)


@kinds
def test_strides_and_dimensions(dtype: torch.dtype, method: Method) -> None:
    wide, weight = randn(2, 3, 90, dtype=dtype), randn(80, 120, dtype=dtype, seed=1)[::2, :60]
    packed, whole = packed_for(method, weight), packed_for(method, weight.contiguous())
    spread = randn(5, 120, dtype=dtype)[:, ::2]  # strided columns
    for x in (wide[..., 7:67], wide[:, 1, 10:70], wide[:, ::2, :60], spread):
        got = matmul(x, packed, None, method)
        assert torch.equal(got, matmul(x.contiguous(), whole, None, method))
        assert got.shape == (*x.shape[:-1], 40)
    if method in ("widened", "dot"):
        assert torch.equal(unpack(pack(weight.T)), weight.T)


@kinds
@pytest.mark.parametrize(("place", "poison"), [(299, math.inf), (0, math.nan), (98, -math.inf), (150, -math.nan)])
def test_zeros_nan_and_infinity_stay_in_their_row(
    dtype: torch.dtype, method: Method, place: int, poison: float
) -> None:
    x, weight = randn(20, 300, dtype=dtype), randn(50, 300, dtype=dtype, seed=1)
    x[2], x[5, :100] = 0, 1e-40
    weight[7] = 0
    clean = product(method, x, weight)
    assert clean[2].eq(0).all()
    assert clean[:, 7].eq(0).all()
    assert clean[5].isfinite().all()
    x[3, place] = poison
    got = product(method, x, weight)
    others = [i for i in range(20) if i != 3]
    assert torch.equal(got[others], clean[others])
    assert not got[3, [0, 6, 8, 49]].isfinite().any()
    if method == "int8":
        return
    assert not got[3].isfinite().any()
    weight[8, place] = poison
    columns = [i for i in range(50) if i != 8]
    got = product(method, x[others], weight)
    assert torch.equal(got[:, columns], clean[others][:, columns])
    assert not got[:, 8].isfinite().any()


@float_kinds
@pytest.mark.parametrize("inner", [1, 63, 64, 401])
def test_infinities_are_exact(dtype: torch.dtype, method: Method, inner: int) -> None:
    x, weight = randn(20, inner, dtype=dtype), randn(50, inner, dtype=dtype, seed=1)
    x[3, inner - 1] = math.inf
    assert torch.equal(product(method, x, weight)[3], math.inf * weight[:, inner - 1].sign())
    weight[7, 0] = -math.inf
    assert torch.equal(product(method, x[:3], weight)[:, 7], -math.inf * x[:3, 0].sign())
    full = torch.full((9, 70), 3e38, dtype=dtype)
    assert bool((product(method, full, torch.ones(3, 70, dtype=dtype)) == math.inf).all())


@pytest.mark.skipif(not loaded(), reason="no C++ compiler here")
def test_widened_products_are_float32_products() -> None:
    """bfloat16 weights are widened exactly: the sums equal those over float32 weights, rounded once."""
    x, weight = randn(33, 500, dtype=BF16), randn(70, 500, dtype=BF16, seed=1)
    assert torch.equal(matmul(x, pack(weight)), matmul(x.float(), pack(weight.float())).bfloat16())


@needs_bfp
@pytest.mark.parametrize(("inner", "sign"), [(1, 1), (40, -1), (96, 1), (96, -1), (300, 1), (960, -1)])
def test_the_largest_sums_are_exact(inner: int, sign: int) -> None:
    x, weight = torch.full((9, inner), 3.0, dtype=BF16), torch.full((20, inner), sign * 2.0, dtype=BF16)
    assert torch.equal(product("bfp", x, weight), torch.full((9, 20), sign * 6.0 * inner, dtype=BF16))


@needs_bfp
@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 1, 1), (64, 576, 80), (131, 577, 33)])
def test_float32_inputs_give_the_same_bits(rows: int, inner: int, outer: int) -> None:
    """The decoder passes the results of its norms as float32 numbers with bfloat16 values."""
    x, packed = randn(rows, inner, dtype=BF16), pack_bfp(randn(outer, inner, dtype=BF16, seed=1))
    wide, out = x.float(), torch.empty(rows, outer, dtype=BF16)
    scratch = torch.empty(packed.scratch + 64, dtype=torch.uint8)
    call = MatmulCall(
        x=wide.data_ptr(), weight=packed.data.data_ptr(), out=out.data_ptr(), rows=rows, inner=inner, outer=outer,
        x_stride=inner, out_stride=outer, method=METHODS[BF16, "bfp"], scratch=-(-scratch.data_ptr() // 64) * 64,
        x_wide=1,
    )  # fmt: skip
    library().bg_matmul(ctypes.byref(call), 1)
    assert torch.equal(out, matmul(x, packed, None, "bfp"))


# Quantisation


@pytest.mark.parametrize(("scheme", "multiple", "steps"), [(BFP, 2, 0.501), (INT8, 4, 0.5001)], ids=["bfp", "int8"])
@pytest.mark.parametrize("inner", [0, 1, 2, 95, 96, 97, 128, 129, 576, 1000])
def test_groups_and_their_errors(scheme: Scheme, multiple: int, steps: float, inner: int) -> None:
    count, size = groups_of(inner, scheme)
    assert count * size >= inner
    assert size % multiple == 0
    assert size <= {BFP: 96, INT8: 128}[scheme]
    assert count * size - inner < max(multiple * count, 1)
    weight = randn(20, inner) * torch.logspace(-3, 3, inner)
    made = quantise_weight(weight, scheme)
    assert made.numbers.shape == (20, count, size)
    assert made.numbers.dtype == scheme.dtype
    assert not inner or made.numbers.abs().amax() == scheme.most
    scales = made.scales.repeat_interleave(size, 1)[:, :inner]
    assert bool(((made.dense() - weight).abs() <= scales * steps).all())


def test_sums_of_a_group_fit_32_bits() -> None:
    assert BFP.group * BFP.most**2 < 2**31
    assert BFP.group * (BFP.most + 1) ** 2 > 2**31


@pytest.mark.parametrize(
    ("of_inputs", "of_weights", "share"), [(1, 1, 0.12), (30, 1, 0.3), (1000, 1, 0.3), (1, 30, 0.3), (100, 10, 0.5)]
)
@pytest.mark.parametrize("inner", [64, 576, 1536])
def test_the_error_of_bfp_is_a_fraction_of_bfloat16_rounding(
    inner: int, of_inputs: int, of_weights: int, share: float
) -> None:
    """float32 numbers, so that both formats lose precision; some may be many times larger than others."""
    x, weight = randn(200, inner), randn(100, inner, seed=1)
    x[:, ::97] *= of_inputs
    weight[:, 5::89] *= of_weights
    exact = x.double() @ weight.double().T
    rounded = x.bfloat16().double() @ weight.bfloat16().double().T
    blocks = grouped_linear(x, quantise_weight(weight, BFP)).double()
    assert (blocks - exact).norm() < share * (rounded - exact).norm()


def test_the_error_of_int8_is_small() -> None:
    x, weight, bias = randn(50, 576), randn(300, 576, seed=1), randn(300, seed=2)
    exact = x @ weight.T + bias
    made = quantise_weight(weight, INT8)
    assert (grouped_linear(x, made, bias) - exact).norm() / exact.norm() < 0.015
    assert torch.equal(grouped_linear(x[:, None], made), grouped_linear(x, made)[:, None])


@pytest.mark.parametrize("method", [pytest.param("bfp", marks=needs_bfp), pytest.param("int8", marks=needs_int8)])
@pytest.mark.parametrize(
    ("outer", "inner", "scale"),
    [(1, 1, 1.0), (16, 96, 1e36), (48, 128, 1.0), (17, 97, 1e-36), (50, 577, 1e36), (5, 0, 1.0), (0, 5, 1.0)],
)
def test_packing_keeps_every_number(method: Method, outer: int, inner: int, scale: float) -> None:
    weight = (randn(outer, inner) * scale).bfloat16()
    made = quantise_weight(weight, BFP if method == "bfp" else INT8)
    back = (unpack_bfp if method == "bfp" else unpack_int8)(packed_for(method, weight))
    assert torch.equal(back.numbers, made.numbers)
    assert torch.equal(back.scales, made.scales)
    assert torch.equal(back.dense(), made.dense())


@needs_int8
@pytest.mark.parametrize("inner", [300, 128])
def test_large_weights_are_quantised_and_packed_a_block_at_a_time(inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = randn(500, inner)
    whole, at_once = quantise_weight(weight, INT8), packed_for("int8", weight)
    monkeypatch.setattr("batchgen.kernels.quantization._BLOCK", 1000)
    monkeypatch.setattr("batchgen.kernels.cpu.matmul._BLOCK", 1 << 16)
    blocks = quantise_weight(weight, INT8)
    assert torch.equal(blocks.numbers, whole.numbers)
    assert torch.equal(blocks.scales, whole.scales)
    assert torch.equal(packed_for("int8", weight).data, at_once.data)


# Refusals, and calls by several threads


@kinds
def test_a_layout_of_another_method_is_refused(dtype: torch.dtype, method: Method) -> None:
    x, packed = randn(2, 8, dtype=dtype), packed_for(method, randn(3, 8, dtype=dtype))
    for other in methods(dtype):
        if other != method and {other, method} != {"widened", "dot"}:
            with pytest.raises(ValueError, match="not packed"):
                matmul(x, packed, None, other)


@pytest.mark.skipif(not loaded(), reason="no C++ compiler here")
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


@pytest.mark.skipif(not loaded(), reason="no C++ compiler here")
def test_python_threads_have_separate_workspaces() -> None:
    x, packed = randn(64, 300, dtype=BF16), pack(randn(100, 300, dtype=BF16, seed=1))
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
