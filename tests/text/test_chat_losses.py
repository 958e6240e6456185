"""Whatever a row gives a chat template is in the prompt, or the row is refused by the name of what is not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchgen.errors import ErrorInfo
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.cases import each
from tests.text.chat_families import FAMILIES
from tests.text.conftest import save_tokenizer

ASK = {"role": "user", "content": "What is it?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Rain."}


def call(arguments: Any, name: str = "weather", call_id: str = "abc123def") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(content: Any = None, arguments: Any = '{"city": "Oslo"}', **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [call(arguments)], **others}


def result(**others: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "abc123def", "content": "rain, 8 degrees", **others}


def tool(name: str = "weather") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": "Current weather.", "parameters": parameters}}


@pytest.fixture(scope="session")
def render(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str | ErrorInfo]:
    """Renders a conversation with the template of a family."""
    loaded: dict[str, Tokenizer] = {}

    def render(family: str, *messages: dict[str, Any], **options: Any) -> str | ErrorInfo:
        if family not in loaded:
            folder = save_tokenizer(tmp_path_factory.mktemp("family"), "bytelevel", template=FAMILIES[family])
            loaded[family] = Tokenizer.load(folder)
        prompt = ChatPrompt(messages, **options)
        first, second = loaded[family].render_chats([prompt, prompt])
        assert first == second
        return first

    return render


Render = Callable[..., str | ErrorInfo]

WRITTEN: list[tuple[str, list[dict[str, Any]], str]] = [
    ("json", [ASK, calling()], 'What is it?<assistant><call>weather: {"city": "Oslo"}'),
    ("json", [ASK, calling("", {"city": "Oslo"})], 'weather: {"city": "Oslo"}'),
    ("json", [ASK, calling("Wait.")], 'Wait.<call>weather: {"city": "Oslo"}'),
    ("json", [ASK, calling(arguments="")], "weather: {}"),
    ("printed", [ASK, calling()], '<assistant><call>weather: {"city": "Oslo"}'),
    ("gated json", [ASK, calling()], 'What is it?<call>weather: {"city": "Oslo"}'),
    ("gated json", [ASK, calling("")], 'What is it?<call>weather: {"city": "Oslo"}'),
    ("gated json", [ASK, {k: v for k, v in calling().items() if k != "content"}], 'weather: {"city": "Oslo"}'),
    ("gated text", [ASK, calling()], 'What is it?<call>weather: {"city": "Oslo"}'),
    ("gated text", [ASK, calling(arguments={"city": "Åre"})], 'weather: {"city": "Åre"}'),
    ("gated text", [ASK, calling(arguments='{"city":"Oslo"}'), result()], '{"city":"Oslo"}<tool>rain, 8 degrees'),
    ("gated text", [ASK, calling(arguments="[1")], "weather: [1"),
    ("undefined", [ASK, calling(), result()], 'What is it?<call>weather: {"city": "Oslo"}<tool>rain'),
    ("joined", [ASK, calling()], 'What is it?<assistant><call>weather: {"city": "Oslo"}'),
    ("joined", [ASK, calling(arguments={"n": {"a": [1, 2.5, None]}})], '{"n": {"a": [1, 2.5, null]}}'),
    ("pairs", [ASK, calling(arguments='{"city": "Oslo", "days": 3}')], "weather city=Oslo days=3"),
    ("thinking", [ASK, calling(arguments='{"city":  "Oslo"}')], 'weather: {"city":  "Oslo"}'),
    ("thinking", [ASK, {**ANSWER, "reasoning_content": "Look."}], "<think>Look.</think>Rain."),
    ("thinking", [ASK, {**ANSWER, "reasoning": "Look."}], "<think>Look.</think>Rain."),
    ("thinking", [ASK, {**ANSWER, "reasoning": "Look.", "reasoning_content": "Look."}], "<think>Look.</think>Rain."),
    ("thinking", [ASK, {**ANSWER, "reasoning_content": "Look."}, ASK], "<assistant>Rain.<user>What is it?"),
    ("thinking", [ASK, calling(reasoning_content="Look."), result(), ANSWER, ASK], "weather"),
    ("strict", [SYSTEM, ASK], "[INST]Be brief.\nWhat is it?[/INST]"),
    ("strict", [ASK, calling(), result()], '"arguments": {"city": "Oslo"}}[RESULT]"rain, 8 degrees"'),
    ("channels", [ASK, calling(reasoning_content="Look.")], '<think>Look.to=weather {"city": "Oslo"}'),
    ("ids", [ASK, {**calling(), "tool_calls": [call({"a": 1}, call_id="weather:0")]}], '<call>weather:0 {"a": 1}'),
    ("names", [{**ASK, "name": "Ann"}], "<user Ann>What is it?"),
    ("names", [ASK, result(name="weather")], "<tool weather>rain"),
    ("json", [ASK, calling(), result(name="weather")], "<tool>rain"),
    ("parts", [{**ASK, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "<user>[a][b]"),
    ("parts", [{**SYSTEM, "content": [{"type": "text", "text": "a"}]}, ASK], "<system>a<user>What"),
    ("first part", [{**ASK, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "<user>a\nb"),
    ("last turn", [ASK], "<check>What is it?"),
    ("last turn", [ASK, ANSWER], "<check>Rain."),
    ("dump", [{**ASK, "name": "Ann", "mood": {"glad": True}}], '"name": "Ann", "mood": {"glad": true}'),
    ("dump", [ASK, calling()], '"arguments": {"city": "Oslo"}'),
    ("plain", [{**ASK, "name": None, "tool_calls": None}], "<user>What is it?"),
    ("plain", [{**ASK, "name": "", "tool_calls": [], "refusal": None, "annotations": []}], "<user>What is it?"),
    ("plain", [{**ASK, "id": "msg_1", "weight": 1, "cache_control": {"type": "ephemeral"}}], "<user>What is it?"),
    ("two roles", [{**SYSTEM, "content": " "}, ASK], "<user>What is it?"),
]  # fmt: skip


@pytest.mark.field("messages", "tools")
@each("family, messages, expected", WRITTEN)
def test_a_conversation_is_given_in_the_form_that_its_template_writes(
    render: Render, family: str, messages: list[dict[str, Any]], expected: str
) -> None:
    text = render(family, *messages)
    assert isinstance(text, str), text
    assert expected in text
    assert "None" not in text


LOST: list[tuple[str, list[dict[str, Any]], str]] = [
    ("plain", [ASK, calling()], "messages[1].tool_calls[0].function.name"),
    ("plain", [{**ASK, "name": "Ann"}], "messages[0].name"),
    ("plain", [ASK, {**ANSWER, "reasoning_content": "Look."}], "messages[1].reasoning_content"),
    ("plain", [ASK, {**ANSWER, "reasoning": "Look."}, ASK], "messages[1].reasoning"),
    ("plain", [ASK, {**ANSWER, "refusal": "No."}], "messages[1].refusal"),
    ("plain", [{**ASK, "mood": {"glad": True}}], "messages[0].mood"),
    ("plain", [ASK, {**ANSWER, "function_call": {"name": "weather", "arguments": "{}"}}], "messages[1].function_call"),
    ("plain", [ASK, {**ANSWER, "prefix": True}], "messages[1].prefix"),
    ("thinking", [ASK, {**ANSWER, "reasoning_content": "Look.", "reasoning": "Hm."}], "messages[1].reasoning"),
    ("gated json", [ASK, calling("Wait.")], "messages[1].tool_calls[0].function.name"),
    ("channels", [ASK, {**calling(reasoning="Hm."), "tool_calls": [call({}), call({}, "time")]}], "tool_calls[1]"),
    ("ids", [ASK, calling()], "messages[1].tool_calls[0].function.name"),
    ("json", [ASK, result(name="weather")], "messages[1].name"),
    ("json", [ASK, calling(), result(name="time")], "messages[2].name"),
    ("two roles", [SYSTEM, ASK], "messages[0].content"),
    ("two roles", [ASK, {**ANSWER, "role": "tool"}], "messages[1].content"),
    ("strict", [SYSTEM, ASK, ANSWER], "messages[0].content"),
]  # fmt: skip


@pytest.mark.field("messages")
@each("family, messages, lost", LOST)
def test_what_the_template_leaves_out_is_refused_by_name(
    render: Render, family: str, messages: list[dict[str, Any]], lost: str
) -> None:
    refused = render(family, *messages)
    assert isinstance(refused, ErrorInfo), refused
    assert (refused.code, refused.param) == ("unsupported_field", "messages")
    assert lost in refused.message
    assert "cannot reach the prompt" in refused.message


@pytest.mark.field("messages")
def test_a_refusal_has_the_words_of_the_template(render: Render) -> None:
    """Not those of a form in which it merely fails, as on a null content."""
    refused = render("no results", ASK, calling(), result())
    assert isinstance(refused, ErrorInfo)
    assert (refused.code, refused.param) == ("invalid_field", "messages")
    assert refused.message.endswith("TemplateError: no results here")


@pytest.mark.field("messages")
def test_turns_that_a_template_drops_by_design_are_not_lost(render: Render) -> None:
    assert render("last turn", ASK, ANSWER, {**ASK, "content": "Really?"}) == "<check>Really?"


@pytest.mark.field("messages")
@pytest.mark.parametrize("family", ["json", "pairs", "gated json"])
def test_arguments_that_are_not_an_object_are_refused_where_the_template_needs_one(render: Render, family: str) -> None:
    for arguments in ("[1", '"Oslo"', "not json", "[" * 3000):
        refused = render(family, ASK, calling(arguments=arguments))
        assert isinstance(refused, ErrorInfo), refused
        assert refused.param == "messages"
        assert "tool_calls" in refused.message


@pytest.mark.field("tools")
@each("family", FAMILIES)
def test_every_tool_is_named_in_the_prompt(render: Render, family: str) -> None:
    text = render(family, {**ASK, "content": "weather, time?"}, tools=(tool("weather"), tool("time")))
    if "tools" in FAMILIES[family]:
        assert isinstance(text, str)
        assert text.count('"name": "weather"') == text.count('"name": "time"') == 1
    else:
        assert isinstance(text, ErrorInfo)
        assert (text.code, text.param) == ("unsupported_field", "tools")


KWARGS: list[tuple[str, dict[str, Any], bool]] = [
    ("thinking", {"enable_thinking": False}, True),
    ("thinking", {"enable_thinking": True}, True),  # what happens anyway
    ("thinking", {"enable_thinking": None}, True),
    ("thinking", {"enable_thinking": "false"}, False),  # a text is not false
    ("thinking", {"enable_thinking": 0}, False),
    ("thinking", {"thinking": False}, False),
    ("channels", {"reasoning_effort": "high"}, True),
    ("channels", {"reasoning_effort": "medium"}, True),  # the template's own default
    ("channels", {"reasoning_effort": None}, True),
    ("plain", {"content": 1}, False),
    ("plain", {"mood": None}, True),
    ("plain", {"documents": [{"title": "a", "text": "b"}]}, False),
]


@pytest.mark.field("chat_template_kwargs")
@pytest.mark.parametrize(("family", "kwargs", "accepted"), KWARGS)
def test_a_variable_has_an_effect_or_asks_for_what_happens_anyway(
    render: Render, family: str, kwargs: dict[str, Any], accepted: bool
) -> None:
    found = render(family, ASK, template_kwargs=kwargs)
    if accepted:
        assert isinstance(found, str), found
        return
    assert isinstance(found, ErrorInfo), found
    assert (found.code, found.param) == ("unsupported_field", "chat_template_kwargs")
    assert all(name in found.message for name in kwargs)


def test_a_run_may_ignore_variables_that_the_template_does_not_read(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=FAMILIES["plain"]))
    rows = [ChatPrompt((ASK,), template_kwargs=settings) for settings in ({}, {"mood": "dark"})]
    plain, refused = tokenizer.render_chats(rows)
    assert isinstance(refused, ErrorInfo)
    tokenizer.use_template(None, keep_unread=True)
    assert tokenizer.render_chats(rows) == [plain, plain]


DEVELOPER = {"role": "developer", "content": "Be brief."}


def test_a_developer_is_the_system_where_the_template_has_no_such_role(tmp_path: Path) -> None:
    strict = (
        "{% for m in messages %}{% if m.role not in ['system', 'user'] %}{{ raise_exception(m.role) }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    silent = "{% for m in messages %}{% if m.role != 'developer' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    for number, template in enumerate((strict, silent)):
        tokenizer = Tokenizer.load(save_tokenizer(tmp_path / str(number), "bytelevel", template=template))
        assert tokenizer.render_chats([ChatPrompt((ASK,))]) == ["<user>What is it?"]
        assert not tokenizer.chat_notes
        assert tokenizer.render_chats([ChatPrompt((DEVELOPER, ASK))]) == ["<system>Be brief.<user>What is it?"]
        (note,) = tokenizer.chat_notes
        assert "developer" in note


def test_a_template_that_has_the_role_developer_gets_it(tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=template))
    assert tokenizer.render_chats([ChatPrompt((DEVELOPER, ASK))]) == ["<developer>Be brief.<user>What is it?"]
    assert not tokenizer.chat_notes


@pytest.mark.field("chat_template_kwargs")
def test_a_variable_that_would_have_an_effect_elsewhere_is_accepted(render: Render) -> None:
    """Settings of a whole file fit all its rows: this one opens no turn in which the model could think."""
    options = {"add_generation_prompt": False, "template_kwargs": {"enable_thinking": False}}
    assert render("thinking", ASK, **options) == "<user>What is it?"


def test_a_row_is_judged_by_its_own_values(render: Render) -> None:
    """Conversations of one shape share a verdict, but a plain message with an empty text loses nothing."""
    assert isinstance(render("two roles", SYSTEM, ASK), ErrorInfo)
    assert render("two roles", {**SYSTEM, "content": ""}, ASK) == "<user>What is it?<assistant>"
    assert isinstance(render("two roles", SYSTEM, ASK), ErrorInfo)


@pytest.mark.slow
def test_a_long_conversation_costs_a_few_renderings(render: Render) -> None:
    """Not one for each of its messages: old thoughts are judged once by the kind of message."""
    turns = [ASK, {**ANSWER, "reasoning_content": "Look."}] * 1500
    began = time.process_time()
    assert isinstance(render("thinking", *turns), str)
    refused = render("plain", *({**message, "name": "Ann", "mood": 1} for message in turns))
    assert isinstance(refused, ErrorInfo)
    assert "messages[0].name" in refused.message
    assert time.process_time() - began < 10


def test_values_that_json_does_not_have_are_refused(render: Render) -> None:
    refused = render("dump", {**ASK, "at": Path("x")})
    assert isinstance(refused, ErrorInfo)
    assert "messages[0]" in refused.message
    assert "JSON" in refused.message
    assert json.loads(str(render("dump", {**ASK, "at": (1, 2)})).removesuffix("<assistant>"))["at"] == [1, 2]
