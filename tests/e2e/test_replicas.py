"""`--replicas`: processes that die, with or without the job, lose no row and double none."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.processors import PAUSED, PAUSING
from tests.e2e.rows import write_lines
from tests.e2e.runner import run, start

MODULE = """
import os, signal
from pathlib import Path

def deadly(logits, rows):
    for row in rows:
        mark = Path(row.params["mark"])
        if row.params["always"] or not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return logits
"""
FORCED = {"temperature": 0.7, "ignore_eos": True}
ROWS = [{"id": f"id {i}", "text": f"Hello {i % 17}", "max_new_tokens": 1 + i % 9, **FORCED} for i in range(60)]
OPTIONS = ["--deterministic", "--dtype", "float32", "--max-num-seqs", "4", "--commit-every", "5"]


def command(model: Path, rows: list[dict[str, Any]], folder: Path, *options: object) -> list[object]:
    source = write_lines(folder / "in.jsonl", rows)
    return ["run", source, "-o", "out.parquet", "--model", model, *OPTIONS, *options]


def deadly(mark: Path, *, always: bool) -> list[dict[str, Any]]:
    """The rows with one that kills its process, whenever it runs or once."""
    params = {"custom_logit_processor": "deadly", "custom_params": {"mark": str(mark), "always": always}}
    return [*ROWS[:30], {"id": "deadly", "text": "Hello 5", "max_new_tokens": 3, **FORCED, **params}, *ROWS[30:]]


@pytest.fixture
def named(tmp_path: Path) -> list[str]:
    (tmp_path / "deadly_module.py").write_text(MODULE)
    return ["--logit-processor", "deadly=deadly_module:deadly"]


def table(folder: Path, name: str = "out.parquet") -> pa.Table:
    return pq.read_table(folder / name)


def test_rows_of_a_process_that_died_are_run_again(model: Path, tmp_path: Path, named: list[str]) -> None:
    words = command(model, deadly(tmp_path / "mark", always=False), tmp_path, *named)
    lines = run([*words, "--replicas", "2"], tmp_path).stderr
    assert "died (signal 9); another one is started" in lines
    found = table(tmp_path)
    run([*words, "--overwrite"], tmp_path)
    assert found.equals(table(tmp_path))


@pytest.mark.slow
def test_a_row_that_kills_each_process_becomes_an_error_row(model: Path, tmp_path: Path, named: list[str]) -> None:
    words = command(model, deadly(tmp_path / "mark", always=True), tmp_path, *named)
    run([*words, "--replicas", "2"], tmp_path)
    rows = table(tmp_path).to_pylist()
    assert [(row["id"], row["error"]["code"]) for row in rows if row["error"]] == [("deadly", "engine_crash")]
    assert len(rows) == len(ROWS) + 1


@pytest.mark.slow
def test_no_process_outlives_a_job_that_is_killed(model: Path, tmp_path: Path) -> None:
    words = command(model, [*ROWS, {"id": "p", "text": "Hi", **PAUSED}], tmp_path, *PAUSING, "--replicas", "2")
    (tmp_path / "pause").touch()
    job = start(words, tmp_path)
    job.wait_for(lambda: (tmp_path / "reached").exists())
    replicas = psutil.Process(job.pid).children()
    job.signal(signal.SIGKILL)
    (tmp_path / "pause").unlink()
    psutil.wait_procs(replicas, timeout=30)
    assert not [each for each in replicas if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    run(words, tmp_path)
    found = table(tmp_path)
    run([*words[:-2], "--overwrite"], tmp_path)
    assert found.equals(table(tmp_path))


def test_a_job_whose_rows_are_all_committed_is_finished(model: Path, tmp_path: Path) -> None:
    words = command(model, ROWS[:6], tmp_path, "--replicas", "2")
    run(words[:-2], tmp_path)
    found = table(tmp_path)
    for name in ("out.parquet", "all.parquet"):
        run([*words, "-o", name, "--reuse", "out.parquet"] if name == "all.parquet" else words, tmp_path)
    assert table(tmp_path, "all.parquet").drop(["cached_tokens"]).equals(found.drop(["cached_tokens"]))


def test_a_job_that_is_stopped_blames_no_row(model: Path, tmp_path: Path) -> None:
    words = command(model, [*ROWS, {"id": "p", "text": "Hi", **PAUSED}], tmp_path, *PAUSING, "--replicas", "2")
    (tmp_path / "pause").touch()
    job = start(words, tmp_path)
    job.wait_for(lambda: (tmp_path / "reached").exists())
    job.signal(signal.SIGTERM)
    assert job.wait().code == 143
    assert not [*(tmp_path / "out.parquet.work").glob("in-work-*")]


def test_more_processes_than_processors_are_refused(model: Path, tmp_path: Path) -> None:
    words = command(model, ROWS, tmp_path, "--replicas", "60000")
    assert "this machine has" in run(words, tmp_path, expect=2).stderr


@pytest.mark.slow
def test_a_hundred_kills_of_replicas_and_jobs(model: Path, tmp_path: Path) -> None:
    rng = Random(0)
    rows = [{**row, "id": f"{k} {row['id']}", "max_new_tokens": 40} for k in range(20) for row in ROWS]
    words = command(model, rows, tmp_path, "--replicas", "2")
    run([*words[:-2]], tmp_path)
    expected = table(tmp_path)
    kills = 0
    while kills < 100:
        for path in tmp_path.glob("out*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        done = False
        while not done:
            job = start(words, tmp_path)
            while not job.ends_within(rng.uniform(1.0, 4.0)):
                replicas = psutil.Process(job.pid).children() if rng.random() < 0.7 else []
                (rng.choice(replicas) if replicas else psutil.Process(job.pid)).kill()
                kills += 1
            result = job.wait()
            assert result.code in (0, -9), result.stderr
            done = result.code == 0
        assert table(tmp_path).equals(expected)
