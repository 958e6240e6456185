"""What is kept about this machine: found again, and believed only where it is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from batchgen.kernels.cpu import figures as module
from batchgen.kernels.cpu.figures import keep_figures, kept_figures


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a library is said to stand."""
    monkeypatch.setattr(module, "loaded", lambda: True)
    monkeypatch.setattr(module, "library_file", lambda: tmp_path / "batchgen-1234.so")
    return tmp_path


def test_what_is_kept_is_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept_figures("speed", ["one", "two"]) is None
    keep_figures("speed", {"two": 0.25, "one": 1 / 3})
    assert [path.name for path in folder.iterdir()] == [f"batchgen-1234-speed-torch-{torch.__version__}.json"]
    found = kept_figures("speed", ["one", "two"])
    assert found == {"one": 1 / 3, "two": 0.25}
    assert list(found) == ["one", "two"]  # the order is the caller's
    keep_figures("speed", {"one": 2.0, "two": 3.0})
    assert kept_figures("speed", ["one", "two"]) == {"one": 2.0, "two": 3.0}

    assert kept_figures("size", ["one", "two"]) is None
    assert kept_figures("speed", ["one"]) is None
    assert kept_figures("speed", ["one", "two", "three"]) is None
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert kept_figures("speed", ["one", "two"]) is None


@pytest.mark.parametrize(
    "content",
    [b"", b'{"one": 1.0', b"\xff\xfe", b"[1.0]", b"1.0", b"null"]
    + [json.dumps({"one": value}).encode() for value in (0.0, -1.0, float("nan"), float("inf"), 1, True, "1", None)],
)
def test_what_is_damaged_is_not_believed(folder: Path, content: bytes) -> None:
    keep_figures("speed", {"one": 1.0})
    (file,) = folder.iterdir()
    file.write_bytes(content)
    assert kept_figures("speed", ["one"]) is None
    keep_figures("speed", {"one": 2.0})
    assert kept_figures("speed", ["one"]) == {"one": 2.0}


def test_a_folder_that_cannot_be_written_keeps_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "library_file", lambda: folder / "none" / "batchgen-1234.so")
    keep_figures("speed", {"one": 1.0})
    assert kept_figures("speed", ["one"]) is None
    assert not list(folder.iterdir())


def test_without_a_library_nothing_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_figures("speed", {"one": 1.0})
    monkeypatch.setattr(module, "loaded", lambda: False)
    monkeypatch.setattr(module, "library_file", lambda: pytest.fail("there is none"))
    keep_figures("speed", {"one": 2.0})
    assert kept_figures("speed", ["one"]) is None
