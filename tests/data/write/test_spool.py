"""Spools return the appended values, interleaved with appends, and remove their files."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data.files import FileSystem
from batchgen.data.spool import BlobSpool, TokenSpool
from batchgen.errors import OutputError


@given(blobs=st.lists(st.binary(max_size=50), max_size=30), reads=st.lists(st.integers(0, 29), max_size=30))
def test_a_blob_spool_behaves_as_a_list(
    tmp_path_factory: pytest.TempPathFactory, blobs: list[bytes], reads: list[int]
) -> None:
    path = tmp_path_factory.mktemp("spool") / "blobs"
    with BlobSpool(path) as spool:
        for i, blob in enumerate(blobs):
            assert spool.append(blob) == i
            if i < len(reads) and reads[i] <= i:
                assert spool[reads[i]] == blobs[reads[i]]
        assert [spool[i] for i in range(len(spool))] == blobs
        for index in (-1, len(blobs)):
            with pytest.raises(IndexError):
                spool[index]
    assert not path.exists()


@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20), max_size=10))
def test_a_token_spool_behaves_as_a_list(tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]) -> None:
    path = tmp_path_factory.mktemp("spool") / "tokens"
    with TokenSpool(path) as spool:
        flat: list[int] = []
        for prompt in prompts:
            spool.append(np.array(prompt, np.int32) if len(prompt) % 2 else prompt)
            flat += prompt
            ids = spool.ids()
            assert ids.dtype == np.int32
            assert ids.tolist() == flat
        spool.close(keep=True)
        assert spool.ids().tolist() == flat, "readable after the file is closed"
    with TokenSpool(path, len(flat)) as again:
        again.append([7])
        assert again.ids().tolist() == [*flat, 7]
    assert not path.exists()


def test_a_full_disk_is_an_output_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "full"
    with monkeypatch.context() as full:
        full.setattr(FileSystem, "open", lambda _, opened, flags: io.FileIO("/dev/full", "r+"))
        spool = BlobSpool(path)
    with spool, pytest.raises(OutputError, match="Free some space"):
        spool.append(b"x" * (2 << 20))


def test_a_spool_replaces_a_file_and_leaves_what_a_link_names(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_bytes(b"not a spool")
    (tmp_path / "blobs").symlink_to(kept)
    with BlobSpool(tmp_path / "blobs") as spool:
        spool.append(b"blob")
    assert kept.read_bytes() == b"not a spool"
