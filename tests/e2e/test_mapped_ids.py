"""Token ids stay on disk: `run` and `check` plan from a memory-mapped file."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import batchgen.engine.engine as engine
import batchgen.job.check as check
from batchgen.cli.app import run_command
from tests.e2e.rows import write_lines

ROWS = [{"text": f"Sort in ascending order: {i}, 2, 1", "max_new_tokens": 1} for i in range(40)]


def backing(array: np.ndarray) -> Any:
    """The object that owns an array's memory."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner.obj if isinstance(owner, memoryview) else owner


@pytest.mark.parametrize(("module", "command"), [(engine, "run"), (check, "check")])
def test_ids_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, command: str) -> None:
    source = write_lines(tmp_path / "rows.jsonl", ROWS)
    plan, calls = module.plan_workload, []

    def watched(table: Any, *arguments: Any, **options: Any) -> Any:
        calls.append((type(backing(table.tokens)), len(table.tokens)))
        return plan(table, *arguments, **options)

    monkeypatch.setattr(module, "plan_workload", watched)
    output = ["-o", str(tmp_path / "out.parquet"), "--device", "cpu"] if command == "run" else ["--device", "cpu"]
    assert run_command([command, str(source), *output]) == 0
    [(owner, ids)] = calls
    assert owner is mmap.mmap
    assert ids > 5 * len(ROWS)
