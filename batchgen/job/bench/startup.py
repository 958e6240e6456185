"""`batchgen bench startup`: seconds from a fresh interpreter to the help, to the first token and to the end of a run.

One row of the demonstration model, in processes started one after the other as a user would start them.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchgen.job.bench.fresh import CommandFigure, command_figure, fresh_command

__all__ = ["run_startup_bench"]

_ROW = {"text": "Sort in ascending order: 3, 1, 2", "max_new_tokens": 8, "temperature": 0, "stream": True}


@dataclass(frozen=True, slots=True)
class _Taken:
    """Seconds that a process took."""

    first: float
    """To its first line on stdout."""
    whole: float
    cpu: float


def run_startup_bench(repeat: int, emit: Callable[[str], None]) -> list[CommandFigure]:
    """Measure, after one start of each that fills the caches of the disk; one JSON line a figure to `emit`.

    `help_seconds`, `first_token_seconds` and `run_seconds`, by the wall clock from the start of the process.

    Raises:
        CommandFailed: a process did.
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
    figures = [
        _figure("help_seconds", [taken.whole for taken in helps[1:]], [taken.cpu for taken in helps[1:]]),
        _figure("first_token_seconds", [taken.first for taken in runs[1:]], None),
        _figure("run_seconds", [taken.whole for taken in runs[1:]], [taken.cpu for taken in runs[1:]]),
    ]
    for figure in figures:
        emit(figure.to_json())
    return figures


def _start(arguments: Sequence[str], folder: Path) -> _Taken:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    with fresh_command(arguments, folder) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first = time.perf_counter() - began
        process.stdout.read()
    whole = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return _Taken(first, whole, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _figure(metric: str, seconds: Sequence[float], cpu: Sequence[float] | None) -> CommandFigure:
    return command_figure("startup", metric, "s", seconds, cpu)
