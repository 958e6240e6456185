"""`--deterministic` from the command line: resumed, sharded, in other batches, and verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.e2e.rows import mixed_lines, read, write_lines
from tests.e2e.runner import run, start

ROWS = 90
OPTIONS: list[Any] = ["--deterministic", "--dtype", "bfloat16", "--commit-every", "10", "--commit-seconds", "0.2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A folder with in.jsonl and its finished out.parquet."""
    folder = tmp_path_factory.mktemp("whole")
    lines = [
        line | {"return_logprob": True} if isinstance(line, dict) and "body" not in line else line
        for line in mixed_lines(ROWS)
    ]
    write_lines(folder / "in.jsonl", lines)
    run(["run", folder / "in.jsonl", "-o", "out.parquet", "--model", model, *OPTIONS], folder)
    return folder


def assert_equal(actual: Path, expected: Path, ignore: tuple[str, ...] = ()) -> None:
    """Assert that every column and row is exactly equal, logprobs included."""
    left, right = read(actual), read(expected)
    assert left.schema == right.schema
    for name in set(right.column_names) - set(ignore):
        assert left[name].equals(right[name]), name


def test_verify_finds_every_row_the_same(whole: Path) -> None:
    result = run(["verify", "out.parquet", "--rows", "1000"], whole).stdout
    assert "differs" not in result
    assert len(result.splitlines()) > ROWS // 2


def test_results_are_equal_in_other_batches(whole: Path, model: Path, tmp_path: Path) -> None:
    """Small steps and pages. tests/engine/test_deterministic.py covers preempted rows."""
    options = [*OPTIONS, "--max-num-seqs", "7", "--max-tokens-per-step", "31", "--page-size", "8"]
    run(["run", whole / "in.jsonl", "-o", "out.parquet", "--model", model, *options], tmp_path)
    assert_equal(tmp_path / "out.parquet", whole / "out.parquet")


def test_results_are_equal_after_a_kill_and_a_resume(whole: Path, model: Path, tmp_path: Path) -> None:
    arguments = ["run", whole / "in.jsonl", "-o", "out.parquet", "--model", model, *OPTIONS, "--max-num-seqs", "8"]
    job = start(arguments, tmp_path)
    parts = tmp_path / "out.parquet.work" / "parts"
    job.wait_for(lambda: len(list(parts.glob("part-*.parquet"))) > 2)
    job.kill_after(0)
    assert not (tmp_path / "out.parquet").exists()
    run(arguments, tmp_path)
    assert_equal(tmp_path / "out.parquet", whole / "out.parquet")


def test_merged_shards_equal_one_run(whole: Path, model: Path, tmp_path: Path) -> None:
    for shard in range(2):
        arguments = ["run", whole / "in.jsonl", "-o", "shards", "--model", model, *OPTIONS]
        run([*arguments, "--shard", f"{shard}/2"], tmp_path)
    run(["merge", "shards", "-o", "out.parquet"], tmp_path)
    assert_equal(tmp_path / "out.parquet", whole / "out.parquet", ignore=("cached_tokens", "dedup_of"))


def test_deterministic_is_part_of_the_fingerprint(whole: Path, model: Path, tmp_path: Path) -> None:
    """It is in the footer, and an output does not mix deterministic rows with others."""
    assert b'"deterministic": true' in pq.read_metadata(whole / "out.parquet").metadata[b"batchgen.run"]
    command = ["run", whole / "in.jsonl", "-o", "out.parquet", "--model", model]
    job = start([*command, *OPTIONS, "--max-num-seqs", "4"], tmp_path)
    job.wait_for(lambda: (tmp_path / "out.parquet.work" / "run.json").exists())
    job.kill_after(0)
    assert "(different: --deterministic)" in run([*command, *OPTIONS[1:]], tmp_path, expect=2).stderr


def test_a_backend_that_cannot_be_deterministic_is_refused(whole: Path, model: Path, tmp_path: Path) -> None:
    command = ["run", whole / "in.jsonl", "-o", "out.parquet", "--model", model, "--deterministic"]
    result = run([*command, "--attention", "flash"], tmp_path, expect=2).stderr
    assert (
        "`--attention flash` cannot run here: `--deterministic`: flash splits its work according to the batch" in result
    )
