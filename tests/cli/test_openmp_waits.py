"""`short_openmp_spins` sets the spin count while torch is imported, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.library_settings import short_openmp_spins

VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
ENGINE = "import os, batchgen; batchgen.Engine; print('GOMP_SPINCOUNT' in os.environ)"


@pytest.fixture(autouse=True)
def _without_user_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_variable_is_set_only_inside_the_context() -> None:
    with short_openmp_spins():
        assert 0 < int(os.environ["GOMP_SPINCOUNT"]) < 300_000
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize("name", VARIABLES)
def test_user_setting_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "7")
    with short_openmp_spins():
        assert [os.environ.get(choice) for choice in VARIABLES] == [
            "7" if choice == name else None for choice in VARIABLES
        ]
    assert os.environ[name] == "7"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only GNU OpenMP prints its settings")
@pytest.mark.parametrize("entry_point", ["engine", "command"])
def test_torch_reads_the_setting_from_engine_and_command(entry_point: str, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("One\n")
    job = ["-m", "batchgen", "run", "one.txt", "--max-new-tokens", "1"]
    done = subprocess.run(
        [sys.executable, *(["-c", ENGINE] if entry_point == "engine" else job)],
        cwd=tmp_path,
        env={**os.environ, "OMP_DISPLAY_ENV": "verbose", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    values = [line.split("'")[1] for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    assert values
    assert all(0 < int(spins) < 300_000 for spins in values)
    assert entry_point == "command" or done.stdout == "False\n"
