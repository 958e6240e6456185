"""Cache of measurements on this machine: stored values are found again, damaged files are ignored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from batchgen.kernels import layouts as module
from batchgen.kernels.layouts import load_timings, save_timings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a fake library."""
    monkeypatch.setattr(module, "loaded", lambda: True)
    monkeypatch.setattr(module, "library_file", lambda: tmp_path / "batchgen-1234.so")
    return tmp_path


def test_stored_measurements_are_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_timings("speed", ["one", "two"]) is None
    save_timings("speed", {"two": 0.25, "one": 1 / 3})
    assert [path.name for path in folder.iterdir()] == [f"batchgen-1234-speed-torch-{torch.__version__}.json"]
    found = load_timings("speed", ["one", "two"])
    assert found == {"one": 1 / 3, "two": 0.25}
    assert list(found) == ["one", "two"]  # the order is the caller's
    save_timings("speed", {"one": 2.0, "two": 3.0})
    assert load_timings("speed", ["one", "two"]) == {"one": 2.0, "two": 3.0}

    assert load_timings("size", ["one", "two"]) is None
    assert load_timings("speed", ["one"]) is None
    assert load_timings("speed", ["one", "two", "three"]) is None
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert load_timings("speed", ["one", "two"]) is None


@pytest.mark.parametrize(
    "content",
    [b"", b'{"one": 1.0', b"\xff\xfe", b"[1.0]", b"1.0", b"null"]
    + [json.dumps({"one": value}).encode() for value in (0.0, -1.0, float("nan"), float("inf"), 1, True, "1", None)],
)
def test_damaged_files_are_ignored(folder: Path, content: bytes) -> None:
    save_timings("speed", {"one": 1.0})
    (file,) = folder.iterdir()
    file.write_bytes(content)
    assert load_timings("speed", ["one"]) is None
    save_timings("speed", {"one": 2.0})
    assert load_timings("speed", ["one"]) == {"one": 2.0}


def test_nothing_is_stored_in_a_folder_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "library_file", lambda: folder / "none" / "batchgen-1234.so")
    save_timings("speed", {"one": 1.0})
    assert load_timings("speed", ["one"]) is None
    assert not list(folder.iterdir())


def test_nothing_is_stored_without_a_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_timings("speed", {"one": 1.0})
    monkeypatch.setattr(module, "loaded", lambda: False)
    monkeypatch.setattr(module, "library_file", lambda: pytest.fail("there is none"))
    save_timings("speed", {"one": 2.0})
    assert load_timings("speed", ["one"]) is None
