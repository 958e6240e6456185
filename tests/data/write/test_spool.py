"""Spools return the appended values, interleaved with appends, and remove their files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data.write.spool import BlobSpool, TokenSpool
from batchgen.errors import OutputError


@given(blobs=st.lists(st.none() | st.binary(max_size=50), max_size=30), reads=st.lists(st.integers(0, 29), max_size=30))
def test_a_blob_spool_behaves_as_a_list(
    tmp_path_factory: pytest.TempPathFactory, blobs: list[bytes | None], reads: list[int]
) -> None:
    path = tmp_path_factory.mktemp("spool") / "blobs"
    with BlobSpool(path) as spool:
        for i, blob in enumerate(blobs):
            assert spool.append(blob) == i
            if i < len(reads) and reads[i] <= i:
                assert spool.get(reads[i]) == blobs[reads[i]]
        assert [spool.get(i) for i in range(len(spool))] == blobs
        for index in (-1, len(blobs)):
            with pytest.raises(IndexError):
                spool.get(index)
    assert not path.exists()


@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20), max_size=10))
def test_a_token_spool_behaves_as_a_list(tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]) -> None:
    path = tmp_path_factory.mktemp("spool") / "tokens"
    with TokenSpool(path) as spool:
        flat: list[int] = []
        for prompt in prompts:
            assert spool.append(np.array(prompt, np.int32) if len(prompt) % 2 else prompt) == len(flat)
            flat += prompt
            ids = spool.map()
            assert ids.dtype == np.int32
            assert ids.tolist() == flat
        assert spool.map().tolist() == flat
        assert len(spool) == len(flat)
    assert not path.exists()


def test_a_full_disk_is_an_output_error(tmp_path: Path) -> None:
    path = tmp_path / "full"
    path.symlink_to("/dev/full")
    with BlobSpool(path) as spool, pytest.raises(OutputError, match="Free some space"):
        spool.append(b"x" * (2 << 20))
    assert not path.is_symlink()
