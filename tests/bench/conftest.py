"""Fixtures of the tests of `batchgen bench`."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.bench.shapes import build_model
from tests.bench.fakes import TEXT


@pytest.fixture
def fast_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the machine's rates briefly and on small matrices."""
    monkeypatch.setattr("batchgen.bench.floors._SIZES", {"decode": (4, 64, 64), "prompt": (8, 64, 64)})
    monkeypatch.setattr("batchgen.bench.floors._SECONDS", 0.0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of `TEXT`."""
    path = tmp_path_factory.mktemp("bench-model")
    build_model(TEXT, path)
    return path
