"""Fused sampling in Triton's interpreter against the row-by-row reference: the same token on every path of a row."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels import sampling as pytorch
from batchgen.kernels.gpu.sampling import SamplingTile, greedy, nan_rows, sample
from batchgen.kernels.noise import row_keys
from batchgen.kernels.sampling import SamplingColumns
from batchgen.kernels.sampling_reference import filtered_distribution, sample_reference
from tests.kernels.gpu.test_top_k_threshold import KINDS, logits_of

CPU = torch.device("cpu")
Params = tuple[float, int, float, float]
SMALL = SamplingTile(block=64, capacity=32, spread=16, few_block=16, warps=4)
"""Rows of a few hundred logits take every path: collected ids that fit or do not fit, and several blocks of both."""
WIDE = SamplingTile(block=256, capacity=128, spread=64, few_block=128, warps=4)

GRID: list[Params] = list(
    itertools.product(
        [1e-6, 1e-5, 0.3, 1.0, 100.0],
        [-1, 0, 1, 2, 5, 31, 70, 5000, 1 << 40],
        [1.0, 0.95, 0.5, 1e-9],
        [0.0, 0.1, 1.0],
    )
)


def keys_for(rows: int, seed: int = 0) -> Tensor:
    seeds = torch.full((rows,), seed, dtype=torch.int64)
    return row_keys(seeds, torch.zeros(rows, dtype=torch.int64), torch.arange(rows))


def columns_of(params: list[Params], keys: Tensor) -> SamplingColumns:
    return SamplingColumns.of(*zip(*params, strict=True)).with_keys(keys)  # type: ignore[arg-type]


def draw(logits: Tensor, params: list[Params], seed: int = 0, tile: SamplingTile = SMALL) -> Tensor:
    before = logits.clone()
    result = sample(logits, columns_of(params, keys_for(len(params), seed)), tile=tile)
    assert torch.equal(logits, before)
    assert result.tokens.dtype == torch.int64
    assert result.bad is not None
    assert not result.bad.any()
    return result.tokens


def expected(logits: Tensor, params: list[Params], seed: int = 0) -> list[int]:
    keys = keys_for(len(params), seed).tolist()
    return [sample_reference(logits[i].float().numpy(), *p, keys[i]) for i, p in enumerate(params)]


def some(params: list[Params], count: int, seed: int) -> list[Params]:
    order = np.random.default_rng(seed).permutation(len(params))[:count]
    return [params[i] for i in order]


@pytest.mark.field("temperature", "top_k", "top_p", "min_p", "seed")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 2, 63, 200])
def test_mixed_rows_equal_the_reference(kind: str, vocab: int) -> None:
    params = some(GRID, 8, seed=vocab + len(kind))
    logits = logits_of(kind, len(params), vocab)
    assert draw(logits, params, seed=vocab).tolist() == expected(logits, params, seed=vocab)


@pytest.mark.parametrize(
    "params",
    [
        (1.0, -1, 1.0, 0.0),
        (0.6, 20, 0.95, 0.0),
        (1.0, 50, 1.0, 0.0),
        (0.8, 100, 0.9, 0.02),
        (1.0, -1, 0.9, 0.0),
        (3.0, -1, 0.9, 0.0),
        (100.0, -1, 0.3, 0.0),
        (1.0, -1, 1.0, 0.05),
        (1.0, -1, 0.8, 0.05),
        (0.0, -1, 1.0, 0.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_long_rows_of_every_dtype(params: Params, dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(2, 1501, generator=torch.Generator().manual_seed(5))).to(dtype)
    assert draw(logits, [params] * 2, tile=WIDE).tolist() == expected(logits, [params] * 2)


def test_top_k_too_large_to_collect() -> None:
    params: list[Params] = [(1.0, 300, 0.9, 0.0), (1.0, 257, 1.0, 0.0)]
    logits = logits_of("normal", 2, 700).half()
    assert draw(logits, params, tile=WIDE).tolist() == expected(logits, params)


def test_equals_pytorch() -> None:
    params = some(GRID, 20, seed=1)
    logits = logits_of("normal", 20, 90)
    assert torch.equal(draw(logits, params), pytorch.sample(logits, columns_of(params, keys_for(20))).tokens)


@settings(max_examples=20, deadline=None)
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
    tile = SamplingTile(block=16, capacity=8, spread=4, few_block=8, warps=1)
    assert draw(logits, params, seed, tile).tolist() == expected(logits, params, seed)


@pytest.mark.parametrize("tile", [SMALL, WIDE, SamplingTile(block=512, capacity=256, spread=256, few_block=64)])
def test_tiles_do_not_change_the_result(tile: SamplingTile) -> None:
    params = some(GRID, 16, seed=3)
    logits = logits_of("normal", 16, 400)
    assert draw(logits, params, tile=tile).tolist() == expected(logits, params)


def test_a_row_draws_the_same_token_alone_and_in_a_batch() -> None:
    params = some(GRID, 14, seed=4)
    logits, keys = logits_of("ties", 14, 150), keys_for(14)
    whole = sample(logits, columns_of(params, keys), tile=SMALL).tokens
    order = torch.randperm(14, generator=torch.Generator().manual_seed(0))
    shuffled = sample(logits[order], columns_of([params[i] for i in order], keys[order]), tile=SMALL).tokens
    assert torch.equal(shuffled, whole[order])
    for row in (0, 5, 13):
        alone = sample(logits[row : row + 1], columns_of(params[row : row + 1], keys[row : row + 1]), tile=SMALL).tokens
        assert int(alone) == int(whole[row])


def test_several_draw_from_one_row() -> None:
    params, rows = some(GRID, 12, seed=6), torch.tensor([0, 2, 2, 1, 0, 2, 2, 2, 1, 0, 0, 1])
    logits, columns = logits_of("ties", 3, 150), columns_of(params, keys_for(12))
    found = sample(logits, columns, rows, tile=SMALL)
    assert torch.equal(found.tokens, sample(logits[rows], columns, tile=SMALL).tokens)
    assert torch.equal(found.tokens, pytorch.sample(logits, columns, rows).tokens)
    assert found.bad is not None
    assert len(found.bad) == 12


def test_strided_logits() -> None:
    params = some(GRID, 6, seed=5)
    wide = torch.full((6, 700), torch.nan)
    logits = logits_of("normal", 6, 300)
    for view in (wide[:, 100:400], wide[:, ::2][:, :300], wide[:, 50:650:2]):
        view.copy_(logits)
        assert draw_view(view, params) == expected(logits, params)
        view.fill_(torch.nan)


def draw_view(view: Tensor, params: list[Params]) -> list[int]:
    tokens: list[int] = sample(view, columns_of(params, keys_for(len(params))), tile=SMALL).tokens.tolist()
    return tokens


@pytest.mark.parametrize(("params", "draws"), [((0.7, -1, 1.0, 0.0), 120), ((1.2, 5, 0.85, 0.05), 40)], ids=str)
def test_draws_follow_the_filtered_distribution(params: Params, draws: int) -> None:
    vocab = 12
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)).mul_(1.5)
    logits[4] = -torch.inf
    logits[9] = logits[3]
    exact = filtered_distribution(logits.numpy(), *params)
    tokens = draw(logits.expand(draws, vocab), [params] * draws, seed=11, tile=SamplingTile(16, 16, 8, 16, 1))
    observed = np.bincount(tokens.numpy(), minlength=vocab)
    assert not observed[exact == 0].any()
    cells = exact * draws >= 5
    rest = ~cells & (exact > 0)
    wanted = np.append(exact[cells], exact[rest].sum()) * draws
    counted = np.append(observed[cells], observed[rest].sum())
    wanted, counted = wanted[wanted > 0], counted[wanted > 0]
    free = len(wanted) - 1
    assert ((counted - wanted) ** 2 / wanted).sum() <= free + 4.5 * np.sqrt(2 * max(free, 1))


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
    result = sample(poisoned, columns_of(params, keys_for(7)), tile=SMALL)
    assert result.bad is not None
    assert result.bad.tolist() == [False, True, False, False, True, True, True]
    assert torch.equal(result.tokens[[0, 2, 3]], clean[[0, 2, 3]])
    assert ((result.tokens >= 0) & (result.tokens < 200)).all()
