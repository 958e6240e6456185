"""Times of the `batchgen` command in fresh interpreters, and `batchgen bench startup`.

`startup` measures the seconds from the start of a process to the help, to the first token of one row of the
demonstration model, and to the end of that run.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import IO

import batchgen
from batchgen.bench.machine import commit_name, cpu_name, processors
from batchgen.errors import BatchgenError


class CommandFailed(BatchgenError):
    """A measured process failed."""


@dataclass(frozen=True, slots=True)
class CommandFigure:
    """One measured value of the command, with its context."""

    workload: str
    metric: str
    value: float
    """Median of the repeats."""
    unit: str
    min: float
    max: float
    cpu_seconds: float | None
    """Median processor time of the whole process; None if the metric ends before the process does."""
    repeat: int
    processors: int
    cpu: str
    commit: str | None

    def to_json(self) -> str:
        """One JSON line."""
        return json.dumps(asdict(self), ensure_ascii=False)


def command_figure(
    workload: str, metric: str, unit: str, values: Sequence[float], cpu: Sequence[float] | None = None
) -> CommandFigure:
    """The figure of repeated measurements, rounded to three decimals."""
    return CommandFigure(
        workload=workload,
        metric=metric,
        value=round(median(values), 3),
        unit=unit,
        min=round(min(values), 3),
        max=round(max(values), 3),
        cpu_seconds=None if cpu is None else round(median(cpu), 3),
        repeat=len(values),
        processors=processors(),
        cpu=cpu_name(),
        commit=commit_name(),
    )


@contextmanager
def batchgen_process(
    arguments: Sequence[str],
    folder: Path,
    *,
    killed: bool = False,
    stderr: Path | None = None,
    start: Sequence[str] = ("-m", "batchgen"),
) -> Iterator[subprocess.Popen[str]]:
    """Context manager that runs `batchgen` in a subprocess with stdout as a pipe, and waits for its end.

    Args:
        arguments: command line after `batchgen`.
        folder: working directory.
        killed: whether the block kills the process with SIGKILL; otherwise it must exit with 0.
        stderr: the file that receives stderr; None: a temporary one.
        start: arguments of Python that start the command.

    Raises:
        CommandFailed: the process ended differently; with the last line of its stderr.
    """
    with _log(stderr) as log:
        with _process([*start, *arguments], folder, log) as process:
            try:
                yield process
            except BaseException:
                process.kill()
                raise
        if process.returncode != (-signal.SIGKILL if killed else 0):
            log.seek(0)
            lines = log.read().strip().splitlines() if process.returncode else ["it ended before it could be killed"]
            last = lines[-1] if lines else f"exit code {process.returncode}"
            raise CommandFailed(f"batchgen {' '.join(arguments)} failed: {last}")


def kill_when(done: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Kill the process with SIGKILL as soon as `done()` is true, unless it ends before."""
    while process.poll() is None:
        if done():
            process.kill()
            return
        try:
            process.wait(0.01)
        except subprocess.TimeoutExpired:
            continue


def _log(path: Path | None) -> IO[str]:
    if path is None:
        return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
    return path.open("w+", encoding="utf-8", errors="replace")


def _process(arguments: Sequence[str], folder: Path, log: IO[str]) -> subprocess.Popen[str]:
    paths = (str(Path(batchgen.__file__).parents[1]), os.environ.get("PYTHONPATH"))
    # Options in the environment of this shell must not change what is measured.
    others = {name: value for name, value in os.environ.items() if not name.startswith("BATCHGEN_")}
    env = {**others, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=log, text=True)


_ROW = {"text": "Sort in ascending order: 3, 1, 2", "max_new_tokens": 8, "temperature": 0, "stream": True}


@dataclass(frozen=True, slots=True)
class _ProcessTimes:
    """Times of a process in seconds."""

    first: float
    """Time to its first line on stdout."""
    total: float
    """Time to its end."""
    cpu: float
    """Processor time."""


def run_startup_bench(repeat: int, emit: Callable[[str], None]) -> list[CommandFigure]:
    """Measure the start of the command and pass one JSON line per figure to `emit`. A first start warms the disk cache.

    The metrics `help_seconds`, `first_token_seconds` and `run_seconds` are wall-clock times from the process's start.

    Raises:
        CommandFailed: a process failed.
    """
    helps: list[_ProcessTimes] = []
    runs: list[_ProcessTimes] = []
    with tempfile.TemporaryDirectory(prefix="batchgen-start-") as scratch:
        folder = Path(scratch)
        (folder / "row.jsonl").write_text(json.dumps(_ROW) + "\n", encoding="utf-8")
        for number in range(repeat + 1):
            out = f"{number}.parquet"
            helps.append(_start(["--help"], folder))
            runs.append(_start(["run", "row.jsonl", "-o", out, "--events", "-", "--progress", "none"], folder))
    figures = [
        _figure("help_seconds", [times.total for times in helps[1:]], [times.cpu for times in helps[1:]]),
        _figure("first_token_seconds", [times.first for times in runs[1:]], None),
        _figure("run_seconds", [times.total for times in runs[1:]], [times.cpu for times in runs[1:]]),
    ]
    for figure in figures:
        emit(figure.to_json())
    return figures


def _start(arguments: Sequence[str], folder: Path) -> _ProcessTimes:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    with batchgen_process(arguments, folder) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first = time.perf_counter() - start
        process.stdout.read()
    total = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return _ProcessTimes(first, total, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _figure(metric: str, seconds: Sequence[float], cpu: Sequence[float] | None) -> CommandFigure:
    return command_figure("startup", metric, "s", seconds, cpu)
