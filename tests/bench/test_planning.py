"""`batchgen bench plan`: counts against brute force, and imports."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from batchgen.bench.jobs.planning import PLAN_SHAPES, PlanSize, draw_prompts
from batchgen.cli.app import run_command
from batchgen.errors import UsageError
from tests.plan.trie import Trie, count_pages


def test_each_shape_has_a_line_with_correct_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags of the command override those of a file."""
    (tmp_path / "bench.toml").write_text('workloads = ["plan"]\nplan_size = "9x9"')
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run_command(["bench", "--config", str(tmp_path / "bench.toml"), "--plan-size", "60x33"]) == 0
    for shape, line in zip(PLAN_SHAPES, capsys.readouterr().out.splitlines(), strict=True):
        found = json.loads(line)
        prompts = np.concatenate(list(draw_prompts(shape, PlanSize(60, 33)))).reshape(60, 33).tolist()
        assert (found["workload"], found["shape"], found["rows"], found["tokens"]) == ("plan", shape, 60, 60 * 33)
        assert found["distinct_tokens"] == Trie(prompts).nodes
        assert found["page_waste"] == pytest.approx(count_pages(prompts, [1] * 60, [64] * 60, 16).waste, abs=1e-6)
        assert found["ids_bytes"] == 60 * 33 * 4
        assert set(found["phases"]) == {"sort", "tree", "dedup", "counts", "scheduler"}
    assert [path.name for path in tmp_path.iterdir()] == ["bench.toml"]


def test_ids_do_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in PLAN_SHAPES:
        whole = np.concatenate(list(draw_prompts(shape, PlanSize(50, 21))))
        with monkeypatch.context() as patch:
            patch.setattr("batchgen.bench.jobs.planning._BLOCK", 21 * 7)
            parts = list(draw_prompts(shape, PlanSize(50, 21)))
        assert len(parts) == 8
        assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("text", ["", "10", "10x", "0x5", "10x5x2", "-1x5"])
def test_invalid_sizes_are_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="--plan-size must be ROWSxTOKENS"):
        PlanSize.parse(text)


def test_workloads_without_engines_import_no_torch() -> None:
    """The import takes seconds, and each shape is planned in a new process."""
    modules = ", ".join(f"batchgen.bench.jobs.{name}" for name in ("planning", "commands"))
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
