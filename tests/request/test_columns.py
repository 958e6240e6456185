"""Columns keep their values, whatever they are, in few bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.request.table.columns import Column

INT64 = st.integers(-(2**63), 2**63 - 1)
NUMBERS = st.integers(-(2**40), 2**40)
LINES = st.builds(
    lambda first, step, count: [first + step * i for i in range(count)], NUMBERS, NUMBERS, st.integers(0, 40)
)


def column(values: list[int], pack_every: int, typecode: str = "q") -> Column:
    found = Column(typecode)
    for value in values:
        found.append(value)
        if len(found.tail) >= pack_every:
            found.pack()
    return found


@given(st.lists(st.one_of(LINES, st.lists(INT64, max_size=5)), max_size=3), st.integers(1, 50))
def test_a_column_has_the_values_that_were_added(parts: list[list[int]], pack_every: int) -> None:
    values = [value for part in parts for value in part]
    found = column(values, pack_every)
    assert len(found) == len(values)
    assert [found[i] for i in range(len(found))] == values
    with pytest.raises(IndexError):
        found[len(values)]
    assert found.values().dtype == np.int64
    assert found.values().tolist() == found.stored().tolist() == values
    again = Column("q")
    again.append(5)
    again.replace(found.values())
    again.append(-1)
    assert again.values().tolist() == [*values, -1]


@pytest.mark.parametrize(
    ("typecode", "values", "each"),
    [
        ("q", [7] * 1000, 0),
        ("q", [*range(10, 1010)], 0),
        ("q", [*range(0, 1000 << 30, 1 << 30)], 0),
        ("B", [4] * 1000, 0),
        ("i", [1, 2] * 500, 1),
        ("i", [-1] * 999 + [3], 1),
        ("i", [*range(900)] + [0] * 100, 2),
        ("q", [0, 40_000] * 500, 4),
        ("q", [2**40, 0] * 500, 8),
        ("i", [-(2**31), 2**31 - 1] * 500, 4),
    ],
)
def test_a_column_needs_the_bytes_of_its_widest_value_or_none(typecode: str, values: list[int], each: int) -> None:
    found = column(values, 100, typecode)
    assert found.values().tolist() == values
    assert found.values().dtype == np.dtype(typecode)
    assert found.nbytes == each * 1000
