"""`batchgen bench job`: what a row costs beside the model, in whole jobs of the demonstration model.

Each repeat is six runs of the command: a job of one row, whose times are what any job pays; the job of all rows; that
one again, killed once half of its rows are committed, and taken up where it stopped; and the same with a job of two
rows, whose times are what any job pays that is taken up. What a job of all rows takes beyond those, over its further
rows, is what a row costs. The small jobs run three times even where one repeat is asked for.
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

- `reading`: parsing, checking and tokenising, with what is left to wait for of the model that is loaded meanwhile.
- `planning`: prefix tree and pages.
- `writing`: handing finished rows to the writer while the steps wait, and gathering the results in the end.
- `resuming`: reading and planning again in a job that was killed, with what it had committed.
- `between_steps`: of generating, what is neither the model nor writing: plans of steps, ends of rows, completions.
- `model`: of generating, the model, its head and the draws, as if all threads had computed all of it.
- `rows_over_model`: the first four together as per cent of `model`.
- `steps_over_model`: `between_steps` as per cent of `model`.
"""

_TWO: Final = (
    {"text": "a", "max_new_tokens": 1},
    {"text": "b", "max_new_tokens": 400, "ignore_eos": True},
)
"""A row that is committed at once, and one that runs long enough to be killed meanwhile."""
_COMMITS: Final = 16
"""Parts, or fewer, in which the job that is killed commits its rows."""
_SMALL_JOBS: Final = 3
"""Times that a job of one or two rows runs at least: one that waited for the disk would cost more than all rows do."""


def run_job_bench(repeat: int, emit: Callable[[str], None], count: int = JOB_ROWS) -> list[CommandFigure]:
    """Measure jobs of `count` rows, after one that fills the caches of the disk; one JSON line a figure to `emit`.

    Raises:
        CommandFailed: a process did, or none of its rows were kept when it was killed.
    """
    ones, twos, wholes, agains = [], [], [], []
    with tempfile.TemporaryDirectory(prefix="batchgen-job-") as scratch:
        folder = Path(scratch)
        rows = list(task_rows("heldout", count))
        for name, chosen in (("one", rows[:1]), ("two", _TWO), ("all", rows)):
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        _run(folder, "one", "warm")
        for number in range(max(repeat, _SMALL_JOBS)):
            ones.append(_run(folder, "one", f"one-{number}"))
            twos.append(_resumed(folder, "two", f"two-{number}", len(_TWO)))
            if number >= repeat:
                continue
            wholes.append(_run(folder, "all", f"all-{number}"))
            agains.append(_resumed(folder, "all", f"again-{number}", count))
    # One start's imports take longer than another's by more than all rows do: the median of them is what any job pays.
    one, two = _medians(ones), _medians(twos)
    costs = [_costs(one, two, whole, again, count) for whole, again in zip(wholes, agains, strict=True)]
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
    spent["model"] = 1e3 * (told["engine"]["compute_milliseconds"] + told["engine"]["beside_milliseconds"])
    spent["writing"] += 1e3 * told["engine"]["output_milliseconds"]
    spent["between_steps"] = 1e3 * (told["engine"]["host_milliseconds"] - told["engine"]["output_milliseconds"])
    spent["rows_resumed"] = told["rows_resumed"]
    return spent


def _resumed(folder: Path, name: str, out: str, count: int) -> Mapping[str, float]:
    """The run that goes on after one that was killed half way."""
    options = ["--commit-every", str(max(1, count // _COMMITS))]
    parts = folder / f"{out}.parquet.work" / "parts"

    def half_way() -> bool:  # by rows: a writer that was kept waiting puts more of them into a part
        try:
            return 2 * sum(int(pq.read_metadata(part).num_rows) for part in parts.glob("part-*.parquet")) >= count
        except OSError:  # the job has just ended, and removed its parts
            return False

    with fresh_command(_command(name, out, options), folder, killed=True) as process:
        run_until(half_way, process)
        process.communicate()
    spent = _run(folder, name, out, options)
    if not spent["rows_resumed"]:
        raise CommandFailed(f"batchgen run resumed none of {count} rows of a job that was killed half way")
    return spent


def _command(name: str, out: str, options: Sequence[str]) -> list[str]:
    return ["run", f"{name}.jsonl", "-o", f"{out}.parquet", "--progress", "none", *options]


def _medians(runs: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    return {name: median(run[name] for run in runs) for name in runs[0]}


def _costs(
    one: Mapping[str, float],
    two: Mapping[str, float],
    whole: Mapping[str, float],
    again: Mapping[str, float],
    rows: int,
) -> Mapping[str, float]:
    """By metric, from microseconds of the jobs of one row and of all, and of those of two rows and of all, taken up."""
    cost = {phase: (whole[phase] - one[phase]) / (rows - 1) for phase in ("reading", "planning", "writing")}
    cost["resuming"] = sum(again[phase] - two[phase] for phase in ("reading", "planning")) / (rows - 2)
    steps, model = ((whole[phase] - one[phase]) / (rows - 1) for phase in ("between_steps", "model"))
    shares = {"rows_over_model": 100 * sum(cost.values()) / model, "steps_over_model": 100 * steps / model}
    return {**cost, "between_steps": steps, "model": model, **shares}
