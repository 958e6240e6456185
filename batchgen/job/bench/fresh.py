"""batchgen's own command line in fresh interpreters, as a user starts it, and the figures that come of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TextIO

import batchgen
from batchgen.errors import BatchgenError
from batchgen.job.bench.machine import commit_name, cpu_name

__all__ = ["CommandFailed", "CommandFigure", "command_figure", "fresh_command", "run_until"]


class CommandFailed(BatchgenError):
    """A process that was to be measured failed."""


@dataclass(frozen=True, slots=True)
class CommandFigure:
    """One measured number."""

    workload: str
    metric: str
    value: float
    """The median of the repeats."""
    unit: str
    min: float
    max: float
    cpu_seconds: float | None
    """Processor time of the whole process, the median; None where what is measured ends before it does."""
    repeat: int
    processors: int
    cpu: str
    commit: str | None

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), ensure_ascii=False)


def command_figure(
    workload: str, metric: str, unit: str, values: Sequence[float], cpu: Sequence[float] | None = None
) -> CommandFigure:
    """The figure of repeated measurements, to three places."""
    return CommandFigure(
        workload=workload,
        metric=metric,
        value=round(median(values), 3),
        unit=unit,
        min=round(min(values), 3),
        max=round(max(values), 3),
        cpu_seconds=None if cpu is None else round(median(cpu), 3),
        repeat=len(values),
        processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu=cpu_name(),
        commit=commit_name(),
    )


@contextmanager
def fresh_command(arguments: Sequence[str], folder: Path, *, killed: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Run a command line standing in `folder`, its stdout a pipe, and wait for its end.

    Args:
        arguments: after `batchgen`.
        folder: where it stands.
        killed: SIGKILL ends it, sent within; else it must end well.

    Raises:
        CommandFailed: it ended otherwise; with the last line of what it said.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        with _process(arguments, folder, log) as process:
            try:
                yield process
            except BaseException:
                process.kill()
                raise
        if process.returncode != (-signal.SIGKILL if killed else 0):
            log.seek(0)
            said = log.read().strip().splitlines() if process.returncode else ["it ended before it could be killed"]
            last = said[-1] if said else f"exit code {process.returncode}"
            raise CommandFailed(f"batchgen {' '.join(arguments)} failed: {last}")


def run_until(done: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Kill the process, as a machine that goes down does, once something is `done`; it may end before."""
    while process.poll() is None:
        if done():
            process.kill()
            return
        try:
            process.wait(0.01)
        except subprocess.TimeoutExpired:
            continue


def _process(arguments: Sequence[str], folder: Path, log: TextIO) -> subprocess.Popen[str]:
    paths = (str(Path(batchgen.__file__).parents[1]), os.environ.get("PYTHONPATH"))
    # What is measured is the command as it stands, not with the options that this shell has for others.
    others = {name: value for name, value in os.environ.items() if not name.startswith("BATCHGEN_")}
    env = {**others, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-m", "batchgen", *arguments]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
