"""Request shapes are encoded for the footer, decoded and merged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data.row_shapes import RowShape, RowShapes
from batchgen.errors import InputError

SHAPES = st.builds(RowShape, st.booleans(), st.booleans(), st.booleans())


def encoded(shapes: list[tuple[int, RowShape]]) -> str:
    found = RowShapes()
    for row, shape in shapes:
        found.add(row, *shape)
    return found.encode()


@given(shapes=st.lists(SHAPES), shards=st.integers(1, 5))
def test_decode_is_the_inverse_of_encode_and_merged_shapes_equal_those_of_one_file(
    shapes: list[RowShape], shards: int
) -> None:
    rows = list(enumerate(shapes))
    assert RowShapes.decode(encoded(rows)) == shapes
    parts = [rows[i::shards] for i in range(shards)][::-1]
    indexes = [np.array([row for row, _ in part], np.int64) for part in parts]
    assert RowShapes.merged([encoded(part) for part in parts], indexes) == encoded(rows)


def test_many_equal_rows_are_small() -> None:
    assert len(encoded([(row, RowShape(True, False)) for row in range(200_000)])) < 4096


@pytest.mark.parametrize("text", ["", "?", "AAAA", "eJxLBAAAYgBi"])
def test_damaged_text_is_an_input_error(text: str) -> None:
    with pytest.raises(InputError, match="row_shapes"):
        RowShapes.decode(text)
