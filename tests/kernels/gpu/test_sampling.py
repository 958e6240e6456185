"""Fused sampling in Triton's interpreter against the row-by-row reference: the same token on every path of a row."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels import sampling as pytorch
from batchgen.kernels.gpu.sampling import SamplingTile, greedy, nan_rows, sample
from batchgen.kernels.noise import row_keys
from batchgen.kernels.sampling import SamplingColumns
from tests.cases import examples
from tests.kernels.gpu.sampled_rows import SMALL, TINY, Params, some
from tests.kernels.logit_rows import MORE_KINDS, logits_of
from tests.kernels.references import sample_reference

WIDE = SamplingTile(block=256, capacity=128, spread=64, few_block=128, warps=4)

GRID: list[Params] = list(
    itertools.product(
        [1e-6, 1e-5, 0.3, 1.0, 100.0],
        [-1, 0, 1, 2, 5, 31, 70, 5000, 1 << 40],
        [1.0, 0.95, 0.5, 1e-9],
        [0.0, 0.1, 1.0],
    )
)


def columns_of(params: list[Params], seed: int = 0) -> SamplingColumns:
    rows = len(params)
    keys = row_keys(torch.full((rows,), seed), torch.zeros(rows, dtype=torch.int64), torch.arange(rows))
    return SamplingColumns.of(*zip(*params, strict=True)).with_keys(keys)  # type: ignore[arg-type]


def draw(logits: Tensor, params: list[Params], seed: int = 0, tile: SamplingTile = SMALL) -> Tensor:
    before = logits.clone()
    result = sample(logits, columns_of(params, seed), tile=tile)
    assert torch.equal(logits, before)
    assert result.tokens.dtype == torch.int64
    assert result.bad is not None
    assert not result.bad.any()
    return result.tokens


def expected(logits: Tensor, params: list[Params], seed: int = 0) -> list[int]:
    keys = columns_of(params, seed).keys
    assert keys is not None
    return [sample_reference(logits[i].float().numpy(), *p, int(keys[i])) for i, p in enumerate(params)]


@pytest.mark.field("temperature", "top_k", "top_p", "min_p", "seed")
@pytest.mark.parametrize(
    ("kind", "vocab"),
    [*((kind, 200) for kind in MORE_KINDS), *zip(MORE_KINDS, itertools.cycle((1, 2, 63)), strict=False)],
)
def test_mixed_rows_equal_the_reference(kind: str, vocab: int) -> None:
    params = some(GRID, 8, seed=vocab + len(kind))
    logits = logits_of(kind, len(params), vocab)
    assert draw(logits, params, seed=vocab).tolist() == expected(logits, params, seed=vocab)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_long_rows_of_every_dtype(dtype: torch.dtype) -> None:
    params: list[Params] = [
        *((1.0, -1, 1.0, 0.0), (0.6, 20, 0.95, 0.0), (1.0, 50, 1.0, 0.0), (0.8, 100, 0.9, 0.02), (1.0, -1, 0.9, 0.0)),
        *((3.0, -1, 0.9, 0.0), (100.0, -1, 0.3, 0.0), (1.0, -1, 1.0, 0.05), (1.0, -1, 0.8, 0.05), (0.0, -1, 1.0, 0.0)),
        *((1.0, 300, 0.9, 0.0), (1.0, 257, 1.0, 0.0)),  # too many to collect
    ]
    logits = (3 * torch.randn(len(params), 1501, generator=torch.Generator().manual_seed(5))).to(dtype)
    assert draw(logits, params, tile=WIDE).tolist() == expected(logits, params)


@examples(20)
@given(
    st.lists(st.sampled_from([-torch.inf, -2.0, -0.0, 0.0, 0.5, 1.0, 1.25, 7.0]), min_size=1, max_size=40),
    st.sampled_from([0.0, 1e-5, 0.5, 1.0, 3.0]),
    st.integers(-1, 44),
    st.sampled_from([1.0, 0.99, 0.5, 0.1]),
    st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    st.integers(0, 1000),
)
def test_random_rows_equal_the_reference(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = torch.tensor([values])
    if pytorch.nan_rows(logits).any():
        return
    params = [(temperature, top_k, top_p, min_p)]
    assert draw(logits, params, seed, TINY).tolist() == expected(logits, params, seed)


def test_several_draw_from_one_row() -> None:
    params, rows = some(GRID, 12, seed=6), torch.tensor([0, 2, 2, 1, 0, 2, 2, 2, 1, 0, 0, 1])
    logits, columns = logits_of("ties", 3, 150), columns_of(params)
    found = sample(logits, columns, rows, tile=SMALL)
    assert found.tokens.tolist() == expected(logits[rows], params)
    assert torch.equal(found.tokens, pytorch.sample(logits, columns, rows).tokens)
    assert found.bad is not None
    assert len(found.bad) == 12


def test_strided_logits() -> None:
    params = some(GRID, 6, seed=5)
    wide = torch.full((6, 700), torch.nan)
    logits = logits_of("normal", 6, 300)
    for view in (wide[:, 100:400], wide[:, ::2][:, :300], wide[:, 50:650:2]):
        view.copy_(logits)
        assert sample(view, columns_of(params), tile=SMALL).tokens.tolist() == expected(logits, params)
        view.fill_(torch.nan)


def test_all_greedy_needs_no_keys() -> None:
    columns = SamplingColumns.of([0.0, 9e-6], [-1, 3], [1.0, 0.5], [0.0, 0.0])
    assert sample(torch.tensor([[0.0, 2.0], [3.0, 1.0]]), columns, tile=SMALL).tokens.tolist() == [1, 0]


def test_no_rows() -> None:
    columns = SamplingColumns.of([], [], [], [])
    assert sample(torch.empty(0, 7), columns, tile=SMALL).tokens.shape == (0,)


@pytest.mark.parametrize("vocab", [1, 2, 63, 300])
def test_greedy_takes_the_first_of_equal_logits(vocab: int) -> None:
    logits = torch.randint(0, 3, (6, vocab), generator=torch.Generator().manual_seed(vocab)).float()
    first = [int(np.flatnonzero(row == row.max())[0]) for row in logits.numpy()]
    assert greedy(logits).tolist() == first
    assert draw(logits, [(0.0, 5, 0.5, 0.5)] * 6).tolist() == first


# The interpreter's numpy warns about intended operations: exp of a row with an infinity, log of no mass.
@pytest.mark.filterwarnings("ignore:(overflow|divide by zero|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bad_rows_are_reported_and_do_not_affect_others(dtype: torch.dtype) -> None:
    logits = logits_of("normal", 7, 200).to(dtype)
    params: list[Params] = [(1.0, -1, 0.9, 0.05)] * 3 + [(1.0, 20, 0.9, 0.0)] * 3 + [(0.0, -1, 1.0, 0.0)]
    clean = draw(logits, params)
    poisoned = logits.clone()
    poisoned[1, 7] = torch.nan
    poisoned[4] = -torch.inf
    poisoned[5, 3] = torch.inf
    poisoned[6, 199] = torch.nan
    assert nan_rows(poisoned).tolist() == pytorch.nan_rows(poisoned).tolist()
    result = sample(poisoned, columns_of(params), tile=SMALL)
    assert result.bad is not None
    assert result.bad.tolist() == [False, True, False, False, True, True, True]
    assert torch.equal(result.tokens[[0, 2, 3]], clean[[0, 2, 3]])
    assert ((result.tokens >= 0) & (result.tokens < 200)).all()
