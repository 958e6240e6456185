"""Conversations are rendered to the same text as by the library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import AutoTokenizer

from batchgen.errors import ErrorInfo, UsageError
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.text.conftest import CHAT_TEMPLATE, SENTENCES, save_tokenizer

TEMPLATES = {
    "usual": CHAT_TEMPLATE,
    "variables and blocks": (
        "{% block top %}{{ bos_token }}{{ eos_token }}{% endblock %}{% set ns = namespace(count=0) %}"
        "{% macro turn(m) %}[{{ m.role }}: {{ m['content'] | trim | upper }}]{% endmacro %}"
        "{% for m in messages %}{% set ns.count = ns.count + loop.index %}{{ turn(m) }}{% if loop.last %}"
        "{{ ns.count }}{% break %}{% endif %}{% endfor %}{{ dict(a=1) | tojson }}{{ messages | tojson }}"
    ),
    "undefined variables": (
        "{{ tools }}{{ documents is none }}{{ nothing is defined }}{{ add_generation_prompt }}"
        "{% for m in messages %}{{ m.name }}{{ m.content }}{{ m.reasoning_content }}{% endfor %}"
    ),
}
CONTENTS = [*SENTENCES, "", " ", "{{ 1 }} {% if %}", "<|im_end|>\n", "\x00\u2028", "e\u0301 😀", "a" * 1000]


def conversation(rng: Random) -> ChatPrompt:
    """Random conversation: mostly plain messages, else with a narrator, further keys or settings."""
    roles = ["system", "user", "assistant", "narrator" if rng.random() < 0.1 else "user"]
    messages: list[Mapping[str, Any]] = []
    for _ in range(rng.randint(1, 5)):
        message: dict[str, Any] = {"role": rng.choice(roles), "content": rng.choice(CONTENTS)}
        if rng.random() < 0.1:
            message |= rng.choice([{"name": "Ann"}, {"name": None}])
        messages.append(message)
    return ChatPrompt(tuple(messages), add_generation_prompt=rng.random() < 0.9)


@pytest.mark.parametrize("name", TEMPLATES)
def test_random_conversations_are_rendered_as_by_the_library(tmp_path: Path, name: str) -> None:
    folder = save_tokenizer(tmp_path, "bytelevel", template=TEMPLATES[name])
    tokenizer, library = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    rng, equal = Random(name), 0
    for count in (1, 2, 63, 100):
        prompts = [conversation(rng) for _ in range(count)]
        for prompt, found in zip(prompts, tokenizer.render_chats(prompts), strict=True):
            if isinstance(found, ErrorInfo):  # a part of it would be lost
                continue
            asked = {"add_generation_prompt": prompt.add_generation_prompt, "tokenize": False}
            assert found == library.apply_chat_template(list(prompt.messages), **asked)
            equal += 1
    assert equal > 50


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{{ m.content.x.y }}",
        "{{ strftime_now('%Y') }}{% if messages %}",
        {"rag": "{{ messages[0].content }}", "tool_use": "{{ messages[0].content }}"},
    ],
)
def test_the_error_of_a_template_is_the_rows(tmp_path: Path, template: Any) -> None:
    """What is asked of the template before the first row is answered."""
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=template))
    assert (tokenizer.clock_text, tokenizer.template_reads("tools")) == (None, False)
    assert tokenizer.written is not None
    assert tokenizer.written.call is None
    (found,) = tokenizer.render_chats([ChatPrompt(({"role": "user", "content": "b"},))])
    assert isinstance(found, ErrorInfo)
    assert "cannot be rendered" in found.message


EACH = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
TOOL = {"type": "function", "function": {"name": "now", "description": "d", "parameters": {"type": "object"}}}
HELLO = ChatPrompt(({"role": "user", "content": "Hi"},))
NAMED = [
    # (names of the model's templates, --chat-template-name, that of a row without tools, and of one with tools)
    (["default", "tool_use"], None, "default", "tool_use"),
    (["default", "rag"], None, "default", "default"),
    (["default", "tool_use", "rag"], "rag", "rag", "rag"),
    (["tool_use"], None, None, "tool_use"),
    (["rag", "tool_use"], "rag", "rag", "rag"),
]


@pytest.mark.field("tools")
@pytest.mark.parametrize(("names", "wanted", "plain", "calling"), NAMED)
def test_a_model_with_several_templates_renders_with_the_one_that_fits(
    names: list[str], wanted: str | None, plain: str | None, calling: str, tmp_path: Path
) -> None:
    templates = {name: f"{name}: {EACH}" for name in names}
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=templates))
    tokenizer.use_template(wanted)
    first, second = tokenizer.render_chats([HELLO, HELLO._replace(tools=(TOOL,))])
    if plain is None:
        assert isinstance(first, ErrorInfo)
        assert (first.code, first.param) == ("invalid_field", "messages")
        assert "--chat-template-name" in first.message
        assert all(repr(name) in first.message for name in names)
    else:
        assert first == f"{plain}: Hi"
    assert str(second).startswith(f"{calling}: Hi")


def test_a_list_of_named_templates_and_files_next_to_one_are_the_same(tmp_path: Path) -> None:
    templates = {"default": f"default: {EACH}", "tool_use": f"tool_use: {EACH}"}
    folder = save_tokenizer(tmp_path, "bytelevel", template=templates)
    listed = save_tokenizer(tmp_path / "listed", "bytelevel", template=None)
    config = json.loads((listed / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    (listed / "tokenizer_config.json").write_text(json.dumps(config))
    assert [path.name for path in (folder / "additional_chat_templates").iterdir()] == ["tool_use.jinja"]
    prompts = [HELLO, HELLO._replace(tools=(TOOL,))]
    assert Tokenizer.load(folder).render_chats(prompts) == Tokenizer.load(listed).render_chats(prompts)


def test_a_name_of_no_template_is_refused_with_those_there_are(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template={"default": EACH, "rag": EACH}))
    with pytest.raises(UsageError, match="'default', 'rag'"):
        tokenizer.use_template("tool")
