"""Features of images in a work folder: found again by a later run, never damaged, and no reason to end a job."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import numpy as np
import pytest

from batchgen.data import feature_files
from batchgen.data.feature_files import FeatureFiles
from tests.faults.layer import Fail, Layer, ShortWrite, in_place

Floats = np.ndarray[Any, np.dtype[np.float32]]


def names(numbers: Iterable[int]) -> dict[int, bytes]:
    return {number: bytes([number]) * 32 for number in numbers}


def features(number: int) -> Floats:
    """Those of odd numbers are numbers of bfloat16, too."""
    values = np.random.default_rng(number).standard_normal((number + 1, 8)).astype(np.float32)
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32) if number % 2 else values


def opened(folder: Path, numbers: Iterable[int] = range(10), notes: list[str] | None = None) -> FeatureFiles:
    return FeatureFiles(folder / "features", names(numbers), (notes if notes is not None else []).append)


def write(folder: Path, numbers: Iterable[int] = range(10)) -> None:
    files = opened(folder)
    for number in numbers:
        files.add(number, features(number))
    files.close()


def found(files: FeatureFiles) -> set[int]:
    """The numbers that are kept; each must be what was written."""
    whole = set()
    for number in range(10):
        if number in files and (values := files.read(number)) is not None:
            np.testing.assert_array_equal(values, features(number))
            whole.add(number)
    return whole


class Held(Layer):
    """Writes wait until they may go on."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go = Event()

    def before(self, name: str, path: Path, size: int | None = None) -> int | None:
        if name == "write":
            assert self.go.wait(20)
        return super().before(name, path, size)


def test_a_later_run_finds_what_it_needs_and_removes_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_files, "FILE_BYTES", 400)
    write(tmp_path)
    count = len(list((tmp_path / "features").iterdir()))
    assert count > 3
    assert found(opened(tmp_path)) == set(range(10))
    later = opened(tmp_path, [8, 9])
    assert len(list((tmp_path / "features").iterdir())) < count
    assert found(later) == {8, 9}
    later.remove(8)
    later.remove(9)
    assert found(later) == set()
    assert list((tmp_path / "features").iterdir()) == []


def test_features_by_another_name_are_not_found(tmp_path: Path) -> None:
    write(tmp_path)
    other = FeatureFiles(tmp_path / "features", {n: bytes([n + 100]) * 32 for n in range(10)}, [].append)
    assert found(other) == set()


def test_whatever_changes_in_a_file_no_damaged_features_are_found(tmp_path: Path) -> None:
    write(tmp_path)
    (file,) = (tmp_path / "features").iterdir()
    content, rng = file.read_bytes(), Random(5)
    for _ in range(300):
        changed = bytearray(content)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        file.write_bytes(changed)
        assert found(opened(tmp_path)) != set(range(10))
        file.write_bytes(content[: rng.randrange(len(content))])
        kept = found(opened(tmp_path))
        assert kept == set(range(len(kept))), "what was written first"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_ends_the_keeping_alone(tmp_path: Path, code: int) -> None:
    for number in range(0, 40, 3):
        folder, notes = tmp_path / str(number), list[str]()
        folder.mkdir()
        with in_place(Fail(folder, number, code, from_then_on=True)):
            files = opened(folder, notes=notes)
            for each in range(10):
                files.add(each, features(each))
            files.close()
            found(files)
            files.remove(0)
        assert len(notes) <= 1
        assert all("a run that continues this job encodes them again" in note for note in notes)
        found(opened(folder))


def test_short_writes_are_continued(tmp_path: Path) -> None:
    with in_place(ShortWrite(tmp_path, 0)):
        write(tmp_path)
    assert found(opened(tmp_path)) == set(range(10))


def test_a_slow_disk_does_not_hold_up_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_files, "WAITING_BYTES", 600)
    layer = Held(tmp_path)
    with in_place(layer):
        files = opened(tmp_path)
        for number in range(10):
            files.add(number, features(number))
        files.remove(1)
        layer.go.set()
        files.close()
    assert found(files) == found(opened(tmp_path)) - {1}
    assert {0, 2} <= found(files) <= set(range(2, 9)) | {0}


def test_little_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_files, "MOST_BYTES", 1000)
    write(tmp_path)
    assert 2 <= len(found(opened(tmp_path))) < 10
    monkeypatch.setattr(feature_files, "LEFT_BYTES", 1 << 62)
    notes: list[str] = []
    files = opened(tmp_path / "full", notes=notes)
    files.add(0, features(0))
    files.close()
    assert 0 not in files
    assert "the disk is almost full" in notes[0]


def test_links_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path)
    (file,) = (tmp_path / "features").iterdir()
    content = file.read_bytes()
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    files = opened(tmp_path)
    assert found(files) == set()
    files.add(3, features(3))
    files.close()
    assert found(files) == {3}
    assert (tmp_path / "elsewhere").read_bytes() == content
