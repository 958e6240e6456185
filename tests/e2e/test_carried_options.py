"""Misspelt fields and foreign options on rows, and the commonest row error, as a user sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import batchgen
from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import run

F32 = ["--dtype", "float32"]
GREEDY = {"temperature": 0, "max_new_tokens": 3}
ROWS = [
    {"id": "t1", "text": "Hi", **GREEDY, "max_new_token": 3, "idx": 1, "label": "a"},
    {"id": "t2", "text": "Hi", **GREEDY, "temprature": 0},
    {"id": "t3", "text": "Hi", **GREEDY, "until": ["\n"]},
    {"id": "t4", "text": "Hi", **GREEDY, "until": ["a"], "source": "x"},
    {"id": "t5", "text": "Hi", **GREEDY, "generation_kwargs": {"max_new_tokens": 2}},
]
LINES = [
    "`until` in 2 rows: an option of lm-eval: use `stop`; carried, not obeyed",
    "`generation_kwargs` in 1 row: an option of lm-eval: use `sampling_params`; carried, not obeyed",
    "`max_new_token` in 1 row: did you mean `max_new_tokens`? carried, not obeyed",
    "`temprature` in 1 row: did you mean `temperature`? carried, not obeyed",
]
COUNTS = {"until": 2, "generation_kwargs": 1, "max_new_token": 1, "temprature": 1}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", ROWS)


def test_a_run_names_them_at_once_and_in_the_summary_and_the_report(model: Path, source: Path) -> None:
    done = run(["run", source, "--model", model, *F32, "--report", "-"], source.parent)
    stderr = done.stderr.splitlines()
    assert [line for line in stderr if line.startswith("`")] == LINES
    (summary,) = (line.split(maxsplit=1)[1] for line in stderr if line.startswith("carried "))
    assert summary.startswith(
        "not obeyed, though they look like options or media: `until` in 2 rows, `generation_kwargs` in"
    )
    assert {note["key"]: note["rows"] for note in done.report["carried_options"]} == COUNTS
    assert json.loads(rows_of(source.parent / "in.out.parquet")[2]["extra"]) == {"until": ["\n"]}


def test_check_names_them(model: Path, source: Path) -> None:
    words = ["check", source, "--model", model, *F32]
    shown = run(words, source.parent).stdout
    assert all(f"carried         {line}" in shown for line in LINES)
    report = json.loads(run([*words, "--json"], source.parent).stdout)
    assert {note["key"]: note["rows"] for note in report["carried_options"]} == COUNTS


def test_strictly_they_are_row_errors(model: Path, source: Path) -> None:
    words = ["run", source, "--model", model, *F32, "--strict-fields", "--max-errors", "5"]
    done = run([*words, "--carry", "until"], source.parent)
    rows = rows_of(source.parent / "in.out.parquet")
    assert [row["error"] and row["error"]["param"] for row in rows] == [
        "max_new_token", "temprature", None, None, "generation_kwargs",
    ]  # fmt: skip
    assert "carried, not obeyed" not in done.stderr
    refused = run([*words, "--overwrite", "--max-errors", "0"], source.parent, expect=3)
    assert "most frequent: unknown_field in 2 rows, first in row 2 (id 't3'): " in refused.stderr


def test_carry_says_that_a_column_is_meant(model: Path, source: Path) -> None:
    done = run(["run", source, "--model", model, *F32, "--carry", "until,temprature"], source.parent)
    assert "`until`" not in done.stderr
    assert "`max_new_token` in 1 row: did you mean `max_new_tokens`? left out, not obeyed" in done.stderr


def test_a_resumed_run_that_reads_no_rows_names_them_again(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [*ROWS, {"id": "bad"}])
    words = ["run", source, "--model", model, *F32]
    run([*words, "--max-errors", "0"], tmp_path, expect=3)
    assert LINES[0] in run([*words, "--max-errors", "1"], tmp_path).stderr


def test_python_warns(engine: batchgen.Engine) -> None:
    with pytest.warns(
        UserWarning, match=r"`temprature` in 1 row: did you mean `temperature`\? left out, not obeyed"
    ) as found:
        list(engine.generate([ROWS[1]]))
    assert found[0].filename == __file__, "of the caller"


def test_too_many_errors_name_the_commonest_with_its_first_row(model: Path, tmp_path: Path) -> None:
    rows = [{"id": "a", "text": "Hi", "top_p": 7}, {"id": "b", "question": "Hi"}, {"id": "c", "question": "Ho"}]
    source = write_lines(tmp_path / "in.jsonl", rows)
    words = ["run", source, "--model", model, *F32]
    reason = "most frequent: missing_prompt in 2 rows, first in row 1 (id 'b'): "
    stopped = run(words, tmp_path, expect=3).stderr.splitlines()[-1]
    assert f"{reason}{source}, line 2: " in stopped
    assert "--prompt-column question" in stopped
    done = run([*words, "--max-errors", "3", "--report", "-"], tmp_path)
    assert reason in done.stderr
    assert done.report["commonest_error"].startswith(reason)
    checked = run(["check", source, "--model", model, *F32], tmp_path, expect=3)
    assert f"  2 rows (1, 2), the first with id 'b': missing_prompt: {source}, line 2: " in checked.stdout
    assert "row 0 (id 'a'): invalid_field: " in checked.stdout


def test_a_prompt_column_that_no_row_has(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": "Hi", "question": "Hi"}] * 2)
    words = ["run", source, "--model", model, *F32, "--prompt-column", "qestion"]
    stopped = run(words, tmp_path, expect=3).stderr.splitlines()[-1]
    assert "the row has no field `qestion`, which --prompt-column names; it has `text`, `question`" in stopped
    assert "did you mean `question`?" in stopped
