"""Large jobs: `python -m tests.e2e.load [JOB...] > configs/bench/results/load-MACHINE.jsonl`, a JSON line per job.

Shows that nothing grows: the memory of the process, its open files, and the time of a row. All jobs but `demo-rows` run
the instant model (`tests.e2e.instant`), so that what is measured is everything around a model. The jobs take from one
minute to half an hour each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from batchgen.bench.machine import commit_name, cpu_name
from batchgen.library_settings import processors

ROOT = Path(__file__).parents[2]
INSTANT, REAL = "tests.e2e.instant", "batchgen"
SAMPLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class LoadJob:
    """A large job."""

    name: str
    description: str
    write: Callable[[Path], Sequence[str]]
    """Writes the input into a folder; returns the arguments of `run`."""
    rows: int
    """Rows of the output."""
    module: str = INSTANT


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of the process at one moment."""

    seconds: float
    """Since its start."""
    processor_seconds: float
    anonymous: int
    """Bytes of memory that belong to no file."""
    resident: int
    """Bytes of memory, mapped files included."""
    handles: int
    """Open files."""


@dataclass(frozen=True, slots=True)
class LoadFigure:
    """What a job took. Rates are rows per processor second of the generating phase, which other programs on the
    machine change less than those per second."""

    workload: str
    job: str
    description: str
    rows: int
    seconds: dict[str, float]
    """By phase."""
    finish_share: float
    """Seconds of writing the output, relative to all, in per cent."""
    rate_first_tenth: float
    rate_last_tenth: float
    peak_anonymous_bytes: int
    peak_resident_bytes: int
    handles_first_half: int
    """Most open files in the first half of the samples."""
    handles_last_half: int
    output_bytes: int
    processors: int
    cpu: str
    commit: str | None


def _lines(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(f"{json.dumps(row)}\n" for row in rows)


def _short(count: int) -> Callable[[Path], Sequence[str]]:
    def write(folder: Path) -> Sequence[str]:
        tail = {"ignore_eos": True}
        _lines(
            folder / "rows.jsonl",
            (
                {"id": f"r{i}", "text": f"Row {i * 7919 % count} says hello", "max_new_tokens": 1 + i % 2, **tail}
                for i in range(count)
            ),
        )
        return ("rows.jsonl",)

    return write


def _grammars(count: int) -> Callable[[Path], Sequence[str]]:
    def write(folder: Path) -> Sequence[str]:
        _lines(
            folder / "rows.jsonl",
            (
                {
                    "text": "Answer in JSON:",
                    "max_new_tokens": 3,
                    "json_schema": {"type": "object", "properties": {f"name{i}": {"type": "integer"}}},
                }
                for i in range(count)
            ),
        )
        return ("rows.jsonl",)

    return write


def _files(files: int, each: int) -> Callable[[Path], Sequence[str]]:
    def write(folder: Path) -> Sequence[str]:
        (folder / "rows").mkdir()
        for number in range(files):
            rows = ({"text": f"File {number}, row {i}", "max_new_tokens": 2} for i in range(each))
            _lines(folder / "rows" / f"{number:05}.jsonl", rows)
        return ("rows",)

    return write


def _samples(count: int) -> Callable[[Path], Sequence[str]]:
    def write(folder: Path) -> Sequence[str]:
        _lines(folder / "rows.jsonl", iter([{"text": "Once", "n": count, "max_new_tokens": 4, "temperature": 1.0}]))
        return ("rows.jsonl",)

    return write


JOBS = (
    LoadJob("samples", "one row with 100,000 samples", _samples(100_000), 100_000),
    LoadJob("files", "2,000 files of 100 rows", _files(2_000, 100), 200_000),
    LoadJob("grammars", "50,000 rows, each with another JSON schema", _grammars(50_000), 50_000),
    LoadJob("demo-rows", "200,000 short rows of the demonstration model", _short(200_000), 200_000, REAL),
    LoadJob("short-rows", "5,000,000 short rows", _short(5_000_000), 5_000_000),
)


def sample(process: int, began: float) -> Sample | None:
    """The state of a process that was started at `began`; None when it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        handles = len(os.listdir(f"/proc/{process}/fd"))  # noqa: PTH208
    except OSError:
        return None
    values = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmRSS" not in values:
        return None
    anonymous, resident = (int(values[name].split()[0]) * 1024 for name in ("RssAnon", "VmRSS"))
    return Sample(time.monotonic() - began, used, anonymous, resident, handles)


def run(job: LoadJob, folder: Path) -> LoadFigure:
    """Run a job in a folder and check its output.

    Raises:
        RuntimeError: the command failed, or rows are missing.
    """
    files = job.write(folder)
    words = ["run", *files, "-o", "out.parquet", "--device", "cpu", "--progress", "json", "--report", "report.json"]
    command = [sys.executable, "-m", job.module, *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    samples: list[Sample] = []
    with (folder / "log.txt").open("wb") as log:
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)
        while process.poll() is None:
            found = sample(process.pid, began)
            if found is not None:
                samples.append(found)
            time.sleep(SAMPLE_SECONDS)
    text = (folder / "log.txt").read_text(encoding="utf-8")
    if process.returncode:
        raise RuntimeError(f"{job.name} ended with {process.returncode}: {text[-2000:]}")
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    rows = pq.ParquetFile(folder / "out.parquet").metadata.num_rows
    if (rows, report["rows_error"]) != (job.rows, 0):
        raise RuntimeError(f"{job.name}: {rows} rows instead of {job.rows}, {report['errors']}")
    first, last = _rates(text, samples)
    seconds = report["seconds"]
    middle = len(samples) // 2
    return LoadFigure(
        workload="load",
        job=job.name,
        description=job.description,
        rows=rows,
        seconds=seconds,
        finish_share=round(100 * seconds["writing"] / sum(seconds.values()), 2),
        rate_first_tenth=round(first),
        rate_last_tenth=round(last),
        peak_anonymous_bytes=max(x.anonymous for x in samples),
        peak_resident_bytes=max(x.resident for x in samples),
        handles_first_half=max(x.handles for x in samples[: middle + 1]),
        handles_last_half=max(x.handles for x in samples[middle:]),
        output_bytes=(folder / "out.parquet").stat().st_size,
        processors=processors(),
        cpu=cpu_name(),
        commit=commit_name(),
    )


def _rates(log: str, samples: Sequence[Sample]) -> tuple[float, float]:
    """Rows per processor second in the first and in the last tenth of the generating phase's rows."""
    lines = [json.loads(line) for line in log.splitlines() if line.startswith('{"phase"') or '"phase":' in line[:40]]
    points = [(x["rows_done"], x["seconds"]) for x in lines if x["phase"] in ("generating", "writing")]
    points = [point for at, point in enumerate(points) if not at or point[0] > points[at - 1][0]]
    rows, seconds = (np.array(values, np.float64) for values in zip(*points, strict=True))
    used = np.interp(seconds, [x.seconds for x in samples], [x.processor_seconds for x in samples])
    tenths = np.interp(np.linspace(rows[0], rows[-1], 11), rows, used)
    tenth = (rows[-1] - rows[0]) / 10
    return tuple(tenth / max(tenths[end] - tenths[end - 1], 1e-9) for end in (1, 10))


def main(words: Sequence[str]) -> int:
    """Run the named jobs, or all."""
    names = [job.name for job in JOBS]
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.load", description="Large jobs, a JSON line for each.")
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"{', '.join(names)}; all by default")
    chosen = parser.parse_args(words).jobs or names
    if unknown := set(chosen) - set(names):
        parser.error(f"unknown jobs: {', '.join(sorted(unknown))}")
    for job in JOBS:
        if job.name in chosen:
            with tempfile.TemporaryDirectory(prefix="batchgen-load-") as scratch:
                print(json.dumps(asdict(run(job, Path(scratch)))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
