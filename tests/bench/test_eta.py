"""`batchgen bench eta`: what it makes of progress lines, and that a job shows them. Tests no times."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from batchgen.bench.jobs import eta
from batchgen.bench.jobs.commands import CommandFailed, CommandTimes
from batchgen.bench.jobs.eta import ETA_JOBS, EtaJob, eta_lines, read_lines
from batchgen.request.rows.parser import RowDefaults, parse_row
from tests.e2e.runner import run


def line(phase: str, seconds: float, rows_done: int = 0, left: float | None = None) -> str:
    ends = {} if left is None else {"eta_seconds_min": left - 3, "eta_seconds_max": left + 3}
    values = {"eta_seconds_min": None, "eta_seconds_max": None, **ends, "eta_seconds": left}
    return json.dumps({"phase": phase, "seconds": seconds, "rows": 100, "rows_done": rows_done, **values})


LOG = [
    "a warning of a library",
    json.dumps({"note": "hello"}),
    line("reading", 1.0),
    line("generating", 2.0, 50),
    line("generating", 3.0, 50, 500.0),  # before 5 %
    line("generating", 7.0, 60, 99.75),  # 5 more than were left
    line("generating", 52.0, 75, 45.0),  # 5 less
    line("generating", 77.0, 80, 30.0),  # 5 more: a fifth
    line("generating", 100.0, 99, 9.0),  # after 95 %
    line("writing", 102.0, 100, 0.0),
]


def test_errors_are_relative_to_the_time_that_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def command(arguments: list[str], folder: Path, *, stderr: Path, start: object) -> CommandTimes:
        commands.append(arguments)
        stderr.write_text("\n".join(LOG))
        return CommandTimes(1.0, 4.0, 3.0)

    monkeypatch.setattr(eta, "run_batchgen", command)
    job = EtaJob("plain", "two rows", lambda rng: [{"text": "a"}, {"text": "b"}], model="demo", options=("--seed", "3"))
    (line,) = eta_lines(2, [job])
    assert (line["job"], line["rows"], line["seconds"], line["repeat"]) == ("plain", 2, 100.0, 2)
    assert line["errors"] == {"5": 5.0, "10": -10.0, "25": -10.0, "50": -10.0, "75": 20.0, "90": None}
    assert (line["worst_error"], line["worst_of_all"], line["processor_share"]) == (20.0, 20.0, 0.75)
    assert (line["lines"], line["within_10_percent"]) == (6, 66.7)
    # 30 rows in 75 seconds and 20 left: 50 seconds instead of 25.
    assert line["by_rows_worst_error"] == 100.0
    assert line["in_range"] == 0.0
    assert len(commands) == 2
    assert all(arguments[-2:] == ["--seed", "3"] for arguments in commands)


def test_a_run_without_a_generating_phase_is_an_error() -> None:
    with pytest.raises(CommandFailed, match="no progress of its generating phase"):
        read_lines([line("starting", 0.1), line("writing", 0.2)])


def test_the_commands_progress_is_what_is_read(tmp_path: Path) -> None:
    rows = [{"text": "Sort: 3, 1, 2", "max_new_tokens": 40, "ignore_eos": True} for _ in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(["run", "rows.jsonl", "--progress", "json"], tmp_path)
    found, seconds = read_lines(done.stderr.splitlines())
    assert done.code == 0
    assert found
    assert seconds > 0


@pytest.mark.parametrize("job", ETA_JOBS, ids=lambda job: job.name)
def test_the_lengths_of_every_jobs_rows_are_given(job: EtaJob) -> None:
    rows = list(job.rows(np.random.default_rng(0)))
    assert rows == list(job.rows(np.random.default_rng(0))), "the same rows in every run"
    for row in rows[:20]:
        if row == {"text": 5}:
            continue
        params = parse_row(row, 0, RowDefaults()).params
        assert "completions" in row or params.ignore_eos
