"""`batchgen bench job`: cost of a row outside the model, in whole jobs of the demonstration model.

A repeat is six runs of the command: a job of one row; a job of all rows; the same job killed after half of its rows
are committed, then resumed; and a job of two rows, killed and resumed as well. The jobs of one and two rows measure the
fixed cost of a job and of a resumed job. A row's cost is the additional time of the job of all rows divided by its
additional rows. The small jobs run at least three times.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import pyarrow.parquet as pq

from batchgen.bench.demo_tasks.tasks import rows as task_rows
from batchgen.bench.subprocess_timing import CommandFailed, CommandFigure, batchgen_process, command_figure, kill_when

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


def run_job_bench(repeat: int, emit: Callable[[str], None], count: int = JOB_ROWS) -> list[CommandFigure]:
    """Measure jobs of `count` rows and pass one JSON line per figure to `emit`. A first job warms the disk cache.

    Raises:
        CommandFailed: a process failed, or a resumed job found no committed rows.
    """
    one_row_jobs, two_row_jobs, full_jobs, resumed_jobs = [], [], [], []
    with tempfile.TemporaryDirectory(prefix="batchgen-job-") as scratch:
        folder = Path(scratch)
        rows = list(task_rows("heldout", count))
        for name, chosen in (("one", rows[:1]), ("two", _TWO_ROWS), ("all", rows)):
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        _run(folder, "one", "warm")
        for number in range(max(repeat, _MIN_SMALL_JOBS)):
            one_row_jobs.append(_run(folder, "one", f"one-{number}"))
            two_row_jobs.append(_killed_and_resumed(folder, "two", f"two-{number}", len(_TWO_ROWS)))
            if number >= repeat:
                continue
            full_jobs.append(_run(folder, "all", f"all-{number}"))
            resumed_jobs.append(_killed_and_resumed(folder, "all", f"again-{number}", count))
    # The time of imports varies by more than all rows cost, so the fixed cost is a median over the repeats.
    one, two = _medians(one_row_jobs) | _least_writing(one_row_jobs), _medians(two_row_jobs)
    full_jobs = [job | _least_writing(full_jobs) for job in full_jobs]
    costs = [_costs(one, two, full, resumed, count) for full, resumed in zip(full_jobs, resumed_jobs, strict=True)]
    units = dict.fromkeys(JOB_METRICS[:6], "us/row") | dict.fromkeys(JOB_METRICS[6:], "%")
    figures = [command_figure("job", metric, units[metric], [cost[metric] for cost in costs]) for metric in JOB_METRICS]
    for figure in figures:
        emit(figure.to_json())
    return figures


def _run(folder: Path, name: str, out: str, options: Sequence[str] = ()) -> dict[str, float]:
    """Run a job and return the microseconds of each phase, from its report."""
    report = folder / f"{out}.json"
    with batchgen_process(_command(name, out, ["--report", report.name, *options]), folder) as process:
        process.communicate()
    report_values: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    if report_values["rows_error"]:
        raise CommandFailed(
            f"{report_values['rows_error']} of {report_values['rows']} rows of the demonstration failed"
        )
    spent = {phase: 1e6 * seconds for phase, seconds in report_values["seconds"].items()}
    spent["reading"] += spent.pop("loading")  # loading runs in parallel; jobs of few rows wait for it
    spent["model"] = 1e3 * (report_values["engine"]["compute_ms"] + report_values["engine"]["overlapped_compute_ms"])
    spent["writing"] += 1e3 * report_values["engine"]["output_ms"]
    spent["between_steps"] = 1e3 * (report_values["engine"]["host_ms"] - report_values["engine"]["output_ms"])
    spent["rows_resumed"] = report_values["rows_resumed"]
    return spent


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

    with batchgen_process(command, folder, killed=True) as process:
        kill_when(half_committed, process)
        process.communicate()


def _command(name: str, out: str, options: Sequence[str]) -> list[str]:
    return ["run", f"{name}.jsonl", "-o", f"{out}.parquet", "--progress", "none", *options]


def _medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(run[name] for run in runs) for name in runs[0]}


def _least_writing(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {"writing": min(run["writing"] for run in runs)}


def _costs(
    one: Mapping[str, float],
    two: Mapping[str, float],
    full: Mapping[str, float],
    resumed: Mapping[str, float],
    rows: int,
) -> Mapping[str, float]:
    """Metric -> value.

    Args:
        one: microseconds of each phase of a job of one row.
        two: the same for a resumed job of two rows.
        full: the same for a job of all rows.
        resumed: the same for a resumed job of all rows.
        rows: number of rows of the job of all rows.
    """
    cost = {phase: (full[phase] - one[phase]) / (rows - 1) for phase in ("reading", "planning", "writing")}
    cost["resuming"] = sum(resumed[phase] - two[phase] for phase in ("reading", "planning")) / (rows - 2)
    steps, model = ((full[phase] - one[phase]) / (rows - 1) for phase in ("between_steps", "model"))
    shares = {"rows_over_model": 100 * sum(cost.values()) / model, "steps_over_model": 100 * steps / model}
    return {**cost, "between_steps": steps, "model": model, **shares}
