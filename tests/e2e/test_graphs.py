"""A run's report of CUDA graphs: the reason why there are none, and the counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.engine.step.cuda_graph import GraphCounts
from batchgen.engine.step.eager import EagerExecutor
from tests.e2e.rows import write_lines
from tests.e2e.runner import run


@pytest.mark.parametrize("reason", ["", "the model's decode steps cannot be captured: it asks the host"])
def test_the_reason_for_no_graphs_is_printed_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """With an executor that reports graphs, as on a GPU."""
    counts = GraphCounts(captures=1, replays=2, padded=3, first=4).by_key()
    monkeypatch.setattr(EagerExecutor, "counts", lambda _: counts)
    monkeypatch.setattr(EagerExecutor, "note", lambda _: f"no CUDA graphs: {reason}" if reason else None)
    source = write_lines(tmp_path / "in.jsonl", [{"input_ids": [5, 6], "max_new_tokens": 2}])
    words = ["run", source, "--model", model, "--dtype", "float32", "--progress", "plain", "--report", "-"]
    done = run(words, tmp_path)
    assert done.stderr.count(f"no CUDA graphs: {reason}") == bool(reason)
    assert done.report["engine"].items() >= counts.items()
