"""Hidden states through the command line: their file next to the results, resuming, and the limit of its size."""

from __future__ import annotations

import json
import shutil
from base64 import b64encode
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchgen.data.write.durable_files import read_footer
from batchgen.data.write.states import states_part
from tests.e2e.rows import prompts, read, write_lines
from tests.e2e.runner import run
from tests.models.tiny import save_tiny

ROWS = 60
F32 = ["--dtype", "float32"]
OPTIONS = [*F32, "--commit-every", "8", "--commit-seconds", "0.1", "--max-num-seqs", "6", "--include-prompt-ids"]
TOLERANCE = 1e-4


def lines(count: int = ROWS, seed: int = 0) -> list[bytes | dict[str, Any]]:
    """Rows that request states of every kind, rows without states, and some invalid rows."""
    rng = Random(seed)
    found: list[bytes | dict[str, Any]] = []
    for i, text in enumerate(prompts(count, seed)):
        row: dict[str, Any] = {"id": f"r{i}", "text": text, "temperature": 0, "max_new_tokens": rng.choice([0, 1, 30])}
        if i % 5:
            row["return_hidden_states"] = {
                "layers": rng.sample([-1, 0, 1, 2], rng.randint(1, 2)),
                "tokens": rng.choice(["prompt", "all", "last"]),
                "pool": rng.choice(["none", "last", "mean"]),
            }
        if i % 7 == 3:
            row |= {"n": 2, "temperature": 1.0}
        found.append({**row, "return_hidden_states": {"layers": [3]}} if i % 31 == 30 else row)
    return found


class UninterruptedRun:
    """The job's inputs and the outputs of an uninterrupted run."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.lines = lines()
        self.input = write_lines(folder / "in.jsonl", self.lines)
        self.arguments: list[Any] = ["run", self.input, "--model", model, *OPTIONS, "-o"]
        run([*self.arguments, "whole.parquet"], folder)
        self.results = read(folder / "whole.parquet").to_pylist()
        self.path = folder / "whole.hidden.parquet"
        self.states = pq.read_table(self.path).to_pylist()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, model: Path) -> UninterruptedRun:
    return UninterruptedRun(tmp_path_factory.mktemp("uninterrupted"), model)


def assert_same_states(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Assert that the rows are equal, values within the tolerance."""
    assert len(got) == len(wanted)
    for left, right in zip(got, wanted, strict=True):
        assert {k: v for k, v in left.items() if k != "values"} == {k: v for k, v in right.items() if k != "values"}
        np.testing.assert_allclose(left["values"], right["values"], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.field("return_hidden_states")
def test_the_file_contains_the_requested_states(uninterrupted: UninterruptedRun, model: Path) -> None:
    """Compared with transformers' eager model over each finished text."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    after: list[torch.Tensor] = []
    reference.model.layers[-1].register_forward_hook(lambda m, a, out: after.append(out))
    states = {(s["row_index"], s["sample_index"], s["layer"]): s for s in uninterrupted.states}
    assert len(states) == len(uninterrupted.states)
    expected = 0
    for result in uninterrupted.results:
        row = uninterrupted.lines[result["row_index"]]
        assert isinstance(row, dict)
        requested = row.get("return_hidden_states")
        if result["status"] == "error":
            assert requested == {"layers": [3]}
            assert result["error"]["code"] == "invalid_field"
            continue
        if requested is None:
            continue
        ids = [*result["prompt_ids"], *result["output_ids"][:-1]]
        p, c = result["prompt_tokens"], result["completion_tokens"]
        after.clear()
        with torch.no_grad():
            out = reference(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        whole = {0: out.hidden_states[0], 1: out.hidden_states[1], 2: after[0], -1: out.hidden_states[-1]}
        first, count = {"prompt": (0, p), "all": (0, len(ids)), "last": (len(ids) - 1, 1)}[requested["tokens"]]
        for layer in requested["layers"]:
            expected += 1
            got = states[result["row_index"], result["sample_index"], layer]
            want = whole[layer].reshape(len(ids), -1)[first : first + count].numpy()
            want = {"none": want, "last": want[-1:], "mean": want.mean(0, keepdims=True)}[requested["pool"]]
            assert got["id"] == row["id"]
            assert got["span"] == requested["tokens"]
            assert got["dtype"] == "float32"
            assert got["token_start"] == (first + count - 1 if requested["pool"] == "last" else first)
            assert got["shape"] == [*want.shape]
            assert len(ids) == max(p, p + c - 1)
            np.testing.assert_allclose(
                np.array(got["values"]).reshape(want.shape), want, atol=TOLERANCE, rtol=TOLERANCE
            )
    assert expected == len(states) > 50


def test_four_readers_read_the_same_values(uninterrupted: UninterruptedRun, tmp_path: Path) -> None:
    """pandas, polars, DuckDB and Hugging Face datasets."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    path = str(uninterrupted.path)
    data = Dataset.from_parquet(path, cache_dir=str(tmp_path))
    found = {
        "pandas": [*map(list, pd.read_parquet(path)["values"])],
        "polars": pl.read_parquet(path)["values"].to_list(),
        "duckdb": [values for (values,) in duckdb.sql(f"SELECT values FROM '{path}'").fetchall()],
        "datasets": [*data["values"]],
    }
    for name, lists in found.items():
        assert lists == [row["values"] for row in uninterrupted.states], name


def test_a_finished_job_does_nothing(uninterrupted: UninterruptedRun, tmp_path: Path) -> None:
    for name in ("whole.parquet", "whole.hidden.parquet"):
        shutil.copy2(uninterrupted.path.parent / name, tmp_path)
    before = [(p, p.stat().st_mtime_ns) for p in sorted(tmp_path.glob("*.parquet"))]
    done = run([*uninterrupted.arguments, "whole.parquet"], tmp_path)
    assert "is complete" in done.stderr
    assert [(p, p.stat().st_mtime_ns) for p in sorted(tmp_path.glob("*.parquet"))] == before
    (tmp_path / "whole.hidden.parquet").unlink()
    done = run([*uninterrupted.arguments, "whole.parquet"], tmp_path, expect=5)
    assert "whole.hidden.parquet are missing" in done.stderr


def test_a_job_without_states_has_one_file(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": "fox", "max_new_tokens": 2, "return_hidden_states": False}])
    run(["run", source, "--model", model, *F32, "-o", "out.parquet"], tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix) == ["in.jsonl", "out.parquet"]


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
    limit = 2 * report["estimated_output_bytes"]
    run(["run", *job, "-o", "wide.parquet", "--max-output-bytes", limit], tmp_path)
    assert_same_states(
        pq.read_table(tmp_path / "wide.hidden.parquet").to_pylist(),
        pq.read_table(tmp_path / "out.hidden.parquet").to_pylist(),
    )


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
    refused = write_lines(tmp_path / "dense.jsonl", rows[:1])
    run(["run", refused, "--model", model, *F32, "-o", "dense.parquet", "--max-errors", "5"], tmp_path)
    (row,) = read(tmp_path / "dense.parquet").to_pylist()
    assert row["error"]["code"] == "unsupported_field"
    assert row["error"]["param"] == "return_routed_experts"
