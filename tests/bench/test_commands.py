"""`batchgen bench startup` and `batchgen bench job`: whole processes, some of them killed. Tests no times."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchgen.bench.jobs import commands
from batchgen.bench.jobs.commands import JOB_METRICS, CommandFailed, ids_lines, job_lines, run_batchgen
from batchgen.cli.app import run_command
from tests.e2e.runner import start

# Processes


def test_the_error_names_the_failed_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options in the environment are ignored: an unknown variable would make the command fail with another error."""
    monkeypatch.setenv("BATCHGEN_NO_SUCH_OPTION", "1")
    with pytest.raises(CommandFailed, match=r"batchgen check nowhere\.jsonl failed: error: .*nowhere"):
        run_batchgen(["check", "nowhere.jsonl"], tmp_path)


def test_a_process_is_killed_when_the_condition_is_true(tmp_path: Path) -> None:
    times = run_batchgen(["run", "--help"], tmp_path, kill_when=lambda: True)
    assert times.total < 60
    with pytest.raises(CommandFailed, match="batchgen --version failed: it ended before it could be killed"):
        run_batchgen(["--version"], tmp_path, kill_when=lambda: False)


def test_sigterm_ends_the_benchmark_and_removes_its_files(tmp_path: Path) -> None:
    """The token ids in the folder for temporary files can be gigabytes."""
    arguments = [sys.executable, "-m", "batchgen", "bench", "plan", "--plan-size", "200000x50"]
    pipe, env = subprocess.PIPE, {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(arguments, env=env, stdout=pipe, stderr=pipe, text=True)
    while process.poll() is None and not any(tmp_path.glob("batchgen-plan-*/*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert errors.splitlines()[-1].startswith("error: ended by SIGTERM")
    assert list(tmp_path.iterdir()) == []


# The start


@pytest.mark.slow
def test_startup_reports_three_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", "startup", "--repeat", "1"]) == 0
    found = {line["metric"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(found) == ["help_seconds", "first_token_seconds", "run_seconds"]
    for line in found.values():
        assert line["workload"] == "startup"
        assert line["repeat"] == 1
        assert 0 < line["min"] == line["value"] == line["max"]
    assert found["first_token_seconds"]["cpu_seconds"] is None
    assert min(found["help_seconds"]["cpu_seconds"], found["run_seconds"]["cpu_seconds"]) > 0


# The cost of a row


@pytest.mark.slow
def test_the_cost_of_ids_is_the_processor_time_of_further_rows() -> None:
    (line,) = ids_lines(1, count=400)
    assert (line["workload"], line["metric"], line["unit"]) == ("ids", "us_per_row", "us/row")
    assert line["repeat"] == 1


@pytest.mark.slow
def test_the_benchmark_reports_every_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands run in forked processes, which saves the imports."""

    def forked(arguments: list[str], folder: Path, *, kill_when: Callable[[], bool] | None = None) -> None:
        job = start(arguments, folder)
        while kill_when is not None and job.alive:
            if kill_when():
                job.signal(signal.SIGKILL)
            time.sleep(0.01)
        assert job.wait().code == (0 if kill_when is None else -signal.SIGKILL)

    monkeypatch.setattr(commands, "run_batchgen", forked)
    lines = {line["metric"]: line for line in job_lines(1, count=512)}
    assert list(lines) == list(JOB_METRICS)
    value = {metric: line["value"] for metric, line in lines.items()}
    assert min(value["model"], value["writing"], value["between_steps"]) > 0
    assert value["steps_over_model"] == pytest.approx(100 * value["between_steps"] / value["model"], abs=1e-2)
    rows = sum(value[name] for name in JOB_METRICS[:4])
    assert value["rows_over_model"] == pytest.approx(100 * rows / value["model"], abs=1e-2)
    assert [line["unit"] for line in lines.values()] == ["us/row"] * 6 + ["%"] * 2


PHASES = {"reading": 0.0, "planning": 0.0, "between_steps": 0.0, "writing": 0.0, "model": 5.0}
JOBS = {
    "one": {"reading": 500.0, "planning": 10.0, "between_steps": 3.0, "writing": 40.0, "model": 100.0},
    "all": {"reading": 1500.0, "planning": 20.0, "between_steps": 203.0, "writing": 140.0, "model": 10_100.0},
    "two, resumed": {"reading": 600.0, "planning": 12.0},
    "all, resumed": {"reading": 1486.0, "planning": 31.0},
}
"""Job -> microseconds of its phases."""


def reported(monkeypatch: pytest.MonkeyPatch, rows_resumed: int) -> None:
    """Make jobs write the report of `JOBS` at once. Every second one waits longer for the disk."""
    slow = itertools.cycle((0.0, 30.0))

    def command(arguments: list[str], folder: Path, *, kill_when: object = None) -> None:
        if kill_when is not None:
            return
        name = arguments[1].removesuffix(".jsonl") + (", resumed" if "--commit-every" in arguments else "")
        spent = PHASES | JOBS[name]
        late = next(slow) if name == "one" else 0.0
        report: dict[str, Any] = {"rows": 1, "rows_error": 0, "rows_resumed": rows_resumed}
        report["seconds"] = {"loading": 0.0} | {p: 1e-6 * spent[p] for p in ("reading", "planning", "writing")}
        report["engine"] = {"compute_ms": 1e-3 * spent["model"], "overlapped_compute_ms": 0.0}
        report["engine"] |= {"output_ms": 1e-3 * late, "host_ms": 1e-3 * (spent["between_steps"] + late)}
        (folder / arguments[arguments.index("--report") + 1]).write_text(json.dumps(report))

    monkeypatch.setattr(commands, "run_batchgen", command)


def test_a_rows_cost_is_the_additional_time_per_additional_row(monkeypatch: pytest.MonkeyPatch) -> None:
    reported(monkeypatch, rows_resumed=50)
    cost = {line["metric"]: line["value"] for line in job_lines(1, count=101)}
    rows = {"reading": 10.0, "planning": 0.1, "writing": 1.0, "resuming": 905 / 99}
    shares = {"rows_over_model": 11.1 + 905 / 99, "steps_over_model": 2.0}
    assert cost == pytest.approx({**rows, "between_steps": 2.0, "model": 100.0, **shares}, abs=1e-3)


def test_a_resumed_job_without_committed_rows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reported(monkeypatch, rows_resumed=0)
    with pytest.raises(CommandFailed, match="resumed none of 2 rows"):
        list(job_lines(1, count=101))
