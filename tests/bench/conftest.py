"""Fixtures of the tests of `batchgen bench`."""

from __future__ import annotations

import sys

import pytest

from batchgen.bench.engines import peer_tools

sys.modules.setdefault("peer_tools", peer_tools)  # importable as in the worker process


@pytest.fixture
def fast_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the machine's rates briefly and on small matrices."""
    monkeypatch.setattr("batchgen.bench.rates._SIZES", {"decode": (4, 64, 64), "prompt": (8, 64, 64)})
    monkeypatch.setattr("batchgen.bench.rates._SECONDS", 0.0)
