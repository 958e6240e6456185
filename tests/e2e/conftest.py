"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import batchgen
from tests.e2e.model import save_model

# Before anything of ours or torch's starts a thread: several processes at once share the machine's few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny checkpoint."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def engine(model: Path) -> batchgen.Engine:
    """An engine of the tiny checkpoint in float32."""
    return batchgen.Engine(str(model), dtype="float32")
