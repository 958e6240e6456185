"""Fixtures of the tests of jobs and of their benchmark."""

from __future__ import annotations

import pytest


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's rates are measured on small matrices and for a moment: seconds before every pass otherwise."""
    monkeypatch.setattr("batchgen.job.bench.rates._SIZES", {"decode": (4, 64, 64), "prompt": (8, 64, 64)})
    monkeypatch.setattr("batchgen.job.bench.rates._SECONDS", 0.0)
