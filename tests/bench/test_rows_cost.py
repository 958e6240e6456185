"""`batchgen bench job`: whole jobs of the demonstration model, some of them killed. Tests no times."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from batchgen.bench import rows_cost
from batchgen.bench.rows_cost import JOB_METRICS, run_job_bench
from batchgen.bench.subprocess_timing import CommandFailed, batchgen_process, kill_when
from tests.e2e.runner import Job, start


class Forked:
    """The part of `Popen`'s interface that the benchmark uses, for a forked process without imports."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def poll(self) -> int | None:
        return None if self._job.alive else self._job.wait().code

    def wait(self, seconds: float) -> int:
        time.sleep(seconds)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("batchgen", seconds)
        return code

    def kill(self) -> None:
        self._job.signal(signal.SIGKILL)

    def communicate(self) -> None:
        self._job.wait()


@contextmanager
def forked_command(arguments: list[str], folder: Path, *, killed: bool = False) -> Iterator[Forked]:
    """`batchgen_process` in a forked process, which saves the imports."""
    process = Forked(start(arguments, folder))
    yield process
    process.communicate()
    assert process.poll() == (-signal.SIGKILL if killed else 0)


@pytest.mark.parametrize("command", [forked_command, pytest.param(batchgen_process, marks=pytest.mark.slow)])
def test_the_benchmark_reports_every_metric(monkeypatch: pytest.MonkeyPatch, command: Callable[..., Any]) -> None:
    monkeypatch.setattr(rows_cost, "batchgen_process", command)
    lines: list[str] = []
    figures = run_job_bench(1, lines.append, count=512)
    assert [figure.metric for figure in figures] == list(JOB_METRICS)
    assert [json.loads(line)["value"] for line in lines] == [figure.value for figure in figures]
    by_name = {figure.metric: figure for figure in figures}
    assert by_name["model"].value > 0
    assert by_name["writing"].value > 0
    assert by_name["between_steps"].value > 0
    assert by_name["steps_over_model"].value == pytest.approx(
        100 * by_name["between_steps"].value / by_name["model"].value, abs=1e-2
    )
    rows = sum(by_name[name].value for name in JOB_METRICS[:4])
    assert by_name["rows_over_model"].value == pytest.approx(100 * rows / by_name["model"].value, abs=1e-2)
    assert [figure.unit for figure in figures] == ["us/row"] * 6 + ["%"] * 2


def test_a_rows_cost_is_the_additional_time_per_additional_row() -> None:
    one = {"reading": 500.0, "planning": 10.0, "between_steps": 3.0, "writing": 40.0, "model": 100.0}
    whole = {"reading": 1500.0, "planning": 20.0, "between_steps": 203.0, "writing": 140.0, "model": 10_100.0}
    two = {"reading": 600.0, "planning": 12.0, "between_steps": 0.0, "writing": 0.0, "model": 5.0}
    again = {"reading": 1486.0, "planning": 31.0, "between_steps": 0.0, "writing": 0.0, "model": 5.0}
    cost = rows_cost._costs(one, two, whole, again, 101)
    assert {name: cost[name] for name in JOB_METRICS[:6]} == {
        "reading": 10.0, "planning": 0.1, "writing": 1.0, "resuming": 905 / 99, "between_steps": 2.0, "model": 100.0,
    }  # fmt: skip
    assert cost["rows_over_model"] == pytest.approx(11.1 + 905 / 99)
    assert cost["steps_over_model"] == 2.0


def test_a_resumed_job_without_committed_rows_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_cost, "batchgen_process", _killed_at_once)
    monkeypatch.setattr(rows_cost, "_run", lambda *_: {"rows_resumed": 0})
    with pytest.raises(CommandFailed, match="resumed none of 64 rows"):
        rows_cost._killed_and_resumed(tmp_path, "all", "again", 64)


def _killed_at_once(arguments: list[str], folder: Path, *, killed: bool):  # type: ignore[no-untyped-def]
    assert killed
    assert arguments[-2:] == ["--commit-every", "4"]
    return batchgen_process(["--version"], folder)


def test_a_process_is_killed_when_the_condition_is_true(tmp_path: Path) -> None:
    began = time.monotonic()
    with batchgen_process(["run", "--help"], tmp_path, killed=True) as process:
        kill_when(lambda: True, process)
    assert process.returncode == -9
    assert time.monotonic() - began < 60
    with (
        pytest.raises(CommandFailed, match="batchgen --version failed: it ended before it could be killed"),
        batchgen_process(["--version"], tmp_path, killed=True) as process,
    ):
        kill_when(lambda: False, process)
