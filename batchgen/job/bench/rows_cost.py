"""`batchgen bench job`: what a row costs beside the model, in whole jobs of the demonstration model.

Each repeat is four runs of the command: a job of one row, whose times are what any job pays; the job of all rows; the
same again, killed once half of its rows are committed; and that one taken up where it stopped. What the job of all rows
takes beyond those of one row, over its further rows, is what a row costs.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import pyarrow.parquet as pq

from batchgen.demo.tasks import rows as task_rows
from batchgen.job.bench.fresh import CommandFailed, CommandFigure, command_figure, fresh_command, run_until

__all__ = ["JOB_METRICS", "JOB_ROWS", "run_job_bench"]

JOB_ROWS: Final = 2048
JOB_METRICS: Final = (
    "reading", "planning", "writing", "resuming", "between_steps", "model", "rows_over_model", "steps_over_model"
)  # fmt: skip
"""Figures, in order. All but the last two are microseconds a row, by the wall clock:

- `reading`: parsing, checking and tokenising, beyond the time in which the model is loaded and any job waits.
- `planning`: prefix tree and pages.
- `writing`: handing finished rows to the writer while the steps wait, and gathering the results in the end.
- `resuming`: reading and planning again in a job that was killed, with what it had committed.
- `between_steps`: of generating, what is neither the model nor writing: plans of steps, ends of rows, completions.
- `model`: of generating, the model, its head and the draws.
- `rows_over_model`: the first four together as per cent of `model`.
- `steps_over_model`: `between_steps` as per cent of `model`.
"""

_COMMITS: Final = 16
"""Parts, or fewer, in which the job that is killed commits its rows."""


def run_job_bench(repeat: int, emit: Callable[[str], None], count: int = JOB_ROWS) -> list[CommandFigure]:
    """Measure jobs of `count` rows, after one that fills the caches of the disk; one JSON line a figure to `emit`.

    Raises:
        CommandFailed: a process did, or none of its rows were kept when it was killed.
    """
    ones, wholes, agains = [], [], []
    with tempfile.TemporaryDirectory(prefix="batchgen-job-") as scratch:
        folder = Path(scratch)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in task_rows("heldout", count)]
        (folder / "one.jsonl").write_text(lines[0], encoding="utf-8")
        (folder / "all.jsonl").write_text("".join(lines), encoding="utf-8")
        _run(folder, "one", "warm")
        for number in range(repeat):
            ones.append(_run(folder, "one", f"one-{number}"))
            wholes.append(_run(folder, "all", f"all-{number}"))
            agains.append(_resumed(folder, f"again-{number}", count))
    # One start's imports take longer than another's by more than all rows do: the median of them is what any job pays.
    any_job = {name: median(one[name] for one in ones) for name in ones[0]}
    costs = [_costs(any_job, whole, again, count - 1) for whole, again in zip(wholes, agains, strict=True)]
    units = dict.fromkeys(JOB_METRICS[:6], "us/row") | dict.fromkeys(JOB_METRICS[6:], "%")
    figures = [command_figure("job", metric, units[metric], [cost[metric] for cost in costs]) for metric in JOB_METRICS]
    for figure in figures:
        emit(figure.to_json())
    return figures


def _run(folder: Path, name: str, out: str, options: Sequence[str] = ()) -> Mapping[str, float]:
    """Microseconds by what they were spent on, from the report of a run."""
    report = folder / f"{out}.json"
    with fresh_command(_command(name, out, ["--report", report.name, *options]), folder) as process:
        process.communicate()
    told: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    if told["rows_error"]:
        raise CommandFailed(f"{told['rows_error']} of {told['rows']} rows of the demonstration failed")
    spent = {phase: 1e6 * seconds for phase, seconds in told["seconds"].items()}
    spent["reading"] += spent.pop("loading")  # which goes on meanwhile, and is waited for where there are few rows
    spent["model"] = 1e3 * told["engine"]["compute_milliseconds"]
    spent["writing"] += 1e3 * told["engine"]["output_milliseconds"]
    spent["between_steps"] = 1e3 * (told["engine"]["host_milliseconds"] - told["engine"]["output_milliseconds"])
    spent["rows_resumed"] = told["rows_resumed"]
    return spent


def _resumed(folder: Path, out: str, count: int) -> Mapping[str, float]:
    """The run that goes on after one that was killed half way."""
    options = ["--commit-every", str(max(1, count // _COMMITS))]
    parts = folder / f"{out}.parquet.work" / "parts"

    def half_way() -> bool:  # by rows: a writer that was kept waiting puts more of them into a part
        try:
            return 2 * sum(int(pq.read_metadata(part).num_rows) for part in parts.glob("part-*.parquet")) >= count
        except OSError:  # the job has just ended, and removed its parts
            return False

    with fresh_command(_command("all", out, options), folder, killed=True) as process:
        run_until(half_way, process)
        process.communicate()
    spent = _run(folder, "all", out, options)
    if not spent["rows_resumed"]:
        raise CommandFailed(f"batchgen run resumed none of {count} rows of a job that was killed half way")
    return spent


def _command(name: str, out: str, options: Sequence[str]) -> list[str]:
    return ["run", f"{name}.jsonl", "-o", f"{out}.parquet", "--progress", "none", *options]


def _costs(
    any_job: Mapping[str, float], whole: Mapping[str, float], again: Mapping[str, float], rows: int
) -> Mapping[str, float]:
    """By metric, from microseconds of jobs of one row and of `rows` more."""
    cost = {phase: (whole[phase] - any_job[phase]) / rows for phase in ("reading", "planning", "writing")}
    cost["resuming"] = sum(again[phase] - any_job[phase] for phase in ("reading", "planning")) / rows
    steps, model = ((whole[phase] - any_job[phase]) / rows for phase in ("between_steps", "model"))
    shares = {"rows_over_model": 100 * sum(cost.values()) / model, "steps_over_model": 100 * steps / model}
    return {**cost, "between_steps": steps, "model": model, **shares}
