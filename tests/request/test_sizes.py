"""Sizes of a row's options: each limit holds at its edge, and beyond it the row has an error that names the field."""

from __future__ import annotations

from typing import Any

import pytest

from batchgen.errors import RowError
from batchgen.request import checks
from batchgen.request.checks import MAX_OPTION_SIZE, MAX_STOP_CHARACTERS
from batchgen.request.fields.field_checks import MAX_ID_CHARACTERS
from batchgen.request.rows import parser
from tests.rows import parse, text


def refused(**options: Any) -> str | None:
    with pytest.raises(RowError) as caught:
        parse(text(**options))
    assert len(caught.value.info.message) < 300
    return caught.value.info.param


@pytest.mark.field("stop")
def test_stop_strings_have_a_longest_length() -> None:
    assert parse(text(stop=["a", "b" * MAX_STOP_CHARACTERS]))
    assert refused(stop=["a", "b" * (MAX_STOP_CHARACTERS + 1)]) == "stop"


@pytest.mark.field("bad_words")
def test_bad_words_have_a_longest_length() -> None:
    assert parse(text(bad_words=["b" * MAX_STOP_CHARACTERS, [1]]))
    assert refused(bad_words=["b" * (MAX_STOP_CHARACTERS + 1), [1]]) == "bad_words"


@pytest.mark.field("id")
@pytest.mark.parametrize("name", ["id", "custom_id"])
def test_an_id_has_a_longest_length(name: str) -> None:
    row = {"text": "a"} if name == "id" else {"url": "/v1/completions", "method": "POST", "body": {"prompt": "a"}}
    assert parse({**row, name: "i" * MAX_ID_CHARACTERS}).id == "i" * MAX_ID_CHARACTERS
    with pytest.raises(RowError) as caught:
        parse({**row, name: "i" * (MAX_ID_CHARACTERS + 1)})
    assert caught.value.info.param == name


SIZED: dict[str, Any] = {
    "suffix": lambda size: "a" * size,
    "ebnf": lambda size: "a" * size,
    "json_schema": lambda size: {"title": "a" * (size - len('{"title":""}'))},
    "choice": lambda size: ["a" * (size // 2 - 8), "b" * (size // 2)],
    "bad_words": lambda size: ["a" * (size - 24), [1]],
    "stop_token_ids": lambda size: list(range(size // 8 - 1)),
    "allowed_token_ids": lambda size: list(range(size // 8 - 1)),
}
"""Field -> value of a size."""


@pytest.mark.parametrize("name", SIZED)
def test_an_option_has_a_largest_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_OPTION_SIZE >= 24 * 262_144, "a bias for each token of a large vocabulary"
    monkeypatch.setattr(checks, "MAX_OPTION_SIZE", 256)
    assert parse(text(**{name: SIZED[name](256)}))
    assert refused(**{name: SIZED[name](264)}) == name


def test_a_row_has_a_largest_number_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser, "MAX_ROW_PROMPTS", 4)
    line: dict[str, Any] = {"method": "POST", "url": "/v1/completions"}
    assert len(parse({"text": ["a"] * 4}).prompts) == len(parse({**line, "body": {"prompt": ["a"] * 4}}).prompts) == 4
    assert len(parse({"text": "a", "completions": ["b"] * 4}).completions) == 4
    for row, param in (
        ({"text": ["a"] * 5}, "text"),
        ({"input_ids": [[1]] * 5}, "input_ids"),
        ({**line, "body": {"prompt": ["a"] * 5}}, "prompt"),
        ({"text": ["a", "b"], "completions": ["c", "d", "e"]}, "completions"),
    ):
        with pytest.raises(RowError) as caught:
            parse(row)
        assert (caught.value.info.code, caught.value.info.param) == ("invalid_field", param)
    messages = [{"role": "user", "content": "a"}] * 5
    assert parse({"messages": messages}), "a conversation is one prompt"
