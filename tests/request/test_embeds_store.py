"""`EmbedsStore` compared with a list of arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.errors import OutputError
from batchgen.request.table.embeds_store import EmbedsStore
from tests.cases import examples


@examples(50)
@given(lengths=st.lists(st.integers(1, 7), max_size=20), repeats=st.lists(st.integers(0, 19)), seed=st.integers(0, 99))
def test_added_embeddings_are_read_back(lengths: list[int], repeats: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=(n, 5)).astype(np.float32) for n in lengths]
    arrays += [arrays[i].copy() for i in repeats if i < len(lengths)]
    store = EmbedsStore(5)
    first = [store.add(array) for array in arrays]
    assert len(store) == sum(lengths), "equal arrays are stored once"
    for array, at in zip(arrays, first, strict=True):
        for start in range(len(array)):
            np.testing.assert_array_equal(store.rows(at + start, at + len(array)), array[start:])
    for i, a in enumerate(arrays):
        for j, b in enumerate(arrays):
            assert (first[i] == first[j]) == np.array_equal(a, b)


def test_file_is_unnamed_and_prefixes_are_stored_separately(tmp_path: Path) -> None:
    store = EmbedsStore(3, tmp_path)
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert [store.add(whole), store.add(whole[:2]), store.add(whole[::2]), store.add(whole)] == [0, 4, 6, 0]
    assert list(tmp_path.iterdir()) == []
    np.testing.assert_array_equal(store.rows(6, 8), whole[::2])


def test_folder_that_cannot_be_written_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="embeddings"):
        EmbedsStore(3, tmp_path / "none").add(np.zeros((1, 3), np.float32))
