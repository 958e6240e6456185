"""Odd places and clocks: full and read-only file systems, a clock that was set back, files of the future."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.rows import assert_same, prompts, read, write_lines
from tests.e2e.runner import interrupt, run

ROWS = 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"text": text, "max_new_tokens": 4, "seed": i} for i, text in enumerate(prompts(ROWS, 5))]
    write_lines(tmp_path / "in.jsonl", rows)
    states = [{"text": text * 8, "max_new_tokens": 4, "return_hidden_states": True} for text in prompts(ROWS, 6)]
    write_lines(tmp_path / "states.jsonl", states)
    return tmp_path


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """A file system of 256 KiB, and one that is read-only."""
    small, only = tmp_path / "small", tmp_path / "only"
    small.mkdir()
    only.mkdir()
    commands = [
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)],
        ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(only)],
    ]
    done = []
    try:
        for words in commands:
            if os.geteuid() or subprocess.run(words, capture_output=True, check=False).returncode:
                pytest.skip("mounting file systems is not allowed here")
            done.append(words[-1])
        yield {"small": small, "only": only}
    finally:
        for path in done:
            subprocess.run(["umount", "-l", path], check=True)


def job(model: Path, name: str = "in.jsonl") -> list[Any]:
    return ["run", name, "--model", model, "--dtype", "float32", "--attention", "torch"]


def test_a_read_only_place_is_refused_before_anything_is_computed(
    folder: Path, model: Path, mounted: dict[str, Path]
) -> None:
    run([*job(model), "-o", "done.parquet"], folder)
    for words in (
        [*job(model), "-o", "only/out.parquet"],
        [*job(model), "-o", "only/new/out.parquet"],
        [*job(model), "-o", "out.parquet", "--report", "only/report.json"],
        [*job(model), "-o", "out.parquet", "--events", "only/events.jsonl"],
        ["export", "done.parquet", "--format", "jsonl", "-o", "only/out.jsonl"],
    ):
        stderr = run(words, folder, expect=5).stderr
        assert "only/" in stderr
        assert "tokens/s" not in stderr, "rows were generated"
    assert not (folder / "out.parquet").exists()


def test_a_full_place_keeps_what_was_committed(folder: Path, model: Path, mounted: dict[str, Path]) -> None:
    # The run that goes on has other batches.
    words = [*job(model, "states.jsonl"), "--deterministic", "--commit-every", "8", "-o"]
    run([*words, "whole.parquet"], folder)
    filler = mounted["small"] / "filler"
    filler.write_bytes(bytes(100_000))
    stderr = run([*words, "small/out.parquet"], folder, expect=5).stderr
    assert "No space left on device" in stderr
    assert "run the same command again: committed rows are kept" in stderr
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,size=64m", str(mounted["small"])], check=True)
    run([*words, "small/out.parquet"], folder)
    assert_same(read(mounted["small"] / "out.parquet"), read(folder / "whole.parquet"))
    assert_same(read(mounted["small"] / "out.hidden.parquet"), read(folder / "whole.hidden.parquet"))


def test_a_clock_that_is_set_back_while_a_job_runs(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock shows an hour less."""
    run([*job(model), "-o", "whole.parquet"], folder)
    now = [time.time()]

    def backwards() -> float:
        now[0] -= 3600
        return now[0]

    monkeypatch.setattr(time, "time", backwards)
    monkeypatch.setattr(time, "time_ns", lambda: int(backwards() * 1e9))
    options = ["--max-time", "1h", "--commit-seconds", "1000", "--progress", "json", "--report", "-"]
    done = run([*job(model), "-o", "out.parquet", *options], folder)
    assert_same(read(folder / "out.parquet"), read(folder / "whole.parquet"))
    assert all(seconds >= 0 for seconds in done.report["seconds"].values())
    assert done.report["output_tokens_per_second"] > 0
    assert '"seconds": -' not in done.stderr
    assert '"eta_seconds": -' not in done.stderr


@pytest.mark.parametrize("moment", [0, 4e9], ids=["1970", "2096"])
def test_times_of_files_decide_nothing_when_a_job_resumes(folder: Path, model: Path, moment: float) -> None:
    run([*job(model), "-o", "whole.parquet"], folder)
    interrupt([*job(model), "-o", "out.parquet"], folder)
    for path in (folder / "in.jsonl", *(folder / "out.parquet.work").rglob("*")):
        os.utime(path, (moment, moment))
    resumed = run([*job(model), "-o", "out.parquet", "--report", "-"], folder).report
    assert resumed["rows_resumed"] > 0
    assert_same(read(folder / "out.parquet"), read(folder / "whole.parquet"))
    os.utime(folder / "out.parquet", (moment, moment))
    os.utime(folder / "in.jsonl")
    assert "is complete" in run([*job(model), "-o", "out.parquet"], folder).stderr
    assert (folder / "out.parquet").stat().st_mtime == moment
