"""`batchgen bench job`: whole jobs of the demonstration model, some of them killed. Tests no times."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


@pytest.mark.slow
def test_the_benchmark_reports_every_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_cost, "batchgen_process", forked_command)
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


class Ended:
    """A process that has ended."""

    def poll(self) -> int:
        return 0

    def communicate(self) -> None:
        return None


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

    @contextmanager
    def command(arguments: list[str], folder: Path, *, killed: bool = False) -> Iterator[Ended]:
        if not killed:
            resumed = "--commit-every" in arguments
            name = arguments[1].removesuffix(".jsonl") + (", resumed" if resumed else "")
            spent = PHASES | JOBS[name]
            late = next(slow) if name == "one" else 0.0
            report = {
                "rows": 1,
                "rows_error": 0,
                "rows_resumed": rows_resumed,
                "seconds": {"loading": 0.0} | {p: 1e-6 * spent[p] for p in ("reading", "planning", "writing")},
                "engine": {
                    "compute_ms": 1e-3 * spent["model"],
                    "overlapped_compute_ms": 0.0,
                    "output_ms": 1e-3 * late,
                    "host_ms": 1e-3 * (spent["between_steps"] + late),
                },
            }
            (folder / arguments[arguments.index("--report") + 1]).write_text(json.dumps(report))
        yield Ended()

    monkeypatch.setattr(rows_cost, "batchgen_process", command)


def test_a_rows_cost_is_the_additional_time_per_additional_row(monkeypatch: pytest.MonkeyPatch) -> None:
    reported(monkeypatch, rows_resumed=50)
    cost = {figure.metric: figure.value for figure in run_job_bench(1, lambda line: None, count=101)}
    assert cost == pytest.approx(
        {
            "reading": 10.0,
            "planning": 0.1,
            "writing": 1.0,
            "resuming": 905 / 99,
            "between_steps": 2.0,
            "model": 100.0,
            "rows_over_model": 11.1 + 905 / 99,
            "steps_over_model": 2.0,
        },
        abs=1e-3,
    )


def test_a_resumed_job_without_committed_rows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reported(monkeypatch, rows_resumed=0)
    with pytest.raises(CommandFailed, match="resumed none of 2 rows"):
        run_job_bench(1, lambda line: None, count=101)


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
