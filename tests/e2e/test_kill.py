"""`kill -9` at random moments: committed parts are kept, and the finished file equals that of an uninterrupted run."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.rows import assert_same, mixed_lines, read, write_lines
from tests.e2e.runner import run, start

ROWS = 260
OPTIONS = ["--dtype", "float32", "--commit-every", "15", "--commit-seconds", "0.2", "--max-num-seqs", "24"]


class UninterruptedRun:
    """The results of an uninterrupted run, and the time of a second one, when caches are warm."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.input = write_lines(folder / "in.jsonl", mixed_lines(ROWS))
        self.arguments: list[Any] = ["run", self.input, "--model", model, *OPTIONS, "--report", "-", "-o"]
        self.report = run([*self.arguments, "whole.parquet"], folder).report
        began = time.monotonic()
        run([*self.arguments, "again.parquet"], folder)
        self.seconds = time.monotonic() - began
        self.table = read(folder / "whole.parquet")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, model: Path) -> UninterruptedRun:
    return UninterruptedRun(tmp_path_factory.mktemp("uninterrupted"), model)


def parts(out: Path) -> dict[str, tuple[int, int]]:
    """Name of each committed part -> its inode and time of last change."""
    folder = out.with_name(out.name + ".work") / "parts"
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.glob("part-*.parquet")}


def committed(out: Path) -> list[dict[str, Any]]:
    """Rows of all parts."""
    folder = out.with_name(out.name + ".work") / "parts"
    files = sorted(folder.glob("part-*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def keys(rows: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    return [(row["row_index"], row["prompt_index"], row["sample_index"]) for row in rows]


def generated(rows: list[dict[str, Any]]) -> int:
    return sum(row["completion_tokens"] or 0 for row in rows)


def assert_finished(out: Path, expected: pa.Table) -> None:
    assert not out.with_name(out.name + ".work").exists()
    assert [p.name for p in out.parent.iterdir() if not p.name.startswith(".")] == [out.name]
    assert_same(read(out), expected)


def killed_until_done(job: UninterruptedRun, folder: Path, rng: Random) -> int:
    """Run the job with at most four kills at random moments, then to its end; return the number of kills."""
    out = folder / "out.parquet"
    before: dict[str, tuple[int, int]] = {}
    hits = 0
    for _ in range(rng.choice([1, 1, 2, 4])):
        killed = start([*job.arguments, out.name], folder).kill_after(rng.uniform(0.1, job.seconds))
        if not killed:
            break
        hits += 1
        if out.exists():  # killed while it removed the work folder: the output is complete
            assert_same(read(out), job.table)
            break
        assert parts(out).items() >= before.items(), "a committed part was changed"
        before = parts(out)
    finished = out.exists()
    kept = committed(out)
    assert len(set(keys(kept))) == len(kept), "a row was committed twice"
    report = run([*job.arguments, out.name], folder).report
    if finished:
        assert report["already_done"]
    else:
        assert report["rows_resumed"] == len({row["row_index"] for row in kept})
        fresh = job.report["completion_tokens"] - generated(kept)
        assert report["engine"]["sampled_tokens"] <= fresh, "a committed row was generated again"
    assert_finished(out, job.table)
    return hits


@pytest.mark.parametrize("seed", range(3))
def test_jobs_killed_at_random_moments(uninterrupted: UninterruptedRun, tmp_path: Path, seed: int) -> None:
    killed_until_done(uninterrupted, tmp_path, Random(seed))


@pytest.mark.slow
def test_twenty_kills_at_random_moments(uninterrupted: UninterruptedRun, tmp_path: Path) -> None:
    rng = Random(20)
    hits = trial = 0
    while hits < 20:
        folder = tmp_path / str(trial)
        folder.mkdir()
        hits += killed_until_done(uninterrupted, folder, rng)
        shutil.rmtree(folder)
        trial += 1
        assert trial < 60, "the kills come too late to hit"


def test_committed_rows_are_not_computed_again(uninterrupted: UninterruptedRun, tmp_path: Path) -> None:
    """Killed when some parts are committed: the second run generates exactly the other rows."""
    out = tmp_path / "out.parquet"
    job = start([*uninterrupted.arguments, out.name], tmp_path)
    job.wait_for(lambda: len(parts(out)) >= 6)
    job.kill_after(0)
    assert not out.exists()
    before, kept = parts(out), committed(out)
    assert len(kept) >= 60
    second = start([*uninterrupted.arguments, out.name], tmp_path)
    second.wait_for(lambda: len(parts(out)) > len(before) or not second.alive)
    assert parts(out).items() >= before.items()
    report = second.wait().report
    assert_finished(out, uninterrupted.table)
    assert report["rows_resumed"] == len({row["row_index"] for row in kept})
    done = set(keys(kept))
    rest = [row for row in uninterrupted.table.to_pylist() if keys([row])[0] not in done]
    # A copy is generated only if its original was committed before.
    originals = {row["row_index"] for row in kept}
    own = [row for row in rest if row["dedup_of"] is None]
    copies = {json.dumps(row["output_ids"]): row for row in rest if row["dedup_of"] in originals}
    most = generated(own) + generated([row for row in rest if row["dedup_of"] in originals])
    assert generated(own) + generated(list(copies.values())) <= report["engine"]["sampled_tokens"] <= most
