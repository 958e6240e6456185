"""`batchgen bench eta`: the estimated time left of whole jobs, against the time that was left.

Each job runs as a command with `--progress json`. Its lines are compared with the end of its generating phase. The
command computes with one thread, and all its clocks are that of its processor time: other programs of the machine
disturb the time of day more than anything that is judged here.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from batchgen.bench.jobs.commands import CommandFailed, run_batchgen, run_half, write_rows
from batchgen.bench.machine import machine
from batchgen.bench.shapes import resolve_bench_model
from batchgen.bench.workloads import Level, Workload

Row = Mapping[str, Any]
MakeRows = Callable[[np.random.Generator], Iterable[Row]]
_VOCABULARY: Final = 2048


@dataclass(frozen=True, slots=True)
class EtaJob:
    """A job, and what differs from a plain run."""

    name: str
    description: str
    rows: MakeRows
    model: str = "random:5m"
    options: tuple[str, ...] = ()
    """Further options of the command."""
    resumed: bool = False
    """Whether the job is killed after half of its rows are committed, and its second run is judged."""


def random_rows(
    count: int, prompt: tuple[int, int], output: tuple[int, int], *above: Level, **more: object
) -> MakeRows:
    """Rows of random lengths; prompts begin with those of the levels `above`, of which each has `count` rows below."""

    def rows(rng: np.random.Generator) -> Iterator[Row]:
        seed = int(rng.integers(1 << 32))
        for row in Workload("", "", (*above, Level(count, prompt)), output, seed).rows(_VOCABULARY):
            yield {"input_ids": row.ids, "max_new_tokens": row.max_new, "ignore_eos": True, "temperature": 0, **more}

    return rows


def _sorted(rng: np.random.Generator) -> Iterable[Row]:
    """The rows of `_MIXED` with the shortest outputs first."""
    return sorted(_MIXED(rng), key=lambda row: int(row["max_new_tokens"]))


def _long_tail(rng: np.random.Generator) -> Iterator[Row]:
    for number, row in enumerate(random_rows(150, (32, 256), (64, 64))(rng)):
        yield {**row, "max_new_tokens": 10000} if number % 16 == 3 else row


def _scored(rng: np.random.Generator) -> Iterator[Row]:
    texts = iter(random_rows(8400, (40, 40), (1, 1))(rng))
    for row in random_rows(2800, (200, 600), (1, 1))(rng):
        yield {"input_ids": row["input_ids"], "completions": [next(texts)["input_ids"] for _ in range(3)]}


def _repeated(rng: np.random.Generator) -> Iterator[Row]:
    """Every third row copies another one, and every seventh is invalid."""
    rows = list(random_rows(3200, (32, 256), (50, 300))(rng))
    for number in range(6400):
        yield {"text": 5} if number % 7 == 0 else rows[number // 2]


_MIXED: Final = random_rows(1500, (32, 256), (8, 512))
_MIXED_TEXT: Final = "1,500 prompts of 32-256 tokens, 8-512 out"

ETA_JOBS: Final = (
    EtaJob("short-in-long-out", "1,000 prompts of 8-16 tokens, 512 out", random_rows(1000, (8, 16), (512, 512))),
    EtaJob("long-in-short-out", "700 prompts of 1,000-1,900 tokens, 8 out", random_rows(700, (1000, 1900), (8, 8))),
    EtaJob("shared-prefix", "3,500 prompts of 32 tokens after one prefix of 1,024, 128 out",
           random_rows(3500, (32, 32), (128, 128), Level(1, (1024, 1024)))),
    EtaJob("tree", "a root of 300, 20 groups of 500, 10 of 120 in each, 20 prompts of 30 in each, 96 out",
           random_rows(20, (30, 30), (96, 96), Level(1, (300, 300)), Level(20, (500, 500)), Level(10, (120, 120)))),
    EtaJob("mixed", _MIXED_TEXT, _MIXED),
    EtaJob("mixed-sorted", f"{_MIXED_TEXT}, the shortest outputs first", _sorted),
    EtaJob("n-samples", "600 prompts of 200 tokens, 8 samples of 128 each",
           random_rows(600, (200, 200), (128, 128), n=8, temperature=1.0)),
    EtaJob("long-tail", "150 prompts of 32-256 tokens, 64 out, but ten of 10,000 out", _long_tail),
    EtaJob("scoring", "2,800 prompts of 200-600 tokens, three texts of 40 tokens each to score", _scored, "demo"),
    EtaJob("copies", "6,400 rows, of which half copy another one and a seventh is invalid", _repeated, "demo"),
    EtaJob("few-pages", f"{_MIXED_TEXT}, in a small KV cache", _MIXED, options=("--kv-memory", "64MiB")),
    EtaJob("resumed", "3,600 prompts of 32-256 tokens, 8-512 out, half of them committed before",
           random_rows(3600, (32, 256), (8, 512)), resumed=True),
)  # fmt: skip
"""Jobs in order."""

FROM_SHARE: Final = 0.05
"""Share of the generating phase after which estimates are judged."""
TO_SHARE: Final = 0.95
"""Share up to which they are: later ones are within fractions of a second."""
START: Final = """
import queue, sys, threading, time  # before the clocks change: these wait by the time of day
time.monotonic = time.perf_counter = time.process_time
from batchgen.__main__ import main
sys.exit(main())
"""
RUN_OPTIONS: Final = ("--device", "cpu", "--cpu-threads", "1", "--progress", "json", "--max-errors", "100%")
_PARTS: Final = 16
"""Parts in which the rows of a job are committed."""
_CHECKPOINTS: Final = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9)


@dataclass(frozen=True, slots=True)
class EtaLine:
    """A progress line of the generating phase. Errors are (estimated - true) / true time left, in per cent."""

    share: float
    """Of the phase that has passed."""
    error: float | None
    """None without an estimate."""
    error_by_rows: float | None
    """What the average rate of rows would have; None if it predicts nothing."""
    in_range: bool | None
    """Whether the range of the estimate holds the true time; None without a range."""


@dataclass(frozen=True, slots=True)
class _Run:
    lines: list[EtaLine]
    seconds: float
    """Length of the generating phase."""
    processor_share: float


def eta_lines(repeat: int, jobs: Sequence[EtaJob] = ETA_JOBS) -> Iterator[dict[str, Any]]:
    """Run every job `repeat` times and return its JSON line.

    Raises:
        CommandFailed: a command failed, or a job to resume ended before it was killed.
    """
    with tempfile.TemporaryDirectory(prefix="batchgen-eta-") as scratch:
        folder = Path(scratch)
        for number, job in enumerate(jobs):
            rows = list(job.rows(np.random.default_rng(number)))
            write_rows(folder / f"{job.name}.jsonl", rows)
            yield _line(job, len(rows), [_run(folder, job, len(rows), str(at)) for at in range(repeat)])


def _run(folder: Path, job: EtaJob, rows: int, at: str) -> _Run:
    """Run a job and read its progress lines."""
    output, log = f"{job.name}-{at}.parquet", folder / "progress.jsonl"
    command = ["run", f"{job.name}.jsonl", "-o", output, "--commit-every", str(max(1, rows // _PARTS))]
    command += ["--model", resolve_bench_model(job.model), *RUN_OPTIONS, *job.options]
    if job.resumed:
        run_half(folder, command, output, rows)
    times = run_batchgen(command, folder, stderr=log, start=("-c", START))
    lines, seconds = read_lines(log.read_text(encoding="utf-8").splitlines())
    return _Run(lines, seconds, times.cpu / times.total)


def read_lines(log: Iterable[str]) -> tuple[list[EtaLine], float]:
    """The progress lines of the generating phase, and its length in seconds.

    Raises:
        CommandFailed: the phase did not begin or did not end.
    """
    # A log may hold other lines, such as warnings of libraries.
    values = [line for line in map(json.loads, (line for line in log if line.startswith("{"))) if "phase" in line]
    generating = [line for line in values if line["phase"] == "generating"]
    ended = [line["seconds"] for line in values if line["phase"] == "writing"]
    if not generating or not ended:
        raise CommandFailed("batchgen run showed no progress of its generating phase")
    began, rows_then = generating[0]["seconds"], generating[0]["rows_done"]
    length, lines = ended[0] - began, []
    for line in generating:
        seconds, done = line["seconds"] - began, line["rows_done"] - rows_then
        left, ends = length - seconds, (line["eta_seconds_min"], line["eta_seconds_max"])
        by_rows = seconds / done * (line["rows"] - line["rows_done"]) if done else None
        held = None if None in ends else ends[0] <= left <= ends[1]
        lines.append(EtaLine(seconds / length, _error(line["eta_seconds"], left), _error(by_rows, left), held))
    return lines, length


def _error(estimated: float | None, left: float) -> float | None:
    return None if estimated is None or not left else 100.0 * (estimated - left) / left


def _worst(errors: Iterable[float | None]) -> float:
    """The largest error in size; no estimate is as wrong as one of 0."""
    return max((100.0 if error is None else abs(error) for error in errors), default=0.0)


def _line(job: EtaJob, rows: int, runs: Sequence[_Run]) -> dict[str, Any]:
    """How well the time left of one job was estimated.

    Errors are those of `EtaLine`: `worst_error` is the largest in size from 5 % to 95 % of the phase, `worst_of_all`
    the largest of all repeats, `by_rows_worst_error` that of the average rate of rows, and `errors` those of the first
    line from a share of the phase on. `lines` are judged, of all repeats; `in_range` is the share of lines with an
    estimate whose range holds the true time. `processor_share` is the processor time of the command relative to the
    time of day that it took; other programs lower it. Values are medians of the repeats.
    """
    judged = [{line.share: line for line in run.lines if FROM_SHARE <= line.share <= TO_SHARE} for run in runs]
    every = [line for lines in judged for line in lines.values()]
    worst = [_worst(line.error for line in lines.values()) for lines in judged]
    by_rows = [line.error_by_rows for line in every if line.error_by_rows is not None]
    held = [line.in_range for run in runs for line in run.lines if line.in_range is not None]
    errors: dict[str, float | None] = {}
    for share in _CHECKPOINTS:
        first = [next((line.error for line in lines.values() if line.share >= share), None) for lines in judged]
        known = [error for error in first if error is not None]
        errors[f"{100 * share:g}"] = round(median(known), 1) if known else None
    return {
        "workload": "eta",
        "job": job.name,
        "model": job.model,
        "description": job.description,
        "rows": rows,
        "seconds": round(median(run.seconds for run in runs), 1),
        "worst_error": round(median(worst), 1),
        "worst_of_all": round(max(worst), 1),
        "lines": len(every),
        "within_10_percent": round(100 * sum(_worst([line.error]) <= 10 for line in every) / max(1, len(every)), 1),
        "by_rows_worst_error": round(_worst(by_rows), 1) if by_rows else None,
        "errors": errors,
        "in_range": round(100 * sum(held) / max(1, len(held)), 1),
        "repeat": len(runs),
        "processor_share": round(median(run.processor_share for run in runs), 3),
        **machine(),
    }
