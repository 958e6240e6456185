"""`batchgen bench startup`: seconds from a fresh interpreter to the help, to the first token and to the end of a run.

One row of the demonstration model, in processes started one after the other as a user would start them.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import batchgen
from batchgen.errors import BatchgenError
from batchgen.job.bench.machine import commit_name, cpu_name

__all__ = ["StartFailed", "StartFigure", "run_startup_bench"]

_ROW = {"text": "Sort in ascending order: 3, 1, 2", "max_new_tokens": 8, "temperature": 0, "stream": True}


class StartFailed(BatchgenError):
    """A process that was to be measured failed."""


@dataclass(frozen=True, slots=True)
class StartFigure:
    """One measured number."""

    workload: str
    metric: str
    """`help_seconds`, `first_token_seconds` or `run_seconds`, by the wall clock from the start of the process."""
    value: float
    """The median of the repeats."""
    unit: str
    min: float
    max: float
    cpu_seconds: float | None
    """Processor time of the whole process, the median; None where the clock stops before its end."""
    repeat: int
    processors: int
    cpu: str
    commit: str | None

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class _Taken:
    """Seconds that a process took."""

    first: float
    """To its first line on stdout."""
    whole: float
    cpu: float


def run_startup_bench(repeat: int, emit: Callable[[str], None]) -> list[StartFigure]:
    """Measure, after one start of each that fills the caches of the disk; one JSON line a figure to `emit`.

    Raises:
        StartFailed: a process did, with the last line of what it said.
    """
    helps: list[_Taken] = []
    runs: list[_Taken] = []
    with tempfile.TemporaryDirectory(prefix="batchgen-start-") as scratch:
        folder = Path(scratch)
        (folder / "row.jsonl").write_text(json.dumps(_ROW) + "\n", encoding="utf-8")
        for number in range(repeat + 1):
            out = f"{number}.parquet"
            helps.append(_start(["--help"], folder))
            runs.append(_start(["run", "row.jsonl", "-o", out, "--events", "-", "--progress", "none"], folder))
    measured = {
        "help_seconds": ([taken.whole for taken in helps[1:]], [taken.cpu for taken in helps[1:]]),
        "first_token_seconds": ([taken.first for taken in runs[1:]], None),
        "run_seconds": ([taken.whole for taken in runs[1:]], [taken.cpu for taken in runs[1:]]),
    }
    figures = [_figure(metric, seconds, cpu) for metric, (seconds, cpu) in measured.items()]
    for figure in figures:
        emit(figure.to_json())
    return figures


def _start(arguments: Sequence[str], folder: Path) -> _Taken:
    """Run a command line in an interpreter of its own, standing in `folder`."""
    paths = (str(Path(batchgen.__file__).parents[1]), os.environ.get("PYTHONPATH"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        began = time.perf_counter()
        command = [sys.executable, "-m", "batchgen", *arguments]
        with subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=log) as process:
            assert process.stdout is not None
            process.stdout.readline()
            first = time.perf_counter() - began
            process.stdout.read()
        whole = time.perf_counter() - began
        if process.returncode:
            log.seek(0)
            said = log.read().strip().splitlines() or [f"exit code {process.returncode}"]
            raise StartFailed(f"batchgen {' '.join(arguments)} failed: {said[-1]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return _Taken(first, whole, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _figure(metric: str, seconds: Sequence[float], cpu: Sequence[float] | None) -> StartFigure:
    return StartFigure(
        workload="startup",
        metric=metric,
        value=round(median(seconds), 3),
        unit="s",
        min=round(min(seconds), 3),
        max=round(max(seconds), 3),
        cpu_seconds=None if cpu is None else round(median(cpu), 3),
        repeat=len(seconds),
        processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu=cpu_name(),
        commit=commit_name(),
    )
