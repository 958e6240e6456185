"""Fixtures of the tests of jobs and of their benchmark."""

from __future__ import annotations

import sys

import pytest

from batchgen.job.bench.engines import peer_tools

sys.modules.setdefault("peer_tools", peer_tools)  # as the worker lends it to the peers' scripts


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's rates are measured on small matrices and for a moment: seconds before every pass otherwise."""
    monkeypatch.setattr("batchgen.job.bench.rates._SIZES", {"decode": (4, 64, 64), "prompt": (8, 64, 64)})
    monkeypatch.setattr("batchgen.job.bench.rates._SECONDS", 0.0)
