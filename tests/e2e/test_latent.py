"""Jobs with a model that keeps the latent of its attention: the bytes that `check` and the report state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runner import run
from tests.engine.reference import save_with_words

LAYERS, LATENT, ROPE, PAGE = 3, 16, 8, 4


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_planned_and_used_bytes_are_those_of_the_latent_and_the_rotated_key(
    dtype: str, width: int, tmp_path: Path
) -> None:
    """Rows of 13 prompt tokens and 4 of output: four pages each, as the last token's keys are not needed."""
    model = save_with_words("deepseek_v3", tmp_path / "model")
    lines = [{"input_ids": list(range(20 * i, 20 * i + 13)), "ignore_eos": True} for i in range(1, 6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = ["rows.jsonl", "--model", str(model), "--device", "cpu", "--dtype", dtype]
    common += ["--page-size", str(PAGE), "--max-new-tokens", "4"]
    checked = run(["check", *common, "--json"], tmp_path).report
    ran = run(["run", *common, "-o", "out.parquet", "--report", "-"], tmp_path).report
    token = (LATENT + ROPE) * LAYERS * width
    assert checked["model"]["kv_bytes_per_token"] == token
    assert checked["kv_peak_bytes"] == ran["kv_peak_bytes"] == len(lines) * 4 * PAGE * token
