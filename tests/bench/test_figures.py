"""`batchgen bench`: floors and figures against numbers computed by hand."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import batchgen
from batchgen.bench.figures import Measured, workload_figures
from batchgen.bench.floors import FloorWork, count_work, measure_bandwidth, measure_matmul
from batchgen.bench.machine import commit_name, cpu_name, versions
from batchgen.bench.process import Generated
from batchgen.bench.shapes import Shape, build_model
from batchgen.bench.workloads import BenchRow
from batchgen.models.base import ModelSpec
from tests.models.loading import inspect_model

TINY = Shape(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, inner=48, vocab=400, context=128)
HEAD = 400 * 32
LAYERS = 2 * (32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32
ATTENTION = 2 * 2 * 4 * 2 * 8
"""Attention operations per cached position: two layers, products with keys and values, four heads of 8."""
POSITION = 2 * 2 * 2 * 8 * 4
"""Bytes per cached position: two layers, keys and values, two heads of 8, float32."""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path: Path = tmp_path_factory.mktemp("tiny")
    build_model(TINY, path)
    return inspect_model(path, dtype="float32", device="cpu")


# Floors


def test_arithmetic_counts_distinct_prompt_tokens_and_decoded_tokens(spec: ModelSpec) -> None:
    rows = [BenchRow([5, 6, 7, 8], 3), BenchRow([5, 6, 9], 2), BenchRow([5, 6, 9], 1)]
    work = count_work(rows, spec, tied=True)
    assert (work.prompt_tokens, work.distinct_prompt_tokens) == (10, 5)
    assert (work.output_tokens, work.decode_rows) == (6, 3)
    assert spec.parameters == LAYERS + HEAD
    assert work.flops == 2 * LAYERS * (5 + 3) + 2 * HEAD * 6
    assert count_work(rows, spec, tied=False).flops == 2 * (LAYERS - HEAD) * 8 + 2 * HEAD * 6


def test_memory_and_attention_by_hand(spec: ModelSpec) -> None:
    """Segments [5, 6], [7, 8] and [9]; the rows decode two, one and no tokens."""
    rows = [BenchRow([5, 6, 7, 8], 3), BenchRow([5, 6, 9], 2), BenchRow([5, 6, 9], 1)]
    work = count_work(rows, spec, tied=True)
    assert work.prompt_flops == 2 * LAYERS * 5 + ATTENTION * (1 + 2 + 3 + 4 + 3)
    assert work.decode_flops == 2 * LAYERS * 3 + 2 * HEAD * 6 + ATTENTION * (4 + 4 + 3 + 1)
    # Two steps read the weights. [5, 6] and [7, 8] are read twice, [9] once, and one output token once.
    assert work.decode_bytes == 2 * 4 * (LAYERS + HEAD) + POSITION * (2 * 2 + 2 * 2 + 1 + 1)
    assert work.resident_bytes == 4 * (LAYERS + HEAD) + POSITION * (5 + 3)


def test_serial_floor_adds_and_overlap_floor_takes_the_longer() -> None:
    work = FloorWork(0, 0, 0, 10, flops=8.0, prompt_flops=6.0, decode_flops=4.0, decode_bytes=30.0, resident_bytes=0)
    assert work.seconds(2.0, 10.0) == {"arithmetic": 4.0, "overlap": 3.0 + 3.0, "serial": 3.0 + 2.0 + 3.0}
    assert work.seconds(2.0, 30.0) == {"arithmetic": 4.0, "overlap": 3.0 + 2.0, "serial": 3.0 + 2.0 + 1.0}


def test_samples_share_a_prompt_and_its_logits(spec: ModelSpec) -> None:
    work = count_work([BenchRow([5, 6, 7], 4, samples=3)], spec, tied=True)
    assert (work.distinct_prompt_tokens, work.output_tokens, work.decode_rows) == (3, 12, 9)
    assert work.flops == 2 * LAYERS * (3 + 9) + 2 * HEAD * (1 + 9)
    # Three steps read the prompt once for all samples, and each sample's earlier outputs: 0, 1 and 2.
    assert work.decode_bytes == 3 * 4 * (LAYERS + HEAD) + POSITION * (3 * 3 + 3 * (0 + 1 + 2))


def test_adapters_share_nothing_and_add_operations(spec: ModelSpec) -> None:
    rows = [BenchRow([5, 6], 2, fields={"lora_path": name}) for name in ("a", "a", "b")]
    work = count_work([*rows, BenchRow([5, 6], 2)], spec, tied=True, adapter=100)
    assert work.distinct_prompt_tokens == 6
    assert work.flops == 2 * (LAYERS + 100) * (4 + 3) + 2 * LAYERS * (2 + 1) + 2 * HEAD * 8


def test_states_are_written_once(spec: ModelSpec) -> None:
    row = BenchRow([5, 6], 5)
    states = replace(row, fields={"return_hidden_states": {"layers": [0, -1], "tokens": "output"}})
    plain, more = (count_work([r], spec, tied=True) for r in (row, states))
    assert more.decode_bytes - plain.decode_bytes == 4 * 32 * 2 * 5
    assert more.flops == plain.flops


def test_a_row_of_one_token_decodes_nothing(spec: ModelSpec) -> None:
    work = count_work([BenchRow([5, 6], 1)], spec, tied=True)
    assert (work.decode_rows, work.decode_bytes, work.decode_flops) == (0, 0.0, 2 * HEAD)


# The machine


def test_machine_rates_are_finite(fast_rates: None) -> None:
    cpu = torch.device("cpu")
    flops, form = measure_matmul(torch.bfloat16, cpu)
    assert 1e6 < flops < 1e16
    assert form.split(", ")[2] in ("decode size", "prompt size")
    assert 1e6 < measure_bandwidth(cpu, 1) < 1e16
    assert cpu_name()
    assert set(versions()) == {"python", "torch", "system"}


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_a_checkout_names_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batchgen, "__file__", str(tmp_path / "__init__.py"))

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = subprocess.run(["git", "-C", tmp_path, *who, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init")
    (tmp_path / "__init__.py").touch()
    assert commit_name() is None, "no file of the checkout's, as in an installed package"
    git("add", "__init__.py")
    git("commit", "-m", "one")
    commit = commit_name()
    assert commit is not None
    assert len(commit) >= 12
    assert git("rev-parse", "HEAD").startswith(commit)
    (tmp_path / "__init__.py").write_text("changed = 1\n")
    assert commit_name() == f"{commit}+changes"


# Figures


def passes(*seconds: float) -> list[Generated]:
    return [Generated([[1, 2], [3, 4]], s, 2 * s, {"steps": 7}) for s in seconds]


WORK = FloorWork(6, 4, 2, 4, flops=8.0, prompt_flops=6.0, decode_flops=4.0, decode_bytes=30.0, resident_bytes=0)
"""At 8 FLOP/s and 10 bytes/s the floors are arithmetic 1, overlap 3.75 and serial 4.25 seconds."""
RATES = (8.0, 10.0)
ABOUT = {"workload": "toy", "model": "tiny", "repeat": 3, "gemm_form": "plain", "gemm_gflops": 8e-9}
ENGINE = {"version": "1", "dtype": "float32", "device": "cpu", "rows_equal": 1.0}


def measured(name: str, threads: int, *found: list[Generated], **about: object) -> Measured:
    return Measured({"engine": name, "threads": threads, "setting": {}, "agreement": 1.0, **ENGINE, **about}, *found)


def test_figures_of_a_workload() -> None:
    ours = measured("batchgen", 2, passes(1.0, 2.0, 4.0))
    peer = measured("other", 2, passes(2.0, 4.0, 2.0), setting={"batch": 8})
    wall, cpu, *others = workload_figures(ABOUT, [ours, peer], WORK, *RATES)
    assert (wall.metric, wall.value, wall.min, wall.max) == ("output_tokens_per_second", 2.0, 1.0, 4.0)
    assert wall.floor_tokens_per_second == pytest.approx(4.0)
    assert wall.floor_share == pytest.approx(0.5)
    assert wall.floors["overlap"] == pytest.approx({"tokens_per_second": 4 / 3.75, "share": 2 * 3.75 / 4})
    assert wall.floors["serial"] == pytest.approx({"tokens_per_second": 4 / 4.25, "share": 2 * 4.25 / 4})
    assert wall.ratio == {"other": {"median": 2.0, "min": 0.5, "max": 2.0}}, "of pairs of repeats"
    assert wall.counted["steps"] == 7
    assert wall.counted["distinct_prompt_tokens"] == 4
    assert (wall.gemm_form, wall.gemm_gflops) == ("plain", 8e-9)
    assert (cpu.metric, cpu.value) == ("output_tokens_per_cpu_second", 1.0)
    assert cpu.floor_tokens_per_second == pytest.approx(2.0), "two threads' seconds"
    assert [f.ratio["batchgen"]["median"] for f in others] == [0.5, 0.5]
    assert others[0].setting == {"batch": 8}
    assert json.loads(wall.to_json())["unit"] == "tokens/s"


def test_slowdown_of_special_rows_is_computed_repeat_by_repeat() -> None:
    engine = measured("batchgen", 1, passes(2.0, 10.0, 2.0), passes(1.0, 8.0, 1.5))
    rate, slowdown, cpu_rate, cpu_slowdown = workload_figures(ABOUT, [engine], WORK, *RATES)
    assert rate.value == 2.0
    assert (slowdown.metric, slowdown.unit) == ("slowdown", "%")
    assert (slowdown.value, slowdown.min, slowdown.max) == pytest.approx((25.0, 20.0, 50.0))
    assert slowdown.floor_share is None
    assert slowdown.ratio == slowdown.floors == {}
    assert (cpu_rate.metric, cpu_slowdown.metric) == ("output_tokens_per_cpu_second", "slowdown_by_cpu_time")
