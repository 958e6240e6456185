"""The norm kernels in Triton's interpreter, against PyTorch and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels import norm as pytorch
from batchgen.kernels.gpu import norm as gpu
from batchgen.kernels.gpu.launch import recording
from tests.kernels.closeness import DTYPES, assert_as_close

torch.set_num_threads(1)

WIDTHS = (1, 3, 63, 100, 576, 1000)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0, size: float = 1.0) -> Tensor:
    return (size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def check(x: Tensor, weight: Tensor, eps: float) -> None:
    before = x.clone()
    got = gpu.rms_norm(x, weight, eps)
    assert got.is_contiguous()
    assert torch.equal(x, before)
    assert_as_close(got, pytorch.rms_norm(x, weight, eps), exact_norm(x, weight, eps))


def check_sum(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> None:
    before, untouched = x.clone(), delta.clone()
    got = gpu.add_rms_norm(x, delta, weight, eps)
    expected = before.clone()
    plain = pytorch.add_rms_norm(expected, delta, weight, eps)
    assert torch.equal(x, expected)
    assert torch.equal(delta, untouched)
    assert_as_close(got, plain, exact_norm(before.double() + delta.double(), weight, eps))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    check(randn(5, width, dtype=dtype), randn(width, dtype=dtype, seed=1), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm(width: int, dtype: torch.dtype) -> None:
    x, delta = randn(5, width, dtype=dtype), randn(5, width, dtype=dtype, seed=2, size=0.1)
    check_sum(x, delta, randn(width, dtype=dtype, seed=1), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(3, 16), (7, 80)])
def test_heads_of_a_fused_projection(heads: int, dim: int, dtype: torch.dtype) -> None:
    qkv = randn(6, heads + 4, dim, dtype=dtype)
    check(qkv[:, 2 : 2 + heads], randn(dim, dtype=dtype, seed=1), 1e-5)


@pytest.mark.parametrize("rows", [1, 2, 127, 128, 129, 300])
def test_tiles_of_many_rows(rows: int) -> None:
    check(randn(rows, 13, dtype=torch.float32), randn(13, dtype=torch.float32, seed=1), 1e-6)
    check_sum(
        randn(rows, 13, dtype=torch.float32),
        randn(rows, 13, dtype=torch.float32, seed=2),
        randn(13, dtype=torch.float32, seed=1),
        1e-6,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16384, 5000])
def test_the_widest_rows(width: int, dtype: torch.dtype) -> None:
    x, weight = randn(2, width, dtype=dtype), randn(width, dtype=dtype, seed=1)
    check(x, weight, 1e-6)
    check_sum(x, randn(2, width, dtype=dtype, seed=2), weight, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_gaps(dtype: torch.dtype) -> None:
    weight = randn(20, dtype=dtype, seed=1)
    both, other = randn(7, 50, dtype=dtype), randn(7, 64, dtype=dtype, seed=2)
    check(both[::2, 3:23], weight, 1e-6)
    rest = both.clone()
    check_sum(both[:, 5:25], other[:, 40:60], weight, 1e-6)
    rest[:, 5:25] = both[:, 5:25]
    assert torch.equal(both, rest)  # nothing outside the rows is written
    check(both[0, :20], weight, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "eps"), [(1e-3, 1e-6), (1e3, 1e-6), (1e-4, 0.1), (0.0, 1e-5)])
def test_sizes_and_eps(size: float, eps: float, dtype: torch.dtype) -> None:
    check(randn(3, 33, dtype=dtype, size=size), randn(33, dtype=dtype, seed=1), eps)


def test_float16_squares_do_not_overflow() -> None:
    check(randn(2, 40, dtype=torch.float16, size=15_000.0), randn(40, dtype=torch.float16, seed=1), 1e-6)


def test_a_step_without_tokens() -> None:
    x, weight = torch.zeros(0, 8), torch.ones(8)
    assert gpu.rms_norm(x, weight, 1e-6).shape == (0, 8)
    assert gpu.add_rms_norm(x, x, weight, 1e-6).shape == (0, 8)


def test_not_a_number_stays_in_its_row() -> None:
    x = randn(4, 9, dtype=torch.float32)
    x[2, 3] = torch.nan
    got = gpu.rms_norm(x, torch.ones(9), 1e-6)
    assert got.isnan().any(-1).tolist() == [False, False, True, False]


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    eps=st.sampled_from([1e-6, 1e-5, 0.1]),
    size=st.sampled_from([1e-2, 1.0, 1e2]),
    seed=st.integers(0, 99),
)
def test_any_shape(rows: int, width: int, dtype: torch.dtype, eps: float, size: float, seed: int) -> None:
    x, delta = randn(rows, width, dtype=dtype, seed=seed, size=size), randn(rows, width, dtype=dtype, seed=seed + 1)
    weight = randn(width, dtype=dtype, seed=seed + 2)
    check(x, weight, eps)
    check_sum(x, delta, weight, eps)


def test_specialisations_do_not_depend_on_the_number_of_rows() -> None:
    seen: list[tuple[Any, ...]] = []

    def note(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        rows, *others = [x for x in args if not isinstance(x, Tensor)]  # `rows` is not specialised
        seen.append((kernel, others, constants, rows))

    counts = (1, 2, 16, 33)
    with recording(note):
        for rows in counts:
            gpu.add_rms_norm(torch.zeros(rows, 48), torch.zeros(rows, 48), torch.zeros(48), 1e-6)
    assert [launch[-1] for launch in seen] == list(counts)
    assert all(launch[:-1] == seen[0][:-1] for launch in seen)
