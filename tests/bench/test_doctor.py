"""`batchgen doctor`: what it reports of this machine, of one where no job runs, and of one that lacks something."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchgen.bench import doctor
from batchgen.cli.app import run_command
from batchgen.library_settings import processors
from tests.e2e.runner import run

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.bench.floors._SECONDS", 0.001)


def report(capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    assert run_command(["doctor", "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys)
    assert found["ready"]
    assert found["problems"] == []
    assert 0 < found["job_seconds"] < 600
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert 1 <= found["processor"]["processors"] <= processors()
    assert 0 < found["processor"]["free"] < found["processor"]["memory"]
    assert found["products_per_second"] > 1e6
    assert found["copy_bytes_per_second"] > 1e6
    assert found["disks"][str(Path.cwd())] > 0
    assert found["kernels"].startswith(("compiled", "torch", "triton", "flash"))


@pytest.mark.parametrize("columns", [60, 80])
def test_the_figures_fit_a_terminal(columns: int, tmp_path: Path) -> None:
    shown = run(["doctor"], tmp_path, env={"COLUMNS": str(columns), "TERM": "xterm"}, terminal=True).stdout
    shown = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert max(map(len, shown.splitlines())) <= columns
    labels = {line[:13].strip() for line in shown.splitlines()}
    assert {"versions", "processor", "GPU", "kernels", "products", "copies", "disk", "hub cache", "ready"} <= labels


def test_a_machine_on_which_no_job_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "model_path", lambda: tmp_path)
    found = report(capsys, code=7)
    assert not found["ready"]
    assert str(tmp_path) in found["problems"][0]
    assert run_command(["doctor"]) == 7
    text = capsys.readouterr().out
    assert "problem" in text
    assert text.splitlines()[-1].split() == ["ready", "no:", "see", "the", "problem"]


def test_what_is_missing_comes_with_its_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ["torch>=2.11", "pillow>=11.3; extra == 'media'", 'soxr>=0.5; extra == "media"', "x>1; extra == 'test'"]
    monkeypatch.setattr(doctor, "requires", lambda name: [*wanted, "triton>=3.6; (a == 'b') and extra == 'gpu'"])
    real = doctor.library_version
    monkeypatch.setattr(doctor, "library_version", lambda name: None if name in ("soxr", "triton") else real(name))
    monkeypatch.setattr(doctor, "compiler_name", lambda: None)
    soxr = "soxr, for rows with images and sounds: pip install 'batchgen[media]'"
    monkeypatch.setattr(doctor, "missing", lambda: None)  # a wheel may bring the kernels
    assert report(capsys)["missing"] == [soxr]
    monkeypatch.setattr(doctor, "missing", lambda: "no C++ compiler was found")
    found = report(capsys)
    assert found["compiler"] is None
    assert found["missing"][0].startswith(
        "the compiled kernels, which make a CPU fast: no C++ compiler was found; install"
    )
    assert found["missing"][1:] == [soxr]


def test_a_job_runs_without_a_compiler(tmp_path: Path) -> None:
    env = os.environ | {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    env |= {"TMPDIR": str(tmp_path)}
    words = [sys.executable, "-m", "batchgen", "doctor", "--json"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ready"]
    assert found["kernels"].startswith("torch (no compiled: CXX names no-such-compiler")
