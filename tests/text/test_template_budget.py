"""Chat templates end: within the budget with the library's text, beyond it with the row's error, in bounded memory."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import pytest

from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.request.prompts import ChatPrompt
from batchgen.text import template_budget
from batchgen.text.tokenizer import Tokenizer
from tests.text.conftest import save_tokenizer

pytestmark = pytest.mark.field("messages")

EACH = "{% for m in messages %}{{ m.content }}{% endfor %}"
TWICE = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = MADE %}{% endfor %}{{ ns.x | length }}"
LONG = (
    "{% set s = 'a' * 99999 %}{% set ns = namespace(x=[]) %}{% for i in range(99) %}{% set ns.x = MADE %}{% endfor %}"
)
HOSTILE = {
    "loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{% for b in range(99) %}some text{% endfor %}{% endfor %}",
    "one character": "{% for a in range(99999) %}{% for b in range(99) %}{{ 1 }}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}",
    "concatenation": TWICE.replace("MADE", "ns.x ~ ns.x"),
    "sum": TWICE.replace("MADE", "ns.x + ns.x"),
    "product": TWICE.replace("MADE", "ns.x * 9"),
    "numbers": TWICE.replace("'ab'", "9").replace("MADE", "ns.x * ns.x").replace("ns.x | length", "ns.x > 1"),
    "lists": TWICE.replace("'ab'", "[1]").replace("MADE", "ns.x + ns.x"),
    "nested lists": TWICE.replace("MADE", "[ns.x, ns.x]").replace("ns.x | length", "ns.x"),
    "nested dicts": TWICE.replace("MADE", "{'a': ns.x, 'b': ns.x}").replace("ns.x | length", "ns.x | tojson"),
    "nested by name": TWICE.replace("MADE", "dict(a=ns.x, b=ns.x)").replace("ns.x | length", "ns.x | string"),
    "sums in lists": TWICE.replace("'ab'", "['ab']").replace("MADE", "[ns.x[0] + ns.x[0]]"),
    "sums in dicts": TWICE.replace("'ab'", "{'a': 'ab'}").replace("MADE", "{'a': ns.x.a + ns.x.a}"),
    "sums in keys": TWICE.replace("'ab'", "{'a': 1}").replace("MADE", "{(ns.x | first) + (ns.x | first): 1}"),
    "slices in lists": LONG.replace("MADE", "ns.x + [s[i:]]"),
    "slices in dicts": LONG.replace("MADE", "ns.x + [{'a': s[i:]}]"),
    "slices in namespaces": LONG.replace("MADE", "[namespace(a=s[i:], b=ns.x)]"),
    "batches": TWICE.replace("'ab'", "[1]").replace("MADE", "ns.x | batch(2, ns.x) | list"),
    "set block": TWICE.replace("{% set ns.x = MADE %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "macro": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + TWICE.replace("MADE", "f(ns.x)"),
    "replace": TWICE.replace("MADE", "ns.x | replace('a', ns.x)"),
    "replace method": TWICE.replace("MADE", "ns.x.replace('a', ns.x)"),
    "join": TWICE.replace("MADE", "ns.x | join(ns.x)"),
    "join method": TWICE.replace("MADE", "ns.x.join(ns.x | list)"),
    "translate": TWICE.replace("MADE", "ns.x.translate({97: ns.x})"),
    "repeated": "{{ 'a' * 10 ** 11 }}",
    "list repeated": "{{ ([1] * 10 ** 11) | length }}",
    "power": "{{ 10 ** 10 ** 10 > 1 }}",
    "center": "{{ 'a' | center(10 ** 11) }}",
    "ljust": "{{ 'a'.ljust(10 ** 11) }}",
    "zfill": "{{ '1'.zfill(10 ** 11) }}",
    "tabs": "{{ 'a\tb'.expandtabs(10 ** 11) }}",
    "indent": "{{ ('a\n' * 9999) | indent(99999) }}",
    "tojson": "{{ messages | tojson(indent=10 ** 11) }}",
    "percent": "{{ '%99999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (10 ** 11, 1) }}",
    "format filter": "{{ '%099999999999d' | format(1) }}",
    "format method": "{{ '{:>99999999999}'.format(1) }}",
    "percent after a sign": "{{ '%%%99999999d' % 1 }}",
    "percent precision": "{{ '%.99999999f' % 1 }}",
    "percent name": "{{ '%(a(b)%)99999999d' % {'a(b)%': 1} }}",
    "percent length": "{{ '%l%%99999999d' % 1 }}",
    "percent often": "{{ ('%(a)999999d' * 9999) % {'a': 1} }}",
    "format width": "{{ '{:{w}}'.format(1, w=10 ** 11) }}",
    "format precision": "{{ '{:.99999999f}'.format(1) }}",
    "format by name": "{{ '{a:99999999}'.format_map({'a': 1}) }}",
    "format often": "{{ ('{0:999999}' * 9999).format(1) }}",
    "format nested": "{{ '{:>{}}'.format(1, 10 ** 11) }}",
    "map": "{{ range(99999) | map('center', 99999) | list | length }}",
    "batch": "{{ [1] | batch(10 ** 11, 1) | list | length }}",
}


def render(folder: Path, template: str, **settings: Any) -> str | ErrorInfo:
    tokenizer = Tokenizer.load(save_tokenizer(folder, "bytelevel", template=template))
    prompt = ChatPrompt(({"role": "user", "content": "Hi"},), **settings)
    (found,) = tokenizer.render_chats([prompt])
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_the_rows_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "MAX_STEPS", 20_000)
    monkeypatch.setattr(template_budget, "MAX_CHARACTERS", 1 << 20)
    began, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = render(tmp_path, EACH + HOSTILE[name])
    assert time.thread_time() - began < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10
    assert isinstance(found, ErrorInfo)
    assert (found.code, found.param) == (ErrorCode.INVALID_FIELD, "messages")
    assert "the chat template" in found.message


FORMATS = {
    "{{ '{}: {}'.format('a', 'b') }}": "a: b",
    "{{ 'x: {a} {b}'.format(a=1, b=2) }}": "x: 1 2",
    "{{ '%s: {%s}' % ('a', 'b') }}": "a: {b}",
    '{{ \'{"name": {"x": "%s"}}\' | format(\'a\') }}': '{"name": {"x": "a"}}',
    "{{ '{} is 50% **off**'.format('it') }}": "it is 50% **off**",
    "{{ '{:*>4}|{:x^5}'.format(1, 2) }}": "***1|xx2xx",
    "{{ '{{{}}} 1234567890'.format('a') }}": "{a} 1234567890",
    "{{ '1234567890 * %s' % 'a' }}": "1234567890 * a",
    "{{ '%(n)s * %%: 99999999' | format(n=1) }}": "1 * %: 99999999",
    "{{ '{}'.format(17000000000) }}": "17000000000",
    "{{ '%05.1f|%-4d|' % (1.25, 7) }}": "001.2|7   |",
}


@pytest.mark.parametrize("template", FORMATS)
def test_only_the_widths_of_a_format_are_bounded(template: str, tmp_path: Path) -> None:
    assert render(tmp_path, EACH + template) == "Hi" + FORMATS[template]


def test_a_format_that_is_not_one_is_the_templates_own_error(tmp_path: Path) -> None:
    found = render(tmp_path, EACH + "{{ '{'.format(1) }}")
    assert isinstance(found, ErrorInfo)
    assert "ValueError" in found.message


@pytest.mark.parametrize(
    "element", ["m", "{'role': m.role, 'content': m.content}", "{'role': m['role'], 'content': '>' + m['content']}"]
)
def test_messages_that_are_gathered_one_by_one_count_once(element: str, tmp_path: Path) -> None:
    template = (
        "{% set ns = namespace(all=[]) %}{% for m in messages %}{% set ns.all = ns.all + [ELEMENT] %}{% endfor %}"
        "{% for m in ns.all %}{{ m.content }}{% endfor %}"
    ).replace("ELEMENT", element)
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=template))
    turns = tuple({"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 80} for i in range(600))
    (found,) = tokenizer.render_chats([ChatPrompt(turns)])
    assert isinstance(found, str), found
    assert found.replace(">", "") == "word " * 80 * 600


def test_a_row_cannot_make_the_templates_loops_longer_than_the_budget(tmp_path: Path) -> None:
    template = EACH + "{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}{{ n }}"
    good = render(tmp_path, template, template_kwargs={"n": 1000})
    assert good == "Hi1000"
    bad = render(tmp_path, template, template_kwargs={"n": 9000})
    assert isinstance(bad, ErrorInfo)
    assert f"takes more than {template_budget.MAX_STEPS} steps" in bad.message


def test_steps_and_characters_end_at_their_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass of the loop, which writes two characters and the content."""
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=template))
    first = ChatPrompt(({"role": "user", "content": "Hi"},))
    assert tokenizer.render_chats([first]) == ["<Hi>"], "which looks at this kind of conversation once"
    with monkeypatch.context() as patch:
        patch.setattr(template_budget, "MAX_CHARACTERS", 4)
        assert tokenizer.render_chats([first]) == ["<Hi>"]
        (error,) = tokenizer.render_chats([ChatPrompt(({"role": "user", "content": "Hi!"},))])
        assert isinstance(error, ErrorInfo)
        assert "more than 4 characters" in error.message
    with monkeypatch.context() as patch:
        patch.setattr(template_budget, "MAX_STEPS", 1)
        assert tokenizer.render_chats([first]) == ["<Hi>"]
        patch.setattr(template_budget, "MAX_STEPS", 0)
        (error,) = tokenizer.render_chats([first])
        assert isinstance(error, ErrorInfo)
        assert "more than 0 steps" in error.message


@pytest.mark.parametrize("settings", [{}, {"template_kwargs": {"n": 1}}], ids=["plain", "settings"])
@pytest.mark.parametrize("steps", [4, 6, 20, 60])
def test_the_same_conversation_has_the_same_outcome_each_time(
    steps: int, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the template makes of this kind of conversation is looked at only once."""
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=EACH + "{{ n }}"))
    prompt = ChatPrompt(({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}) * 2, **settings)
    monkeypatch.setattr(template_budget, "MAX_STEPS", steps)
    found = [tokenizer.render_chats([prompt])[0] for _ in range(3)]
    assert found[0] == found[1] == found[2]


def test_long_conversations_are_within_the_budget(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=EACH))
    turns = tuple({"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 10} for i in range(5_000))
    (found,) = tokenizer.render_chats([ChatPrompt(turns)])
    assert found == "word " * 50_000
    (found,) = tokenizer.render_chats([ChatPrompt(({"role": "user", "content": "word " * 2_000_000},))])
    assert found == "word " * 2_000_000
