"""Fields of lists and objects that hold the JSON text of one: the error says so, whatever the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchgen.errors import ErrorInfo, RowError
from batchgen.request.rows.parser import parse_row
from batchgen.request.rows.values import RowDefaults

CHAT = [{"role": "user", "content": "Hi"}]
VALUES: dict[str, Any] = {
    "messages": CHAT,
    "input_ids": [1, 2],
    "sampling_params": {"top_p": 0.5},
    "stop_token_ids": [1],
    "logit_bias": {"7": -1},
    "allowed_token_ids": [3],
    "custom_params": {"strength": 1},
    "choice": ["a", "b"],
    "completions": ["a", "b"],
    "chat_template_kwargs": {"a": 1},
}


def refused(row: dict[str, Any]) -> ErrorInfo:
    with pytest.raises(RowError) as caught:
        parse_row(row, 0, RowDefaults())
    return caught.value.info


@pytest.mark.parametrize("name", VALUES)
def test_the_text_of_a_value_is_named(name: str) -> None:
    prompt: dict[str, Any] = {} if name in ("messages", "input_ids") else {"text": "Hi"}
    kind = "list" if type(VALUES[name]) is list else "object"
    error = refused({**prompt, name: json.dumps(VALUES[name])})
    assert f"which is JSON text: write the {kind} itself" in error.message
    assert error.param == name
    assert ("--prompt-column messages" in error.message) == (name == "messages")
    for text in ("plain", "[1, ", "{}x"):
        assert "JSON text" not in refused({**prompt, name: text}).message


@pytest.mark.parametrize("name", ["messages", "logit_bias", "body"])
def test_the_text_of_a_value_in_a_batch_line_is_named(name: str) -> None:
    body: Any = {"model": "*", "messages": CHAT, "logit_bias": {"7": 1}}
    body = json.dumps(body) if name == "body" else body | {name: json.dumps(body[name])}
    error = refused({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body})
    assert "which is JSON text: write the" in error.message
    assert "--prompt-column" not in error.message
