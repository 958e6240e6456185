"""Batch files of other systems as a user runs them: model names, lines without `url`, ids, and what resumes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from batchgen import Engine
from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import run

ASK = [{"role": "user", "content": "Hello there"}]
LINES: list[dict[str, Any]] = [
    {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "gpt-4o-mini", "messages": ASK},
    },
    {"custom_id": 17, "body": {"model": "gpt-4o-mini", "messages": ASK, "n": 1.0}},
    {"custom_id": "c", "body": {"messages": [{**ASK[0], "name": None, "tool_calls": []}], "service_tier": "flex"}},
    {"custom_id": 18, "method": "POST", "url": "/v1/responses", "body": {"model": "gpt-4o-mini", "input": "a"}},
]
LIMIT = ["--max-new-tokens", "3", "--temperature", "0", "--no-dedup"]


@pytest.mark.field("model", "id", "url", "method", "body")
def test_a_file_runs_under_a_served_name(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", LINES)
    command = ["run", source, "-o", "out.parquet", "--model", model, *LIMIT]
    run([*command, "--served-model-name", "other"], tmp_path)
    first, second, third, fourth = rows_of(tmp_path / "out.parquet")
    assert "--served-model-name gpt-4o-mini" in first["error"]["message"]
    assert [row["id"] for row in (first, second, third, fourth)] == ["a", "17", "c", "18"]
    assert (fourth["error"]["code"], fourth["error"]["param"]) == ("unsupported_field", "url")
    for names in (["--served-model-name", "other", "--served-model-name", "gpt-4o-mini"], ["--any-model"]):
        run([*command, *names, "--overwrite"], tmp_path)
        found = rows_of(tmp_path / "out.parquet")
        assert [row["status"] for row in found] == ["ok", "ok", "ok", "error"]
        assert len({row["text"] for row in found[:3]}) == 1


def test_names_do_not_stop_a_resume(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", LINES[:3])
    command = ["run", source, "-o", "out.parquet", "--model", model, *LIMIT]
    run([*command, "--max-time", "0"], tmp_path, expect=75)
    run([*command, "--any-model", "--retry-errors"], tmp_path)
    found = rows_of(tmp_path / "out.parquet")
    assert [row["status"] for row in found] == ["ok"] * 3
    written = (tmp_path / "out.parquet").stat().st_mtime_ns
    run([*command, "--served-model-name", "x"], tmp_path)
    assert (tmp_path / "out.parquet").stat().st_mtime_ns == written, "the job is finished"


@pytest.mark.field("verbosity", "reasoning_effort")
def test_variables_reach_a_template_that_reads_them(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}|{{ verbosity }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    bodies = [{"verbosity": "low"}, {"verbosity": "medium"}, {}, {"reasoning_effort": "low"}]
    rows = [{"custom_id": str(i), "body": {"messages": ASK, **body}} for i, body in enumerate(bodies)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    run(["run", source, "-o", "out.parquet", "--model", folder, *LIMIT, "--include-prompt"], tmp_path)
    *found, refused = rows_of(tmp_path / "out.parquet")
    assert [row["prompt"].partition("|")[2] for row in found] == ["low", "medium", ""]
    assert (refused["error"]["code"], refused["error"]["param"]) == ("unsupported_field", "reasoning_effort")


@pytest.mark.field("return_cached_tokens_details")
def test_parts_of_cached_tokens(engine: Engine) -> None:
    row = {"input_ids": [5, 6, 7, 8], "max_new_tokens": 2, "return_cached_tokens_details": True, "seed": 1}
    rows: list[dict[str, Any]] = [
        row | {"temperature": 1}, row | {"temperature": 1}, row | {"input_ids": [5, 6, 9]},
        row | {"n": 2, "best_of": 3}, row | {"temperature": 0}, row | {"temperature": 0}, row | {"max_new_tokens": 0},
        row | {"input_ids": [20, 21, 22], "temperature": 0}, row | {"input_ids": [20, 21, 22], "temperature": 0},
        row | {"input_ids": [30, 31, 32], "temperature": 2, "n": 2, "best_of": 12},
        row | {"return_cached_tokens_details": False},
    ]  # fmt: skip
    found = list(engine.generate(rows, ordered=True))
    assert len(found) == 13
    for done in found[:-1]:
        assert done.cached_tokens_details is not None
        assert done.prompt_tokens is not None
        parts = (done.cached_tokens_details.prefix, done.cached_tokens_details.duplicate)
        whole = done.cached_tokens == done.prompt_tokens
        assert parts == ((0, done.cached_tokens) if whole else (done.cached_tokens, 0))
    assert {(d.cached_tokens_details.prefix, d.cached_tokens_details.duplicate) for d in found[:-1]} == {  # type: ignore[union-attr]
        (0, 0),
        (2, 0),
        (0, 4),
        (0, 3),
    }
    assert found[-1].cached_tokens_details is None


def test_the_column_of_cached_tokens(model: Path, tmp_path: Path) -> None:
    rows = [{"text": "ab", "max_new_tokens": 1}, {"text": "ab", "max_new_tokens": 1, "temperature": 0.5}]
    source = write_lines(tmp_path / "in.jsonl", rows)
    command = ["run", source, "-o", "out.parquet", "--model", model]
    run([*command, "--return-cached-tokens-details"], tmp_path)
    details = [row["cached_tokens_details"] for row in rows_of(tmp_path / "out.parquet")]
    tokens = rows_of(tmp_path / "out.parquet")[0]["prompt_tokens"]
    assert details == [{"prefix": 0, "duplicate": 0}, {"prefix": 0, "duplicate": tokens}]
    run([*command, "--overwrite"], tmp_path)
    assert {row["cached_tokens_details"] for row in rows_of(tmp_path / "out.parquet")} == {None}


def test_an_output_of_the_first_schema_version_is_read(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"id": "a", "text": "ab", "max_new_tokens": 2, "temperature": 0}])
    command = ["run", source, "-o", "out.parquet", "--model", model]
    run(command, tmp_path)
    table = pq.read_table(tmp_path / "out.parquet")
    metadata = {**table.schema.metadata, b"batchgen.schema_version": b"1"}
    old = table.drop_columns(["cached_tokens_details"]).replace_schema_metadata(metadata)
    pq.write_table(old, tmp_path / "old.parquet")
    assert "a" in run(["show", "old.parquet"], tmp_path).stdout
    run(["export", "old.parquet", "--format", "openai-batch", "-o", "old.jsonl"], tmp_path)
    assert '"custom_id":"a"' in (tmp_path / "old.jsonl").read_text().replace(": ", ":")


@pytest.mark.field("dtype")
@pytest.mark.parametrize(
    ("dtype", "pattern"),
    [("int", r"[-+]?[0-9]+"), ("float", r"[-+]?[0-9]*\.?[0-9]+"), ("bool", "True|False"), ("str", r"\"[\w\s]*\"")],
)
def test_dtype_is_a_pattern_of_the_whole_text(engine: Engine, dtype: str, pattern: str) -> None:
    row: dict[str, Any] = {"text": "The answer is ", "max_new_tokens": 6, "seed": 3, "temperature": 1.5}
    python_type = {"int": int, "float": float, "bool": bool, "str": str}[dtype]
    forms = [row | {"dtype": dtype}, row | {"sampling_params": {"dtype": dtype}}, row | {"dtype": python_type}]
    *found, expected = engine.generate([*forms, row | {"regex": pattern}], ordered=True)
    for done in found:
        assert done.error is None, done.error
        assert (done.text, done.output_ids) == (expected.text, expected.output_ids)
    assert {one.constraint_ok for one in found} == {expected.constraint_ok}
