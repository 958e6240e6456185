"""Prompt templates: the text is what jinja2 makes of the fields; what is missing, null or no text is never printed."""

from __future__ import annotations

from typing import Any

import pytest

from batchgen.errors import RowError, UsageError
from batchgen.text.chat.prompt_template import PromptTemplate
from batchgen.text.chat.template_process import RenderLimits
from tests.cases import each

ROW = {"q": "a 'b'", "n": 3, "opts": ["x", "y"], "meta": {"t": "T", "none": None}, "gone": None, "Full Name": "Z"}

TEXTS = {
    "plain": ("{{ q }}: {{ n }}", "a 'b': 3"),
    "loop": ("{% for o in opts %}\n  {{ loop.index }}. {{ o }}\n{% endfor %}", "  1. x\n  2. y\n"),
    "nested": ("{{ meta.t }}", "T"),
    "any name": ("{{ row['Full Name'] }}", "Z"),
    "default": ("{{ gone or '-' }}{{ absent | default('+') }}", "-+"),
    "condition": ("{% if gone %}{{ gone }}{% elif q is defined and absent is none %}yes{% endif %}", "yes"),
    "json": ('{"a": {{ q | tojson }}, "b": {{ ("[1, 2]" | fromjson)[1] }}}', '{"a": "a \'b\'", "b": 2}'),
    "last line end": ("{{ q }}\n", "a 'b'"),
}

ERRORS = {
    "null": ("{{ gone }}", "`gone` is null or missing; where it may be, write {{ NAME or '' }}"),
    "missing": ("{{ absent }}", "`absent` is null or missing"),
    "null in a filter": ("{{ gone | upper }}", "`gone` is null or missing"),
    "null in JSON": ("{{ gone | tojson }}", "`gone` is null or missing"),
    "null joined": ("{{ 'a' ~ gone }}", "`gone` is null or missing"),
    "missing of a row": ("{{ row['x'] }}", "x"),
    "null of an object": ("{{ meta.none }}", "it prints a null value"),
    "bytes": ("{{ raw }}", "it prints bytes"),
    "messages that are not JSON": (
        '[{"role": "user", "content": "{{ quoted }}"}]',
        "makes a list of messages that is not JSON",
    ),
    "the template's refusal": ("{{ raise_exception('too ' ~ q) }}", "too a 'b'"),
    "the time": ("{{ q }}{{ strftime_now('%Y') }}", "`strftime_now` is null or missing"),
    "an endless loop": (
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}{{ q }}",
        "second",
    ),
    "the sandbox": ("{{ q.__class__.__mro__ }}", "unsafe"),
}

REFUSED = {
    "syntax": ("{{ q }", "is not a template"),
    "filter": ("{{ q | nosuch }}", "nosuch"),
    "no field": ("Hello", "reads no field"),
    "chance": ("{{ opts | random }}", "at random"),
}


def prompts(source: str, *rows: dict[str, Any]) -> Any:
    return PromptTemplate(source, RenderLimits(seconds=0.1)).prompts(rows)


@each("source, text", TEXTS.values())
def test_text(source: str, text: str) -> None:
    assert prompts(source, ROW, {**ROW, "more": 1}) == [text, text]


@each("source, problem", ERRORS.values())
def test_a_row_error_leaves_the_other_rows(source: str, problem: str) -> None:
    row = {**ROW, "raw": b"\x00", "quoted": 'say "hi"'}
    good = {**row, "gone": "g", "absent": "h", "raw": "r", "quoted": "q", "x": 1, "meta": {"none": 1}}
    error, other = prompts(source, row, good)
    assert isinstance(error, RowError)
    assert "`--prompt-template`" in error.info.message
    assert problem in error.info.message
    assert isinstance(other, str) or "field" not in other.info.message


@each("source, problem", REFUSED.values())
def test_a_template_of_no_use_is_refused(source: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        PromptTemplate(source)


def test_a_refusal_of_the_template_itself_is_of_rows() -> None:
    source = "{% if not q %}{{ raise_exception('no q') }}{% endif %}{{ q }}"
    refused, text = prompts(source, {}, {"q": "a"})
    assert "no q" in refused.info.message
    assert text == "a"


def test_the_fields_that_are_read() -> None:
    source = (
        "{% set a = q %}{% for o in opts %}{{ o ~ a }}{{ namespace(x=1).x }}{% endfor %}{{ row['z'] }}{{ range(2) }}"
    )
    assert PromptTemplate(source).fields == {"q", "opts"}
