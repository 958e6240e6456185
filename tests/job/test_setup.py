"""Waiting for the digests of the weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchgen.errors import Interrupted
from batchgen.job.preflight import wait_for_hashes
from batchgen.job.signals import StopRequest
from batchgen.models.checkpoint.file_hashes import FileHashes, FileStamp


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[FileHashes]:
    """Digests of a file that cannot be read yet, as on a slow disk: a pipe without a writer."""
    os.mkfifo(tmp_path / "weights")
    hashes = FileHashes({tmp_path / "weights": FileStamp(0, 0, 3 << 30, 0, 0)}, [tmp_path / "weights"])
    yield hashes
    (tmp_path / "weights").write_bytes(b"")
    assert hashes.done.exception(timeout=20) is not None


def test_a_long_wait_is_explained_and_can_be_stopped(stuck: FileHashes) -> None:
    stop, notes = StopRequest(), list[str]()

    def note(line: str) -> None:
        notes.append(line)
        stop.request("SIGUSR1", 75)

    with pytest.raises(Interrupted, match="stopped by SIGUSR1 at the start") as caught:
        wait_for_hashes(stuck, note, stop)
    assert caught.value.exit_status == 75
    assert notes == ["hashing 3.0 GiB of weights, to tell them from others when the job is run again"]


def test_a_short_wait_says_nothing() -> None:
    wait_for_hashes(FileHashes({}, []), pytest.fail)
