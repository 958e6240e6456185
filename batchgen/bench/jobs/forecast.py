"""`batchgen bench forecast`: what `batchgen plan` predicts of whole jobs, against the time that they take.

A pilot job of each model measures the machine: its report is the machine file of the other jobs. Processes compute with
one thread, and all their clocks are that of their processor time, as in `bench eta`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from batchgen.bench.jobs.commands import run_batchgen, write_rows
from batchgen.bench.jobs.eta import ETA_JOBS, RUN_OPTIONS, START, EtaJob, Row, random_rows
from batchgen.bench.machine import machine
from batchgen.bench.shapes import resolve_bench_model
from batchgen.bench.workloads import Level

_JOBS: Final = tuple(job for job in ETA_JOBS if not job.resumed)
_PILOTS: Final = (
    random_rows(240, (8, 64), (16, 256)),
    random_rows(60, (600, 1500), (8, 64)),
    random_rows(240, (16, 64), (32, 128), Level(1, (700, 700))),
    random_rows(4, (16, 64), (900, 900)),
)
"""Rows of the pilot: of each kind, as many as take seconds. The last ones run alone at the end."""


def forecast_lines(jobs: Sequence[EtaJob] = _JOBS) -> Iterator[dict[str, Any]]:
    """Run each job once, after it was planned, and return its JSON line. `seconds` are those of the whole command.

    Raises:
        CommandFailed: a command failed.
    """
    with tempfile.TemporaryDirectory(prefix="batchgen-forecast-") as scratch:
        folder = Path(scratch)
        for model in dict.fromkeys(job.model for job in jobs):
            rng = np.random.default_rng(1000)
            _run(folder, model, "pilot", list(chain.from_iterable(rows(rng) for rows in _PILOTS)))
            for number, job in enumerate(jobs):
                if job.model == model:
                    yield _line(folder, job, list(job.rows(np.random.default_rng(number))))


def _line(folder: Path, job: EtaJob, rows: Sequence[Row]) -> dict[str, Any]:
    write_rows(folder / f"{job.name}.jsonl", rows)
    plan = [f"{job.name}.jsonl", "--machine", "pilot.json", "--devices", "1", "--json"]
    command = ["plan", *plan, "--model", resolve_bench_model(job.model), *RUN_OPTIONS, *job.options]
    figures: dict[str, Any] = json.loads(run_batchgen(command, folder).output)
    forecast = figures["devices"][0]
    seconds = _run(folder, job.model, job.name, rows, job.options)
    return {
        "workload": "forecast",
        "job": job.name,
        "model": job.model,
        "description": job.description,
        "rows": len(rows),
        "seconds": round(seconds, 1),
        "predicted": round(forecast["seconds"], 1),
        "low": round(forecast["seconds_min"], 1),
        "high": round(forecast["seconds_max"], 1),
        "error": round(100.0 * (forecast["seconds"] / seconds - 1.0), 1),
        "in_range": forecast["seconds_min"] <= seconds <= forecast["seconds_max"],
        "limited_by": forecast["limited_by"],
        **machine(),
    }


def _run(folder: Path, model: str, name: str, rows: Sequence[Row], options: Sequence[str] = ()) -> float:
    """Run a job; returns the processor seconds of the command."""
    write_rows(folder / f"{name}.jsonl", rows)
    command = ["run", f"{name}.jsonl", "-o", f"{name}.parquet", "--overwrite", "--report", f"{name}.json"]
    command += ["--model", resolve_bench_model(model), *RUN_OPTIONS, *options]
    return run_batchgen(command, folder, start=("-c", START)).cpu
