"""Penalties, biases and masks in Triton's interpreter, against the twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels import shaping as twin
from batchgen.kernels.gpu import shaping as gpu
from tests.kernels.gpu.closeness import DTYPES
from tests.kernels.gpu.logit_rows import drawn, strided

torch.set_num_threads(1)

KINDS = ["packed", "padded", "transposed"]


def distinct_pairs(rows: int, vocab: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    places = torch.randperm(rows * vocab, generator=torch.Generator().manual_seed(seed))[:count]
    return places // vocab, places % vocab


def columns(rows: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    repetition = torch.rand(rows, generator=generator) + 0.5
    return [repetition, *(4 * torch.rand(rows, generator=generator) - 2 for _ in range(2))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "vocab", "pairs"), [(1, 1, 1), (7, 63, 50), (3, 1000, 129), (5, 40, 0), (4, 64, 256)])
def test_penalties(rows: int, vocab: int, pairs: int, kind: str) -> None:
    logits = strided(drawn(rows, vocab), kind)
    expected = logits.clone()
    at = distinct_pairs(rows, vocab, pairs)
    counts = torch.randint(0, 3, (pairs,), generator=torch.Generator().manual_seed(1)).float()
    gpu.penalise(logits, *at, counts, *columns(rows, pairs))
    twin.penalise(expected, *at, counts, *columns(rows, pairs))
    torch.testing.assert_close(logits, expected, rtol=3e-7, atol=1e-6)


def test_columns_of_a_table_serve() -> None:
    logits, table = drawn(4, 30), torch.stack(columns(4, 0), 1)  # [4, 3]
    expected = logits.clone()
    at = torch.stack(distinct_pairs(4, 30, 20), 1)  # [20, 2]
    counts = torch.arange(40.0)[::2]
    for ours, those in ((gpu, logits), (twin, expected)):
        ours.penalise(those, at[:, 0], at[:, 1], counts, *table.unbind(1))
    torch.testing.assert_close(logits, expected, rtol=3e-7, atol=1e-5)


@pytest.mark.parametrize("factor", [0.3, 1.1, 2.0])
def test_repetition_alone_is_the_twins_to_the_bit(factor: float) -> None:
    logits = drawn(3, 100)
    expected = logits.clone()
    at = distinct_pairs(3, 100, 90)
    rest = [torch.zeros(90), torch.full((3,), factor), torch.zeros(3), torch.zeros(3)]
    gpu.penalise(logits, *at, *rest)
    twin.penalise(expected, *at, *rest)
    assert torch.equal(logits, expected)


# The interpreter's numpy tells of the quotient that is then cut to the largest float.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("factor", [1e-45, 1e-38, 2.0])
def test_no_penalty_makes_a_row_unusable(factor: float) -> None:
    logits = torch.tensor([[3.0, -3.0, 0.0, -torch.inf, 1.0, 3e38]])
    expected = logits.clone()
    rows, ids = torch.zeros(5, dtype=torch.int64), torch.tensor([0, 1, 2, 3, 5])
    rest = [torch.ones(5), torch.full((1,), factor), torch.zeros(1), torch.zeros(1)]
    gpu.penalise(logits, rows, ids, *rest)
    twin.penalise(expected, rows, ids, *rest)
    assert torch.equal(logits, expected)
    assert torch.isfinite(logits).tolist() == [[True, True, True, False, True, True]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pairs", [0, 1, 30, 300])
def test_biases_of_a_pair_named_twice_add_up(pairs: int, kind: str) -> None:
    logits = strided(drawn(3, 17), kind)
    expected = logits.clone()
    generator = torch.Generator().manual_seed(pairs)
    rows, ids = (torch.randint(0, most, (pairs,), generator=generator) for most in (3, 17))
    values = torch.randint(-8, 8, (pairs,), generator=generator) / 4
    gpu.add_bias(logits, rows, ids, values)
    twin.add_bias(expected, rows, ids, values)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "pairs"), [(5, 0), (63, 40), (5000, 200)])
def test_keeping_some(vocab: int, pairs: int, kind: str, dtype: torch.dtype) -> None:
    logits = strided(drawn(4, vocab, dtype), kind)
    expected = logits.clone()
    whole = torch.tensor([3, 0])
    places, ids = distinct_pairs(2, vocab, pairs)
    gpu.keep_only(logits, whole, whole[places], ids)
    twin.keep_only(expected, whole, whole[places], ids)
    assert torch.equal(logits, expected)


def test_a_pair_that_is_kept_twice_stays() -> None:
    logits = drawn(2, 9)
    expected = logits.clone()
    rows, ids = torch.tensor([1, 1, 1]), torch.tensor([4, 4, 0])
    for ours, those in ((gpu, logits), (twin, expected)):
        ours.keep_only(those, torch.tensor([1]), rows, ids)
    assert torch.equal(logits, expected)


def test_no_row_to_keep_some_of() -> None:
    logits, none = drawn(2, 9), torch.empty(0, dtype=torch.int64)
    before = logits.clone()
    gpu.keep_only(logits, none, none, none)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 6, 200])
def test_drew_masked(count: int, dtype: torch.dtype) -> None:
    logits = drawn(max(count, 1), 33, dtype)
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(0, 33, (len(logits),), generator=generator)
    rows = torch.randperm(len(logits), generator=generator)[:count]
    logits[rows[::3]] = -torch.inf
    got = gpu.drew_masked(logits, rows, tokens)
    assert got.dtype == torch.bool
    assert torch.equal(got, twin.drew_masked(logits, rows, tokens))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_penalties(data: st.DataObject) -> None:
    rows, vocab = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 50))
    logits = drawn(rows, vocab, seed=data.draw(st.integers(0, 99)))
    expected = logits.clone()
    at = distinct_pairs(rows, vocab, data.draw(st.integers(0, rows * vocab)), seed=vocab)
    counts = torch.arange(len(at[0])).float() % 5
    signed = st.floats(-2, 2, width=32)
    rest = [torch.tensor([data.draw(s) for _ in range(rows)]) for s in (st.floats(0.0625, 2, width=32), signed, signed)]
    gpu.penalise(logits, *at, counts, *rest)
    twin.penalise(expected, *at, counts, *rest)
    torch.testing.assert_close(logits, expected, rtol=3e-7, atol=2e-6)
