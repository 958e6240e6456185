"""Processes that die: a row that ends run after run becomes an error row; a healthy job loses none, however killed."""

from __future__ import annotations

import json
import signal
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.e2e.processors import PAUSED, PAUSING
from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import ProcessResult, run, start

DEADLY = """
import os, signal

def deadly(logits, rows):
    for row in rows:
        if row.params.get("dies") == len(row.output_ids):
            os.kill(os.getpid(), signal.SIGKILL) if row.params.get("kill") else os._exit(9)
    return logits
"""
TOKENIZER = """
import os
from batchgen.text.tokens.tokenizer import Tokenizer

encode = Tokenizer.encode_plain

def encode_plain(self, texts):
    if any("deadly" in text for text in texts) and "HARMLESS" not in os.environ:
        os._exit(9)
    return encode(self, texts)

Tokenizer.encode_plain = encode_plain
"""
NAMED = ["--logit-processor", "deadly=deadly_module:deadly"]
FORCED = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deadly_module.py").write_text(DEADLY)
    (tmp_path / "tokenizer_module.py").write_text(TOKENIZER + DEADLY)
    return tmp_path


def plain_rows(count: int, tokens: int = 8) -> list[dict[str, Any]]:
    return [{"id": f"id {i}", "text": f"Hello {i % 17}", "max_new_tokens": tokens, **FORCED} for i in range(count)]


def deadly(i: int, **params: Any) -> dict[str, Any]:
    processor = {"custom_logit_processor": "deadly", "custom_params": params}
    return {"id": f"id {i}", "text": "A deadly row", "max_new_tokens": 8, **FORCED, **processor}


def command(model: Path, *options: object) -> list[object]:
    return ["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--max-num-seqs", "8", *options]


def until_finished(arguments: list[object], folder: Path, most: int) -> tuple[int, ProcessResult]:
    """Run a command again until it exits with 0; (number of deaths, last result)."""
    for deaths in range(most + 1):
        done = start(arguments, folder).wait()
        if done.code == 0:
            return deaths, done
        assert done.code in (9, -9), done.stderr
    raise AssertionError(f"{most} deaths, and the job is not finished")


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("at", "kill"),
    [(3, True), *(pytest.param(*case, marks=SLOW) for case in [(0, True), (0, False), (3, False), (7, True)])],
)
def test_a_row_that_ends_run_after_run_is_set_aside_with_its_copies(
    model: Path, folder: Path, at: int, kill: bool
) -> None:
    rows = plain_rows(30)
    for i in (3, 11, 29):
        rows[i] = deadly(i, dies=at, kill=kill)
    write_lines(folder / "in.jsonl", rows)
    deaths, _ = until_finished(command(model, *NAMED, "--report", "report.json"), folder, 6)
    assert deaths == 5  # two among others, three alone
    report = json.loads((folder / "report.json").read_text())
    made = report["engine"]["sampled_tokens"] + report["copied_tokens"]
    assert made == 8 * (report["rows_ok"] - report["rows_resumed"]), "rows that ran alone are counted"
    found = rows_of(folder / "out.parquet")
    assert [row["id"] for row in found if row["error"]] == ["id 3", "id 11", "id 29"]
    assert found[11]["error"]["code"] == "engine_crash"
    assert "--retry-errors" in found[11]["error"]["message"]
    write_lines(folder / "in.jsonl", [row for row in rows if "custom_params" not in row])
    run(command(model, "--overwrite"), folder)
    assert [row["text"] for row in found if not row["error"]] == [
        row["text"] for row in rows_of(folder / "out.parquet")
    ]


@pytest.mark.slow
def test_a_row_that_was_set_aside_is_tried_again_on_demand(model: Path, folder: Path) -> None:
    rows = plain_rows(12)
    rows[5] = deadly(5, dies=1)
    write_lines(folder / "in.jsonl", rows)
    until_finished(command(model, *NAMED), folder, 6)
    deaths, _ = until_finished(command(model, *NAMED, "--retry-errors"), folder, 6)
    assert deaths == 5
    assert [row["row_index"] for row in rows_of(folder / "out.parquet") if row["error"]] == [5]


def test_a_row_that_ends_the_reading_is_set_aside(model: Path, folder: Path) -> None:
    rows = plain_rows(600)
    rows[300] = {"id": "id 300", "text": "a deadly text", "max_new_tokens": 1, "note": "kept"}
    write_lines(folder / "in.jsonl", rows)
    options = ["--logit-processor", "deadly=tokenizer_module:deadly", "--max-new-tokens", "1"]
    deaths, _ = until_finished(command(model, *options), folder, 5)
    assert deaths == 4  # once in its batch, three times alone
    found = rows_of(folder / "out.parquet")
    assert [row["id"] for row in found if row["error"]] == ["id 300"]
    assert found[300]["error"]["code"] == "engine_crash"
    assert json.loads(found[300]["extra"]) == {"note": "kept"}


def test_what_is_committed_of_a_row_that_ends_the_reading_is_kept(model: Path, folder: Path) -> None:
    rows = plain_rows(150, tokens=59)
    rows[3] = {"id": "id 3", "text": "a deadly text", "max_new_tokens": 60, "n": 2, **FORCED}
    write_lines(folder / "in.jsonl", rows)
    arguments = [*command(model), "--logit-processor", "deadly=tokenizer_module:deadly", "--commit-every", "1"]
    work = folder / "out.parquet.work"

    def committed() -> bool:
        with suppress(FileNotFoundError):  # parts are joined
            parts = (work / "parts").glob("*.parquet")
            return any(3 in pq.read_table(part, columns=["row_index"])[0].to_pylist() for part in parts)
        return False

    first = start(arguments, folder, env={"HARMLESS": "1"})
    first.wait_for(committed)
    first.signal(signal.SIGKILL)
    first.wait()
    (work / "tokenized" / "about.json").unlink()
    deaths, _ = until_finished(arguments, folder, 5)
    found = [row for row in rows_of(folder / "out.parquet") if row["row_index"] == 3]
    assert deaths == 4
    assert [(row["prompt_index"], row["sample_index"], row["status"]) for row in found] == [
        *((0, sample, "ok") for sample in range(2)),
        (1, 0, "error"),
    ]
    assert found[2]["error"]["code"] == "engine_crash"


@pytest.mark.slow
def test_killing_a_healthy_job_loses_no_row(model: Path, folder: Path) -> None:
    rows = plain_rows(60, tokens=40)
    write_lines(folder / "in.jsonl", rows)
    began = time.monotonic()
    start([*command(model), "-o", "whole.parquet"], folder).wait()
    seconds = time.monotonic() - began
    rng = Random(5)
    moments = [rng.uniform(0.3, 0.9) * seconds for _ in range(10)]
    killed = sum(start(command(model, "--commit-every", 6), folder).kill_after(moment) for moment in moments)
    done = start(command(model), folder).wait()
    assert done.code == 0, done.stderr
    found, whole = rows_of(folder / "out.parquet"), rows_of(folder / "whole.parquet")
    assert killed >= 3
    assert [row["error"] for row in found] == [None] * 60
    assert [row["text"] for row in found] == [row["text"] for row in whole]


@pytest.mark.slow
def test_orderly_ends_suspect_nothing(model: Path, folder: Path) -> None:
    """Signals that the run handles, a second one too, do not count as deaths."""
    write_lines(folder / "in.jsonl", [*plain_rows(40), {"text": "Wait", **PAUSED}])
    (folder / "pause").touch()
    for _ in range(3):
        job = start(command(model, *PAUSING), folder)
        job.wait_for((folder / "reached").exists)
        job.signal(signal.SIGINT)
        job.signal(signal.SIGTERM)
        assert job.wait().code in (130, 143)
        (folder / "reached").unlink()
    history = folder / "out.parquet.work" / "deaths.json"
    assert not history.exists() or json.loads(history.read_text())["rows"] == {}
