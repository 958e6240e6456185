"""The thoughts of an output apart from its answer, for each family by transcripts of its documented format."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from batchgen.errors import UsageError
from batchgen.request.fields.params import SamplingParams
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.text.families import NAMES, find_format, named_format, response_format
from batchgen.text.reasoning import ReasoningParser, reasoning_of
from batchgen.text.stops.conditions import FinishedText, StopState
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.cases import each
from tests.text.conftest import CHAT_TEMPLATE, save_tokenizer
from tests.text.reasoning_families import ANSWER, FAMILIES, RESPONSE_TEMPLATES, THOUGHTS, Case

TURNS = ({"role": "user", "content": "What does <think> mean?"},)


class Known(NamedTuple):
    tokenizer: Tokenizer
    parser: ReasoningParser


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Known]:
    """A tokenizer and a parser for each family, found by the template and the vocabulary alone."""
    found = {}
    for name, family in FAMILIES.items():
        folder = tmp_path_factory.mktemp("family")
        save_tokenizer(folder, "bytelevel", template=family.template, added=family.added, special=family.special)
        tokenizer = Tokenizer.load(folder)
        parser = reasoning_of(tokenizer, "auto")
        assert parser is not None, name
        found[name] = Known(tokenizer, parser)
    channels = response_format(RESPONSE_TEMPLATES["channels"][0])
    assert channels is not None
    tokenizer = found["any other"].tokenizer
    return {**found, "channels": Known(tokenizer, ReasoningParser(channels, tokenizer))}


def finished(known: Known, case: Case, **params: object) -> tuple[FinishedText, list[int]]:
    """The parts of the case's output, received token by token, and its ids."""
    tokenizer, row = known.tokenizer, SamplingParams(separate_reasoning=True, **params)  # type: ignore[arg-type]
    prompt = tokenizer.render_chat(ChatPrompt(TURNS, template_kwargs=case.settings))
    prompt_ids, ids = tokenizer.encode_plain([prompt, case.output])
    stops = StopState(row, frozenset(), tokenizer, known.parser.start(prompt_ids))
    for number, token in enumerate(ids, 1):
        if stops.append(token, last=number == len(ids)) is not None:
            break
    return stops.finish("length"), ids


@each("name", FAMILIES)
def test_a_family_is_known_by_its_template_and_vocabulary(known: dict[str, Known], name: str) -> None:
    assert known[name].parser.format.name == FAMILIES[name].name


@pytest.mark.field("separate_reasoning")
@each("name, case", [(name, case) for name, one in FAMILIES.items() for case in one.cases])
def test_a_transcript_has_thoughts_and_an_answer(known: dict[str, Known], name: str, case: str) -> None:
    expected = FAMILIES[name].cases[case]
    for stop in ((), ("not there",)):  # at the end, and token by token
        done, ids = finished(known[name], expected, stop=stop)
        assert (done.reasoning, done.text) == (expected.reasoning, expected.answer)
        if expected.reasoning is not None:
            thoughts = len(known[name].tokenizer.encode_plain([expected.reasoning])[0])
            assert done.reasoning_tokens is not None
            assert abs(done.reasoning_tokens - thoughts) <= 4  # blanks around them, and what joins a marker
            assert done.reasoning_tokens < len(ids) or not expected.answer
        elif case != "empty":
            assert done.reasoning_tokens is None


SHARED = {
    "any other": [
        (f"Well,<think>{THOUGHTS}</think>{ANSWER}", None, f"Well,<think>{THOUGHTS}</think>{ANSWER}"),
        (f"<think>{THOUGHTS}</think>{ANSWER}", THOUGHTS, ANSWER),
        (f"<think>Add.</think>{ANSWER}", "Add.", ANSWER),
    ],
    "hunyuan": [(f"<think>{THOUGHTS}</think><answer>{ANSWER}</answer>", THOUGHTS, ANSWER)],
}
"""Outputs in which a token belongs to a marker and to the text next to it."""


@pytest.mark.parametrize("name", SHARED)
def test_a_token_of_a_marker_and_a_text_is_cut(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    shared = ["Well,<", ".</", ">It", ">Add"]
    save_tokenizer(tmp_path, "bytelevel", template=family.template, added=shared, special=family.special)
    tokenizer = Tokenizer.load(tmp_path)
    parser = reasoning_of(tokenizer, "auto")
    assert parser is not None
    for output, reasoning, answer in SHARED[name]:
        assert any(token in tokenizer.encode_plain([output])[0] for token in map(tokenizer.token_to_id, shared))
        done, _ = finished(Known(tokenizer, parser), Case(output))
        assert (done.reasoning, done.text) == (reasoning, answer)


@pytest.mark.parametrize("name", RESPONSE_TEMPLATES)
def test_a_response_template_names_the_markers(known: dict[str, Known], name: str) -> None:
    template, output = RESPONSE_TEMPLATES[name]
    tokenizer = known["any other"].tokenizer
    form = response_format(template)
    assert form is not None
    parser = ReasoningParser(form, tokenizer)
    assert parser.format.name == "response_template"
    done, _ = finished(Known(tokenizer, parser), Case(output))
    assert (done.reasoning, done.text) == (THOUGHTS, ANSWER)


@pytest.mark.parametrize(
    "template",
    [
        {},
        {"fields": {}},
        {"fields": {"content": {"close": "<e>"}}},
        {"fields": {"thinking": {"open_pattern": "<th.*>", "close": "</th>"}}},
        {"fields": {"thinking": {"open": "<th>"}}},
        {"fields": {"thinking": {"open": "<th>", "close": "</th>"}, "content": {"open_pattern": "x+"}}},
        {"fields": {"thinking": {"open": [], "close": 5}}},
        {"fields": 3},
    ],
)
def test_a_response_template_of_patterns_leaves_the_choice_to_the_table(template: dict[str, object]) -> None:
    assert response_format(template) is None


def test_the_option_names_a_family_or_none(known: dict[str, Known]) -> None:
    tokenizer = known["qwen3"].tokenizer
    assert reasoning_of(tokenizer, "off") is None
    assert [named_format(name).name for name in NAMES] == list(NAMES)
    with pytest.raises(UsageError, match=r"`--reasoning` must be auto, off or one of gpt_oss, .*, got 'gwen'"):
        reasoning_of(tokenizer, "gwen")


@pytest.mark.parametrize("vocabulary", [["<think>"], ["</think>"], []])
def test_a_model_without_markers_has_no_thoughts(vocabulary: list[str]) -> None:
    assert find_format("user: Hi", lambda name: False, vocabulary.__contains__) is None


WRITES_NONE = {
    "in a comment": "{# Thoughts: <think></think> #}" + CHAT_TEMPLATE,
    "in a condition": "{% if '</think>' in messages[0].content or x == '[THINK]' %}{% endif %}" + CHAT_TEMPLATE,
    "around results of tools": (
        "{% for m in messages %}{% if m.role == 'tool' %}<response>{{ m.content }}</response>{% else %}"
        "<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
    ),
    "channels of another kind": (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if false %}<|channel|>{% endif %}<|start|>assistant"
    ),
}


@pytest.mark.parametrize("name", WRITES_NONE)
def test_words_that_a_template_does_not_write_around_thoughts_mark_nothing(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=WRITES_NONE[name]))
    assert reasoning_of(tokenizer, "auto") is None


def test_a_mark_around_results_of_tools_belongs_to_no_answer(tmp_path: Path) -> None:
    template = WRITES_NONE["around results of tools"] + "<think>\n"
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=template, added=["<think>", "</think>"]))
    parser = reasoning_of(tokenizer, "auto")
    assert parser is not None
    output = Case("Add.\n</think>\n\nUse <response> and </response>.")
    done, _ = finished(Known(tokenizer, parser), output)
    assert (done.reasoning, done.text) == ("Add.", "Use <response> and </response>.")


def test_markers_that_are_joined_from_parts_are_found(tmp_path: Path) -> None:
    template = "{% set tag = 'think' %}" + CHAT_TEMPLATE + "{{ '<' ~ tag ~ '>' }}\n"
    parser = reasoning_of(Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=template)), "auto")
    assert parser is not None
    assert parser.format.starts == ("<think>",)


def test_a_named_family_of_models_that_always_think_needs_no_open_prompt(known: dict[str, Known]) -> None:
    tokenizer = known["any other"].tokenizer
    parser = reasoning_of(tokenizer, "deepseek_r1")
    assert parser is not None
    assert finished(Known(tokenizer, parser), Case(f"{THOUGHTS}</think>{ANSWER}"))[0].reasoning == THOUGHTS
    assert not parser.start(tokenizer.encode_plain(["assistant: <think>\n\n</think>\n\n"])[0]).begun


PROMPTS = {
    "<|im_start|>assistant\n<think>": True,
    "<|im_start|>assistant\n<think>\n": True,
    "<|im_start|>assistant\n<think>\nSo far, ": True,  # a continued message
    "<|im_start|>assistant\n<think>\nSo.</think> It": False,
    "<|im_start|>user\n<think> is a tag<|im_end|>\n<|im_start|>assistant\n": False,
    "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n": False,
    "": False,
    "<think>\n": True,
    "Write <think> and then ": False,  # it may be anybody's
    "x" * 9000 + "<think>\n": True,
}


@each("prompt", PROMPTS)
@each("name", ["qwen3", "any other"])
def test_what_the_prompt_ends_with_decides_where_the_output_begins(
    known: dict[str, Known], name: str, prompt: str
) -> None:
    found = known[name]
    assert found.parser.start(found.tokenizer.encode_plain([prompt])[0]).begun == PROMPTS[prompt]


HEADS = re.compile(r"<\|(?:start|channel)\|>[^<]{0,64}(?:<\|(?:channel|constrain)\|>[^<]{0,64})*<\|message\|>")
"""Heads of the messages of gpt-oss, which belong to their markers."""
PARTS = [
    "<",
    "<th",
    "</",
    "think>",
    "<|",
    "\n\n",
    " ",
    "to=",
    " to=f",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    " json",
]
"""What looks like a marker, and what a head has."""


@each("name", [*FAMILIES, "channels"])
def test_all_that_is_written_is_in_a_column(known: dict[str, Known], name: str) -> None:
    """Whatever is written: each word is in the thoughts or in the answer, once, and events join to the answer."""
    tokenizer, parser = known[name]
    form, draw = parser.format, random.Random(7)
    heads = [
        "<|channel|>final json<|message|>",
        "<|channel|>x<|message|>",
        "<|channel|>final <|constrain|>json<|message|>",
    ]
    markers = [*form.markers, *form.markers, *([form.header, *heads] if form.header else [])]
    for number in range(120):
        words = [f"{draw.choice(['', ' ', chr(10)])}word{each}{chr(0x6771)}." for each in range(8)]
        pieces = [*words, *draw.choices(markers, k=draw.randrange(7)), *draw.choices(PARTS, k=draw.randrange(4))]
        draw.shuffle(pieces)
        output = "".join(pieces[: draw.randrange(1, 16)])
        ids = tokenizer.encode_plain([output])[0]
        prompt = tokenizer.encode_plain(["<think>" if number % 5 == 0 else "Hi"])[0]
        found = set()
        for fields in ({}, {"stop": "not there"}, {"stream": True}):
            row = SamplingParams(separate_reasoning=True, **fields)  # type: ignore[arg-type]
            stops, sent = StopState(row, frozenset(), tokenizer, parser.start(prompt)), ""
            for at, token in enumerate(ids, 1):
                stops.append(token, last=at == len(ids))
                sent += stops.next_output_text() if "stream" in fields and at < len(ids) else ""
            done = stops.finish("length")
            assert done.text.startswith(sent), output
            found.add(done)
        assert len(found) == 1, output
        (done,) = found
        kept = re.findall(r"word\d", f"{done.reasoning or ''} {done.text}")
        outside = re.findall(r"word\d", HEADS.sub("", output) if form.header else output)
        assert len(kept) == len(set(kept)), output
        assert set(kept) >= set(outside), output
        assert (done.reasoning_tokens or 0) <= len(ids)
        if form.header is None and not any(marker in output for marker in form.markers) and number % 5:
            assert (done.reasoning, done.text) == (None, tokenizer.decode_output(ids))


@pytest.mark.parametrize("stop", ["It", " is", "5", "It is 5"])
def test_stops_match_in_the_answer_alone(known: dict[str, Known], stop: str) -> None:
    for name in ("qwen3", "qwq", "gpt_oss", "any other"):
        case = FAMILIES[name].cases["thoughts"]
        output = case.output.replace(THOUGHTS, "It is 5, for It is 5.")
        done, _ = finished(known[name], case._replace(output=output), stop=stop)
        assert (done.reasoning, done.text) == ("It is 5, for It is 5.", ANSWER.partition(stop)[0])
        assert (done.stop_kind, done.matched_stop) == ("string", stop)
        done, _ = finished(known[name], case._replace(output=output), stop_regex=stop, no_stop_trim=True)
        assert done.text == "".join(ANSWER.partition(stop)[:2])


def test_an_id_that_the_row_names_stops_in_the_answer_and_an_end_of_sequence_anywhere(known: dict[str, Known]) -> None:
    tokenizer, parser = known["qwq"]
    inside, behind = tokenizer.encode_plain([f"a5{ANSWER}", f"</think>{ANSWER}"])
    five = tokenizer.encode_plain(["5"])[0][0]
    row = SamplingParams(separate_reasoning=True, stop_token_ids=(five,))
    prompt = tokenizer.encode_plain(["<think>"])[0]
    stops = StopState(row, frozenset({1}), tokenizer, parser.start(prompt))
    events = [stops.append(token) for token in (*inside, *behind[:-1])]
    assert events[-1] is not None
    assert not any(events[:-1])
    done = stops.finish("length")
    assert (done.reasoning, done.text, done.matched_stop) == (f"a5{ANSWER}", "It is ", str(five))
    ended = StopState(row, frozenset({five}), tokenizer, parser.start(prompt))
    assert ended.append(five) is not None
    assert ended.finish("length") == FinishedText("", "stop", "eos", str(five), "5", None, 0)
