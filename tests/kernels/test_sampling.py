from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels import sampling, top
from batchgen.kernels.noise import row_keys
from batchgen.kernels.sampling import SamplingColumns, nan_rows, sample
from batchgen.kernels.sampling_reference import filtered_distribution, sample_reference, survivors

CPU = torch.device("cpu")
Params = tuple[float, int, float, float]


def keys_for(rows: int, seed: int = 0) -> Tensor:
    seeds = torch.full((rows,), seed, dtype=torch.int64)
    return row_keys(seeds, torch.zeros(rows, dtype=torch.int64), torch.arange(rows))


def columns_of(params: list[Params], keys: Tensor) -> SamplingColumns:
    return SamplingColumns.of(*zip(*params, strict=True)).with_keys(keys)  # type: ignore[arg-type]


def draw(logits: Tensor, params: list[Params], seed: int = 0) -> Tensor:
    before = logits.clone()
    tokens = sample(logits, columns_of(params, keys_for(len(params), seed))).tokens
    assert torch.equal(logits, before)
    assert tokens.dtype == torch.int64
    return tokens


def expected(logits: Tensor, params: list[Params], seed: int = 0) -> list[int]:
    keys = keys_for(len(params), seed).tolist()
    return [sample_reference(logits[i].numpy(), *p, keys[i]) for i, p in enumerate(params)]


TEMPERATURES = [0.0, 1e-5, 0.3, 1.0, 4.0]
GRID: list[Params] = [
    *itertools.product(
        TEMPERATURES, [-1, 0, 1, 2, 5, 7, 8, 33, 40, 500, 5000, 1 << 30], [1.0, 0.95, 0.5, 1e-9], [0.0, 0.1, 1.0]
    )
]


def logits_of(kind: str, rows: int, vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits = 2 * torch.randn(rows, vocab, generator=generator)
    if kind == "ties":
        logits = logits.round()
    elif kind == "bfloat16":
        logits = logits.bfloat16().float()
    elif kind == "masked":
        logits[torch.rand(rows, vocab, generator=generator) < 0.7] = -torch.inf
        logits[:, vocab // 2] = 0.5
    elif kind == "equal":
        logits.fill_(-3.25)
    elif kind == "peaked":
        logits *= 8
    return logits


@pytest.mark.field("temperature", "top_k", "top_p", "min_p", "seed")
@pytest.mark.parametrize("kind", ["normal", "ties", "bfloat16", "masked", "equal", "peaked"])
@pytest.mark.parametrize("vocab", [1, 2, 63, 1000, 8192])
def test_every_mix_of_parameters_equals_the_reference(kind: str, vocab: int) -> None:
    params = GRID if vocab < 2000 else GRID[::7]
    logits = logits_of(kind, len(params), vocab)
    assert draw(logits, params).tolist() == expected(logits, params)


@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_a_row_draws_the_same_token_alone_and_in_a_batch(kind: str) -> None:
    logits = logits_of(kind, len(GRID), 300)
    keys = keys_for(len(GRID))
    whole = sample(logits, columns_of(GRID, keys)).tokens
    order = torch.randperm(len(GRID), generator=torch.Generator().manual_seed(0))
    shuffled = sample(logits[order], columns_of([GRID[i] for i in order], keys[order])).tokens
    assert torch.equal(shuffled, whole[order])
    for row in range(0, len(GRID), 5):
        alone = sample(logits[row : row + 1], columns_of(GRID[row : row + 1], keys[row : row + 1])).tokens
        assert int(alone) == int(whole[row])


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of("normal", len(GRID), 300)
    whole = draw(logits, GRID)
    monkeypatch.setattr(sampling, "_CHUNK", 700)
    assert torch.equal(draw(logits, GRID), whole)


MIXES: list[Params] = [
    (1.0, -1, 1.0, 0.0),
    (0.7, -1, 1.0, 0.0),
    (1.5, -1, 0.8, 0.0),
    (1.0, -1, 0.3, 0.0),
    (1.0, 10, 1.0, 0.0),
    (1.0, 3, 1.0, 0.0),
    (0.9, 20, 0.85, 0.0),
    (1.0, -1, 1.0, 0.15),
    (1.2, -1, 0.9, 0.05),
    (0.8, 25, 0.9, 0.1),
]


@pytest.mark.parametrize("params", MIXES, ids=str)
def test_twenty_thousand_draws_follow_the_filtered_distribution(params: Params) -> None:
    draws, vocab = 20_000, 50
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)).mul_(1.5)
    logits[[4, 17]] = -torch.inf
    logits[9] = logits[30]
    exact = filtered_distribution(logits.numpy(), *params)
    tokens = draw(logits.expand(draws, vocab), [params] * draws, seed=11)
    observed = np.bincount(tokens.numpy(), minlength=vocab)
    assert not observed[exact == 0].any()
    cells = exact * draws >= 5
    rest = ~cells & (exact > 0)
    wanted = np.append(exact[cells], exact[rest].sum()) * draws
    counted = np.append(observed[cells], observed[rest].sum())
    wanted, counted = wanted[wanted > 0], counted[wanted > 0]
    chi2 = ((counted - wanted) ** 2 / wanted).sum()
    free = len(wanted) - 1
    assert chi2 <= free + 4.5 * np.sqrt(2 * max(free, 1))


def test_top_k_keeps_exactly_k_of_equal_logits() -> None:
    kept, _ = survivors(np.zeros(100, np.float32), 1.0, 7, 1.0, 0.0)
    assert kept.tolist() == list(range(7))
    tokens = draw(torch.zeros(2000, 100), [(1.0, 7, 1.0, 0.0)] * 2000)
    assert set(tokens.tolist()) == set(range(7))


def test_top_p_keeps_the_token_that_crosses() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    for top_p, kept in ((0.5, {0}), (0.50001, {0, 1}), (0.75, {0, 1}), (0.8, {0, 1, 2}), (0.9, {0, 1, 2, 3})):
        tokens = draw(logits.expand(3000, 4), [(1.0, -1, top_p, 0.0)] * 3000)
        assert set(tokens.tolist()) == kept, top_p


def test_min_p_is_relative_to_the_largest() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    for min_p, kept in ((0.2, {0, 1, 2, 3}), (0.3, {0, 1}), (0.51, {0}), (1.0, {0})):
        tokens = draw(logits.expand(3000, 4), [(1.0, -1, 1.0, min_p)] * 3000)
        assert set(tokens.tolist()) == kept, min_p


def test_greedy_takes_the_first_of_equal_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    for vocab in (1, 2, 63, 1000, 8192):
        logits = torch.randint(0, 3, (50, vocab), generator=generator).float()
        first = [int(np.flatnonzero(row == row.max())[0]) for row in logits.numpy()]
        assert draw(logits, [(0.0, 5, 0.5, 0.5)] * 50).tolist() == first


def test_all_greedy_needs_no_keys() -> None:
    columns = SamplingColumns.of([0.0, 9e-6], [-1, 3], [1.0, 0.5], [0.0, 0.0])
    assert columns.all_greedy
    assert sample(torch.tensor([[0.0, 2.0], [3.0, 1.0]]), columns).tokens.tolist() == [1, 0]
    assert not SamplingColumns.of([0.0, 1e-5], [-1, 3], [1.0, 0.5], [0.0, 0.0]).all_greedy


def test_no_rows() -> None:
    columns = SamplingColumns.of([], [], [], [])
    assert sample(torch.empty(0, 7), columns).tokens.shape == (0,)


def test_bad_rows_are_reported_and_do_not_affect_others() -> None:
    logits = logits_of("normal", 6, 200)
    params: list[Params] = [(1.0, -1, 0.9, 0.05)] * 3 + [(1.0, 20, 0.9, 0.0)] * 3
    clean = draw(logits, params)
    poisoned = logits.clone()
    poisoned[1, 7] = torch.nan
    poisoned[4] = -torch.inf
    poisoned[5, 3] = torch.inf
    assert nan_rows(poisoned).tolist() == [False, True, False, False, True, True]
    assert not nan_rows(logits_of("masked", 4, 100)).any()
    tokens = sample(poisoned, columns_of(params, keys_for(6))).tokens
    assert torch.equal(tokens[[0, 2, 3]], clean[[0, 2, 3]])
    assert ((tokens >= 0) & (tokens < 200)).all()


@pytest.mark.parametrize("kind", ["normal", "ties", "bfloat16", "masked", "equal"])
@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (63, 5), (1000, 40), (1000, 1000), (8192, 3), (8192, 700)])
def test_largest_is_a_stable_sort(kind: str, vocab: int, k: int) -> None:
    logits = logits_of(kind, 9, vocab)
    values, ids = top.largest(logits, k)
    for row in range(9):
        order = np.lexsort((np.arange(vocab), -logits[row].numpy()))[:k]
        assert ids[row].tolist() == order.tolist()
        assert torch.equal(values[row], logits[row, ids[row]])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([-torch.inf, -2.0, 0.0, 0.5, 1.0, 1.25, 7.0]), min_size=1, max_size=12),
    st.sampled_from([0.0, 1e-5, 0.5, 1.0, 3.0]),
    st.integers(-1, 14),
    st.sampled_from([1.0, 0.99, 0.5, 0.1]),
    st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    st.integers(0, 1000),
)
def test_small_rows_equal_the_reference(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = torch.tensor([values])
    if nan_rows(logits).any():
        return
    params = [(temperature, top_k, top_p, min_p)]
    assert draw(logits, params, seed).tolist() == expected(logits, params, seed)
