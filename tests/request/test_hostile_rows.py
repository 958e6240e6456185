"""Invalid and hostile rows: each raises the expected `RowError`, and no row raises another exception."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.errors import RowError
from batchgen.request.fields.declared import LOOKUP
from batchgen.request.table.request_table import ParsedRow
from tests.cases import each, examples
from tests.rows import CHAT, COMPLETIONS, HELLO, line, parse, text

Hostile = tuple[Any, str, str | None]
HOSTILE: list[Hostile] = [
    # (row, error code, param)
    # not a row at all
    ([], "invalid_json", None),
    ("text", "invalid_json", None),
    (None, "invalid_json", None),
    (5, "invalid_json", None),
    # no prompt, several prompts, empty prompts
    ({}, "missing_prompt", None),
    ({"text": None}, "missing_prompt", None),
    ({"id": "a", "temperature": 1}, "missing_prompt", None),
    ({"completion": "a"}, "missing_prompt", None),
    ({"url": "https://example.org", "title": "data"}, "missing_prompt", None),
    (text(input_ids=[1]), "ambiguous_prompt", "input_ids"),
    (text(messages=HELLO), "ambiguous_prompt", "messages"),
    ({"input_ids": [1], "messages": HELLO}, "ambiguous_prompt", "messages"),
    ({"text": []}, "empty_prompt", "text"),
    ({"prompt": []}, "empty_prompt", "prompt"),
    ({"input_ids": []}, "empty_prompt", "input_ids"),
    ({"input_ids": [[1], []]}, "empty_prompt", "input_ids"),
    ({"messages": []}, "empty_prompt", "messages"),
    # prompts of a wrong type
    (text(prompt="b"), "invalid_field", "prompt"),
    ({"text": 5}, "invalid_field", "text"),
    ({"text": ["a", 5]}, "invalid_field", "text"),
    ({"text": ["a", None]}, "invalid_field", "text"),
    ({"prompt": [1, 2]}, "invalid_field", "prompt"),
    ({"text": {"a": 1}}, "invalid_field", "text"),
    ({"input_ids": "1 2"}, "invalid_field", "input_ids"),
    ({"input_ids": [1, True]}, "invalid_field", "input_ids"),
    ({"input_ids": [1, [2]]}, "invalid_field", "input_ids"),
    ({"input_ids": [[1], 2]}, "invalid_field", "input_ids"),
    ({"input_ids": [-1]}, "token_out_of_range", "input_ids"),
    ({"input_ids": [2**31]}, "token_out_of_range", "input_ids"),
    ({"input_embeds": [0.5]}, "invalid_field", "input_embeds"),
    ({"input_embeds": [[[[0.5]]]]}, "invalid_field", "input_embeds"),
    ({"input_embeds": [[0.5, True]]}, "invalid_field", "input_embeds"),
    ({"input_embeds": [[0.5, None]]}, "invalid_field", "input_embeds"),
    ({"input_embeds": [["0.5"]]}, "invalid_field", "input_embeds"),
    ({"input_embeds": [[1e39]]}, "invalid_field", "input_embeds"),
    ({"input_embeds": [[10**400]]}, "invalid_field", "input_embeds"),
    ({"input_embeds": {"a": 1}}, "invalid_field", "input_embeds"),
    ({"input_embeds": ""}, "invalid_field", "input_embeds"),
    ({"input_embeds": [[0.5]], "text": "a"}, "ambiguous_prompt", "input_embeds"),
    ({"input_embeds": [[0.5]], "tools": [{}]}, "invalid_field", "tools"),
    ({"input_embeds": [[0.5], [1, 2]]}, "invalid_field", "input_embeds"),
    ({"input_embeds": [[math.nan]]}, "invalid_field", "input_embeds"),
    (text(completion=""), "invalid_field", "completion"),
    (text(completions=[]), "invalid_field", "completions"),
    (text(audio_data=5), "invalid_field", "audio_data"),
    # conversations
    ({"messages": "Hello"}, "invalid_field", "messages"),
    ({"messages": ["Hello"]}, "invalid_field", "messages"),
    ({"messages": [{"content": "a"}]}, "invalid_field", "messages"),
    ({"messages": [{"role": 5, "content": "a"}]}, "invalid_field", "messages"),
    ({"messages": [{"role": "user"}]}, "invalid_field", "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "invalid_field", "messages"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "invalid_field", "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "invalid_field", "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "invalid_field", "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "invalid_field", "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "unsupported_field", "messages"),
    ({"messages": HELLO, "tools": "all"}, "invalid_field", "tools"),
    ({"messages": HELLO, "tools": ["f"]}, "invalid_field", "tools"),
    ({"messages": HELLO, "chat_template_kwargs": []}, "invalid_field", "chat_template_kwargs"),
    ({"text": "a", "chat_template_kwargs": {"a": 1}}, "invalid_field", "chat_template_kwargs"),
    ({"text": "a", "reasoning_effort": "low"}, "invalid_field", "reasoning_effort"),
    ({"messages": HELLO, "chat_template_kwargs": {"chat_template": "x"}}, "invalid_field", "chat_template_kwargs"),
    ({"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, "invalid_field", "chat_template_kwargs"),
    ({"messages": HELLO, "add_generation_prompt": 1}, "invalid_field", "add_generation_prompt"),
    (
        {"messages": HELLO, "add_generation_prompt": True, "continue_final_message": True},
        "invalid_field",
        "continue_final_message",
    ),
    ({"input_ids": [1], "add_generation_prompt": True}, "invalid_field", "add_generation_prompt"),
    # ids
    (text(id=True), "invalid_field", "id"),
    (text(id=1.5), "invalid_field", "id"),
    (text(id=2.0**60), "invalid_field", "id"),
    (text(id=10**5000), "invalid_field", "id"),
    (text(rid=["a"]), "invalid_field", "rid"),
    (text(id="a", rid="a"), "invalid_field", "rid"),
    # one field twice
    (text(max_tokens=5, max_new_tokens=5), "invalid_field", "max_new_tokens"),
    (text(temperature=1, sampling_params={"temperature": 1}), "invalid_field", "temperature"),
    (text(max_tokens=1, sampling_params={"max_new_tokens": 1}), "invalid_field", "max_new_tokens"),
    (text(logprobs=1, return_logprob=True), "invalid_field", "logprobs"),
    (text(logprobs=1, top_logprobs=1), "invalid_field", "top_logprobs"),
    # unknown fields
    (text(sampling_params={"temprature": 1}), "unknown_field", "temprature"),
    (text(sampling_params={"text": "b"}), "unknown_field", "text"),
    (text(sampling_params={"": 1}), "unknown_field", ""),
    (text(sampling_params=[]), "invalid_field", "sampling_params"),
    (text(sampling_params="{}"), "invalid_field", "sampling_params"),
    (line(temprature=1), "unknown_field", "temprature"),
    (line(sampling_params={}), "unknown_field", "sampling_params"),
    (line(text="a"), "unknown_field", "text"),
    (line(top_logprobs=1), "unknown_field", "top_logprobs"),
    # values that do not fit each other
    (text(max_tokens=2**31 + 1), "invalid_field", "max_tokens"),
    (text(min_tokens=5, max_tokens=4), "invalid_field", "min_tokens"),
    (text(min_new_tokens=129), "invalid_field", "min_new_tokens"),
    (text(stop=["a"] * 33), "invalid_field", "stop"),
    (text(logit_bias=[[1, 2.0]]), "invalid_field", "logit_bias"),
    (text(best_of=1, n=2), "invalid_field", "best_of"),
    (text(regex="a", choice=["a"]), "invalid_field", "choice"),
    (text(top_logprobs_num=3), "invalid_field", "top_logprobs_num"),
    (text(return_logprob=False, top_logprobs_num=3), "invalid_field", "top_logprobs_num"),
    # a wrong value is reported before an unsupported field, in any order
    (text(regex="a", temperature="hot"), "invalid_field", "temperature"),
    (text(echo=True, max_tokens=-1), "invalid_field", "max_tokens"),
    # models and adapters
    (text(model="other"), "invalid_field", "model"),
    (text(model=5), "invalid_field", "model"),
    (line(model="gpt-5"), "invalid_field", "model"),
    (line(model="llama:mine"), "unknown_adapter", "model"),
    (line(model="*:mine"), "unknown_adapter", "model"),
    (line(model="other:mine"), "invalid_field", "model"),
    # batch lines
    ({**line(), "method": "GET"}, "invalid_field", "method"),
    ({**line(), "method": ["POST"]}, "invalid_field", "method"),
    ({**line(), "url": "/v1/responses"}, "unsupported_field", "url"),
    ({**line(), "url": "/v1/other"}, "invalid_field", "url"),
    ({**line(), "url": ""}, "invalid_field", "url"),
    ({**line(), "url": "/etc/completions"}, "invalid_field", "url"),
    ({**line(), "url": ["/v1/completions"]}, "invalid_field", "url"),
    ({**line(), "body": "text"}, "invalid_field", "body"),
    ({**line(), "body": None}, "invalid_field", "body"),
    ({**line(), "custom_id": False}, "invalid_field", "custom_id"),
    ({**line(), "id": "b"}, "invalid_field", "id"),
    ({**line(), "text": "a"}, "ambiguous_prompt", "text"),
    ({**line(), "temperature": 1}, "invalid_field", "temperature"),
    ({**line(), "sampling_params": {}}, "invalid_field", "sampling_params"),
    ({**line(), "body": {}}, "missing_prompt", None),
    ({**line(), "body": {"messages": HELLO}}, "missing_prompt", "messages"),
    ({**line(CHAT), "body": {"prompt": "a"}}, "missing_prompt", "prompt"),
    ({**line(), "body": {"messages": HELLO, "prompt": "a"}}, "ambiguous_prompt", "messages"),
    (line(prompt=[]), "empty_prompt", "prompt"),
    (line(prompt=[[1], []]), "empty_prompt", "prompt"),
    (line(prompt=["a", 1]), "invalid_field", "prompt"),
    (line(prompt=[1, "a"]), "invalid_field", "prompt"),
    (line(prompt=5), "invalid_field", "prompt"),
    (line(CHAT, messages=[]), "empty_prompt", "messages"),
    (line(temperature=2.1), "invalid_field", "temperature"),
    (line(CHAT, temperature=2.1), "invalid_field", "temperature"),
    (line(logprobs=True), "invalid_field", "logprobs"),
    (line(CHAT, logprobs=5), "invalid_field", "logprobs"),
    (line(CHAT, top_logprobs=5), "invalid_field", "top_logprobs"),
    (line(CHAT, logprobs=False, top_logprobs=5), "invalid_field", "top_logprobs"),
    (line(user=5), "invalid_field", "user"),
    (line(CHAT, tool_choice="any", tools=[{"type": "function"}]), "invalid_field", "tool_choice"),
    # Unicode that has no UTF-8 form
    ({"text": "a\ud800"}, "invalid_unicode", "text"),
    (text(id="\udfff"), "invalid_unicode", "id"),
    (text(stop=["\ud800"]), "invalid_unicode", "stop"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "invalid_unicode", "messages"),
    ({"messages": [{"role": "user", "content": "a", "\ud800": 1}]}, "invalid_unicode", "messages"),
    (text(note={"deep": ["\ud800"]}), "invalid_unicode", "note"),
    (text(note={"large": 2**70, "deep": {"\ud800": 1}}), "invalid_unicode", "note"),
    (text(note=[{"a": ("\ud800",)}]), "invalid_unicode", "note"),
    (text(**{"\ud800": 1}), "invalid_unicode", "\\ud800"),
    (line(**{"\ud800": 1}), "invalid_unicode", "\\ud800"),
    ({**line(), "url": "\ud800"}, "invalid_unicode", "url"),
]


@pytest.mark.field("sampling_params", "method", "url", "body")
@each("value, code, param", HOSTILE)
def test_wrong_rows(value: Any, code: str, param: str | None) -> None:
    with pytest.raises(RowError) as caught:
        parse(value)
    info = caught.value.info
    assert (info.code, info.param) == (code, param), info.message
    assert len(info.message) < 400
    info.message.encode()  # it is written to the output


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(alphabet=st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
KEYS = st.sampled_from([*LOOKUP["row"], *LOOKUP["chat"], "sampling_params", "method", "url", "body", "other"])
NUMBERS = st.sampled_from([0, 1, -1, 2**63, 10**30, 0.5, math.nan, True, "POST", COMPLETIONS, CHAT, "a", [1], HELLO])
FIELDS_OF_A_ROW = st.dictionaries(KEYS, NUMBERS | JSON, max_size=5)


@examples(600)
@given(value=JSON | st.fixed_dictionaries({"text": st.just("a")}) | FIELDS_OF_A_ROW, nested=FIELDS_OF_A_ROW)
def test_anything_is_a_row_or_a_row_error(value: Any, nested: dict[str, Any]) -> None:
    candidates = [value]
    if isinstance(value, dict):
        candidates += [{**value, "sampling_params": nested}, {**value, "text": "a"}, {**line(), "body": nested}]
        candidates += [{**line(CHAT), "body": nested | {"messages": HELLO}}]
    for candidate in candidates:
        outcome = outcome_of(candidate)
        if isinstance(outcome, RowError):
            text_of = f"{outcome.info.message} {outcome.info.param}"
            assert len(text_of.encode()) < 1000
        else:
            assert outcome.prompts
            json.dumps(outcome.extra)
            hash(outcome.params)


def outcome_of(value: Any) -> ParsedRow | RowError:
    try:
        return parse(value)
    except RowError as error:
        return error


@pytest.mark.field("response_format")
def test_response_format_without_a_schema_requires_an_object() -> None:
    for schema in ({"name": "x"}, {"name": "x", "schema": None}, {"schema": None}):
        found = parse(text(response_format={"type": "json_schema", "json_schema": schema})).params.constraint
        assert found is not None
        assert json.loads(found.text) == {"type": "object"}


@pytest.mark.parametrize("key", ["a" * 10**6, "\ud800" * 10**5])
@pytest.mark.parametrize("row", [lambda fields: text(sampling_params=fields), lambda fields: line(**fields)])
def test_errors_are_short_whatever_the_length_of_a_key(key: str, row: Any) -> None:
    with pytest.raises(RowError) as caught:
        parse(row({key: 1}))
    assert len(f"{caught.value.info.message}{caught.value.info.param}{caught.value}".encode()) < 5000


@pytest.mark.parametrize(
    "value",
    [text(sampling_params={"\x1b]0;a\x07\nb\x9b": 1}), line(**{"\u2028\r\n": 1})],
)
def test_unknown_field_name_is_printed_without_control_characters(value: Any) -> None:
    with pytest.raises(RowError) as caught:
        parse(value)
    assert caught.value.info.code == "unknown_field"
    assert caught.value.info.message.isprintable()
