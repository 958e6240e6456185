"""Constraints through the command line: the demonstration model, `check`, OpenAI lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.e2e.rows import by_id, rows_of, write_lines
from tests.e2e.runner import run

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Paris", "Oslo", "Lima"]},
    },
    "required": ["name", "age", "city"],
}
CHAT = [{"role": "user", "content": "Extract the fields as JSON: Anna is 31 and lives in Oslo."}]


@pytest.mark.field("json_schema", "response_format", "choice", "regex")
def test_the_demonstration_model_fills_a_schema(tmp_path: Path) -> None:
    body = {"model": "*", "messages": CHAT, "temperature": 0, "max_completion_tokens": 80}
    line = {"method": "POST", "url": "/v1/chat/completions"}
    wrapped = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    completion = {"model": "*", "prompt": "Pick one: ", "temperature": 0, "choice": ["red", "green"]}
    lines: list[Any] = [
        {"id": "flat", "messages": CHAT, "temperature": 0, "json_schema": PERSON},
        {"id": "text", "messages": CHAT, "temperature": 0, "json_schema": json.dumps(PERSON)},
        {"id": "inside", "messages": CHAT, "sampling_params": {"temperature": 0, "json_schema": PERSON}},
        {"custom_id": "openai", **line, "body": {**body, "response_format": wrapped}},
        {"custom_id": "object", **line, "body": {**body, "response_format": {"type": "json_object"}}},
        {"custom_id": "free", **line, "body": {**body, "response_format": {"type": "text"}}},
        {"custom_id": "pick", "method": "POST", "url": "/v1/completions", "body": completion},
        {"id": "drawn", "messages": CHAT, "temperature": 1.0, "n": 3, "regex": "[A-Z][a-z]{2,7}, [0-9]{2}"},
    ]
    source = write_lines(tmp_path / "in.jsonl", lines)
    run(["run", source, "-o", "out.parquet"], tmp_path)
    rows = rows_of(tmp_path / "out.parquet")
    found = {row["id"]: row for row in rows if row["sample_index"] == 0}
    for name in ("flat", "text", "inside", "openai"):
        jsonschema.validate(json.loads(found[name]["text"]), PERSON)
        assert (found[name]["constraint_ok"], found[name]["finish_reason"]) == (True, "stop")
    assert len({found[name]["text"] for name in ("flat", "text", "inside", "openai")}) == 1
    if found["object"]["constraint_ok"]:
        assert isinstance(json.loads(found["object"]["text"]), dict)
    assert found["free"]["constraint_ok"] is None
    assert found["pick"]["text"] in ("red", "green")
    drawn = [row["text"] for row in rows if row["id"] == "drawn"]
    assert all(len(text.split(", ")) == 2 for text in drawn)
    assert len(drawn) == 3


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "syntax": ({"regex": "("}, "invalid_grammar"),
    "left": ({"ebnf": 'root ::= root "a" | "a"'}, "invalid_grammar"),
    "not": ({"json_schema": {"type": "integer", "not": {"const": 3}}}, "unsupported_schema_keyword"),
    "format": ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}}},
               "invalid_grammar"),
}  # fmt: skip


def bad_lines() -> list[Any]:
    bad = [{"id": name, "text": "x", **fields} for name, (fields, _) in BAD.items()]
    return [{"id": "good", "text": "x", "regex": "[a-c]{4}", "max_new_tokens": 8}, *bad]


def test_check_and_run_report_the_same_errors(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", bad_lines())
    report = json.loads(run(["check", source, "--json"], tmp_path).stdout)
    assert (report["rows"], report["rows_ok"]) == (5, 1)
    assert {error["id"]: error["code"] for error in report["row_errors"]} == {n: code for n, (_, code) in BAD.items()}
    assert all("in.jsonl, line " in error["message"] for error in report["row_errors"])
    run(["run", source, "-o", "out.parquet"], tmp_path)
    rows = by_id(tmp_path / "out.parquet")
    assert {name: rows[name]["error"]["code"] for name in BAD} == {name: code for name, (_, code) in BAD.items()}
    assert rows["not"]["error"]["param"] == "json_schema"
    assert rows["good"]["constraint_ok"] is True
