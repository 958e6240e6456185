"""How threads wait for each other is settled where torch is imported, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.openmp import brief_waits

CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
ENGINE = "import os, batchgen; batchgen.Engine; print('GOMP_SPINCOUNT' in os.environ)"


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CHOICES:
        monkeypatch.delenv(name, raising=False)


def test_only_within() -> None:
    with brief_waits():
        assert 0 < int(os.environ["GOMP_SPINCOUNT"]) < 300_000
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_of_the_users_own_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "7")
    with brief_waits():
        assert [os.environ.get(choice) for choice in CHOICES] == ["7" if choice == name else None for choice in CHOICES]
    assert os.environ[name] == "7"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU's OpenMP says there what it has read")
@pytest.mark.parametrize("door", ["engine", "command"])
def test_torch_is_told_through_both_doors(door: str, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("One\n")
    job = ["-m", "batchgen", "run", "one.txt", "--max-new-tokens", "1"]
    done = subprocess.run(
        [sys.executable, *(["-c", ENGINE] if door == "engine" else job)],
        cwd=tmp_path,
        env={**os.environ, "OMP_DISPLAY_ENV": "verbose", "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = [line.split("'")[1] for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    assert said
    assert all(0 < int(spins) < 300_000 for spins in said)
    assert door == "command" or done.stdout == "False\n"
