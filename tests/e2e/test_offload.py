"""Streamed models through the commands, and the command that measures them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.docs.results_tables import _offload_table
from tests.e2e.model import save_model
from tests.e2e.offload import measure
from tests.e2e.runner import run


def test_check_says_what_fits_and_the_run_copies_that(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", num_hidden_layers=8)
    rows = [{"text": f"Row {i}", "max_new_tokens": 5, "ignore_eos": True, "temperature": 0} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["rows.jsonl", "--model", model, "--device", "cpu", "--dtype", "float32", "--attention", "torch"]
    streamed = ["--offload", "auto", "--device-memory", "2300KiB", "--kv-memory", "1MiB"]
    report = json.loads(run(["check", *options, *streamed, "--json"], tmp_path).stdout)["offload"]
    assert report["streamed_blocks"] > 0
    assert report["device_weight_bytes"] + report["kv_bytes"] + report["step_bytes"] <= 2300 << 10
    assert "are copied to it in every step" in run(["check", *options, *streamed], tmp_path).stdout
    engines: list[dict[str, Any]] = []
    for name, more in (("whole", []), ("streamed", streamed)):
        done = run(["run", *options, *more, "-o", f"{name}.parquet", "--report", "-"], tmp_path)
        engines.append(done.report["engine"])
    whole, parts = (pq.read_table(tmp_path / f"{name}.parquet")["output_ids"] for name in ("whole", "streamed"))
    assert whole == parts
    assert engines[1]["offload_weight_bytes"] == engines[1]["offload_planned_bytes"]
    assert engines[1]["offload_weight_bytes"] == engines[1]["offload_passes"] * report["pass_bytes"] > 0
    assert "offload_passes" not in engines[0]


def test_check_says_what_of_keys_and_values_fits_and_the_run_copies_no_more(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", num_hidden_layers=8)
    rows = [{"text": f"Row {i} " * 9, "max_new_tokens": 24, "ignore_eos": True, "temperature": 0} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["rows.jsonl", "--model", model, "--device", "cpu", "--dtype", "float32", "--attention", "torch"]
    streamed = ["--offload", "kv", "--device-memory", "64MiB", "--kv-memory", "1MiB"]
    report = json.loads(run(["check", *options, *streamed, "--json"], tmp_path).stdout)["offload"]
    assert report["streamed_blocks"] == 0 < report["kv_streamed_layers"] <= report["kv_layers"] == 8
    assert report["kv_device_bytes"] <= 1 << 20 < report["kv_pass_bytes"] + report["kv_device_bytes"]
    (tmp_path / "one.jsonl").write_text(json.dumps(rows[0]) + "\n")
    large = ["--page-size", "300", "-o", "one.parquet", "--report", "-"]  # the device does not hold two in all layers
    assert run(["run", "one.jsonl", *options[1:], *streamed, *large], tmp_path).report["engine"]["offload_kv_bytes_in"]
    assert "are copied in a step" in run(["check", *options, *streamed], tmp_path).stdout
    engines: list[dict[str, Any]] = []
    for name, more in (("whole", []), ("streamed", streamed)):
        engines.append(
            run(["run", *options, *more, "-o", f"{name}.parquet", "--report", "-"], tmp_path).report["engine"]
        )
    whole, parts = (pq.read_table(tmp_path / f"{name}.parquet")["output_ids"] for name in ("whole", "streamed"))
    assert whole == parts
    for way in ("in", "out"):
        assert engines[1][f"offload_kv_bytes_{way}"] == engines[1][f"offload_kv_planned_bytes_{way}"] > 0
    assert engines[1]["offload_kv_bytes_in"] <= engines[1]["steps"] * report["kv_pass_bytes"]
    assert "offload_kv_bytes_in" not in engines[0]


@pytest.mark.parametrize("several", ["--replicas", "--tensor-parallel"])
def test_each_of_several_processes_streams_by_itself(several: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", num_hidden_layers=8)
    rows = [{"text": f"Row {i}", "max_new_tokens": 5, "temperature": 0} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["rows.jsonl", "--model", model, "--device", "cpu", "--dtype", "float32", "--attention", "torch"]
    streamed = ["--offload", "auto", "--device-memory", "2300KiB", "--kv-memory", "1MiB", several, "2"]
    run(["run", *options, "-o", "whole.parquet"], tmp_path)
    run(["run", *options, *streamed, "-o", "two.parquet"], tmp_path)
    whole, two = (pq.read_table(tmp_path / f"{name}.parquet")["output_ids"] for name in ("whole", "two"))
    assert whole == two


def test_figures_have_a_table() -> None:
    lines = list(measure("random:5m", "cpu", (0.5,), rows=4, prompt=5, tokens=3))
    assert [line["share"] for line in lines] == [None, 0.5]
    assert all(line["same_tokens"] for line in lines)
    assert lines[1]["copied_bytes"] == lines[1]["planned_bytes"] > 0
    assert len(_offload_table(lines)) == 4 + len(lines)
    lines = list(measure("random:5m", "cpu", (0.5,), rows=64, prompt=150, tokens=3, offload="kv"))
    assert all(line["same_tokens"] for line in lines)
    assert lines[1]["copied_bytes"] == lines[1]["planned_bytes"] > 0
