"""The GPU check's command at toy sizes, on any machine; with a GPU, `-m gpu` runs it at real sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.goals import GOALS
from tests.gpu.registry import cases

ROOT = Path(__file__).parents[2]

# Without the stages of whole jobs, which take longest: slow tests have them.
STAGES = ("parity", "flash", "memory", "bench", "profile", "tune")


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.gpu", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=inherited | environment)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """(report, stdout) of one toy run of all stages in `STAGES`."""
    return toy_run(tmp_path_factory.mktemp("toy"), *STAGES)


def toy_run(folder: Path, *stages: str) -> tuple[dict[str, Any], str]:
    """(report, stdout) of a toy run that succeeds."""
    found = folder / "found.json"
    done = run("--toy", "--stages", ",".join(stages), "--time-limit", "3600", "--out", str(found))
    made = json.loads(found.read_text(encoding="utf-8"))
    assert done.returncode == made["exit_code"] == 0, done.stdout + done.stderr
    return made, done.stdout


def test_every_check_runs_and_passes(toy: tuple[dict[str, Any], str]) -> None:
    checks = toy[0]["checks"]
    assert [check for check in checks if check["status"] != "pass"] == []
    stages = set(STAGES) - {"bench", "profile"}
    assert {check["case"] for check in checks} == {case.name for stage in stages for case in cases(stage, toy=True)}
    low = [c for c in checks if c["case"].startswith("decode[bfloat16") and c["what"] == "attention"]
    assert low
    assert all(0 < c["error"] <= c["bound"] and c["plain"] > 0 and c["seconds"] > 0 for c in low)


def test_figures_have_shapes_and_floors_and_the_toy_flag(toy: tuple[dict[str, Any], str]) -> None:
    found, printed = toy
    assert found["toy"] is True
    assert "TOY RUN" in printed
    operations = {"attention" if figure["op"] == "triton" else figure["op"] for figure in found["figures"]}
    assert operations == {case.op for case in cases("bench", toy=True)}
    for figure in found["figures"]:
        assert figure["toy"] is True
        assert figure["shape"]
        assert figure["timing"]["how"] == "wall"
        assert figure["timing"]["p20"] <= figure["timing"]["p50"] <= figure["timing"]["p80"]
        assert figure["floor_us"] > 0
    assert [note for note in found["withheld"] if "not importable" not in note] == []
    assert "stand-in" in found["flash"]


@pytest.mark.slow
def test_workloads_have_floors_goals_and_peers(tmp_path: Path) -> None:
    listed = toy_run(tmp_path, "workloads")[0]["measures"]
    measures = {(m["workload"], m["model"], m["engine"], m["figure"]): m for m in listed}
    assert len(measures) == len(listed)
    assert all(m["toy"] and not m["checked"] for m in measures.values()), "without the stage that checks jobs"
    rate = measures["w-tree", "1b", "batchgen", "output_tokens_per_second"]
    assert rate["floor"] > rate["serial_floor"] > rate["value"] > 0
    assert rate["share"] == pytest.approx(rate["value"] / rate["serial_floor"])
    assert (rate["goal"], rate["moonshot"], rate["factor"]) == (100e3, 150e3, 1.0)
    peer = measures["w-nano", "0.6b", "transformers-continuous", "output_tokens_per_second"]
    assert peer["goal"] is None
    for form in ("fp8", "int4"):
        assert measures["w-nano", f"8b {form}", "batchgen", "times_bfloat16"]["value"] > 0
    assert measures["pictures", "demo", "batchgen", "output_tokens_per_second"]["value"] > 0
    for goal in GOALS:
        if goal.workload not in ("kernel", "decode"):
            key = (goal.workload, goal.model, "batchgen", goal.figure)
            assert key in measures or goal.figure == "constrained", key


def test_the_profile_is_consistent(toy: tuple[dict[str, Any], str]) -> None:
    (profile,) = toy[0]["profiles"]
    assert profile["toy"] is True
    assert profile["step_ms"] >= profile["host_ms"] > 0
    assert profile["busy_share"] is None
    assert 0 < len(profile["kernels"]) <= 15
    assert all(kernel["us_per_step"] >= 0 and kernel["name"] for kernel in profile["kernels"])
    assert sum(kernel["share"] for kernel in profile["kernels"]) <= 1.001


def test_the_report_names_hardware_versions_and_commit(toy: tuple[dict[str, Any], str]) -> None:
    found = toy[0]
    assert set(found["versions"]) == {"python", "torch", "triton", "cuda"}
    assert found["hardware"]["name"]
    assert found["commit"]
    assert list(found["seconds"]) == list(STAGES)
    assert found["rates"]["copy_bytes_per_s"] > 0


def test_the_tuning_fragment_is_a_chip_table(toy: tuple[dict[str, Any], str]) -> None:
    fragment = tomllib.loads(toy[0]["tuning"]["fragment"])["toy"]
    assert fragment["source"].startswith("TOY")
    assert set(fragment["attention"]) == {"decode", "prefill"}
    assert {fragment["attention"][kind]["64"]["keys"] for kind in ("decode", "prefill")} <= {32, 64, 128}
    assert {entry["kind"] for entry in toy[0]["tuning"]["measured"]} == {"decode", "prefill", "split", "prefix"}


def test_only_selects_cases_and_cases_past_the_time_limit_fail(tmp_path: Path) -> None:
    done = run("--toy", "--stages", "parity", "--only", "rms_norm", "--time-limit", "0", "--out", str(tmp_path))
    assert done.returncode == 1
    (written,) = tmp_path.iterdir()
    assert written.name.startswith("toy-")
    checks = json.loads(written.read_text(encoding="utf-8"))["checks"]
    assert checks
    assert {check["status"] for check in checks} == {"unreached"}
    assert all("rms_norm" in check["op"] for check in checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "operations"),
    [
        ("determinism", {"linear", "attention", "jobs"}),
        ("engine", {"parity", "run modes", "logits"}),
        ("syncs", {"syncs"}),
    ],
)
def test_whole_jobs_at_toy_sizes(stage: str, operations: set[str], tmp_path: Path) -> None:
    checks = toy_run(tmp_path, stage)[0]["checks"]
    assert {check["op"] for check in checks} == operations
    assert {check["status"] for check in checks} == {"pass"}


def test_without_a_device_the_exit_code_is_2() -> None:
    done = run("--stages", "parity", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "--toy" in done.stderr


def test_stored_figures_are_of_real_runs() -> None:
    for path in (ROOT / "tests" / "gpu" / "figures").glob("*"):
        assert json.loads(path.read_text(encoding="utf-8"))["toy"] is False


@pytest.mark.gpu
def test_the_command_on_a_gpu(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
