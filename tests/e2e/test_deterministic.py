"""`--deterministic` in bfloat16: killed and resumed, sharded, in other batches, and verified. Comparisons are exact.

tests/e2e/test_every_row.py has every kind of row in float32.
"""

from __future__ import annotations

from pathlib import Path
from time import sleep
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.e2e.rows import mixed_lines, read, write_lines
from tests.e2e.runner import parts_of, run, start

ROWS = 90
OTHER_BATCHES = ["--max-num-seqs", "7", "--max-tokens-per-step", "31", "--page-size", "8"]


@pytest.fixture(scope="module")
def command(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Command without -o."""
    lines = [
        line | {"return_logprob": True} if isinstance(line, dict) and "body" not in line else line
        for line in mixed_lines(ROWS)
    ]
    source = write_lines(tmp_path_factory.mktemp("input") / "in.jsonl", lines)
    return ["run", source, "--model", model, "--deterministic", "--dtype", "bfloat16", "--commit-every", "10"]


@pytest.fixture(scope="module")
def whole(command: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    run([*command, "-o", "out.parquet"], folder)
    return folder / "out.parquet"


def assert_equal(actual: Path, expected: Path, ignore: tuple[str, ...] = ()) -> None:
    """Assert that every column and row is exactly equal, logprobs included."""
    left, right = read(actual), read(expected)
    assert left.schema == right.schema
    for name in set(right.column_names) - set(ignore):
        assert left[name].equals(right[name]), name


def test_the_footer_says_so_and_verify_finds_the_rows_the_same(whole: Path) -> None:
    assert b'"deterministic": true' in pq.read_metadata(whole).metadata[b"batchgen.run"]
    assert run(["verify", whole, "--rows", "20"], whole.parent).stdout.endswith("20 of 20 rows are the same\n")


def test_results_are_equal_after_a_kill_and_a_resume(command: list[Any], whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    job = start([*command, "--max-num-seqs", "8", "-o", out], tmp_path)
    while job.alive and len(parts_of(out)) <= 2:
        sleep(0.001)
    assert job.kill_after(0)
    assert not out.exists()
    assert run([*command, "-o", out, "--report", "-"], tmp_path).report["rows_resumed"] > 0
    assert_equal(out, whole)


def test_merged_shards_in_other_batches_equal_one_run(command: list[Any], whole: Path, tmp_path: Path) -> None:
    for shard in ("0/2", "1/2"):
        run([*command, *OTHER_BATCHES, "-o", "shards", "--shard", shard], tmp_path)
    run(["merge", "shards", "-o", "out.parquet"], tmp_path)
    assert_equal(tmp_path / "out.parquet", whole, ignore=("cached_tokens", "dedup_of"))
