"""`--stop-on-repeat`, against a brute-force check."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.sequence import is_repeating


def brute_force(ids: Sequence[int], span: int) -> bool:
    """Whether repeating some block of at most `span // 4` ids gives the last `span` ids."""
    tail = list(ids[-span:])
    if len(tail) < span:
        return False
    return any(tail == (tail[:size] * span)[:span] for size in range(1, span // 4 + 1))


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), min_size=1, max_size=6), st.data())
def test_same_as_brute_force(head: list[int], block: list[int], data: st.DataObject) -> None:
    ids = head + (block * 20)[: data.draw(st.integers(0, 60))]
    span = data.draw(st.integers(4, 40))
    for length in range(len(ids) + 1):
        assert is_repeating(ids[:length], span) == brute_force(ids[:length], span)


def test_a_block_must_occur_four_times() -> None:
    assert is_repeating([9, 1, 2, 1, 2, 1, 2, 1, 2], 8)
    assert not is_repeating([9, 1, 2, 3, 1, 2, 3, 1, 2], 8), "a block of three is more than a quarter of eight"
    assert not is_repeating([1, 2, 1, 2, 1, 2, 1], 8), "seven tokens are not eight"
    assert is_repeating([5, 5, 5, 5], 4)
    assert is_repeating([3, 1, 2, 1, 2, 1, 2, 1, 2, 1], 9), "the last block may be incomplete"
