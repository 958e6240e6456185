"""Prefix groups realigned to multiples of a block of positions."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.kernels.cpu.attention_list import aligned
from tests.kernels.oracle import visible_slots
from tests.kernels.steps import Shape, StepBuilder


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=9),
    st.lists(st.integers(1, 9), min_size=3, max_size=3),
    st.sampled_from([1, 4, 5]),
    st.integers(1, 7),
)
def test_every_token_sees_the_same_slots_in_order(
    rows: list[tuple[int, int]], levels: list[int], page_size: int, step: int
) -> None:
    """Rows in zero to three nested groups of `levels` pages."""
    b = StepBuilder(Shape(4, 2, 8, 8, page_size))
    b.chunk(7)
    starts = [sum(levels[:depth]) * page_size for depth in range(4)]
    depths = [depth for _, depth in rows]
    numbers = [b.decode(own_len, own_start=starts[depth]) for own_len, depth in rows]
    for level, pages in enumerate(levels):
        members = [number for number, depth in zip(numbers, depths, strict=True) if depth > level]
        if members:
            b.group(members, starts[level], pages)
    batch = b.build().batch
    got = aligned(batch, page_size, step * page_size)
    for (position, slots), (expected_position, expected) in zip(
        visible_slots(got, page_size), visible_slots(batch, page_size), strict=True
    ):
        assert position == expected_position
        assert torch.equal(slots, expected)
    assert got.decode_own_start is not None
    ends = [group.start + len(group.pages) * page_size for group in got.groups]
    assert all(at % (step * page_size) == 0 for at in [*(g.start for g in got.groups), *ends])
    assert (got.decode_own_start % (step * page_size) == 0).all() or not batch.groups
    assert got.decode_lens is None or got.max_decode_len == got.decode_lens.max()
