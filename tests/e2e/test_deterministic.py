"""`--deterministic` from the command line: killed and resumed, in shards, in other batches, and verified."""

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
    """A folder with in.jsonl and out.parquet."""
    folder = tmp_path_factory.mktemp("whole")
    lines = [
        line | {"return_logprob": True} if isinstance(line, dict) and "body" not in line else line
        for line in mixed_lines(ROWS)
    ]
    write_lines(folder / "in.jsonl", lines)
    run(["run", folder / "in.jsonl", "-o", "out.parquet", "--model", model, *OPTIONS], folder)
    return folder


def assert_equal(actual: Path, expected: Path, but: tuple[str, ...] = ()) -> None:
    """Every column and row exactly, logprobs as well."""
    left, right = read(actual), read(expected)
    assert left.schema == right.schema
    for name in set(right.column_names) - set(but):
        assert left[name].equals(right[name]), name


def test_verify_finds_every_row_the_same(whole: Path) -> None:
    said = run(["verify", "out.parquet", "--rows", "1000"], whole).stdout
    assert "differs" not in said
    assert len(said.splitlines()) > ROWS // 2


def test_other_batches(whole: Path, model: Path, tmp_path: Path) -> None:
    """Small steps and pages; preempted rows are for tests/engine/test_deterministic.py."""
    options = [*OPTIONS, "--max-num-seqs", "7", "--max-tokens-per-step", "31", "--page-size", "8"]
    run(["run", whole / "in.jsonl", "-o", "out.parquet", "--model", model, *options], tmp_path)
    assert_equal(tmp_path / "out.parquet", whole / "out.parquet")


def test_killed_and_resumed(whole: Path, model: Path, tmp_path: Path) -> None:
    arguments = ["run", whole / "in.jsonl", "-o", "out.parquet", "--model", model, *OPTIONS, "--max-num-seqs", "8"]
    job = start(arguments, tmp_path)
    parts = tmp_path / "out.parquet.work" / "parts"
    job.wait_for(lambda: len(list(parts.glob("part-*.parquet"))) > 2)
    job.kill_after(0)
    assert not (tmp_path / "out.parquet").exists()
    run(arguments, tmp_path)
    assert_equal(tmp_path / "out.parquet", whole / "out.parquet")


def test_shards(whole: Path, model: Path, tmp_path: Path) -> None:
    for shard in range(2):
        arguments = ["run", whole / "in.jsonl", "-o", "shards", "--model", model, *OPTIONS]
        run([*arguments, "--shard", f"{shard}/2"], tmp_path)
    run(["merge", "shards", "-o", "out.parquet"], tmp_path)
    assert_equal(tmp_path / "out.parquet", whole / "out.parquet", but=("cached_tokens", "dedup_of"))


def test_it_is_part_of_the_job(whole: Path, model: Path, tmp_path: Path) -> None:
    """Written in the footer, and rows of the two kinds do not mix in one output."""
    assert b'"deterministic": true' in pq.read_metadata(whole / "out.parquet").metadata[b"batchgen.run"]
    command = ["run", whole / "in.jsonl", "-o", "out.parquet", "--model", model]
    job = start([*command, *OPTIONS, "--max-num-seqs", "4"], tmp_path)
    job.wait_for(lambda: (tmp_path / "out.parquet.work" / "run.json").exists())
    job.kill_after(0)
    assert "(different: --deterministic)" in run([*command, *OPTIONS[1:]], tmp_path, expect=2).stderr


def test_what_cannot_be_deterministic_is_refused(whole: Path, model: Path, tmp_path: Path) -> None:
    command = ["run", whole / "in.jsonl", "-o", "out.parquet", "--model", model, "--deterministic"]
    said = run([*command, "--attention", "flash"], tmp_path, expect=2).stderr
    assert "`--attention flash` cannot run here: `--deterministic`: flash splits its work by the batch" in said
