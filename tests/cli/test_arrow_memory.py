"""`arrow_system_memory` sets the allocator while a run imports pyarrow, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.library_settings import arrow_system_memory

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


def test_variable_is_set_only_inside_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POOL, raising=False)
    with arrow_system_memory():
        assert os.environ[POOL] == "system"
    assert POOL not in os.environ


def test_user_setting_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POOL, "mimalloc")
    with arrow_system_memory():
        assert os.environ[POOL] == "mimalloc"
    assert os.environ[POOL] == "mimalloc"


def test_run_uses_the_system_allocator(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("One\n")
    environment = {name: value for name, value in os.environ.items() if name != POOL}
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "system None\n"
