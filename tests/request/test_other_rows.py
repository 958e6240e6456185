"""Rows without a prompt: the error says which format they have and how to run them, and that way works."""

from __future__ import annotations

from typing import Any

import pytest

from batchgen.errors import RowError
from batchgen.request.rows.parser import parse_row
from batchgen.request.rows.values import RowDefaults
from tests.cases import each
from tests.rows import HELLO, parse

SAID = {"from": "human", "value": "Hi"}
FORMATS: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    (
        "Anthropic",
        {"custom_id": "a", "params": {"model": "x", "max_tokens": 9, "messages": HELLO, "stop_sequences": ["a"]}},
        "rename `params` to `body`",
        {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "*", "max_tokens": 9, "messages": HELLO, "stop": ["a"]},
        },
    ),
    (
        "Gemini",
        {"key": "g", "request": {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]}},
        "`contents` as `messages`",
        {"key": "g", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    ),
    ("Gemini", {"contents": [{"parts": [{"text": "Hi"}]}]}, "`contents` as `messages`", {"messages": HELLO}),
    (
        "Bedrock",
        {"recordId": "b", "modelInput": {"messages": HELLO, "max_tokens": 5}},
        "rename `recordId` to `id`",
        {"id": "b", "messages": HELLO, "max_tokens": 5},
    ),
    ("ShareGPT", {"conversations": [SAID]}, "`from` is `role`", {"messages": HELLO}),
    ("ShareGPT", {"conversation": [SAID]}, "`value` is `content`", {"messages": HELLO}),
    ("Alpaca", {"instruction": "a", "input": "", "output": ""}, "--prompt-column instruction", {"text": "a"}),
    (
        "lm-eval",
        {"doc_id": 0, "arguments": {"gen_args_0": {"arg_0": "Hi", "arg_1": {"until": ["a"], "do_sample": False}}}},
        "`until` as `stop`",
        {"text": "Hi", "stop": ["a"], "temperature": 0},
    ),
    (
        "TGI",
        {"inputs": "Hi", "parameters": {"max_new_tokens": 5}},
        "rename `parameters` to `sampling_params`",
        {"text": "Hi", "sampling_params": {"max_new_tokens": 5}},
    ),
    ("token ids", {"prompt_token_ids": [5, 6]}, "`input_ids`", {"input_ids": [5, 6]}),
]


@pytest.mark.parametrize(("system", "row", "remedy", "converted"), FORMATS)
def test_a_format_is_recognised(system: str, row: dict[str, Any], remedy: str, converted: dict[str, Any]) -> None:
    info = refused(row)
    assert system in info.message
    assert remedy in info.message
    assert "batchgen help other-systems" in info.message
    assert parse(converted).prompts


COLUMNS: list[tuple[dict[str, Any], str]] = [
    ({"question": "Hi?", "answer": "x"}, "--prompt-column question"),
    ({"content": "Hi"}, "--prompt-column content"),
    ({"input": "Hi"}, "--prompt-column input"),
    ({"query": "Hi", "lang": "en"}, "--prompt-column query"),
    ({"inputs": ["a", "b"]}, "--prompt-column inputs"),
    ({"anything": "Hi", "score": 3}, "--prompt-column anything"),
    ({"conversation": HELLO}, "--prompt-column conversation"),
    ({"one": "a", "two": "b"}, "it has `one`, `two`: give it `text`"),
    ({"score": 3, "temperature": 0}, "it has `score`, `temperature`"),
    ({"Text": "Hi"}, "did you mean `text` by `Text`?"),
    ({"promt": "Hi"}, "did you mean `prompt` by `promt`?"),
    ({"mesages": HELLO}, "did you mean `messages` by `mesages`?"),
    ({f"field {i}": i for i in range(100)}, "and 88 more"),
    ({"\x1b[31m": "Hi"}, r"`\x1b[31m`"),
    ({}, "give it `text`, `input_ids`, `input_embeds` or `messages`"),
    ({"text": None}, "give it `text`"),
]


@each("row, part", COLUMNS)
def test_the_fields_of_a_row_and_the_option_are_named(row: dict[str, Any], part: str) -> None:
    message = refused(row).message
    assert part in message
    assert message.isprintable()
    assert len(message) < 1500


def test_a_prompt_column_that_a_row_has_not() -> None:
    named = RowDefaults(prompt_column="qestion")
    assert refused({"question": "Hi", "idx": 3}, named).message == (
        "the row has no field `qestion`, which --prompt-column names; it has `question`, `idx`; "
        "did you mean `question`?"
    )
    assert "`qestion`, which --prompt-column names, is null" in refused({"qestion": None}, named).message
    with pytest.raises(RowError, match="it has `text`, `id`"):
        parse_row({"id": "a"}, 0, named, {"text": "Hi"})


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        (
            {"role": "user", "content": "x"},
            "a list of messages, got an object; write the message as a list of one",
        ),
        ([SAID], "rename `from` to `role` and `value` to `content`"),
    ],
)
def test_messages_in_another_form(messages: Any, part: str) -> None:
    with pytest.raises(RowError) as caught:
        parse({"messages": messages})
    assert part in caught.value.info.message


def refused(row: dict[str, Any], defaults: RowDefaults | None = None) -> Any:
    with pytest.raises(RowError) as caught:
        parse(row, defaults or RowDefaults())
    assert caught.value.info.code == "missing_prompt"
    return caught.value.info
