"""Functions of `work_items` against loops. The tests of each backend's list check what the items cover."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.kernels.attention.work_items import Items, numbered, spans, token_positions
from tests.kernels.oracle import visible_slots
from tests.kernels.steps import any_batch

counts_of = st.lists(st.integers(0, 5), max_size=9)


@given(counts_of)
def test_members_are_numbered_within_their_sets(counts: list[int]) -> None:
    of, number = numbered(np.array(counts, np.int64))
    assert of.tolist() == [index for index, count in enumerate(counts) for _ in range(count)]
    assert number.tolist() == [member for count in counts for member in range(count)]


@given(counts_of, st.integers(0, 100))
def test_spans_are_concatenated(counts: list[int], seed: int) -> None:
    begin = np.random.default_rng(seed).integers(0, 50, len(counts))
    found = spans(begin, np.array(counts, np.int64))
    assert found.tolist() == [at + i for at, count in zip(begin.tolist(), counts, strict=True) for i in range(count)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20), st.integers(0, 2)), max_size=4),
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 2)), max_size=4),
    st.integers(0, 3),
)
def test_positions_of_tokens(chunks: list[tuple[int, int, int]], rows: list[tuple[int, int]], beyond: int) -> None:
    batch = any_batch(chunks, rows, 4, seed=1)
    expected = [position for position, _ in visible_slots(batch, 4)]
    assert token_positions(batch, len(expected) + beyond).tolist() == expected + [0] * beyond


def test_columns_are_views_of_the_items() -> None:
    items = Items.of(3, np.arange(3), 1, 7, 0, 0, np.array([5, 6, 9]))
    some = Items.join([items, items.take(np.array([2, 0]))])
    assert len(some) == 5
    some.end[:2] = 1
    assert some.columns[5].tolist() == [1, 1, 9, 9, 5]
    assert some.columns[:5].T.tolist() == [[at, 1, 7, 0, 0] for at in (0, 1, 2, 2, 0)]
    assert len(Items.join([])) == 0
