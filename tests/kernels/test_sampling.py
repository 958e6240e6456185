"""Plain sampling and filtered scores against the row-by-row reference, and that against counts of many draws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels import top
from batchgen.kernels.filtering import filtered_scores
from batchgen.kernels.noise import row_keys
from batchgen.kernels.sampling import SamplingColumns, nan_rows, sample
from tests.cases import examples
from tests.chi_square import excess
from tests.kernels.logit_rows import KINDS, logits_of
from tests.kernels.references import filtered_distribution, sample_reference

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


def scores_of(logits: Tensor, params: list[Params], drawn: Tensor) -> Tensor:
    temperature, top_k, top_p, min_p = (torch.tensor(values) for values in zip(*params, strict=True))
    return filtered_scores(logits, temperature, top_k, top_p.float(), min_p.float(), drawn)


GRID: list[Params] = [
    *itertools.product(
        [0.0, 1e-5, 0.3, 1.0, 4.0],
        [-1, 0, 1, 2, 5, 7, 8, 33, 40, 500, 5000, 1 << 30],
        [1.0, 0.95, 0.5, 1e-9],
        [0.0, 0.1, 1.0],
    )
]


@pytest.mark.field("temperature", "top_k", "top_p", "min_p", "seed")
@pytest.mark.parametrize(
    ("kind", "vocab"), [*itertools.product(KINDS, (63, 8192)), ("equal", 1), ("ties", 2), ("normal", 1000)]
)
def test_every_mix_of_parameters_equals_the_reference(kind: str, vocab: int) -> None:
    params = GRID if vocab < 2000 else GRID[::7]
    logits = logits_of(kind, len(params), vocab)
    assert draw(logits, params).tolist() == expected(logits, params)


@examples(150)
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


@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_a_row_does_not_depend_on_the_others(kind: str) -> None:
    logits, keys = logits_of(kind, len(GRID), 300), keys_for(len(GRID))
    whole = sample(logits, columns_of(GRID, keys)).tokens
    scores = scores_of(logits, GRID, whole)
    order = torch.randperm(len(GRID), generator=torch.Generator().manual_seed(0))
    shuffled = sample(logits[order], columns_of([GRID[i] for i in order], keys[order])).tokens
    assert torch.equal(shuffled, whole[order])
    for row in range(0, len(GRID), 7):
        one, params = logits[row : row + 1], GRID[row : row + 1]
        assert int(sample(one, columns_of(params, keys[row : row + 1])).tokens) == int(whole[row])
        assert torch.equal(scores_of(one, params, whole[row : row + 1])[0], scores[row])


@pytest.mark.parametrize(
    "params",
    [(1.0, -1, 1.0, 0.0), (1.5, -1, 0.8, 0.0), (0.9, 20, 0.85, 0.0), (1.2, -1, 0.9, 0.05), (0.8, 25, 0.9, 0.1)],
    ids=str,
)
def test_twenty_thousand_draws_follow_the_filtered_distribution(params: Params) -> None:
    draws, vocab = 20_000, 50
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)).mul_(1.5)
    logits[[4, 17]] = -torch.inf
    logits[9] = logits[30]
    exact = filtered_distribution(logits.numpy(), *params)
    tokens = draw(logits.expand(draws, vocab), [params] * draws, seed=11)
    observed = np.bincount(tokens.numpy(), minlength=vocab)
    assert not observed[exact == 0].any()
    assert excess(observed, exact) <= 4.5


EIGHTHS = [0.5, 0.25, 0.125, 0.125]


@pytest.mark.parametrize(
    ("weights", "filters", "kept"),
    [
        ([1.0] * 100, (7, 1.0, 0.0), 7),  # exactly k of equal ones
        *((EIGHTHS, (-1, p, 0.0), kept) for p, kept in ((0.5, 1), (0.50001, 2), (0.75, 2), (0.8, 3), (0.9, 4))),
        *((EIGHTHS, (-1, 1.0, p), kept) for p, kept in ((0.2, 4), (0.3, 2), (0.51, 1), (1.0, 1))),
    ],
)
def test_tokens_that_survive(weights: list[float], filters: tuple[int, float, float], kept: int) -> None:
    """top_k keeps exactly k, top_p also the token that crosses, and min_p is relative to the largest."""
    logits = torch.tensor(weights).log()
    tokens = draw(logits.expand(3000, -1), [(1.0, *filters)] * 3000)
    assert set(tokens.tolist()) == set(range(kept))


def test_greedy_rows_take_the_first_of_equal_logits_and_need_no_keys() -> None:
    columns = SamplingColumns.of([0.0, 9e-6], [-1, 3], [1.0, 0.5], [0.0, 0.0])
    assert columns.all_greedy
    assert sample(torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]]), columns).tokens.tolist() == [1, 0]
    assert not SamplingColumns.of([0.0, 1e-5], [-1, 3], [1.0, 0.5], [0.0, 0.0]).all_greedy
    assert sample(torch.empty(0, 7), SamplingColumns.of([], [], [], [])).tokens.shape == (0,)


def test_bad_rows_are_reported_and_do_not_affect_others() -> None:
    logits = logits_of("normal", 6, 200)
    params: list[Params] = [(1.0, -1, 0.9, 0.05)] * 3 + [(1.0, 20, 0.9, 0.0)] * 3
    clean = draw(logits, params)
    logits[1, 7] = torch.nan
    logits[4] = -torch.inf
    logits[5, 3] = torch.inf
    assert nan_rows(logits).tolist() == [False, True, False, False, True, True]
    assert not nan_rows(logits_of("masked", 4, 100)).any()
    tokens = sample(logits, columns_of(params, keys_for(6))).tokens
    assert torch.equal(tokens[[0, 2, 3]], clean[[0, 2, 3]])
    assert ((tokens >= 0) & (tokens < 200)).all()


@pytest.mark.parametrize("kind", ["normal", "ties", "masked", "equal"])
@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (63, 5), (1000, 40), (1000, 1000), (8192, 3), (8192, 700)])
def test_largest_is_a_stable_sort(kind: str, vocab: int, k: int) -> None:
    logits = logits_of(kind, 9, vocab)
    values, ids = top.largest(logits, k)
    for row in range(9):
        order = np.lexsort((np.arange(vocab), -logits[row].numpy()))[:k]
        assert ids[row].tolist() == order.tolist()
        assert torch.equal(values[row], logits[row, ids[row]])


# Filtered scores


@pytest.mark.field("temperature", "top_p", "top_k", "min_p")
@pytest.mark.parametrize(
    ("kind", "vocab"), [("normal", 1), ("ties", 2), ("normal", 63), ("ties", 63), ("masked", 1000)]
)
def test_probabilities_equal_the_reference(kind: str, vocab: int) -> None:
    params = [params for params in GRID if params[0]]
    logits = logits_of(kind, len(params), vocab)
    before = logits.clone()
    drawn = draw(logits, params)
    got = scores_of(logits, params, drawn).softmax(-1).numpy()
    assert torch.equal(logits, before)
    for row, one in enumerate(params):
        exact = filtered_distribution(logits[row].numpy(), *one)
        np.testing.assert_allclose(got[row], exact, atol=2e-6, rtol=0, err_msg=str(one))
        assert got[row][drawn[row]] > 0


def test_a_greedy_row_is_unfiltered_at_temperature_one() -> None:
    logits = logits_of("normal", 2, 50)
    got = scores_of(logits, [(0.0, 3, 0.5, 0.5), (1e-6, -1, 1.0, 0.0)], logits.argmax(-1))
    torch.testing.assert_close(got.log_softmax(-1), logits.log_softmax(-1))


def test_the_sampled_token_survives() -> None:
    got = scores_of(torch.zeros(1, 4), [(1.0, -1, 0.5, 0.0)], torch.tensor([3]))
    assert torch.isfinite(got).tolist() == [[True, True, False, True]]
