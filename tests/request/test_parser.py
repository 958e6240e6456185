"""Valid rows and their parsed values."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.errors import ErrorCode, RowError, UsageError
from batchgen.request.checks import ids, token_id_lists
from batchgen.request.fields.declared import FIELDS, LOOKUP, Field
from batchgen.request.fields.params import SamplingParams
from batchgen.request.fields.prompts import ChatPrompt, TextPrompt, TokenPrompt
from batchgen.request.fields.tool_choice import ToolChoice
from batchgen.request.rows.model_names import ModelNames
from batchgen.request.rows.parser import derive_seed, row_extra
from batchgen.request.rows.row_ids import row_id
from batchgen.request.rows.values import RowDefaults
from batchgen.request.table.request_table import ParsedRow
from tests.cases import each, examples
from tests.rows import CHAT, COMPLETIONS, HELLO, PLAIN, line, parse, text


def params(value: Any, defaults: RowDefaults = PLAIN) -> SamplingParams:
    return parse(value, defaults).params


def test_native_row_with_only_a_prompt() -> None:
    assert parse(text()) == ParsedRow(7, "row-7", (TextPrompt("Hello"),), SamplingParams(), {}, "native")


PROMPTS: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
    ({"text": "a"}, (TextPrompt("a"),)),
    ({"prompt": "a"}, (TextPrompt("a"),)),
    ({"text": ["a", "b"]}, (TextPrompt("a"), TextPrompt("b"))),
    ({"text": ""}, (TextPrompt(""),)),
    ({"text": "a", "prompt": None, "messages": None}, (TextPrompt("a"),)),
    ({"input_ids": [1, 2]}, (TokenPrompt(array("i", (1, 2))),)),
    ({"input_ids": [[1, 2], [3]]}, (TokenPrompt(array("i", (1, 2))), TokenPrompt(array("i", (3,))))),
    ({"messages": HELLO}, (ChatPrompt(tuple(HELLO)),)),
    ({"messages": HELLO, "tools": []}, (ChatPrompt(tuple(HELLO)),)),
    ({"messages": HELLO, "tools": [{"type": "function"}]}, (ChatPrompt(tuple(HELLO), ({"type": "function"},)),)),
    ({"messages": HELLO, "add_generation_prompt": False}, (ChatPrompt(tuple(HELLO), add_generation_prompt=False),)),
    (
        {"messages": HELLO, "continue_final_message": True},
        (ChatPrompt(tuple(HELLO), add_generation_prompt=False, continue_final_message=True),),
    ),
    ({"messages": HELLO, "chat_template_kwargs": {"a": 1}}, (ChatPrompt(tuple(HELLO), template_kwargs={"a": 1}),)),
    (line(prompt="a"), (TextPrompt("a"),)),
    (line(prompt=["a", "b"]), (TextPrompt("a"), TextPrompt("b"))),
    (line(prompt=[1, 2]), (TokenPrompt(array("i", (1, 2))),)),
    (line(prompt=[[1, 2], [3]]), (TokenPrompt(array("i", (1, 2))), TokenPrompt(array("i", (3,))))),
    (line(CHAT, messages=HELLO), (ChatPrompt(tuple(HELLO)),)),
    (line(CHAT, messages=HELLO, tools=[{"type": "function"}]), (ChatPrompt(tuple(HELLO), ({"type": "function"},)),)),
]


@pytest.mark.field(
    "text", "input_ids", "prompt", "messages", "tools", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "body", "url", "method",
)  # fmt: skip
@each("value, prompts", PROMPTS)
def test_prompts(value: dict[str, Any], prompts: tuple[Any, ...]) -> None:
    assert parse(value).prompts == prompts


MESSAGES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"role": "user", "content": []}],
    [{"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}],
    [{"role": "anything", "content": "a", "name": "b", "extra": {"c": [1.5, None]}}],
]


@pytest.mark.parametrize("messages", MESSAGES)
def test_messages_are_passed_to_the_template_unchanged(messages: list[dict[str, Any]]) -> None:
    (prompt,) = parse({"messages": messages}).prompts
    assert isinstance(prompt, ChatPrompt)
    assert list(prompt.messages) == messages


SAME: list[dict[str, Any]] = [
    {"max_new_tokens": 5}, {"max_new_tokens": 0}, {"min_new_tokens": 3}, {"ignore_eos": True}, {"no_stop_trim": True},
    {"temperature": 1.5}, {"top_p": 0.5}, {"top_k": 40}, {"min_p": 0.1}, {"n": 4}, {"skip_special_tokens": False},
    {"spaces_between_special_tokens": False}, {"return_logprob": True}, {"best_of": 1},
    {"return_logprob": True, "top_logprobs_num": 3}, {"return_logprob": True, "logprob_start_len": 4},
    {"return_logprob": True, "return_text_in_logprobs": True}, {"repetition_penalty": 0.5},
    {"return_cached_tokens_details": True},
]  # fmt: skip
"""Fields that are the sampling parameters of the same names and values."""
OTHERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # (fields, expected sampling parameters that differ from the defaults)
    ({"max_tokens": 5}, {"max_new_tokens": 5}),
    ({"max_completion_tokens": 5}, {"max_new_tokens": 5}),
    ({"min_tokens": 3}, {"min_new_tokens": 3}),
    ({"stop": "a"}, {"stop": ("a",)}),
    ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
    ({"stop": [str(i) for i in range(32)]}, {"stop": tuple(str(i) for i in range(32))}),
    ({"stop_token_ids": [1, 2]}, {"stop_token_ids": (1, 2)}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"frequency_penalty": -2}, {"frequency_penalty": -2.0}),
    ({"presence_penalty": 2}, {"presence_penalty": 2.0}),
    ({"logit_bias": {"50": -100, "7": 1.5}}, {"logit_bias": ((7, 1.5), (50, -100.0))}),
    ({"bad_words": ["a", [1, 2]]}, {"bad_words": ("a", (1, 2))}),
    ({"dtype": "int"}, {"regex": "[-+]?[0-9]+"}),
    ({"guided_json": {"type": "integer"}}, {"json_schema": {"type": "integer"}}),
    ({"guided_json": '{"type": "integer"}'}, {"json_schema": '{"type": "integer"}'}),
    ({"guided_json_object": True}, {"json_schema": {"type": "object"}}),
    ({"guided_json_object": False, "guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ("a", "b")}),
    ({"guided_grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
    ({"structured_outputs": {"json": {"type": "integer"}}}, {"json_schema": {"type": "integer"}}),
    ({"structured_outputs": {"json_object": True, "regex": None}}, {"json_schema": {"type": "object"}}),
    ({"structured_outputs": {"regex": "a+", "disable_any_whitespace": False}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["a"]}}, {"choice": ("a",)}),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"ebnf": 'root ::= "a"'}),
    ({"guided_decoding": {"structural_tag": "{}"}}, {"structural_tag": "{}"}),
    ({"allowed_token_ids": [3, 1]}, {"allowed_token_ids": (3, 1)}),
    (
        {"return_logprob": True, "token_ids_logprob": [4, 2, 4]},
        {"return_logprob": True, "token_ids_logprob": (4, 2, 4)},
    ),
]
NO_OP: list[dict[str, Any]] = [
    {"stop": []}, {"top_p": 1}, {"top_k": 0}, {"top_k": -1},
    {"logprob_start_len": -1, "return_text_in_logprobs": False},
    {"temperature": None, "stop": None, "regex": None}, {"frequency_penalty": -0.0}, {"presence_penalty": 0},
    {"repetition_penalty": 1}, {"logit_bias": {}}, {"bad_words": []}, {"stop_regex": []}, {"token_ids_logprob": []},
    {"response_format": {"type": "text"}}, {"response_format": {"type": "text", "json_schema": None}}, {"echo": False},
    {"suffix": ""}, {"return_hidden_states": False}, {"return_routed_experts": False}, {"custom_params": {}},
    {"stream": False},
]  # fmt: skip
"""Values that request nothing."""
VALID = [*((fields, fields) for fields in SAME), *OTHERS, *((fields, {}) for fields in NO_OP)]


@pytest.mark.field("sampling_params", "dtype", "return_cached_tokens_details", "structured_outputs")
@pytest.mark.field("guided_json_object")
@each("fields, expected", VALID)
def test_sampling_fields_mean_the_same_in_every_place(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    wanted = SamplingParams(**expected)
    assert params(text(**fields)) == wanted
    assert params(text(sampling_params=fields)) == wanted
    for url, place, limit in ((COMPLETIONS, "completions", 16), (CHAT, "chat", None)):
        if fields.keys() <= LOOKUP[place].keys():
            assert params(line(url, **fields)) == SamplingParams(**{"max_new_tokens": limit, **expected})


@pytest.mark.field("seed")
@pytest.mark.parametrize("seed", [-(2**63), 0, 2**63 - 1])
def test_seeds(seed: int) -> None:
    for row in (text(seed=seed), text(sampling_params={"seed": seed}), line(seed=seed), line(CHAT, seed=seed)):
        assert (parse(row).seed, parse(row).params.seed) == (seed, None)
        assert parse(row, RowDefaults(flags={"seed": 5})).seed == seed
    assert (parse(text()).seed, parse(text(), RowDefaults(flags={"seed": 5})).seed) == (None, 5)


def test_numbers_become_floats() -> None:
    found = params(text(temperature=0, top_p=1, min_p=0))
    assert [type(v) for v in (found.temperature, found.top_p, found.min_p)] == [float] * 3


LOGPROBS: list[tuple[dict[str, Any], bool, int]] = [
    (line(logprobs=0), True, 0),
    (line(logprobs=5), True, 5),
    (line(logprobs=None), False, 0),
    (line(return_logprob=True, top_logprobs_num=2), True, 2),
    (line(CHAT, logprobs=True), True, 0),
    (line(CHAT, logprobs=True, top_logprobs=5), True, 5),
    (line(CHAT, logprobs=False), False, 0),
    (line(CHAT, logprobs=False, top_logprobs=0), False, 0),
    (line(CHAT, top_logprobs=0), False, 0),
    (text(logprobs=3), True, 3),
    (text(logprobs=0), True, 0),
    (text(logprobs=True, top_logprobs=2), True, 2),
    (text(logprobs=False), False, 0),
    (text(top_logprobs_num=0), False, 0),
]


@pytest.mark.field("logprobs", "top_logprobs", "return_logprob", "top_logprobs_num")
@pytest.mark.parametrize(("value", "asked", "top"), LOGPROBS)
def test_logprobs(value: dict[str, Any], asked: bool, top: int) -> None:
    assert (params(value).return_logprob, params(value).top_logprobs_num) == (asked, top)


@pytest.mark.field("logprob_start_len", "token_ids_logprob", "return_text_in_logprobs")
@pytest.mark.parametrize(
    ("name", "value"), [("logprob_start_len", 0), ("token_ids_logprob", (1,)), ("return_text_in_logprobs", True)]
)
def test_logprob_fields_need_logprobs(name: str, value: Any) -> None:
    for row in (text(**{name: value}), text(sampling_params={name: value}), line(**{name: value})):
        with pytest.raises(RowError, match=f"`{name}` needs `return_logprob: true`") as caught:
            parse(row)
        assert (caught.value.info.code, caught.value.info.param) == (ErrorCode.INVALID_FIELD, name)
    run_wide = RowDefaults(flags={name: value})
    assert params(text(), run_wide) == SamplingParams()
    assert getattr(params(text(return_logprob=True), run_wide), name) == value


ACCEPTED: list[dict[str, Any]] = [
    line(model="llama"),
    line(model="models/llama"),
    line(model="*"),
    text(model="*"),
    line(CHAT, tool_choice="none", function_call="none", modalities=["text"], parallel_tool_calls=True),
    line(CHAT, tools=[{"type": "function"}], tool_choice="auto", verbosity="medium"),
    text(sampling_params=None),
    text(sampling_params={"unknown": None}),
    text(best_of=3, n=3),
    text(temperature=1000),
    text(url="https://example.org", body="of the article", method="interview"),
]


@pytest.mark.field("model")
@pytest.mark.parametrize("value", ACCEPTED)
def test_accepted(value: dict[str, Any]) -> None:
    assert parse(value).prompts


@pytest.mark.field("lora_path", "model")
def test_adapters() -> None:
    run = RowDefaults(names=ModelNames(frozenset({"llama", "a:b"})), adapters=frozenset({"fr", "x:y"}))
    good = [
        (text(lora_path="fr"), "fr"),
        (text(model="llama:fr"), "fr"),
        (text(model="*:x:y"), "x:y"),
        (text(model="a:b:fr"), "fr"),
        (text(model="a:b"), None),
        (text(model="llama:fr", lora_path="fr"), "fr"),
        (text(model="llama", sampling_params={"lora_path": "x:y"}), "x:y"),
        (line(model="llama:fr"), "fr"),
        (line(CHAT, model="*", lora_path="fr"), "fr"),
    ]
    for row, expected in good:
        assert params(row, run).lora_path == expected
    bad = [
        (text(lora_path="de"), ErrorCode.UNKNOWN_ADAPTER, "lora_path"),
        (text(model="llama:de"), ErrorCode.UNKNOWN_ADAPTER, "model"),
        (line(model="*:de"), ErrorCode.UNKNOWN_ADAPTER, "model"),
        (text(model="llama:fr", lora_path="x:y"), ErrorCode.INVALID_FIELD, "lora_path"),
        (text(model="llama:"), ErrorCode.INVALID_FIELD, "model"),
        (text(model="fr"), ErrorCode.INVALID_FIELD, "model"),
        (text(lora_path=True), ErrorCode.INVALID_FIELD, "lora_path"),
    ]
    for row, code, param in bad:
        with pytest.raises(RowError) as caught:
            parse(row, run)
        assert (caught.value.info.code, caught.value.info.param) == (code, param)


@pytest.mark.field("id")
def test_ids() -> None:
    for name in ("id", "rid", "custom_id"):
        assert parse(text(**{name: " Ünïcode \n"})).id == " Ünïcode \n"
        assert row_id(text(**{name: "a"}), 3) == "a"
    assert parse(text(id=None)).id == "row-7"
    assert parse(line()).id == "request-1"
    for bad in (None, [], text(), text(id=True), text(id=1.5), text(id="a", rid="b"), text(id="\ud800")):
        assert row_id(bad, 3) == "row-3"


@pytest.mark.field("id")
@pytest.mark.parametrize("name", ["id", "rid", "custom_id"])
def test_integer_ids_are_their_decimal_text(name: str) -> None:
    for value, expected in (
        (17, "17"),
        (0, "0"),
        (-5, "-5"),
        (2**70, str(2**70)),
        (5.0, "5"),
    ):
        assert parse(text(**{name: value})).id == row_id(text(**{name: value}, temperature="hot"), 3) == expected
    assert parse(line() | {"custom_id": 17}).id == "17"


@pytest.mark.field(
    "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"
)
def test_unknown_top_level_keys_are_carried() -> None:
    assert parse(text(label=1, nested={"a": None}, nothing=None)).extra == {
        "label": 1,
        "nested": {"a": None},
        "nothing": None,
    }
    described: dict[str, Any] = {"user": "me", "metadata": {"a": "b"}, "safety_identifier": "s"}
    described |= {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}}
    row = parse({**line(**described), "label": 1})
    assert row.extra == {"label": 1, "body": described}
    native = parse(text(url="https://example.org", body="of the article"))
    assert native.extra == {"url": "https://example.org", "body": "of the article"}


@pytest.mark.parametrize(
    ("value", "extra"),
    [
        (text(label=1, temperature="hot", sampling_params={"odd": 1}), {"label": 1}),
        (text(label="\ud800", other="b", temperature="hot"), {"other": "b"}),
        ({"label": 1}, {"label": 1}),
        (
            line(user="u", metadata={"k": "v"}, temperature=9) | {"label": 1},
            {"label": 1, "body": {"user": "u", "metadata": {"k": "v"}}},
        ),
        (line(user="u", odd=1), {"body": {"user": "u"}}),
        (line(user="u") | {"label": 1, "url": "/v1/other"}, {"label": 1}),
        ("no row", {}),
    ],
)
def test_invalid_rows_carry_their_unknown_fields(value: Any, extra: dict[str, Any]) -> None:
    assert row_extra(value) == extra


@pytest.mark.parametrize("value", [text(label=1, nested={"a": None}, nothing=None), line(user="u") | {"label": 1}])
def test_row_extra_equals_the_parsed_row_s_extra(value: Any) -> None:
    assert row_extra(value) == parse(value).extra


def test_dialects() -> None:
    assert [parse(v).dialect for v in (text(), {"messages": HELLO}, line(), line(CHAT))] == [
        "native",
        "native",
        "openai-completions",
        "openai-chat",
    ]


def test_precedence_is_row_flags_endpoint_model() -> None:
    model = RowDefaults(model={"temperature": 0.6, "top_k": 20})
    assert (params(text(), model).temperature, params(line(), model).top_k) == (0.6, 20)
    both = RowDefaults(model={"temperature": 0.6, "top_k": 20}, flags={"temperature": 0.2, "max_new_tokens": 9})
    assert params(text(), both) == SamplingParams(temperature=0.2, top_k=20, max_new_tokens=9)
    assert [params(line(url), both).max_new_tokens for url in (COMPLETIONS, CHAT)] == [9, 9]
    assert params(text(temperature=1, max_tokens=3), both) == SamplingParams(top_k=20, max_new_tokens=3)
    logprobs = RowDefaults(flags={"return_logprob": True, "top_logprobs_num": 4})
    assert params(text(), logprobs).top_logprobs_num == 4
    assert params(text(top_logprobs_num=2), logprobs).top_logprobs_num == 2
    refused = params(text(return_logprob=False), logprobs)
    assert (refused.return_logprob, refused.top_logprobs_num) == (False, 0)
    assert params(line(CHAT, logprobs=True), logprobs).top_logprobs_num == 0
    constrained = RowDefaults(flags={"choice": ["a"]})
    assert params(text(regex="a"), constrained) == SamplingParams(regex="a")
    assert params(text(), constrained) == SamplingParams(choice=("a",))


@pytest.mark.field("min_new_tokens", "max_new_tokens")
def test_default_minimum_does_not_apply_to_rows_that_generate_nothing() -> None:
    run = RowDefaults(flags={"min_new_tokens": 5})
    for row in (text(max_new_tokens=0), line(max_tokens=0, echo=True)):
        assert (params(row, run).min_new_tokens, params(row, run).max_new_tokens) == (0, 0)
    assert params(text(), run).min_new_tokens == 5
    for row in (text(max_new_tokens=0, min_new_tokens=5), text(max_new_tokens=4)):
        with pytest.raises(RowError, match="`min_new_tokens` must not exceed"):
            parse(row, run)


@pytest.mark.field("best_of")
def test_best_of_is_checked_against_the_merged_n() -> None:
    assert params(text(best_of=4), RowDefaults(flags={"n": 4})).n == 4
    assert params(text(n=2), RowDefaults(flags={"best_of": 4})).samples == 4
    for row, defaults in ((text(best_of=3), {"n": 4}), (text(n=5), {"best_of": 4}), (line(best_of=1, n=2), {})):
        with pytest.raises(RowError, match="`best_of` must be at least n"):
            parse(row, RowDefaults(flags=defaults))


@pytest.mark.field("custom_params")
def test_run_wide_processor_parameters() -> None:
    defaults = RowDefaults(flags={"custom_params": {"by": 1}, "custom_logit_processor": "p"}, processors=frozenset("p"))
    assert params(text(), defaults).custom_params == '{"by":1}'
    assert params(text(custom_params={"by": 2}), defaults).custom_params == '{"by":2}'
    assert params(text(custom_params={}), defaults).custom_params is None
    processor_only = RowDefaults(flags={"custom_logit_processor": "p"}, processors=frozenset("p"))
    assert params(text(custom_params={"by": 2}), processor_only).custom_params == '{"by":2}'


@pytest.mark.parametrize(
    "flags", [{"temperature": -1}, {"temprature": 1}, {"max_new_tokens": True}, {"custom_params": {"by": 2}}]
)
def test_wrong_defaults_are_usage_errors(flags: Mapping[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(flags))):
        RowDefaults(flags=flags)


def test_chat_wraps_text() -> None:
    chat = RowDefaults(chat=True, system="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    row = parse({"text": ["a", "b"], "chat_template_kwargs": {"c": 1}}, chat)
    assert row.prompts == tuple(
        ChatPrompt((system, {"role": "user", "content": t}), template_kwargs={"c": 1}) for t in "ab"
    )
    assert parse({"input_ids": [1]}, chat).prompts == (TokenPrompt(array("i", (1,))),)
    assert parse(line(prompt="a"), chat).prompts == (TextPrompt("a"),), "the endpoint has raw prompts"
    for value in ({"messages": HELLO}, line(CHAT)):
        assert parse(value, chat).prompts == (ChatPrompt((system, *HELLO)),)
    for role in ("system", "developer"):
        own = ({"role": role, "content": "Mine."}, *HELLO)
        assert parse({"messages": list(own)}, chat).prompts == (ChatPrompt(own),)


def test_no_chat_refuses_conversations() -> None:
    raw = RowDefaults(chat=False)
    assert parse(text(), raw).prompts == (TextPrompt("Hello"),)
    for value in ({"messages": HELLO}, line(CHAT)):
        with pytest.raises(RowError, match="--no-chat"):
            parse(value, raw)


def test_messages_never_quote_a_prompt() -> None:
    secret = "my secret"
    rows = [{"text": {"a": secret}}, {"text": ["a", {"b": secret}]}, {"messages": [secret]}, {"messages": secret}]
    for value in [*rows, {"messages": [{"role": "user", "content": {"a": secret}}]}, {"input_ids": secret}]:
        with pytest.raises(RowError) as caught:
            parse(value)
        assert secret not in caught.value.info.message


def test_rows_may_be_any_mapping() -> None:
    class Row(dict[str, Any]):
        pass

    assert parse(Row(text="a")).prompts == (TextPrompt("a"),)
    with pytest.raises(RowError, match="names must be strings"):
        parse({"text": "a", 5: "b"})


def test_seeds_are_stable_and_differ() -> None:
    assert derive_seed(0, "row-0") == 4093976411549130853
    seeds = {derive_seed(run, f"row-{row}") for run in range(10) for row in range(100)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, "1") != derive_seed(11, "")


def test_each_spelling_is_one_field_in_each_place() -> None:
    for place, table in LOOKUP.items():
        spelled = [s for field in FIELDS if place in field.places for s in (field.name, *field.aliases)]
        assert len(spelled) == len(set(spelled)) == len(table), place


ENDPOINTS = {
    "completions": """
best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop stream
stream_options suffix temperature top_p user
""",
    "chat": """
audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages metadata
modalities model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_options
prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store stream
stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options
""",
}
"""All parameters of the two endpoints in OpenAI's reference."""


def test_all_endpoint_parameters_are_known() -> None:
    assert set(ENDPOINTS["completions"].split()) <= set(LOOKUP["completions"])
    assert set(ENDPOINTS["chat"].split()) <= set(LOOKUP["chat"])


REFUSED: dict[str, tuple[list[Any], list[Any]]] = {
    # name: (values that request nothing, values that request something)
    "extra_body": ([{}], [{"top_k": 5}]),
    "functions": ([[]], [[{"name": "f"}]]),
    "function_call": (["none"], ["auto"]),
    "modalities": ([["text"], "text", []], [["text", "audio"], ["audio"], "audio"]),
    "audio": ([], [{"voice": "a", "format": "wav"}]),
    "prediction": ([], [{"type": "content", "content": "a"}]),
    "web_search_options": ([], [{}]),
    "moderation": ([], [{"model": "m"}]),
}


@pytest.mark.field(
    "extra_body", "functions", "function_call", "modalities", "audio",
    "prediction", "web_search_options", "moderation",
)  # fmt: skip
@pytest.mark.parametrize(
    "field", [field for field in FIELDS if not field.supported and field.name in REFUSED], ids=lambda field: field.name
)
def test_unsupported_fields(field: Field) -> None:
    """They are never ignored: a value that requests something is refused by name."""
    no_op, requesting = REFUSED[field.name]
    made = text if field.places == ("row",) else partial(line, CHAT)
    for value in no_op:
        assert parse(made(**{field.name: value})).params == parse(made()).params
    for value in requesting:
        with pytest.raises(RowError, match=f"`{field.name}` is not supported") as caught:
            parse(made(**{field.name: value}))
        assert (caught.value.info.code, caught.value.info.param) == (ErrorCode.UNSUPPORTED_FIELD, field.name)


TOOLS = [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}]


@pytest.mark.field("tool_choice", "parallel_tool_calls")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice("required", ("f",), once=True)),
        ({"type": "function", "name": "f"}, ToolChoice("required", ("f",), once=True)),
        ('{"type": "function", "name": "f"}', ToolChoice("required", ("f",), once=True)),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "g"}}]}},
            ToolChoice("required", ("g",)),
        ),
    ],
)
def test_what_a_row_says_about_calls_goes_with_its_conversation(value: Any, expected: ToolChoice) -> None:
    native = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS}
    for row in (native, line(CHAT, tools=TOOLS)):
        given = row.get("body", row)
        given |= {"tool_choice": value, "parallel_tool_calls": False}
        for _ in range(2):  # the second time with a parameter set that is known
            (prompt,) = parse(row).prompts
            assert isinstance(prompt, ChatPrompt)
            assert (prompt.tools, prompt.tool_choice, prompt.parallel_tool_calls) == (tuple(TOOLS), expected, False)


SCHEMA = {"type": "object", "properties": {"tz": {"enum": ["UTC"]}}, "required": ["tz"]}


@pytest.mark.field("tools")
@pytest.mark.parametrize(
    "tool",
    [
        {"name": "now", "description": "d", "input_schema": SCHEMA},
        {"type": "custom", "name": "now", "description": "d", "input_schema": SCHEMA},
        {"name": "now", "description": "d", "inputSchema": SCHEMA},
        {"type": "function", "function": {"name": "now", "description": "d"}, "parameters": SCHEMA},
        {"type": "function", "function": {"name": "now", "description": "d", "input_schema": SCHEMA}},
    ],
)
def test_the_schema_of_a_tool_has_one_place(tool: dict[str, Any]) -> None:
    (prompt,) = parse(line(CHAT, tools=[tool])).prompts
    assert isinstance(prompt, ChatPrompt)
    function = {"name": "now", "description": "d", "parameters": SCHEMA}
    assert prompt.tools == ({"type": "function", "function": function},)


@pytest.mark.parametrize(
    ("tool", "keys"),
    [
        ({"name": "now", "input_schema": SCHEMA, "parameters": SCHEMA}, "`parameters` and `input_schema`"),
        ({"function": {"name": "now", "parameters": SCHEMA}, "parameters": {}}, "`function.parameters` and `param"),
    ],
)
def test_a_tool_with_two_schemas_is_refused(tool: dict[str, Any], keys: str) -> None:
    with pytest.raises(RowError, match=f"{keys}.*; keep one of them") as caught:
        parse(line(CHAT, tools=[tool]))
    assert caught.value.info.param == "tools"


def test_a_tool_whose_schema_has_an_unknown_name_is_refused() -> None:
    with pytest.raises(RowError, match="has a tool with its schema in 'args_schema'; name it `parameters`"):
        parse(line(CHAT, tools=[{"name": "now", "args_schema": SCHEMA}]))


def test_tools_that_must_not_be_called_are_not_shown() -> None:
    (prompt,) = parse(line(CHAT, tools=TOOLS, tool_choice="none")).prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required"}, "needs `tools`"),
        ({"tools": TOOLS, "tool_choice": "any"}, "must be none, auto, required or"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "must be none, auto, required or"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "must name a function"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": TOOLS}},
            "the mode required",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
            "the mode required",
        ),
    ],
)
def test_wrong_values_of_tool_choice(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RowError, match=words) as caught:
        parse(line(CHAT, **fields))
    assert (caught.value.info.code, caught.value.info.param) == (ErrorCode.INVALID_FIELD, "tool_choice")
    for more in ({"text": "a"}, {"input_ids": [1]}):
        with pytest.raises(RowError, match="needs `messages`"):
            parse({**more, "tool_choice": "auto"})


HANDLING: list[dict[str, Any]] = [
    {"store": True}, {"store": False}, {"service_tier": "flex"}, {"service_tier": "auto"}, {"timeout": 30},
    {"timeout": {"connect": 5.0}}, {"request_timeout": 0.5}, {"max_retries": 2}, {"num_retries": 2}, {"priority": -1},
    {"extra_headers": {"A": "b"}}, {"extra_query": {"a": 1}}, {"api_key": "k"}, {"api_base": "u"}, {"base_url": "u"},
    {"api_version": "2024-10-21"}, {"organization": "o"}, {"cache_salt": "s"}, {"request_id": "r"},
    {"stream_options": {"include_usage": True}}, {"stream_options": {}}, {"stream_options": {"include_usage": None}},
]  # fmt: skip
"""Fields of bodies that say nothing about the text."""


@pytest.mark.field(
    "store", "service_tier", "timeout", "request_timeout", "max_retries", "num_retries", "priority", "extra_headers",
    "extra_query", "api_key", "api_base", "base_url", "api_version", "organization", "cache_salt", "request_id",
)  # fmt: skip
@each("fields", HANDLING)
@each("url", [COMPLETIONS, CHAT])
def test_fields_that_say_nothing_about_the_text(url: str, fields: dict[str, Any]) -> None:
    plain, row = parse(line(url)), parse(line(url, **fields))
    assert (row.prompts, row.extra) == (plain.prompts, {})
    assert replace(row.params, stream_options=None) == plain.params


@pytest.mark.field("verbosity", "reasoning_effort")
@pytest.mark.parametrize(("name", "neutral"), [("verbosity", "medium"), ("reasoning_effort", None)])
def test_variables_of_the_template(name: str, neutral: str | None) -> None:
    """They reach a template that reads them; otherwise only what happens anyway is accepted."""
    reading = RowDefaults(template_reads=name.__eq__)
    for value in ("low", "medium"):
        assert parse(line(CHAT, **{name: value}), reading).prompts == (
            ChatPrompt(tuple(HELLO), template_kwargs={name: value}),
        )
    with pytest.raises(RowError, match=f"`{name}` is given twice"):
        parse(line(CHAT, **{name: "low"}, chat_template_kwargs={name: "low"}), reading)
    for value in ("low", "medium", "high"):
        row = line(CHAT, **{name: value})
        if value == neutral:
            assert parse(row).prompts == parse(line(CHAT)).prompts
        else:
            with pytest.raises(RowError, match=f"`{name}` cannot reach the prompt") as caught:
                parse(row)
            assert (caught.value.info.code, caught.value.info.param) == (ErrorCode.UNSUPPORTED_FIELD, name)


def test_endpoint_defaults() -> None:
    """A body with only a prompt has the defaults of its endpoint, including `max_tokens` of other servers."""
    assert params(line()) == SamplingParams(max_new_tokens=16)
    assert params(line(CHAT)) == SamplingParams(max_new_tokens=None)


class Five(IntEnum):
    """A subclass of int."""

    FIVE = 5


ODD_IDS = [True, 1.0, 2.5, None, "7", -1, 2**31 - 1, 2**31, 2**40, -(2**31), 2**70, [3], math.nan, np.int64(4), Five(5)]


@examples(200)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=30), st.lists(st.sampled_from(ODD_IDS), max_size=2), st.data())
def test_ids_are_those_of_the_check_of_single_items(plain: list[int], odd: list[Any], data: st.DataObject) -> None:
    value = data.draw(st.permutations([*plain, *odd]))
    if value and isinstance(value[0], list):
        return  # a list of prompts

    def outcome(check: Callable[[str, Any], Any]) -> Any:
        try:
            return check("input_ids", value)
        except (RowError, OverflowError) as error:
            return str(error)

    found, wanted = outcome(token_id_lists), outcome(ids)
    assert (found if isinstance(found, str) else tuple(found[0])) == wanted
