"""Boundaries of a row by rank and by mass, against a full sort."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.gpu.launch import launch
from batchgen.kernels.gpu.top_k_threshold import (
    boundary_in_row,
    boundary_of_rank,
    lane_maxima,
    load_logits,
    ordered,
    value_of,
)

KINDS = ["normal", "ties", "bfloat16", "masked", "equal", "peaked", "zeros", "sorted", "clustered"]


def logits_of(kind: str, rows: int, vocab: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(vocab + 1000 * seed)
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
    elif kind == "zeros":
        logits = torch.where(logits > 0, 0.0, -0.0)
    elif kind == "sorted":
        logits = logits.sort(descending=True).values
    elif kind == "clustered":
        logits[:, ::64] += 40  # one lane has all large ones
    return logits


@triton.jit
def _first(p_logits, stride, vocab, k, p_few, p_cut, p_largest, BLOCK: tl.constexpr, CAPACITY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + row * stride
    b_largest, _, _ = lane_maxima(p_row, 1, vocab, BLOCK)
    value, last, count = boundary_of_rank(p_row, 1, vocab, k, b_largest, p_few + row * CAPACITY, BLOCK, CAPACITY)
    tl.store(p_largest + row, tl.max(b_largest, axis=0))
    tl.store(p_cut + row * 3, value.to(tl.float64))
    tl.store(p_cut + row * 3 + 1, last.to(tl.float64))
    tl.store(p_cut + row * 3 + 2, count.to(tl.float64))


def first_of(logits: Tensor, k: int, block: int, capacity: int) -> tuple[list[list[int]], Tensor]:
    """The first k ids of each row by its boundary, rising, and its largest logit; checks the collected ids."""
    rows, vocab = logits.shape
    few = torch.full((rows, capacity), -7, dtype=torch.int32)
    cuts = torch.full((rows, 3), torch.nan, dtype=torch.float64)
    largest = torch.full((rows,), torch.nan)
    launch(_first, (rows,), logits, logits.stride(0), vocab, k, few, cuts, largest, BLOCK=block, CAPACITY=capacity)
    found = []
    for row, (value, last, count), written in zip(logits.double(), cuts.tolist(), few.tolist(), strict=True):
        kept = (row > value) | ((row == value) & (torch.arange(vocab) <= last))
        found.append(torch.arange(vocab)[kept].tolist())
        if count:
            assert written[: int(count)] == sorted(set(written[: int(count)]))
            assert set(found[-1]) <= set(written[: int(count)])
        assert set(written[int(count) :]) == {-7} or not count
    return found, largest


def sorted_first(logits: Tensor, k: int) -> list[list[int]]:
    rows = logits.float().numpy()
    return [sorted(np.lexsort((np.arange(rows.shape[1]), -row))[:k].tolist()) for row in rows]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("vocab", "k", "block", "capacity"),
    [
        (1, 1, 64, 32),
        (63, 1, 64, 32),
        (63, 5, 64, 32),
        (200, 20, 64, 64),
        (1000, 7, 64, 32),
        (999, 30, 64, 64),
        (300, 128, 64, 128),
    ],
)
def test_first_ids_are_those_of_a_stable_sort(kind: str, vocab: int, k: int, block: int, capacity: int) -> None:
    logits = logits_of(kind, 2, vocab)
    before = logits.clone()
    ids, largest = first_of(logits, k, block, capacity)
    assert ids == sorted_first(logits, k)
    assert torch.equal(largest, logits.amax(-1))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    logits = logits_of("normal", 3, 500).to(dtype)
    assert first_of(logits, 25, 128, 64)[0] == sorted_first(logits, 25)


def test_all_tokens() -> None:
    logits = logits_of("ties", 2, 60)
    assert first_of(logits, 60, 32, 64)[0] == [list(range(60))] * 2


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from([-torch.inf, -2.0, -0.0, 0.0, 0.5, 1e-40, 3e38, -3e38]), min_size=1, max_size=40),
    st.integers(1, 40),
)
def test_random_rows(values: list[float], k: int) -> None:
    logits = torch.tensor([values])
    k = min(k, len(values))
    assert first_of(logits, k, 16, 64)[0] == sorted_first(logits, k)


@triton.jit
def _keys(p_values, p_keys, p_back, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    values = load_logits(p_values, 1, offsets, offsets < BLOCK)
    tl.store(p_keys + offsets, ordered(values))
    tl.store(p_back + offsets, value_of(ordered(values)))


def test_keys_have_the_order_of_their_values() -> None:
    ends = [torch.inf, 3.4028235e38, 1.0, 1e-45, 0.0, -1e-45, -1.0, -3.4028235e38, -torch.inf]
    values = torch.tensor([*ends, *torch.randn(55, generator=torch.Generator().manual_seed(0)).tolist()])
    keys, back = torch.empty(64, dtype=torch.int32), torch.empty(64)
    launch(_keys, (1,), values, keys, back, BLOCK=64)
    assert torch.equal(back, values)
    assert torch.equal(keys.argsort(stable=True), values.argsort(stable=True))
    minus = torch.full((64,), -0.0)
    launch(_keys, (1,), minus, keys, back, BLOCK=64)
    assert not keys.any()


@triton.jit
def _mass(p_logits, vocab, limit, p_value, p_last, BLOCK: tl.constexpr):
    largest = tl.max(lane_maxima(p_logits, 1, vocab, BLOCK)[0], axis=0)
    target = limit + tl.full([], 0.0, tl.float64)
    value, last = boundary_in_row(p_logits, 1, vocab, target, largest, 1.0, float("-inf"), vocab, True, BLOCK)
    tl.store(p_value, value)
    tl.store(p_last, last)


@pytest.mark.parametrize("kind", ["normal", "ties", "masked", "equal"])
@pytest.mark.parametrize("share", [0.999, 0.7, 1e-9])
def test_mass_over_a_row(kind: str, share: float) -> None:
    logits = logits_of(kind, 1, 150)
    row = logits[0].numpy()
    order = np.lexsort((np.arange(150), -row))
    q = np.exp(row[order] - row.max()).astype(np.float64)
    limit = share * q.sum()
    kept = order[(np.cumsum(q) - q < limit) & (q > 0)]
    value, last = torch.empty(1), torch.empty(1, dtype=torch.int32)
    launch(_mass, (1,), logits, 150, limit, value, last, BLOCK=64)
    ids = torch.arange(150)
    got = (logits[0] > value) | ((logits[0] == value) & (ids <= last) & (logits[0] > -torch.inf))
    assert ids[got].tolist() == sorted(kept.tolist())
