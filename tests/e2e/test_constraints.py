"""Constraints through the command line: the demonstration model, `check`, OpenAI lines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from batchgen.data.results_file import read_footer
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


@pytest.mark.field("json_schema", "response_format", "choice", "regex", "structured_outputs", "guided_json_object")
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
        {"custom_id": "vllm", **line, "body": {**body, "structured_outputs": {"json": PERSON}}},
        {"custom_id": "older", **line, "body": {**body, "guided_json": PERSON}},
        {"custom_id": "any", **line, "body": {**body, "guided_json_object": True}},
        {"custom_id": "free", **line, "body": {**body, "response_format": {"type": "text"}}},
        {"custom_id": "pick", "method": "POST", "url": "/v1/completions", "body": completion},
        {"id": "drawn", "messages": CHAT, "temperature": 1.0, "n": 3, "regex": "[A-Z][a-z]{2,7}, [0-9]{2}"},
    ]
    source = write_lines(tmp_path / "in.jsonl", lines)
    run(["run", source, "-o", "out.parquet"], tmp_path)
    rows = rows_of(tmp_path / "out.parquet")
    found = {row["id"]: row for row in rows if row["sample_index"] == 0}
    same = ("flat", "text", "inside", "openai", "vllm", "older")
    for name in same:
        jsonschema.validate(json.loads(found[name]["text"]), PERSON)
        assert (found[name]["constraint_ok"], found[name]["finish_reason"]) == (True, "stop")
    assert len({found[name]["text"] for name in same}) == 1
    assert found["any"]["text"] == found["object"]["text"]
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


STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")


@pytest.mark.field("json_schema")
def test_patterns_and_formats_hold_and_the_footer_names_the_compilers(tmp_path: Path) -> None:
    common = {"text": "Return.", "temperature": 1.5, "seed": 1, "n": 8, "max_new_tokens": 60}
    when = {"type": "object", "properties": {"at": {"type": "string", "format": "date-time"}}, "required": ["at"]}
    schemas = {
        "time": when,
        "optional": {"type": "string", "pattern": r"^[0-9]{2}(?:\.[0-9]{1,3})?s$"},
        "length": {"type": "string", "pattern": "^[ab]+$", "maxLength": 3},
    }
    source = write_lines(tmp_path / "in.jsonl", [{"id": n, **common, "json_schema": s} for n, s in schemas.items()])
    assert json.loads(run(["check", source, "--json"], tmp_path).stdout)["grammar_backends"] == {
        "llguidance": 1,
        "xgrammar": 2,
    }
    run(["run", source, "-o", "out.parquet"], tmp_path)
    assert (read_footer(tmp_path / "out.parquet") or {})["grammar_backends"] == ["llguidance", "xgrammar"]
    ended = [row for row in rows_of(tmp_path / "out.parquet") if row["finish_reason"] == "stop"]
    assert {row["id"] for row in ended} == set(schemas)
    for row in ended:
        value = json.loads(row["text"])
        expected = {"optional": re.compile(r"[0-9]{2}(\.[0-9]{1,3})?s"), "length": re.compile("[ab]{1,3}")}
        assert expected.get(row["id"], STAMP).fullmatch(value["at"] if row["id"] == "time" else value), row
        assert row["constraint_ok"] is True


def test_a_keyword_that_is_not_checked_leaves_constraint_ok_open(tmp_path: Path) -> None:
    short = {"type": "string", "maxLength": 3}
    ones = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 3, "uniqueItems": True}
    schemas: dict[str, Any] = {"unknown": {**short, "format": "phone"}, "known": short, "items": ones}
    lines: list[Any] = [{"id": n, "text": "x", "temperature": 0, "json_schema": s} for n, s in schemas.items()]
    source = write_lines(tmp_path / "in.jsonl", lines)
    run(["run", source, "-o", "out.parquet"], tmp_path)
    rows = by_id(tmp_path / "out.parquet")
    assert {rows[name]["error"]["code"] for name in ("unknown", "items")} == {"unsupported_schema_keyword"}
    assert "phone" in rows["unknown"]["error"]["message"]
    run(["run", source, "-o", "lenient.parquet", "--lenient-schemas"], tmp_path)
    rows = by_id(tmp_path / "lenient.parquet")
    verdicts = {name: rows[name]["constraint_ok"] for name in schemas}
    assert verdicts == {"unknown": None, "known": True, "items": False}
