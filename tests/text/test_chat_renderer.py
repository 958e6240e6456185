"""Conversations are rendered to the same text as by the library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import AutoTokenizer

from batchgen.errors import ErrorInfo
from batchgen.request.prompts import ChatPrompt
from batchgen.text.tokenizer import Tokenizer
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


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% for m in messages %}{{ m.content.x.y }}"])
def test_the_error_of_a_template_is_the_rows(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=template))
    (found,) = tokenizer.render_chats([ChatPrompt(({"role": "user", "content": "b"},))])
    assert isinstance(found, ErrorInfo)
    assert "cannot be rendered by the model's chat template" in found.message
