"""The format of calls is found by the call that a chat template writes; for one that writes none nothing is guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.text.reasoning import reasoning_of
from batchgen.text.tokens.tokenizer import Tokenizer
from batchgen.text.tools.rows import tool_parser_of
from tests.text.conftest import save_tokenizer
from tests.text.tools.families import json_calls, template_of
from tests.text.tools.shapes import lists, names, objects, others, tags

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
HERMES = json_calls("\n<tool_call>\n", "\n</tool_call>")
TAGS = "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
SHAPES: dict[str, tuple[str, str | None]] = {
    "markers joined from a variable": (
        template_of(TURN, "{% set t = 'tool_call' %}" + HERMES.replace("tool_call>", "{{ t }}>")), "hermes"
    ),
    "written by a macro": (
        "{% macro call(c) %}<tool_call>\n{{ {'name': c.name, 'arguments': c.arguments} | tojson }}\n</tool_call>"
        "{% endmacro %}"
        + template_of(TURN, "{% for c in m.tool_calls %}{{ call(c.function) }}{% endfor %}"),
        "hermes",
    ),
    "the arguments as text": (
        template_of(TURN, HERMES.replace("c.function.arguments | tojson", "c.function.arguments")), "hermes"
    ),
    "the whole call by tojson": (
        template_of(TURN, "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"),
        "hermes",
    ),
    "another format in a comment": ("{# <minimax:tool_call> [TOOL_CALLS] #}" + template_of(TURN, HERMES), "hermes"),
    "calls that are not read, in known markers": (
        "{% set d = '｜DSML｜' %}" + template_of(TURN, "{% for c in m.tool_calls %}<{{ d }}function_calls>"
        '<{{ d }}invoke name="{{ c.function.name }}"><{{ d }}parameter name="place" string="no">{% endfor %}'),
        "deepseek_v32",
    ),
    "another format in a condition": (
        "{% if '[TOOL_CALLS]' in messages[0].content %}<|python_tag|>{% endif %}" + template_of(TURN, HERMES), "hermes"
    ),
    "tags in the tags of another format": (
        template_of(TURN, f"<tool_call>\n{{% for c in m.tool_calls %}}<function={{{{ c.function.name }}}}>\n{TAGS}"
                          "</function>{% endfor %}\n</tool_call>"),
        "qwen3_coder",
    ),
    "JSON in the tags of a function": (
        template_of(TURN, "{% for c in m.tool_calls %}<function={{ c.function.name }}>"
                          "{{ c.function.arguments | tojson }}</function>{% endfor %}"),
        "functionary",
    ),
    "an example where it writes no calls": (
        '{% if tools %}Write <tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>'
        "{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}" + TURN + "{% endfor %}",
        "hermes",
    ),
    "a namespace in front of tags": (
        "{% set ns = ']~x~[' %}{% if tools %}{{ tools | tojson }}{{ ns ~ '<tool_call>' ~ ns }}<invoke name=\"a\">"
        "{{ ns ~ '</tool_call>' }}{% endif %}{% for m in messages %}" + TURN + "{% endfor %}",
        None,
    ),
    "a namespace in front of calls": (
        template_of(TURN, "{% for c in m.tool_calls %}~x<tool_call>~x<invoke name=\"{{ c.function.name }}\">~x<place>"
                          "{{ c.function.arguments.place }}~x</place>~x</invoke>~x</tool_call>{% endfor %}"),
        None,
    ),
    "unknown markers": (template_of(TURN, json_calls("<my_call>", "</my_call>")), None),
    "no tools": ("{% for m in messages %}" + TURN + "{% endfor %}{# <tool_call> #}", None),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_a_format_is_the_one_that_reads_what_the_template_writes(name: str, tmp_path: Path) -> None:
    template, expected = SHAPES[name]
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=template))
    parser = tool_parser_of(tokenizer, "auto")
    assert (None if parser is None else parser.name) == expected


BUILT = {**objects.SHAPES, **lists.SHAPES, **names.SHAPES, **tags.SHAPES, **others.SHAPES}


@pytest.mark.parametrize("name", BUILT)
def test_the_formats_of_templates_that_are_built_as_published_ones(name: str, tmp_path: Path) -> None:
    shape = BUILT[name]
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=shape.template))
    calls, thoughts = tool_parser_of(tokenizer, "auto"), reasoning_of(tokenizer, "auto")
    assert (calls and calls.name, thoughts and thoughts.format.name) == (shape.calls, shape.thoughts)


def test_tokens_of_the_vocabulary_alone_make_no_format(tmp_path: Path) -> None:
    added = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]"]
    template = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}" + TURN + "{% endfor %}"
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=template, added=added))
    assert tool_parser_of(tokenizer, "auto") is None
