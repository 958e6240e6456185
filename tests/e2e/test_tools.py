"""Calls of tools in a run: calls that rows require, by the demonstration model and by models without sense."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from openai.types.chat import ChatCompletion

from batchgen import Completion, Engine
from batchgen.demo import model_path
from batchgen.request.completion import StreamEvent
from batchgen.text.grammar.schemas.validation import Schema
from tests.e2e.engines import outcomes
from tests.e2e.model import save_model
from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import run
from tests.text.tools.families import FAMILIES

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 5},
        "note": {"type": "string", "maxLength": 4},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOW = {"type": "object", "properties": {"zone": {"type": "string", "maxLength": 3}}, "required": ["zone"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Weather of a city.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": NOW}},
]
SCHEMAS = {"weather": Schema(WEATHER), "now": Schema(NOW)}
HELLO = [{"role": "user", "content": "How is the weather in Rome?"}]
NAMED = {"type": "function", "function": {"name": "now"}}
MODELS = ("qwen3", "gpt-oss")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    found = {}
    for name in MODELS:
        one = FAMILIES[name]
        added = [*one.special, *one.added]
        folder = save_model(
            tmp_path_factory.mktemp("model"), 1024, template=one.template, added=added, specials=len(one.special)
        )
        found[name] = Engine(str(folder), dtype="float32", attention="torch")
    return found


def calls(done: Completion) -> list[tuple[str, Any]]:
    """Name and arguments of each call, whose ids differ."""
    found = json.loads(done.tool_calls or "[]")
    assert len({call["id"] for call in found}) == len(found)
    assert {call["type"] for call in found} <= {"function"}
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.field("tool_choice", "parallel_tool_calls")
def test_required_calls_of_a_model_without_sense(engines: dict[str, Engine], name: str) -> None:
    """Whatever it draws, finished rows have calls that satisfy the schemas and no text."""
    engine = engines[name]
    row = {"messages": HELLO, "tools": TOOLS, "max_new_tokens": 100, "temperature": 1.5, "thinking_budget": 4}
    rows = [
        {**row, "id": "any", "tool_choice": "required", "n": 3},
        {**row, "id": "one", "tool_choice": "required", "parallel_tool_calls": False, "n": 2, "stream": True},
        {**row, "id": "named", "tool_choice": NAMED, "best_of": 2, "n": 2},
        {**row, "id": "endless", "tool_choice": NAMED, "ignore_eos": True, "stop": "never"},
    ]
    events: list[StreamEvent] = []
    together = list(engine.generate(rows, ordered=True, on_event=events.append))
    finished = [done for done in together if done.finish_reason == "stop"]
    assert len(finished) >= 4, [(done.error, done.finish_reason, done.text, done.tool_calls_error) for done in together]
    for done in together:
        assert done.error is None, done.error
        assert done.constraint_ok or done.finish_reason == "length"
    ends = [event for event in events if event.finish_reason is not None]
    assert {event.sample_index: event.tool_calls for event in ends} == {
        done.sample_index: done.tool_calls for done in together if done.row_index == 1
    }
    for done in finished:
        found = calls(done)
        assert found, done
        assert (done.text, done.tool_calls_error) == ("", None)
        assert all(SCHEMAS[called].satisfied_by(json.dumps(arguments)) for called, arguments in found)
        assert done.row_index == 0 or len(found) == 1
        assert done.row_index < 2 or found[0][0] == "now"
    (alone,) = engine.generate([rows[3]])
    assert (alone.tool_calls, outcomes([alone])) == (together[-1].tool_calls, outcomes(together[-1:]))


def test_what_cannot_be_had_is_refused(engines: dict[str, Engine], engine: Engine) -> None:
    known = engines["qwen3"]
    row = {"messages": HELLO, "max_new_tokens": 2}
    cases: list[tuple[Engine, dict[str, Any], str, str]] = [
        (known, {"tool_choice": "required"}, "tool_choice", "needs `tools`"),
        (known, {"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "tool_choice", "one constraint"),
        (
            known,
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "'now'",
        ),
        (
            engine,
            {"tools": TOOLS, "tool_choice": "required"},
            "tool_choice",
            "name the format with Engine argument `tool_parser`",
        ),
        (
            known,
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
            "uses `not`",
        ),
    ]
    for used, fields, name, words in cases:
        (done,) = used.generate([{**row, **fields}])
        assert done.error is not None, fields
        assert (done.error.param, words in done.error.message) == (name, True), done.error
    (done,) = known.generate([{**row, "tools": TOOLS, "tool_choice": "none"}])
    (plain,) = known.generate([row])
    assert (done.prompt_tokens, done.tool_calls) == (plain.prompt_tokens, None)


def test_tools_of_a_model_whose_format_of_calls_is_not_known_are_named(tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    model = save_model(tmp_path / "model", 1024, template=template)
    write_lines(tmp_path / "in.jsonl", [{"messages": HELLO, "tools": TOOLS, "max_new_tokens": 2}] * 3)
    words, line = ["in.jsonl", "--model", model], "the format in which the model calls them is not known"
    assert run(["check", *words], tmp_path).stderr.count(line) == 1
    assert run(["run", *words], tmp_path).stderr.count(line) == 1
    assert line not in run(["run", *words, "-o", "off.parquet", "--tool-parser", "off"], tmp_path).stderr


def test_a_job_of_the_demonstration_model(tmp_path: Path) -> None:
    """Columns, footer, report, verify, reuse and export of a run with tools."""
    row = {"messages": HELLO, "tools": TOOLS, "temperature": 0.8}
    body = {"model": "*", **row, "tool_choice": "required", "max_tokens": 100}
    write_lines(
        tmp_path / "in.jsonl",
        [
            {"id": "native", **row, "tool_choice": NAMED, "max_new_tokens": 100},
            {"custom_id": "line", "method": "POST", "url": "/v1/chat/completions", "body": {**body, "n": 2}},
            {"id": "auto", **row, "max_new_tokens": 8},
            *({"id": f"r{i}", **row, "tool_choice": "required", "max_new_tokens": 100} for i in range(2)),
        ],
    )
    model = ["--model", model_path()]
    report = run(["run", "in.jsonl", "-o", "out.parquet", "--report", "-", *model], tmp_path).report
    assert (report["tool_parser"], report["rows_error"]) == ("hermes", 0)
    rows = rows_of(tmp_path / "out.parquet")
    assert json.loads(pq.read_schema(tmp_path / "out.parquet").metadata[b"batchgen.run"])["tool_parser"] == "hermes"
    assert [each["tool_calls"] is None for each in rows[:4]] == [False, False, False, True]
    assert "2 of 2 rows are the same" in run(["verify", "out.parquet", "--rows", "2", *model], tmp_path).stdout
    exported = run(["export", "out.parquet", "--format", "openai-batch", "-o", "-"], tmp_path).stdout.splitlines()
    bodies = [json.loads(line)["response"]["body"] for line in exported]
    for number, each in enumerate(bodies):
        parsed = ChatCompletion.model_validate(each, strict=True)
        for choice in parsed.choices:
            assert number == 2 or choice.finish_reason in ("tool_calls", "length")
            if choice.finish_reason == "tool_calls":
                assert choice.message.content is None
                for call in choice.message.tool_calls or ():
                    assert call.type == "function"
                    assert SCHEMAS[call.function.name].satisfied_by(call.function.arguments)
    # The calls go back into a conversation as they are.
    message = bodies[0]["choices"][0]["message"]
    assert message["tool_calls"] == json.loads(rows[0]["tool_calls"])
    run(["run", "in.jsonl", "-o", "reused.parquet", "--reuse", "out.parquet", *model], tmp_path)
    reused = rows_of(tmp_path / "reused.parquet")
    assert [each["tool_calls"] for each in reused] == [each["tool_calls"] for each in rows]
    refused = run(["run", "in.jsonl", "-o", "out.parquet", *model, "--tool-parser", "off"], tmp_path, expect=2)
    assert "tool_parser" in refused.stderr
