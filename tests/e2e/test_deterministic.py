"""`--deterministic` from the command line: part of the job, and refused where it cannot be kept."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.rows import write_lines
from tests.e2e.runner import run


def test_deterministic_is_part_of_the_job(model: Path, tmp_path: Path) -> None:
    """An output does not mix deterministic rows with others. tests/e2e/test_every_row.py shows their results."""
    source = write_lines(tmp_path / "in.jsonl", [{"text": "The quick", "max_new_tokens": 2}])
    command = ["run", source, "-o", "out.parquet", "--model", model, "--dtype", "bfloat16"]
    run([*command, "--deterministic", "--max-time", "0"], tmp_path, expect=75)
    assert "(different: --deterministic)" in run(command, tmp_path, expect=2).stderr
    run([*command, "--deterministic"], tmp_path)
    assert b'"deterministic": true' in (tmp_path / "out.parquet").read_bytes()


def test_a_backend_that_cannot_be_deterministic_is_refused(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": "The quick"}])
    command = ["run", source, "-o", "out.parquet", "--model", model, "--deterministic", "--attention", "flash"]
    reason = "`--attention flash` cannot run here: `--deterministic`: flash splits its work according to the batch"
    assert reason in run(command, tmp_path, expect=2).stderr
