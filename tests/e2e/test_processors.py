"""Logit processors, penalties and logprob options on the command line: results, footers and refusals."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import ended_before_torch, run

CODE = """
import helper_of_mine

def only(logits, rows):
    for i, row in enumerate(rows):
        if row.params.get("fail"):
            raise RuntimeError("with_ids to fail")
        logits[i, row.params["token"]] += helper_of_mine.MUCH
    return logits

class Holder:
    only = staticmethod(only)

number = 5
"""
NAMED = ["--logit-processor", "only=mine:only"]
GREEDY = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}


def row(i: int, **params: Any) -> dict[str, Any]:
    return {"id": str(i), "text": "Hello there", **GREEDY, "custom_logit_processor": "only", "custom_params": params}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with in.jsonl, the processor's module and a module that it imports."""
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "helper_of_mine.py").write_text("MUCH = 1000.0\n")
    plain = {"id": "plain", "text": "Hello there", **GREEDY}
    write_lines(tmp_path / "in.jsonl", [row(0, token=9), row(1, token=12), row(2, fail=True), plain])
    return tmp_path


def command(model: Path, *options: str) -> list[object]:
    return ["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--dtype", "float32", *options]


@pytest.mark.field("custom_logit_processor", "custom_params")
def test_rows_name_a_function_of_a_module_in_the_folder(model: Path, folder: Path) -> None:
    run(command(model, *NAMED), folder)
    first, second, failed, plain = rows_of(folder / "out.parquet")
    assert (first["output_ids"], second["output_ids"]) == ([9] * 5, [12] * 5)
    assert failed["error"]["code"] == "processor_error"
    assert "with_ids to fail" in failed["error"]["message"]
    assert plain["error"] is None
    footer = json.loads(pq.read_schema(folder / "out.parquet").metadata[b"batchgen.run"])
    digest = hashlib.sha256((folder / "mine.py").read_bytes()).hexdigest()
    assert footer["logit_processors"] == {"only": ["mine:only", digest]}
    (folder / "mine.py").write_text(CODE + "# more\n")
    assert "is not this job's output" in run(command(model, *NAMED), folder, expect=2).stderr
    dotted = ["--logit-processor", "only=mine:Holder.only", "--overwrite"]
    run(command(model, *dotted), folder)
    assert [r["output_ids"] for r in rows_of(folder / "out.parquet")[:2]] == [[9] * 5, [12] * 5]


@pytest.mark.field("custom_logit_processor")
def test_a_row_cannot_load_a_processor(model: Path, folder: Path) -> None:
    """Neither by naming module:function itself, nor through the folder's batchgen.toml."""
    write_lines(folder / "in.jsonl", [row(0, token=9) | {"custom_logit_processor": "mine:only"}, row(1, token=9)])
    run(command(model, "--max-errors", "5"), folder)
    assert [r["error"]["code"] for r in rows_of(folder / "out.parquet")] == ["unknown_processor"] * 2
    (folder / "batchgen.toml").write_text('logit_processor = ["only=mine:only"]\n')
    assert "would run code" in run(command(model, "--overwrite"), folder, expect=2).stderr
    run(command(model, "--overwrite", "--config", "batchgen.toml"), folder)


def test_a_row_whose_prompts_all_fail_is_one_error(model: Path, folder: Path) -> None:
    """Also if an earlier run committed some of them."""
    several = row(0, fail=True) | {"text": ["Hello there", "Hello again", "Good day"]}
    write_lines(folder / "in.jsonl", [several, row(1, token=9)])
    refused = run(command(model, *NAMED, "--max-errors", "0", "--commit-every", "1"), folder, expect=3)
    assert "1 of 2 rows failed (processor_error 1), more than" in refused.stderr
    again = run(command(model, *NAMED, "--max-errors", "0"), folder, expect=3)
    assert "1 of 2 rows failed (in earlier runs 1), more than" in again.stderr
    for option in ("--resume", "--overwrite"):
        done = run(command(model, *NAMED, option, "--report", "-", "--progress", "json"), folder)
        assert (done.report["rows_ok"], done.report["rows_error"]) == (1, 1)
        shown = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"phase')]
        assert shown[-1]["rows_error"] == 1, done.stderr
    assert [r["status"] for r in rows_of(folder / "out.parquet")] == ["error"] * 3 + ["ok"]


def test_verify_runs_only_processors_that_are_named_on_its_command_line(model: Path, folder: Path) -> None:
    write_lines(folder / "in.jsonl", [row(0, token=9), row(1, token=12)])
    run(command(model, *NAMED), folder)
    refused = run(["verify", "out.parquet"], folder, expect=2).stderr
    assert "Name them again: --logit-processor only=mine:only" in refused
    assert run(["verify", "out.parquet", *NAMED], folder).stdout.endswith("2 of 2 rows are the same\n")
    (folder / "mine.py").write_text(CODE + "# more\n")
    assert "has changed since the run" in run(["verify", "out.parquet", *NAMED], folder, expect=2).stderr


INVALID = {
    "nowhere:f": "cannot import `nowhere`: ModuleNotFoundError",
    "mine:f": "`mine` has no `f`",
    "mine:number": "`number` of `mine` is not a function (it is int)",
    "broken:f": "cannot import `broken`: ZeroDivisionError",
    "quits:f": "cannot import `quits`: SystemExit",
    "mine": "must be NAME=module:function",
}


def test_invalid_processors_are_ended_before_torch_is_imported(folder: Path, model: Path) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "quits.py").write_text("import sys\nsys.exit(0)\n")
    cases = [(command, target) for command in ("run", "check") for target in INVALID]
    lines = [[command, "in.jsonl", "--model", model, "--logit-processor", f"only={t}"] for command, t in cases]
    for (_, target), done in zip(cases, ended_before_torch(lines, folder), strict=True):
        assert done.code == 2, done.stderr
        assert INVALID[target] in done.stderr
        assert f"only={target}" in done.stderr
        assert done.stderr.count("\n") == 1
