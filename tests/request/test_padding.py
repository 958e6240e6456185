"""Null padding and empty optional keys: absent in messages, tools, bodies and `sampling_params`, from every file."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.read.parquet import parquet_rows
from batchgen.errors import RowError
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.request.rows.values import RowDefaults
from tests.rows import CHAT, HELLO, line, parse, text

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"city": "Paris"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **parameters}}}


MESSAGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # (message, the same without its padding)
    ({**USER, "name": None}, USER),
    ({**USER, "tool_calls": [], "refusal": None, "function_call": None, "audio": None, "annotations": []}, USER),
    ({**USER, "function_call": {"name": None, "arguments": None}, "audio": {"id": None}}, USER),
    (
        {**USER, "tool_calls": None, "tool_call_id": None, "note": {"a": [None], "b": None}},
        {**USER, "note": {"a": [None]}},
    ),
    (
        {"role": "user", "content": [{"type": "text", "text": "a", "image_url": None, "source": {"url": None}}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ),
    (
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": None}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ),
    (
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"a": None, "b": [], "c": {"d": None}}}}
        ]},
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"b": [], "c": {}}}}
        ]},
    ),
    (
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": '{"a": null}', "strict": None}}
        ]},
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": '{"a": null}'}}
        ]},
    ),
]  # fmt: skip


@pytest.mark.field("messages")
@pytest.mark.parametrize(("message", "expected"), MESSAGES)
def test_messages(message: dict[str, Any], expected: dict[str, Any]) -> None:
    given = json.dumps(message)
    for row in ({"messages": [USER, message]}, line(CHAT, messages=[USER, message])):
        assert parse(row).prompts == (ChatPrompt((USER, expected)),)
    assert json.dumps(message) == given, "the row itself is not changed"


def test_values_that_only_python_has() -> None:
    """An array has no single truth value; it is left to the template."""
    array = np.zeros(2)
    (prompt,) = parse({"messages": [{**USER, "data": array, "name": None, "flag": False, "count": 0}]}).prompts
    assert isinstance(prompt, ChatPrompt)
    (message,) = prompt.messages
    assert message["data"] is array
    assert {key: message[key] for key in message if key != "data"} == {**USER, "flag": False, "count": 0}


def test_empty_calls_do_not_allow_a_message_without_content() -> None:
    for message in ({"role": "assistant", "tool_calls": []}, {"role": "assistant", "content": None, "tool_calls": []}):
        with pytest.raises(RowError, match="content"):
            parse({"messages": [message]})


TOOLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (tool(properties={"city": None, "n": {"type": "integer", "description": None}}),
     tool(properties={"n": {"type": "integer"}})),
    ({**TOOL, "strict": None}, TOOL),
    (tool(properties={"city": None}), tool(properties={})),
    (tool(properties={"default": None, "enum": {"type": "string", "enum": None}}),
     tool(properties={"enum": {"type": "string", "enum": None}})),
    (tool(additionalProperties=None, required=None, items=[{"type": None}]), tool(items=[{}])),
    (tool(**{"$defs": {"a": None, "const": {"const": None}}}), tool(**{"$defs": {"const": {"const": None}}})),
    (tool(properties={"a": {"default": None}, "b": {"enum": [None, "x"]}, "c": {"const": None}}),) * 2,
    (tool(properties={"a": {"default": {"b": None}}, "b": {"examples": [{"c": None}]}}),) * 2,
    (tool(properties={"a": {"type": ["string", "null"]}}),) * 2,
]  # fmt: skip


@pytest.mark.field("tools")
@pytest.mark.parametrize(("given", "expected"), TOOLS)
def test_tools(given: dict[str, Any], expected: dict[str, Any]) -> None:
    for row in ({"messages": HELLO, "tools": [given]}, line(CHAT, messages=HELLO, tools=[given])):
        assert parse(row).prompts == (ChatPrompt(tuple(HELLO), (expected,)),)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": None}, "b": None}, "required": None}
CLEAN = {"type": "object", "properties": {"a": {"type": "integer"}}}
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"json_schema": SCHEMA}, {"json_schema": CLEAN}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": None}}},
        {"json_schema": CLEAN},
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {**SCHEMA, "name": None, "schema": None}}},
     {"json_schema": CLEAN}),
    ({"response_format": {"type": "text", "json_schema": None}}, {}),
    ({"logit_bias": {"5": 1.5, "7": None}}, {"logit_bias": {"5": 1.5}}),
    ({"return_hidden_states": {"tokens": "last", "layers": None, "pool": None}},
     {"return_hidden_states": {"tokens": "last"}}),
    ({"stream_options": {"include_usage": None}}, {}),
    ({"stop": [], "stop_token_ids": [], "stop_regex": [], "bad_words": [], "token_ids_logprob": [], "seed": None}, {}),
]  # fmt: skip


@pytest.mark.field(
    "sampling_params", "stream_options", "json_schema", "response_format", "logit_bias", "return_hidden_states"
)
@pytest.mark.parametrize(("given", "expected"), OPTIONS)
def test_sampling_fields(given: dict[str, Any], expected: dict[str, Any]) -> None:
    for make in (text, line, lambda **fields: line(CHAT, **fields), lambda **fields: text(sampling_params=fields)):
        assert parse(make(**given)).params == parse(make(**expected)).params


@pytest.mark.field("chat_template_kwargs")
def test_variables_of_the_template() -> None:
    row = {"messages": HELLO, "chat_template_kwargs": {"a": 1, "b": None, "c": {"d": None}, "messages": None}}
    assert parse(row).prompts == (ChatPrompt(tuple(HELLO), template_kwargs={"a": 1, "c": {}}),)


@pytest.mark.field("custom_params")
def test_parameters_of_a_processor() -> None:
    run = RowDefaults(processors=frozenset({"p"}))
    row = text(custom_logit_processor="p", custom_params={"a": [None], "b": None, "c": {"d": None}})
    assert parse(row, run).params.custom_params == '{"a":[null],"c":{}}'


@pytest.mark.field("tools", "chat_template_kwargs", "continue_final_message")
def test_empty_settings_of_a_conversation_do_not_need_one() -> None:
    for padding in ({"tools": []}, {"chat_template_kwargs": {}}, {"continue_final_message": False}, {"tools": None}):
        assert parse(text(**padding)).prompts == parse(text()).prompts


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{**USER, "tool_calls": [], "name": None}, {"role": "assistant", "content": "a", "name": "b"}]},
        {"messages": [USER], "tools": [tool(properties={"city": {"type": "string", "description": None}, "n": None})]},
        line(CHAT, messages=[{**USER, "name": None}], stop=[], temperature=None),
        text(sampling_params={"max_new_tokens": 3, "stop": None}),
    ],
)
def test_a_row_is_the_same_from_both_kinds_of_files(row: dict[str, Any]) -> None:
    """Padded by other rows of the table, whose objects have more keys."""
    other = {
        "messages": [{"role": "a", "content": "b", "name": "c", "tool_calls": [{"id": "d"}], "audio": {"id": "e"}}],
        "tools": [tool(properties={"city": {"type": "string", "description": "x"}, "n": {"type": "integer"}})],
    }
    stream = io.BytesIO()
    table = pa.Table.from_pylist([row, other | {"body": {"stop": ["x"], "messages": other["messages"], "n": 2}}])
    pq.write_table(table, stream)
    from_parquet, _ = parquet_rows(stream, "in.parquet")
    assert from_parquet is not None
    (from_json,) = (json.loads(json.dumps(value)) for value in table.to_pylist()[:1])
    assert parse(from_parquet.value) == parse(from_json) == parse(row)
