"""The demonstration model through `batchgen run`, which uses it when no model is given."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from batchgen.demo import model_path
from batchgen.demo.tasks import TASKS, rows
from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import run

PER_TASK = 30
SAMPLE = Path(__file__).parents[2] / "sample_data" / "prompts.jsonl"


@pytest.fixture(scope="module", autouse=True)
def _model_exists() -> None:
    folder = model_path()
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        pytest.fail(f"{folder} lacks {', '.join(missing)}: the demonstration model is part of the repository")


def score(out: Path) -> tuple[float, str]:
    """(share of rows whose text is the expected one, counts by task in words)"""
    right: Counter[str] = Counter()
    all_rows: Counter[str] = Counter()
    for row in rows_of(out):
        assert row["status"] == "ok", row["error"]
        carried = json.loads(row["extra"])
        all_rows[carried["task"]] += 1
        right[carried["task"]] += row["text"].strip() == carried["expected"]
    by_task = ", ".join(f"{task} {right[task]}/{count}" for task, count in sorted(all_rows.items()))
    return right.total() / all_rows.total(), by_task


def test_at_least_nine_of_ten_held_out_prompts_are_answered_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompts share no content with the training text."""
    source = write_lines(tmp_path / "heldout.jsonl", rows("heldout", PER_TASK * len(TASKS), seed=1))
    done = run(["run", source, "-o", "out.parquet", "--report", "-"], tmp_path)
    assert "no --model given: running the demonstration model" in done.stderr
    assert done.report["rows_ok"] == PER_TASK * len(TASKS)
    share, by_task = score(tmp_path / "out.parquet")
    with capsys.disabled():
        print(f"\ndemonstration model: {share:.1%} exact ({by_task})")
    assert share >= 0.9, by_task


def test_the_sample_file(tmp_path: Path) -> None:
    """The file of the README's first command."""
    shutil.copy(SAMPLE, tmp_path)
    assert "demonstration model" in run(["run", SAMPLE.name], tmp_path).stderr
    share, by_task = score(tmp_path / "prompts.out.parquet")
    assert share >= 0.9, by_task
    footer = run(["show", "prompts.out.parquet", "--row", "0"], tmp_path)
    assert footer.stdout
