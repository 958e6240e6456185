"""Stopping early: signals and `--max-time` commit the finished rows, and the same command resumes the job."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.e2e.processors import PAUSED, PAUSING
from tests.e2e.rows import assert_same, mixed_lines, prompts, read, write_lines
from tests.e2e.runner import Job, run, start

ROWS = 120
ROOT = Path(__file__).parents[2]


class Long:
    """A job that can be paused, and the result of an uninterrupted run."""

    def __init__(self, folder: Path, model: Path) -> None:
        rows = [*mixed_lines(ROWS - 1, seed=2, longest=40), {"id": "paused", "text": "Wait", **PAUSED}]
        source = write_lines(folder / "in.jsonl", rows)
        self.arguments: list[Any] = ["run", source, "--model", model, "--dtype", "float32", "--max-num-seqs", "8"]
        self.arguments += [*PAUSING, "--commit-seconds", "1000", "-o"]
        run([*self.arguments, "whole.parquet"], folder)
        self.table = read(folder / "whole.parquet")


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Long:
    return Long(tmp_path_factory.mktemp("long"), model)


def prompts_by_row(tables: list[pa.Table]) -> Counter[int]:
    """Row index -> number of its prompts in the tables."""
    keys = {key for t in tables for key in zip(*(t[k].to_pylist() for k in ("row_index", "prompt_index")), strict=True)}
    return Counter(row for row, _ in keys)


def paused(long: Long, folder: Path) -> Job:
    """The job in the middle of its rows; it goes on when the file `pause` is removed."""
    (folder / "pause").touch()
    job = start([*long.arguments, "out.parquet"], folder)
    job.wait_for((folder / "reached").exists)
    return job


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
    ids=["INT", "TERM", "HUP"],
)
def test_a_signal_commits_finished_rows_and_the_same_command_resumes(
    long: Long, tmp_path: Path, number: signal.Signals
) -> None:
    job = paused(long, tmp_path)
    job.signal(number)
    (tmp_path / "pause").unlink()
    done = job.wait(20)
    assert done.code == 128 + number, done.stderr
    assert f"error: stopped by {number.name} with " in done.stderr
    assert f" of {ROWS} rows committed. Run the same command again to continue." in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.parquet").exists()
    parts = [read(p) for p in (tmp_path / "out.parquet.work" / "parts").iterdir()]
    finished = sum(map(len, parts))
    assert finished > 0, "finished rows are committed before --commit-every and --commit-seconds are reached"
    committed, whole = (prompts_by_row(tables) for tables in (parts, [long.table]))
    rows = sum(committed[row] == whole[row] for row in committed)
    assert f"with {rows} of {ROWS} rows committed" in done.stderr
    report = run([*long.arguments, "out.parquet", "--report", "-"], tmp_path).report
    assert 0 < report["rows_resumed"] < ROWS
    assert_same(read(tmp_path / "out.parquet"), long.table)


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc to see which signals are handled")
def test_a_signal_while_libraries_are_imported(model: Path, tmp_path: Path) -> None:
    number = signal.SIGUSR1
    write_lines(tmp_path / "in.jsonl", [{"text": "a", "max_new_tokens": 4}])
    words = [sys.executable, "-m", "batchgen", "run", "in.jsonl", "-o", "out.parquet", "--model", str(model)]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        status = Path(f"/proc/{process.pid}/status")
        while not int(status.read_text().split("SigCgt:")[1].split()[0], 16) >> (number - 1) & 1:
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(number)
        assert process.stderr is not None
        stderr = process.stderr.read()
        assert process.wait(20) == 75, stderr
    why = "error: stopped by SIGUSR1 with 0 of 1 rows committed"
    assert stderr.splitlines()[-1].startswith(why), stderr
    assert not (tmp_path / "out.parquet").exists()


def test_a_second_signal_ends_the_process_at_once(long: Long, tmp_path: Path) -> None:
    job = paused(long, tmp_path)
    job.signal(signal.SIGSTOP)  # so that both signals are pending when it continues
    job.signal(signal.SIGINT)
    job.signal(signal.SIGTERM)
    job.signal(signal.SIGCONT)
    assert job.wait(10).code in (130, 143)
    (tmp_path / "pause").unlink()
    assert not (tmp_path / "out.parquet").exists()
    run([*long.arguments, "out.parquet"], tmp_path)
    assert_same(read(tmp_path / "out.parquet"), long.table)


def test_runs_stopped_by_max_time_finish_the_job(long: Long, tmp_path: Path) -> None:
    for attempt in range(20):
        done = run([*long.arguments, "out.parquet", "--max-time", f"{attempt * 0.3:.2f}"], tmp_path, expect=None)
        assert done.code in ((75, 0) if attempt else (75,)), done.stderr
        assert done.code == 0 or "stopped by --max-time" in done.stderr
        if done.code == 0:
            break
    assert_same(read(tmp_path / "out.parquet"), long.table)


@pytest.mark.slow
def test_a_signal_does_not_wait_for_a_step_of_minutes(model: Path, tmp_path: Path) -> None:
    """Another thread commits the finished rows within 20 s of the signal."""
    rows = [{"text": text, "max_new_tokens": 1 + i, "ignore_eos": True} for i, text in enumerate(prompts(40, 4))]
    write_lines(tmp_path / "in.jsonl", rows)
    command = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.e2e.instant import main; sys.exit(main())"
    words = [sys.executable, "-c", command, "run", "in.jsonl", "-o", "out.parquet", "--model", str(model)]
    env = os.environ | {"INSTANT_STEPS": "20"}
    with subprocess.Popen(words, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "generating" not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(1)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
        assert time.monotonic() - began < 20
        assert "finished rows are committed" in process.stderr.read()
    parts = sorted((tmp_path / "out.parquet.work" / "parts").iterdir())
    assert sum(len(read(part)) for part in parts) > 5
    assert not (tmp_path / "out.parquet").exists()


IN_A_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.path.insert(0, os.environ["ROOT"])
from batchgen.cli.app import main
from tests.e2e.instant import install
install()
main()
"""


def test_a_terminal_that_is_closed_while_it_shows_the_progress(model: Path, tmp_path: Path) -> None:
    """The kernel sends SIGHUP, and every later write to the terminal fails."""
    rows = [{"text": text, "max_new_tokens": 3 + i % 4, "ignore_eos": True} for i, text in enumerate(prompts(4000, 4))]
    write_lines(tmp_path / "in.jsonl", rows)
    options = ["--model", str(model), "--max-num-seqs", "8", "-o", "out.parquet", "--commit-every", "8"]
    words = [sys.executable, "-c", IN_A_TERMINAL, "run", "in.jsonl", *options, "--progress", "bar"]
    env = os.environ | {"ROOT": str(ROOT), "TERM": "xterm"}
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        words, cwd=tmp_path, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        seen = b""
        parts = tmp_path / "out.parquet.work" / "parts"
        while b"running" not in seen or not any(parts.glob("*.parquet")):  # the bar shows rows in progress
            seen += os.read(ours, 4096)
        os.close(ours)
        assert process.wait(20) == 129
    assert not (tmp_path / "out.parquet").exists()
    parts = sorted((tmp_path / "out.parquet.work" / "parts").iterdir())
    assert sum(len(read(part)) for part in parts) > 0
    run(["show", "out.parquet"], tmp_path)
