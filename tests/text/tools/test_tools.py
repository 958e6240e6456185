"""Calls of tools in outputs, for each family by transcripts of its documented format, and in texts of its grammar."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from batchgen.errors import RowError, UsageError
from batchgen.request.fields.params import SamplingParams
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.request.fields.tool_choice import ToolChoice
from batchgen.text.calls import ToolCall
from batchgen.text.grammar.kinds import KINDS
from batchgen.text.reasoning import ReasoningParser, reasoning_of
from batchgen.text.stops.conditions import FinishedText, StopState
from batchgen.text.tokens.tokenizer import Tokenizer
from batchgen.text.tools.formats import FORMATS
from batchgen.text.tools.parser import calls_json
from batchgen.text.tools.rows import ToolParser, params_with_tools, tool_parser_of
from batchgen.text.tools.values import property_schemas
from tests.cases import each
from tests.text.conftest import save_tokenizer
from tests.text.grammar.walk import compile_constraint_of
from tests.text.tools.families import FAMILIES, MARKS, OSLO, PARIS, RESPONSE_TEMPLATES, TOOLS

CHAT = ChatPrompt(({"role": "user", "content": "How is the weather in Paris?"},), tuple(TOOLS))


class Known(NamedTuple):
    tokenizer: Tokenizer
    parser: ToolParser
    thoughts: ReasoningParser | None


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Known]:
    """A tokenizer and the parsers for each family, found by the template and the vocabulary alone."""
    found = {}
    for name, family in FAMILIES.items():
        folder = tmp_path_factory.mktemp("family")
        save_tokenizer(folder, "bytelevel", template=family.template, added=family.added, special=family.special)
        tokenizer = Tokenizer.load(folder)
        parser = tool_parser_of(tokenizer, "auto")
        assert parser is not None, name
        found[name] = Known(tokenizer, parser, reasoning_of(tokenizer, "auto"))
    return found


def finished(known: Known, output: str, prompt: ChatPrompt = CHAT, **fields: Any) -> FinishedText:
    """The parts of an output that is received token by token."""
    tokenizer = known.tokenizer
    params = SamplingParams(separate_reasoning=known.thoughts is not None, **fields)
    params = params_with_tools(params, prompt, known.parser)
    prompt_ids, ids = tokenizer.encode_chat(prompt), tokenizer.encode_plain([output])[0]
    thoughts = None if known.thoughts is None else known.thoughts.start(prompt_ids)
    stops = StopState(params, frozenset(), tokenizer, thoughts)
    sent = ""
    for number, token in enumerate(ids, 1):
        if stops.append(token, last=number == len(ids)) is not None:
            break
        sent += stops.next_output_text() if params.stream and number < len(ids) else ""
    done = stops.finish("length")
    assert done.text.startswith(sent), "events do not join to the text"
    return done


def named(calls: Any) -> list[tuple[str, Any]]:
    return [(call.name, dict(call.arguments)) for call in calls]


@each("name", FAMILIES)
def test_a_family_is_known_by_its_template_and_vocabulary(known: dict[str, Known], name: str) -> None:
    assert known[name].parser.name == FAMILIES[name].name


@pytest.mark.field("tools")
@each("name, case", [(name, case) for name, one in FAMILIES.items() for case in one.cases])
def test_a_transcript_has_calls_and_text(known: dict[str, Known], name: str, case: str) -> None:
    expected = FAMILIES[name].cases[case]
    for fields in ({}, {"stop": "not there"}, {"stream": True}):  # at the end, token by token, and in events
        done = finished(known[name], expected.output, **fields)
        assert (named(done.tool_calls), done.text) == (list(expected.calls), expected.text)
        assert (done.tool_calls_error is None) == (expected.error is None), done.tool_calls_error
        assert expected.error is None or expected.error in (done.tool_calls_error or "")


@each("name", FAMILIES)
def test_what_begins_like_a_call_and_is_none_is_an_error(known: dict[str, Known], name: str) -> None:
    """A mark alone, and a call that is cut anywhere or written twice: nothing that is written gets lost."""
    mark, plain, thoughts = MARKS[name], CHAT._replace(tools=None), known[name].thoughts
    opened = thoughts is not None and thoughts.start(known[name].tokenizer.encode_chat(CHAT)).begun
    done = finished(known[name], f"{'</think>' if opened else ''}{mark} is what I write.")
    assert not done.tool_calls
    assert done.tool_calls_error
    assert "is what I write." in done.text
    expected = next(case for case in FAMILIES[name].cases.values() if case.calls)
    twice = finished(known[name], expected.output * 2)
    assert named(twice.tool_calls) == [*expected.calls] * 2 or twice.tool_calls_error
    ids = known[name].tokenizer.encode_plain([expected.output])[0]
    for number in range(1, len(ids), 5):
        output = known[name].tokenizer.decode(ids[:number], skip_special_tokens=False)
        done, without = finished(known[name], output), finished(known[name], output, plain)
        if done.tool_calls:
            assert named(done.tool_calls) == [*expected.calls][: len(done.tool_calls)]
        else:
            assert (done.reasoning, done.text) == (without.reasoning, without.text)
            assert done.tool_calls_error or mark not in without.text


MARKUP = re.compile(
    r'(?:string|type|index)="\w*"?word7|\{"\w*word7\w*": "(?:function|0)"|"type": "?\w*word7'
    r'|id": "\w*word7|word7id|word7[^<{]*<\|[cm]'
)
"""A word in an attribute of a tag, in a key of JSON that says nothing, or in the head of a message."""


@each("name", FAMILIES)
def test_a_word_anywhere_in_a_transcript_is_in_a_column(known: dict[str, Known], name: str) -> None:
    draw, tokenizer = random.Random(7), known[name].tokenizer
    for case in FAMILIES[name].cases.values():
        ids = tokenizer.encode_plain([case.output])[0]
        for at in draw.sample(range(len(ids) + 1), min(3, len(ids))):
            before, after = (tokenizer.decode(part, skip_special_tokens=False) for part in (ids[:at], ids[at:]))
            done = finished(known[name], f"{before}word7{after}")
            columns = (done.text, done.reasoning, done.tool_calls, done.tool_calls_error)
            assert "word7" in repr(columns) or MARKUP.search(f"{before}word7{after}") or "<|call|>" in before


def test_an_id_that_may_name_two_functions_is_an_error(known: dict[str, Known]) -> None:
    tools = tuple({"type": "function", "function": {"name": name}} for name in ("now", "now_1"))
    for written, name in (("functions_now_1", None), ("functions.now_1:0", "now_1"), ("functions_now_2", "now")):
        output = f"<|tool_call_begin|>{written}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        done = finished(known["kimi k2"], output, CHAT._replace(tools=tools))
        assert named(done.tool_calls) == ([] if name is None else [(name, {})])
        assert (done.tool_calls_error or "").endswith("names several of the row's functions") == (name is None)


def test_calls_and_text_with_special_tokens_shown(known: dict[str, Known]) -> None:
    """The text around calls has its special tokens as the row wants them."""
    output = "a<|im_end|>b[TOOL_CALLS]now[ARGS]{}c<s>"
    for skip, text in ((True, "ab\nc"), (False, "a<|im_end|>b\nc<s>")):
        done = finished(known["mistral v11"], output, skip_special_tokens=skip, spaces_between_special_tokens=False)
        assert (named(done.tool_calls), done.text) == ([("now", {})], text)


@pytest.mark.parametrize("kind", ["nested", "bytefallback"])
def test_calls_are_found_with_every_kind_of_decoder(kind: str, tmp_path: Path) -> None:
    family = FAMILIES["mistral v11"]
    save_tokenizer(tmp_path, kind, template=family.template, special=family.special)
    tokenizer = Tokenizer.load(tmp_path)
    parser = tool_parser_of(tokenizer, "auto")
    assert parser is not None
    known = Known(tokenizer, parser, None)
    city = ("get_weather", {"city": "Łódź 東京", "days": 3})
    call = f"[TOOL_CALLS]get_weather[ARGS]{json.dumps(city[1], ensure_ascii=False)}"
    for output, text in (
        (f"Zażółć a {call}", "Zażółć a"),
        (f"{call} b </s> c", "b  c"),
        (f"é{call}[TOOL_CALLS]now[ARGS]{{}}", "é"),
    ):
        done = finished(known, output)
        assert named(done.tool_calls)[0] == city
        assert " ".join(done.text.split()) == " ".join(text.split())


def test_stops_cut_in_calls_and_behind_them(known: dict[str, Known]) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for stop, text, calls in (
        ("</tool_call>", "I look.", [("now", {})]),
        ("END", "I look.\nDone ", [("now", {})]),
        ("arguments", 'I look. <tool_call>\n{"name": "now", "', []),
    ):
        done = finished(known["qwen2.5"], f"I look. {call} Done END more", stop=stop)
        assert (named(done.tool_calls), done.text.strip(), done.matched_stop) == (calls, text.strip(), stop)
        assert (done.tool_calls_error is None) == bool(calls)
    (eom,) = known["llama 3.1"].tokenizer.encode_plain(["<|eom_id|>"])[0]
    params = params_with_tools(SamplingParams(stop_token_ids=(7,)), CHAT, known["llama 3.1"].parser)
    assert params.stop_token_ids == (7, eom)
    assert not params_with_tools(SamplingParams(ignore_eos=True), CHAT, known["llama 3.1"].parser).stop_token_ids


@pytest.mark.field("parallel_tool_calls")
def test_only_the_first_of_several_calls_is_kept_where_one_is_wanted(known: dict[str, Known]) -> None:
    output = FAMILIES["qwen3"].cases["two"].output
    assert named(finished(known["qwen3"], output, CHAT._replace(parallel_tool_calls=False)).tool_calls) == [PARIS]


def test_rows_whose_answer_is_constrained_or_without_tools_have_no_calls(known: dict[str, Known]) -> None:
    output = FAMILIES["qwen2.5"].cases["one"].output
    for prompt, fields in ((CHAT, {"regex": "x"}), (CHAT._replace(tools=None), {})):
        params = SamplingParams(**fields)
        assert params_with_tools(params, prompt, known["qwen2.5"].parser if fields else None) is params
    assert finished(known["qwen2.5"], output, regex="x").text == output


@pytest.mark.parametrize("name", RESPONSE_TEMPLATES)
def test_a_response_template_names_the_format(name: str, tmp_path: Path) -> None:
    field, expected, output = RESPONSE_TEMPLATES[name]
    template = {"start_anchor": "<|im_start|>assistant\n", "fields": {"tool_calls": field, "content": {}}}
    save_tokenizer(tmp_path, "bytelevel", template=FAMILIES["granite 3"].template)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "response_template": template}))
    tokenizer = Tokenizer.load(tmp_path)
    parser = tool_parser_of(tokenizer, "auto")
    assert parser is not None
    assert parser.name == expected
    done = finished(Known(tokenizer, parser, None), f"I look. {output}")
    assert (named(done.tool_calls), done.text) == ([PARIS], "I look.")
    required = CHAT._replace(tool_choice=ToolChoice("required"))
    if expected == "response_template":
        with pytest.raises(RowError, match="name the format with --tool-parser"):
            params_with_tools(SamplingParams(), required, parser)
        broken = finished(Known(tokenizer, parser, None), "<<now>>==<<end>>")
        assert (named(broken.tool_calls), broken.text) == ([("now", {"": "="})], "") or broken.tool_calls_error
    else:
        assert params_with_tools(SamplingParams(), required, parser).constraint is not None


def test_the_option_names_a_format_or_none(known: dict[str, Known]) -> None:
    tokenizer = known["qwen3"].tokenizer
    assert tool_parser_of(tokenizer, "off") is None
    assert [tool_parser_of(tokenizer, name).name for name in FORMATS] == list(FORMATS)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=r"`--tool-parser` must be auto, off or one of hermes, .*, got 'herme'"):
        tool_parser_of(tokenizer, "herme")
    assert {family.name for family in FAMILIES.values()} == set(FORMATS)


def test_ids_are_those_that_the_model_writes_or_depend_on_the_prompt_alone(known: dict[str, Known]) -> None:
    kimi = finished(known["kimi k2"], FAMILIES["kimi k2"].cases["two"].output).tool_calls
    assert [call["id"] for call in json.loads(calls_json(kimi, [1], 0, None))] == [
        "functions.get_weather:0",
        "functions.now:1",
    ]
    same = json.loads(calls_json([kimi[0], kimi[0]], [1], 0, None))
    assert len({call["id"] for call in same}) == 2
    plain = [ToolCall("now", {})] * 2
    ids = [
        call["id"]
        for prompt, sample in (([1, 2], 0), ([1, 2], 1), ([1, 3], 0))
        for call in json.loads(calls_json(plain, prompt, sample, 9))
    ]
    assert len(set(ids)) == 6
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert calls_json(plain, [1, 2], 0, None) == calls_json(plain, [1, 2], 0, None)


FUNCTIONS = [
    {
        "name": tool["function"]["name"],
        "parameters": tool["function"]["parameters"] or {"type": "object", "maxProperties": 0},
    }
    for tool in TOOLS
]
MORE = [
    {
        "name": "more",
        "parameters": {
            "type": "object",
            "$defs": {"point": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}},
            "properties": {
                "on": {"type": "boolean"},
                "at": {"$ref": "#/$defs/point"},
                "day": {"type": "string", "format": "date"},
                "word": {"type": ["string", "null"], "maxLength": 2},
                "of": {
                    "anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "pattern": "^[ab]$"}]
                },
                "what": {"const": "this"},
                "list": {"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 1, "maxItems": 3},
            },
        },
    }
]


@each("name, parallel", [*((name, True) for name in FORMATS), ("hermes", False), ("mistral", False), ("olmo3", False)])
def test_texts_of_the_grammar_are_calls_that_satisfy_the_schemas(name: str, parallel: bool) -> None:
    """Whatever the grammar of required calls allows is read back, and is what the schemas allow."""
    functions = [each for each in FUNCTIONS if each["name"] != "now"] + MORE
    functions.append({"name": "now", "parameters": {"type": "object", "properties": {}}})
    text = json.dumps({"format": name, "functions": functions, "parallel": parallel})
    walk, check = compile_constraint_of("tool_choice", text), KINDS["tool_choice"].check
    assert check is not None
    schemas = {each["name"]: property_schemas(each["parameters"]) for each in functions}
    written = FORMATS[name].write([ToolCall(*OSLO), ToolCall("now", {})][: 1 + parallel])
    assert walk.accepts(written), written
    found = 0
    for seed in range(5):
        drawn = walk.random_text(seed)
        try:
            output = "" if drawn is None else drawn.decode()
        except UnicodeDecodeError:
            continue
        if not output:
            continue
        spans = FORMATS[name].spans(output, schemas)
        calls = [call for span in spans for call in span.calls]
        assert not [span.error for span in spans if span.error], output
        assert check(text)(calls_json(calls, [1], 0, None)) is True, (output, calls)
        found += 1
    assert found > 1


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "object", "anyOf": [{"required": ["a"]}]}, "uses `anyOf`"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "uses `required`"),
        ({"type": "object", "properties": {"a b": {"type": "string"}}}, "has the name 'a b'"),
    ],
)
def test_schemas_that_a_format_without_json_cannot_hold_are_refused(parameters: dict[str, Any], words: str) -> None:
    for name in ("qwen3_coder", "gemma4", "pythonic"):
        with pytest.raises(RowError, match=words) as caught:
            compile_constraint_of("tool_choice", required(name, parameters))
        assert caught.value.info.param == "tools"


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": 5},
        {"type": "object", "properties": [1]},
        {"type": "object", "properties": {"a": {"enum": 5}}},
        {"type": "object", "properties": {"a": {"anyOf": "x"}}},
        {"type": "object", "properties": {"a": {"type": "array", "minItems": "1"}}},
        "text",
    ],
)
def test_what_is_not_a_schema_is_refused_where_calls_are_required(known: dict[str, Known], parameters: Any) -> None:
    for name in ("hermes", "gemma4", "pythonic"):
        with pytest.raises(RowError) as caught:
            compile_constraint_of("tool_choice", required(name, parameters))
        assert caught.value.info.param == "tools"
    tools = ({"type": "function", "function": {"name": "get_weather", "parameters": parameters}},)
    done = finished(known["qwen3 coder"], FAMILIES["qwen3 coder"].cases["one"].output, CHAT._replace(tools=tools))
    assert named(done.tool_calls) == [PARIS]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gemma4", "pythonic"])
def test_arguments_come_in_the_order_that_the_schema_asks_for(name: str) -> None:
    names = {"type": "object", "properties": {"b": {"type": "boolean"}, "a": {"type": "boolean"}}}
    ordered = {**names, "required": ["a", "b"], "propertyOrdering": ["a", "b"]}
    walk = compile_constraint_of("tool_choice", required(name, ordered))
    assert walk.accepts(FORMATS[name].write([ToolCall("f", {"a": True, "b": False})]))
    assert not walk.accepts(FORMATS[name].write([ToolCall("f", {"b": True, "a": False})]))


def test_a_schema_may_refer_to_others_and_to_itself() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "on": {"type": "boolean"}}}
    nodes = {"$ref": "#/$defs/node", "$defs": {"node": {**node, "required": ["on"]}}}
    for name in ("hermes", "qwen3_coder", "pythonic"):
        walk = compile_constraint_of("tool_choice", required(name, nodes))
        assert walk.accepts(FORMATS[name].write([ToolCall("f", {"next": {"on": True}, "on": False})]))
        assert not walk.accepts(FORMATS[name].write([ToolCall("f", {"next": {"on": True}})]))
    with pytest.raises(RowError, match="a schema that holds itself"):
        compile_constraint_of("tool_choice", required("gemma4", nodes))


def required(name: str, parameters: Any) -> str:
    """The text of a constraint for one function `f`."""
    functions = [{"name": "f", "parameters": parameters}]
    return json.dumps({"format": name, "functions": functions, "parallel": True})


HOSTILE = [
    '<tool_call>{"name": "\\ud800", "arguments": {"\\ud800": "\\udfff"}}</tool_call>',
    "<tool_call>" * 2000,
    '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}</tool_call>",
    '<tool_call>{"name": "now", "arguments": {"a": ' + "9" * 6000 + "}}</tool_call>",
    '<tool_call>{"name": "now", "arguments": {"a": 1e999}}</tool_call>',
    '<tool_call>{"name": 5}</tool_call>',
    "<tool_call>[[[[",
    "[" * 9000,
    "[now(a=" + "[" * 9000,
    "[now(a=" + "9" * 9000 + ")]",
    '<|tool_call>call:now{a:<|"|>' * 50,
    "<function=now>" + "<parameter=a>" * 3000,
    '<invoke name="now">' * 2000,
    "[TOOL_CALLS]" * 2000 + "now{",
    " to=functions.now<|message|>" * 500 + "{}",
    *(f"{begin}{' ' * 30_000}" for begin in ("", "to=functions.now", "[TOOL_CALLS]now", "<tool_call>now", "[now()")),
    *(f"{begin}{' ' * 30_000}" for begin in ("<function_calls>now()", "<|tool_call_start|>now()", "<function=now>")),
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>now{' ' * 30_000}",
    f"<|tool_call_begin|>functions.now:0{' ' * 30_000}",
    "<function=now><parameter=a>" * 1000,
]


@each("name", FORMATS)
def test_hostile_outputs_are_texts(name: str) -> None:
    for output in HOSTILE:
        for span in FORMATS[name].spans(output, {"now": {}}):
            assert bool(span.calls) != bool(span.error)
            json.loads(calls_json(span.calls, [1], 0, None).encode())


@pytest.mark.slow
@each("name", FORMATS)
def test_hostile_outputs_take_no_seconds(name: str) -> None:
    began = time.process_time()
    for output in HOSTILE:
        list(FORMATS[name].spans(output, {"now": {}}))
    assert time.process_time() - began < 3
