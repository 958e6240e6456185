"""The files of `configs/recipes` do what they say, with the tools that they are for; Slurm's are in `test_slurm`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.e2e.processors import PAUSED, PAUSING
from tests.e2e.rows import write_lines

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "configs" / "recipes"
ROWS = [{"id": f"id-{i}", "text": f"Hi {i}", "max_new_tokens": 16, "ignore_eos": True} for i in range(12)]
PATHS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
"""Also the tools that are installed next to this Python."""


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """A folder with rows and a model, and `batchgen` in `bin`, which commits each row and may be paused."""
    write_lines(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "Qwen3-0.6B").symlink_to(model)
    (tmp_path / "bin").mkdir()
    options = " ".join(["--commit-every", "1", *PAUSING])
    run = f'case "$1" in run) set -- "$@" {options}; [ -e stop ] && set -- "$@" --max-time 0 ;; esac\n'
    add_program(tmp_path, "batchgen", f'{run}exec {sys.executable} -m batchgen "$@"\n')
    return tmp_path


def add_program(folder: Path, name: str, body: str) -> None:
    (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}")
    (folder / "bin" / name).chmod(0o755)


def start(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """A command, in a process group for itself."""
    fixed = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": f"{folder / 'bin'}:{PATHS}"}
    env = os.environ | fixed | variables
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, cwd=folder, env=env, start_new_session=True, **streams)


def run(folder: Path, *words: str, **variables: str) -> str:
    process = start(folder, *words, **variables)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    return printed


def parts(folder: Path) -> list[Path]:
    """What jobs that are not finished have committed."""
    return [*folder.glob("*.work/**/parts/part-*.parquet")]


def kill_in_work(folder: Path, *words: str) -> None:
    """Start a command whose longest row waits; after its first commit end it and all its children at once."""
    paused = {"text": "Hi", **PAUSED, "max_new_tokens": 60, "custom_params": {"at": 50}}
    write_lines(folder / "rows.jsonl", [*ROWS, paused])
    (folder / "pause").touch()
    process = start(folder, *words)
    end = time.monotonic() + 120
    while not parts(folder) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    printed, _ = process.communicate()
    assert parts(folder), printed
    (folder / "pause").unlink()


def exported(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def test_make_runs_resumes_and_exports(folder: Path) -> None:
    shutil.copy(RECIPES / "Makefile", folder)
    kill_in_work(folder, "make")
    assert not (folder / "answers.parquet").exists()
    assert "resumed" in run(folder, "make")
    assert exported(folder / "answers.openai.jsonl")[: len(ROWS)] == [row["id"] for row in ROWS]
    assert "up to date" in run(folder, "make")
    write_lines(folder / "rows.jsonl", ROWS[:3])
    run(folder, "make")
    assert pq.read_metadata(folder / "answers.parquet").num_rows == 3


@pytest.mark.slow
def test_snakemake_runs_shards_resumes_and_exports(folder: Path) -> None:
    if shutil.which("snakemake", path=PATHS) is None:
        pytest.skip("needs snakemake")
    shutil.copy(RECIPES / "Snakefile", folder)
    words = ("snakemake", "--cores", "2", "--rerun-incomplete")
    kill_in_work(folder, *words)
    run(folder, "snakemake", "--unlock")
    assert "resumed" in run(folder, *words)
    assert exported(folder / "all.openai.jsonl")[: len(ROWS)] == [row["id"] for row in ROWS]
    assert "Nothing to be done" in run(folder, *words)


def steps(folder: Path) -> Iterator[tuple[int, str]]:
    """Run the steps with a command, as the runner does: (exit code, output) of each, up to the first that fails."""
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((RECIPES / "github-actions.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    for step in [step["run"] for step in job["steps"] if "run" in step]:
        process = start(folder, "bash", "-eo", "pipefail", "-c", step, **{**workflow["env"], "MODEL": "./Qwen3-0.6B"})
        printed, _ = process.communicate(timeout=300)
        yield process.returncode, printed
        if process.returncode:
            return


def test_the_steps_of_the_github_workflow(folder: Path) -> None:
    add_program(folder, "pip", 'echo "pip $*" >> pip.txt\n')
    (folder / "stop").touch()
    *_, (code, _) = steps(folder)
    assert code == 75
    assert (folder / "answers.parquet.work").exists(), "what the workflow keeps"
    (folder / "stop").unlink()
    done = list(steps(folder))
    assert [code for code, _ in done] == [0] * 4, done
    assert (folder / "pip.txt").read_text().endswith(" ./batchgen-0.1.0-py3-none-linux_x86_64.whl\n")
    assert exported(folder / "answers.openai.jsonl") == [row["id"] for row in ROWS]
