"""Settings of libraries that are read when they are imported: set while a run imports them, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.library_settings import arrow_system_memory, short_openmp_spins

POOL = "ARROW_DEFAULT_MEMORY_POOL"
SPINS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
ENGINE = "import os, batchgen; batchgen.Engine; print('GOMP_SPINCOUNT' in os.environ)"
RUN = """
import os, sys
from batchgen.cli.app import app
try:
    app(["run", "one.txt", "--max-new-tokens", "1"])
except SystemExit as end:
    assert not end.code, end.code
import pyarrow
print(pyarrow.default_memory_pool().backend_name, os.environ.get("ARROW_DEFAULT_MEMORY_POOL"))
"""


@pytest.fixture(autouse=True)
def _without_user_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (POOL, *SPINS):
        monkeypatch.delenv(name, raising=False)


def test_variables_are_set_only_inside_the_context() -> None:
    with arrow_system_memory(), short_openmp_spins():
        assert os.environ[POOL] == "system"
        assert 0 < int(os.environ["GOMP_SPINCOUNT"]) < 300_000
    assert not {POOL, *SPINS} & os.environ.keys()


@pytest.mark.parametrize("name", [POOL, *SPINS])
def test_user_setting_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "7")
    with arrow_system_memory(), short_openmp_spins():
        assert os.environ[name] == "7"
        assert name == POOL or not ({*SPINS} - {name}) & os.environ.keys()
    assert os.environ[name] == "7"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only GNU OpenMP prints its settings")
@pytest.mark.parametrize(("code", "output"), [(ENGINE, "False\n"), (RUN, "system None\n")], ids=["engine", "command"])
def test_libraries_read_the_settings(code: str, output: str, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("One\n")
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "OMP_DISPLAY_ENV": "verbose", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, output), done.stderr
    values = [line.split("'")[1] for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    assert values
    assert all(0 < int(spins) < 300_000 for spins in values)
