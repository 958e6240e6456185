"""Hidden states through the command line: their file next to the results, resuming, and the limit of its size."""

from __future__ import annotations

import json
import shutil
from base64 import b64encode
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import pytest

from batchgen.data.results_file import read_footer
from batchgen.data.states import states_part
from tests.e2e.rows import read, write_lines
from tests.e2e.runner import run
from tests.models.tiny import save_tiny

F32 = ["--dtype", "float32"]


def test_check_estimates_the_size_and_run_refuses_too_much(model: Path, tmp_path: Path) -> None:
    rows = [{"text": f"The quick {i}", "temperature": 0, "max_new_tokens": 20, "ignore_eos": True} for i in range(40)]
    source = write_lines(tmp_path / "in.jsonl", [{**row, "return_hidden_states": True} for row in rows])
    job = [source, "--model", model, *F32]
    report = json.loads(run(["check", *job, "--json"], tmp_path).stdout)
    run(["run", *job, "-o", "out.parquet"], tmp_path)
    table = read(tmp_path / "out.parquet").to_pylist()
    numbers = sum(64 * (row["prompt_tokens"] + row["completion_tokens"] - 1) for row in table)
    assert report["estimated_hidden_states_bytes"] == 4 * numbers
    assert report["estimated_output_bytes"] > 4 * numbers
    size = (tmp_path / "out.hidden.parquet").stat().st_size
    assert 0.7 * size < report["estimated_hidden_states_bytes"] < 1.5 * size

    for command in ("run", "check"):
        refused = run([command, *job, "-o", "small.parquet", "--max-output-bytes", "100KB"], tmp_path, expect=2)
        assert "more than --max-output-bytes" in refused.stderr
        assert "hidden states" in refused.stderr
        assert "pool" in refused.stderr
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("small")], "nothing is left"
    run(["run", *job, "-o", "wide.parquet", "--max-output-bytes", 2 * report["estimated_output_bytes"]], tmp_path)


def test_a_run_that_exceeds_its_output_limit_stops_and_resumes(model: Path, tmp_path: Path) -> None:
    """Carried fields that hardly compress exceed the estimate."""
    rng = Random(1)
    rows = [
        {"text": f"fox {i}", "max_new_tokens": 4, "ballast": b64encode(rng.randbytes(6000)).decode(),
         "return_hidden_states": {"layers": [1], "tokens": "last"}}
        for i in range(60)
    ]  # fmt: skip
    source = write_lines(tmp_path / "in.jsonl", rows)
    job = ["run", source, "--model", model, *F32, "-o", "out.parquet", "--commit-every", "10", "--max-num-seqs", "8"]
    stopped = run([*job, "--max-output-bytes", "300KB"], tmp_path, expect=5)
    assert "would exceed --max-output-bytes" in stopped.stderr
    assert not (tmp_path / "out.parquet").exists()
    assert not (tmp_path / "out.hidden.parquet").exists()
    work = tmp_path / "out.parquet.work"
    parts = [*work.glob("parts/*.parquet")]
    kept = sum(pq.read_metadata(part).num_rows for part in parts)
    assert kept
    assert sum(p.stat().st_size for p in [*parts, *map(states_part, parts)]) <= 300_000
    report = run([*job, "--max-output-bytes", "10MB", "--report", "-"], tmp_path).report
    assert report["rows_resumed"] == kept
    assert report["engine"]["forced_syncs"] == 0 < report["engine"]["in_flight_peak_bytes"] < 1 << 20
    assert len(pq.read_table(tmp_path / "out.hidden.parquet")) == len(rows)


@pytest.mark.field("return_routed_experts")
def test_the_footer_names_the_layers_of_routed_experts(model: Path, tmp_path: Path) -> None:
    moe = tmp_path / "moe"
    shutil.copytree(model, moe)
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    save_tiny("deepseek_v3", moe, vocab_size=vocab, bos_token_id=0, eos_token_id=1)
    rows = [{"text": "fox", "max_new_tokens": n, "ignore_eos": True, "return_routed_experts": True} for n in (0, 3)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    run(["run", source, "--model", moe, *F32, "-o", "out.parquet"], tmp_path)
    footer = read_footer(tmp_path / "out.parquet")
    assert footer is not None
    assert footer["layer_ids"] == [1, 2]
    assert footer["experts_per_token"] == 2
    for row in read(tmp_path / "out.parquet").to_pylist():
        computed = row["prompt_tokens"] + max(0, row["completion_tokens"] - 1)
        assert len(row["routed_experts"]) == computed * 2 * 2
        assert {*row["routed_experts"]} <= {0, 1, 2, 3}
