"""The order of rows: `check` predicts the counts of `run`, and the order does not change results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.e2e.rows import write_lines
from tests.e2e.runner import run

LENGTHS = np.random.default_rng(0).integers(2, 25, 48).tolist()
ROWS = [
    {"id": str(i), "input_ids": [5 + i % 40, 7 + i, 9], "temperature": 0, "max_new_tokens": n, "ignore_eos": True}
    for i, n in enumerate(LENGTHS)
]


def test_predicted_steps_equal_counted_steps(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ROWS)
    options = [source, "--model", model, "--dtype", "float32", "--max-num-seqs", "8"]
    checked = json.loads(run(["check", *options, "--json"], tmp_path).stdout)
    counted = run(["run", *options, "--report", "-"], tmp_path).report["engine"]
    for name in ("steps", "tail_steps", "occupancy", "tail_efficiency"):
        assert abs(checked[f"estimated_{name}"] - counted[name]) < 1e-4, name
    assert counted["slots"] == 8
    assert counted["occupancy"] > 0.9
