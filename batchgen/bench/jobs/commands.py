"""Measurements of the `batchgen` command in fresh interpreters: `batchgen bench startup` and `batchgen bench job`.

`startup` measures the seconds from the start of a process to the help, to the first token of one row of the
demonstration model, and to the end of that run.

`job` measures the cost of a row outside the model, in whole jobs of the demonstration model. A repeat is six runs of
the command: a job of one row; a job of all rows; the same job killed after half of its rows are committed, then
resumed; and a job of two rows, killed and resumed as well. The jobs of one and two rows measure the fixed cost of a job
and of a resumed job. A row's cost is the additional time of the job of all rows divided by its additional rows. The
small jobs run at least three times.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import pyarrow.parquet as pq

import batchgen
from batchgen.bench.machine import machine
from batchgen.demo.tasks import rows as task_rows
from batchgen.errors import BatchgenError


class CommandFailed(BatchgenError):
    """A measured process failed."""


@dataclass(frozen=True, slots=True)
class CommandTimes:
    """Seconds of a finished process."""

    first: float
    """To its first line on stdout."""
    total: float
    cpu: float
    """Processor time."""
    output: str = ""
    """Its stdout."""


def run_batchgen(
    arguments: Sequence[str],
    folder: Path,
    *,
    kill_when: Callable[[], bool] | None = None,
    stderr: Path | None = None,
    start: Sequence[str] = ("-m", "batchgen"),
) -> CommandTimes:
    """Run `batchgen` in a fresh interpreter to its end and return its times.

    Args:
        arguments: command line after `batchgen`.
        folder: working directory.
        kill_when: the process is killed with SIGKILL as soon as this is true; None: it must exit with 0.
        stderr: the file that receives stderr; None: a temporary one.
        start: arguments of Python that start the command.

    Raises:
        CommandFailed: the process ended differently; with the last line of its stderr.
    """
    paths = (str(Path(batchgen.__file__).parents[1]), os.environ.get("PYTHONPATH"))
    # Options in the environment of this shell must not change what is measured.
    others = {name: value for name, value in os.environ.items() if not name.startswith("BATCHGEN_")}
    env = {**others, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    cpu, began = _children_seconds(), time.perf_counter()
    with stderr.open("w+", errors="replace") if stderr else tempfile.TemporaryFile("w+", errors="replace") as log:
        command = [sys.executable, *start, *arguments]
        with subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            assert process.stdout is not None
            try:
                while kill_when is not None and process.poll() is None:
                    if kill_when():
                        process.kill()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(0.01)
                output = process.stdout.readline()
                first = time.perf_counter() - began
                output += process.stdout.read()
            except BaseException:
                process.kill()
                raise
        total = time.perf_counter() - began
        if process.returncode != (0 if kill_when is None else -signal.SIGKILL):
            log.seek(0)
            lines = log.read().strip().splitlines() if process.returncode else ["it ended before it could be killed"]
            last = lines[-1] if lines else f"exit code {process.returncode}"
            raise CommandFailed(f"batchgen {' '.join(arguments)} failed: {last}")
    return CommandTimes(first, total, _children_seconds() - cpu, output)


def _children_seconds() -> float:
    """Processor time of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _line(
    workload: str, metric: str, unit: str, values: Sequence[float], cpu: Sequence[float] | None = None
) -> dict[str, Any]:
    """The JSON line of repeated measurements, rounded to three decimals; `cpu` are seconds of whole processes."""
    return {
        "workload": workload,
        "metric": metric,
        "value": round(median(values), 3),
        "unit": unit,
        "min": round(min(values), 3),
        "max": round(max(values), 3),
        "cpu_seconds": None if cpu is None else round(median(cpu), 3),
        "repeat": len(values),
        **machine(),
    }


_ROW: Final = {"text": "Sort in ascending order: 3, 1, 2", "max_new_tokens": 8, "temperature": 0, "stream": True}


def startup_lines(repeat: int) -> Iterator[dict[str, Any]]:
    """Measure the start of the command and return the JSON line of each metric. A first start warms the disk cache.

    The metrics `help_seconds`, `first_token_seconds` and `run_seconds` are wall-clock times from the process's start.

    Raises:
        CommandFailed: a process failed.
    """
    helps, runs = [], []
    with tempfile.TemporaryDirectory(prefix="batchgen-start-") as scratch:
        folder = Path(scratch)
        (folder / "row.jsonl").write_text(json.dumps(_ROW) + "\n", encoding="utf-8")
        for number in range(repeat + 1):
            helps.append(run_batchgen(["--help"], folder))
            run = ["run", "row.jsonl", "-o", f"{number}.parquet", "--events", "-", "--progress", "none"]
            runs.append(run_batchgen(run, folder))
    del helps[0], runs[0]
    yield _line("startup", "help_seconds", "s", [one.total for one in helps], [one.cpu for one in helps])
    yield _line("startup", "first_token_seconds", "s", [one.first for one in runs])
    yield _line("startup", "run_seconds", "s", [one.total for one in runs], [one.cpu for one in runs])


JOB_ROWS: Final = 2048
JOB_METRICS: Final = (
    "reading", "planning", "writing", "resuming", "between_steps", "model", "rows_over_model", "steps_over_model"
)  # fmt: skip
"""Metrics in order. All but the last two are wall-clock microseconds per row:

- `reading`: parsing, checking and tokenising, and waiting for the model, which loads meanwhile.
- `planning`: prefix tree and page counts.
- `writing`: passing finished rows to the writer while no step runs, and the final merge. The least of all jobs of each
  size, because they wait for the disk, which other programs delay by more than all rows cost.
- `resuming`: reading and planning in a resumed job, including the committed rows.
- `between_steps`: part of generating that is neither the model nor writing: step plans, finished rows, completions.
- `model`: part of generating spent in the model, its head and the sampler.
- `rows_over_model`: sum of the first four, as a percentage of `model`.
- `steps_over_model`: `between_steps`, as a percentage of `model`.
"""
_TWO_ROWS: Final = (
    {"text": "a", "max_new_tokens": 1},
    {"text": "b", "max_new_tokens": 400, "ignore_eos": True},
)
"""A row that is committed immediately, and one that runs long enough for the job to be killed."""
_MAX_PARTS: Final = 16
"""Largest number of parts in which the killed job commits its rows."""
_MIN_SMALL_JOBS: Final = 3
"""Number of runs of the small jobs; the median hides single runs that waited for the disk."""

Spent = Mapping[str, float]
"""Phase of a job -> microseconds."""


def job_lines(repeat: int, count: int = JOB_ROWS) -> Iterator[dict[str, Any]]:
    """Measure jobs of `count` rows and return the JSON line of each metric. A first job warms the disk cache.

    Raises:
        CommandFailed: a process failed, or a resumed job found no committed rows.
    """
    one_row, two_rows, full, resumed = [], [], [], []
    with tempfile.TemporaryDirectory(prefix="batchgen-job-") as scratch:
        folder = Path(scratch)
        rows = list(task_rows("heldout", count))
        for name, chosen in (("one", rows[:1]), ("two", _TWO_ROWS), ("all", rows)):
            write_rows(folder / f"{name}.jsonl", chosen)
        _run(folder, "one", "warm")
        for number in range(max(repeat, _MIN_SMALL_JOBS)):
            one_row.append(_run(folder, "one", f"one-{number}"))
            two_rows.append(_killed_and_resumed(folder, "two", f"two-{number}", len(_TWO_ROWS)))
            if number < repeat:
                full.append(_run(folder, "all", f"all-{number}"))
                resumed.append(_killed_and_resumed(folder, "all", f"again-{number}", count))
    # The time of imports varies by more than all rows cost, so the fixed cost is a median over the repeats.
    one, two = ({name: median(run[name] for run in runs) for name in runs[0]} for runs in (one_row, two_rows))
    one["writing"], writing = (min(run["writing"] for run in runs) for runs in (one_row, full))
    costs = [
        _costs(one, two, {**job, "writing": writing}, again, count) for job, again in zip(full, resumed, strict=True)
    ]
    for metric in JOB_METRICS:
        yield _line("job", metric, "%" if "_over_" in metric else "us/row", [cost[metric] for cost in costs])


def ids_lines(repeat: int, count: int = 8192) -> Iterator[dict[str, Any]]:
    """Measure reading and planning of `count` rows of 1,964 ids by `check`; a first one warms the disk cache.

    The metric `us_per_row` is the processor time of a row in microseconds.

    Raises:
        CommandFailed: a process failed.
    """
    draw, costs = random.Random(0), []
    shared, *own = ([draw.randrange(4, 200) for _ in range(size)] for size in (1900, *[64] * count))
    with tempfile.TemporaryDirectory(prefix="batchgen-ids-") as scratch:
        folder = Path(scratch)
        write_rows(folder / "all.jsonl", ({"input_ids": shared + ids} for ids in own))
        write_rows(folder / "one.jsonl", [{"input_ids": shared}])
        run_batchgen(["check", "one.jsonl"], folder)
        for _ in range(repeat):
            one, every = (run_batchgen(["check", f"{name}.jsonl"], folder).cpu for name in ("one", "all"))
            costs.append(1e6 * (every - one) / (count - 1))
    yield _line("ids", "us_per_row", "us/row", costs)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write input rows as JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _command(name: str, out: str, options: Sequence[str]) -> list[str]:
    return ["run", f"{name}.jsonl", "-o", f"{out}.parquet", "--progress", "none", *options]


def _run(folder: Path, name: str, out: str, options: Sequence[str] = ()) -> dict[str, float]:
    """Run a job and return the microseconds of each phase, from its report."""
    file = folder / f"{out}.json"
    run_batchgen(_command(name, out, ["--report", file.name, *options]), folder)
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if report["rows_error"]:
        raise CommandFailed(f"{report['rows_error']} of {report['rows']} rows of the demonstration failed")
    engine, spent = report["engine"], {phase: 1e6 * seconds for phase, seconds in report["seconds"].items()}
    spent["reading"] += spent.pop("loading")  # loading runs in parallel; jobs of few rows wait for it
    spent["model"] = 1e3 * (engine["compute_ms"] + engine["overlapped_compute_ms"])
    spent["writing"] += 1e3 * engine["output_ms"]
    spent["between_steps"] = 1e3 * (engine["host_ms"] - engine["output_ms"])
    return {**spent, "rows_resumed": report["rows_resumed"]}


def _killed_and_resumed(folder: Path, name: str, out: str, count: int) -> dict[str, float]:
    """Run a job, kill it after half of its rows are committed, resume it, and return the times of the resumed run."""
    options = ["--commit-every", str(max(1, count // _MAX_PARTS))]
    run_half(folder, _command(name, out, options), f"{out}.parquet", count)
    spent = _run(folder, name, out, options)
    if not spent["rows_resumed"]:
        raise CommandFailed(f"batchgen run resumed none of {count} rows of a job that was killed after half of them")
    return spent


def run_half(folder: Path, command: Sequence[str], output: str, count: int) -> None:
    """Run a job of `count` rows in `folder`, and kill it once half of its rows are committed to `output`.

    Raises:
        CommandFailed: it ended before.
    """
    parts = folder / f"{output}.work" / "parts"

    def half_committed() -> bool:  # counts rows, not parts, because a late writer puts more rows into a part
        try:
            return 2 * sum(int(pq.read_metadata(part).num_rows) for part in parts.glob("part-*.parquet")) >= count
        except OSError:  # the job has finished and removed its parts
            return False

    run_batchgen(command, folder, kill_when=half_committed)


def _costs(one: Spent, two: Spent, full: Spent, resumed: Spent, rows: int) -> dict[str, float]:
    """Metric -> value, from jobs of one row and of all, and resumed jobs of two rows and of all."""
    phases = ("reading", "planning", "writing", "between_steps", "model")
    cost = {phase: (full[phase] - one[phase]) / (rows - 1) for phase in phases}
    cost["resuming"] = sum(resumed[phase] - two[phase] for phase in ("reading", "planning")) / (rows - 2)
    cost["rows_over_model"] = 100 * sum(cost[metric] for metric in JOB_METRICS[:4]) / cost["model"]
    cost["steps_over_model"] = 100 * cost["between_steps"] / cost["model"]
    return cost
