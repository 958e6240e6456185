"""`batchgen bench forecast`: what it makes of a forecast and the seconds of the command. Tests no times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchgen.bench.jobs import forecast
from batchgen.bench.jobs.commands import CommandTimes
from batchgen.bench.jobs.eta import EtaJob
from batchgen.bench.jobs.forecast import forecast_lines


def test_a_forecast_is_compared_with_the_seconds_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    one = {"seconds": 12.0, "seconds_min": 9.0, "seconds_max": 14.0, "limited_by": "steps"}

    def command(arguments: list[str], folder: Path, *, start: object = None) -> CommandTimes:
        commands.append(arguments)
        assert (folder / f"{arguments[1]}").exists()
        return CommandTimes(1.0, 4.0, 10.0, json.dumps({"devices": [one]}) if arguments[0] == "plan" else "")

    monkeypatch.setattr(forecast, "run_batchgen", command)
    rows = [{"text": "a"}, {"text": "b"}]
    jobs = [EtaJob("one", "two rows", lambda rng: rows, "demo", ("--seed", "3")), EtaJob("two", "", lambda rng: rows)]
    first, second = forecast_lines(jobs)
    assert (first["job"], first["rows"], first["seconds"], first["predicted"]) == ("one", 2, 10.0, 12.0)
    assert (first["low"], first["high"], first["error"], first["in_range"]) == (9.0, 14.0, 20.0, True)
    assert (second["model"], second["limited_by"]) == ("random:5m", "steps")
    # A pilot of each model, then the plan and the run of its job.
    assert [words[1] for words in commands] == ["pilot.jsonl", *["one.jsonl"] * 2, "pilot.jsonl", *["two.jsonl"] * 2]
    assert all(words[-2:] == ["--seed", "3"] for words in commands[1:3])
