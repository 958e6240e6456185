"""The fast renderer of plain conversations gives the same text as the library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from batchgen.errors import ErrorInfo, RowError
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
            message |= rng.choice([{"name": "Ann"}, {"name": None}, {"reasoning": "so"}, {"content": None}])
        messages.append(message)
    return ChatPrompt(tuple(messages), add_generation_prompt=rng.random() < 0.9)


def render_one(tokenizer: Tokenizer, prompt: ChatPrompt) -> str | ErrorInfo:
    try:
        return tokenizer.render_chat(prompt)
    except RowError as error:
        return error.info


@pytest.mark.parametrize("name", TEMPLATES)
def test_random_conversations_are_rendered_as_by_the_library(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=TEMPLATES[name]))
    rng, found, slow = Random(name), [], 0
    batches = [[conversation(rng) for _ in range(count)] for count in (1, 2, 63, 100)]
    expected = [[render_one(tokenizer, prompt) for prompt in prompts] for prompts in batches]
    tokenizer.render_chats([ChatPrompt(({"role": "user", "content": "b"},))])
    library = PreTrainedTokenizerBase.apply_chat_template

    def counted(self: Any, messages: Any, *args: Any, **more: Any) -> Any:
        nonlocal slow
        slow += len(messages) if isinstance(messages[0], list) else 1
        return library(self, messages, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerBase, "apply_chat_template", counted)
        found = [tokenizer.render_chats(prompts) for prompts in batches]
    assert found == expected
    assert sum(map(len, batches)) - slow > 50, "most plain conversations do not go through the library"


def test_plain_conversations_do_not_go_through_the_library(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ChatPrompt(({"role": "system", "content": "a"}, {"role": "user", "content": "b"}))
    expected = tokenizer.render_chats([plain])
    asked = []
    monkeypatch.setattr(tokenizer._hf, "apply_chat_template", lambda *args, **kwargs: asked.append(args))
    assert tokenizer.render_chats([plain] * 5) == expected * 5
    assert not asked


def test_an_overridden_apply_chat_template_disables_the_fast_renderer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ChatPrompt(({"role": "user", "content": "b"},))
    original = PreTrainedTokenizerBase.apply_chat_template

    def uppercase(self: Any, *args: Any, **kwargs: Any) -> Any:
        rendered = original(self, *args, **kwargs)
        return [text.upper() for text in rendered] if isinstance(rendered, list) else rendered.upper()

    overriding = Tokenizer.load(save_tokenizer(tmp_path / "own", "bytelevel"))
    monkeypatch.setattr(type(overriding._hf), "apply_chat_template", uppercase)  # overridden by the tokenizer's class
    assert overriding.render_chats([plain]) == [overriding.render_chat(plain)]
    monkeypatch.undo()
    changed = Tokenizer.load(save_tokenizer(tmp_path / "other", "bytelevel"))
    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", uppercase)  # changed in the library
    assert changed.render_chats([plain]) == [changed.render_chat(plain)]


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% for m in messages %}{{ m.content.x.y }}"])
def test_a_template_that_fails_on_a_probe_is_rendered_by_the_library(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=template))
    plain = ChatPrompt(({"role": "user", "content": "b"},))
    assert isinstance(tokenizer.render_chats([plain])[0], ErrorInfo)
