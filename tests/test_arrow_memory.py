"""Where pyarrow takes its memory from is settled where a run imports it, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.arrow_memory import system_memory

POOL = "ARROW_DEFAULT_MEMORY_POOL"
RUN = """
import os, sys
from batchgen.cli.app import app
try:
    app(["run", "one.txt", "--max-new-tokens", "1"])
except SystemExit as end:
    assert not end.code, end.code
import pyarrow
print(pyarrow.default_memory_pool().backend_name, os.environ.get("ARROW_DEFAULT_MEMORY_POOL"))
"""


def test_only_within(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POOL, raising=False)
    with system_memory():
        assert os.environ[POOL] == "system"
    assert POOL not in os.environ


def test_a_choice_of_the_users_own_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POOL, "mimalloc")
    with system_memory():
        assert os.environ[POOL] == "mimalloc"
    assert os.environ[POOL] == "mimalloc"


def test_a_run_takes_the_systems(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("One\n")
    environment = {name: value for name, value in os.environ.items() if name != POOL}
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "system None\n"
