"""`batchgen bench startup`: figures of whole processes. Tests no absolute times."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchgen.bench.subprocess_timing import CommandFailed, batchgen_process
from batchgen.cli.app import run_command


def test_startup_reports_three_metrics(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_the_error_names_the_failed_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options in the environment are ignored: an unknown variable would make the command fail with another error."""
    monkeypatch.setenv("BATCHGEN_NO_SUCH_OPTION", "1")
    with (
        pytest.raises(CommandFailed, match=r"batchgen check nowhere\.jsonl failed: error: .*nowhere"),
        batchgen_process(["check", "nowhere.jsonl"], tmp_path),
    ):
        pass


def test_sigterm_ends_the_benchmark_and_removes_its_files(tmp_path: Path) -> None:
    """The token ids in the folder for temporary files can be gigabytes."""
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
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert errors.splitlines()[-1].startswith("error: ended by SIGTERM")
    assert list(tmp_path.iterdir()) == []
