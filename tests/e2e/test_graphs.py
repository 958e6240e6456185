"""A run's report of CUDA graphs: the reason why there are none, and the counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.rows import write_lines

ROOT = Path(__file__).parents[2]
PATCHED = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from batchgen.cli.app import app
from batchgen.engine.executors.cuda_graph import GraphCounts
from batchgen.engine.executors.eager import EagerExecutor
reason = sys.argv.pop(1)
EagerExecutor.counts = lambda self: GraphCounts(captures=1, replays=2, padded=3, first=4).by_key()
EagerExecutor.note = lambda self: f"no CUDA graphs: {{reason}}" if reason else None
app()
"""
"""A program that runs `batchgen` with an executor that reports graphs, as on a GPU."""


def test_the_reason_for_no_graphs_is_printed_once(model: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [{"input_ids": [5, 6], "max_new_tokens": 2}])
    reason = "the model's decode steps cannot be captured: it asks the host"
    for refused in ("", reason):
        words = ["run", "in.jsonl", "-o", f"{len(refused)}.parquet", "--model", str(model), "--dtype", "float32"]
        words += ["--progress", "plain", "--report", "report.json"]
        command = [sys.executable, "-c", PATCHED, refused, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count(f"no CUDA graphs: {reason}") == bool(refused)
        counted = json.loads((tmp_path / "report.json").read_text())["engine"]
        names = ("captures", "replays", "padded", "first")
        assert [counted[f"graph_{name}"] for name in names] == [1, 2, 3, 4]
