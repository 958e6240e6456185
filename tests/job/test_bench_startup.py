"""`batchgen bench startup`: three figures, each of whole processes; how long they are is the machine's affair."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchgen.cli.app import run_command
from batchgen.job.bench.fresh import CommandFailed, fresh_command


def test_three_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", "startup", "--repeat", "1"]) == 0
    found = {line["metric"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(found) == ["help_seconds", "first_token_seconds", "run_seconds"]
    for line in found.values():
        assert line["workload"] == "startup"
        assert line["repeat"] == 1
        assert 0 < line["min"] == line["value"] == line["max"]
    assert found["help_seconds"]["value"] < found["first_token_seconds"]["value"] < found["run_seconds"]["value"]
    assert found["first_token_seconds"]["cpu_seconds"] is None
    assert found["help_seconds"]["cpu_seconds"] < found["run_seconds"]["cpu_seconds"]


def test_a_process_that_fails_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(CommandFailed, match=r"batchgen show nowhere\.parquet failed: error: .*nowhere"),
        fresh_command(["show", "nowhere.parquet"], tmp_path),
    ):
        pass


def test_options_of_the_shell_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that no command takes would end each of them."""
    monkeypatch.setenv("BATCHGEN_NO_SUCH_OPTION", "1")
    monkeypatch.setenv("BATCHGEN_LIMIT", "1")
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n' * 3, encoding="utf-8")
    with fresh_command(["check", "in.jsonl", "--json"], tmp_path) as process:
        said, _ = process.communicate()
    assert json.loads(said)["rows"] == 3


def test_sigterm_ends_a_bench_and_takes_its_files_along(tmp_path: Path) -> None:
    """The planner's token ids may be gigabytes in the folder for temporary files."""
    arguments = [sys.executable, "-m", "batchgen", "bench", "plan", "--plan-size", "200000x50"]
    process = subprocess.Popen(
        arguments,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not any(tmp_path.iterdir()):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 143
    assert told.splitlines()[-1].startswith("error: ended by SIGTERM")
    assert list(tmp_path.iterdir()) == []
