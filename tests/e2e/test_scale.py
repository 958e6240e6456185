"""Host memory stays bounded for many rows, measured with a model that computes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.e2e.instant import LIKELIEST

ROOT = Path(__file__).parents[2]


def write_rows(path: Path, count: int) -> None:
    """Short rows, all different, half of them greedy; one or two new tokens each."""
    with path.open("w") as stream:
        for i in range(count):
            stream.write(
                f'{{"id": "request-{i}", "text": "Row {i * 7919 % count} says hello", "temperature": {i % 2}, '
                f'"max_new_tokens": {1 + i % 2}, "ignore_eos": true, "tag": "t{i % 10}"}}\n'
            )


def instant_run(folder: Path, model: Path, rows: int, seconds: float) -> tuple[int, dict[str, Any]]:
    """(peak memory of the process in bytes, its report)"""
    write_rows(folder / f"{rows}.jsonl", rows)
    words = ["run", f"{rows}.jsonl", "-o", f"{rows}.parquet", "--model", str(model), "--kv-memory", "64MiB"]
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.e2e.instant import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--report", "report.json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1]), json.loads((folder / "report.json").read_text())


def assert_whole(path: Path, rows: int) -> None:
    """Assert that the output has exactly the input's rows, in order; greedy ones have the likeliest token."""
    file = pq.ParquetFile(path)
    assert file.metadata.num_rows == rows
    at = 0
    for batch in file.iter_batches(columns=["id", "row_index", "status", "output_ids", "completion_tokens", "extra"]):
        indexes = range(at, at + len(batch))
        assert batch["row_index"].to_pylist() == list(indexes)
        assert batch["id"].to_pylist() == [f"request-{i}" for i in indexes]
        assert pc.all(pc.equal(batch["status"], "ok")).as_py()
        assert batch["completion_tokens"].to_pylist() == [1 + i % 2 for i in indexes]
        greedy = batch.filter(pc.equal(batch["completion_tokens"], 1))
        assert greedy["output_ids"].to_pylist() == [[LIKELIEST]] * len(greedy)
        assert batch["extra"][0].as_py() == f'{{"tag":"t{at % 10}"}}'
        at += len(batch)


@pytest.mark.slow
def test_a_million_rows_need_less_than_two_gigabytes(model: Path, tmp_path: Path) -> None:
    few, _ = instant_run(tmp_path, model, 5_000, 120)
    many, report = instant_run(tmp_path, model, 150_000, 600)
    assert (report["rows"], report["rows_ok"]) == (150_000, 150_000)
    assert (
        report["computed_prompt_tokens"]
        == report["distinct_prompt_tokens"] + report["engine"]["recomputed_last_tokens"]
    )
    assert_whole(tmp_path / "150000.parquet", 150_000)
    # Up to 128 MiB of results are sorted in memory, more on disk: the first rows need more memory than later ones.
    each = (many - few) / 145_000
    assert few + 1_000_000 * each < 2 << 30, f"{each:.0f} bytes a row"
