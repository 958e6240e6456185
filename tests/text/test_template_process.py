"""Chat templates give the library's text within their limits; beyond them, or with chance in it, the row's error."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.text.chat.template_process import PROCESS, RenderLimits
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.text.conftest import save_tokenizer

pytestmark = pytest.mark.field("messages")

EACH = "{% for m in messages %}{{ m.content }}{% endfor %}"


def load(folder: Path, template: Any, **limits: Any) -> Tokenizer:
    tokenizer = Tokenizer.load(save_tokenizer(folder, "bytelevel", template=template))
    assert tokenizer.template is not None
    tokenizer.template.limits = RenderLimits(**limits)
    return tokenizer


def user(text: str, **settings: Any) -> ChatPrompt:
    return ChatPrompt(({"role": "user", "content": text},), **settings)


LIMITS = {
    "characters": ("more than 50 characters", "{{ n * 'ab' }}", {"characters": 50}),
    "seconds": (
        "more than 0.1 seconds",
        "{% for i in range(n * 1000) %}{% for j in range(100) %}{% endfor %}{% endfor %}",
        {"seconds": 0.1},
    ),
    "memory": ("more than 32 MiB", "{{ ('a' * (n * 2_000_000)) | length }}", {"memory": 32 << 20}),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_row_beyond_a_limit_is_refused_alone(name: str, tmp_path: Path) -> None:
    message, template, limits = LIMITS[name]
    tokenizer = load(tmp_path, EACH + template, **limits)
    rows = [user("a", template_kwargs={"n": n}) for n in (0, 40, 1)]
    first, refused, last = tokenizer.render_chats(rows)
    assert isinstance(refused, ErrorInfo)
    assert (refused.code, refused.param) == (ErrorCode.INVALID_FIELD, "messages")
    assert f"{message}" in refused.message
    assert "shorten it" in refused.message
    assert isinstance(first, str)
    assert isinstance(last, str)
    assert tokenizer.render_chats(rows[:2]) == [first, refused], "the next process renders on"


@pytest.mark.slow
def test_a_row_beyond_a_limit_takes_as_long_among_others_as_alone(tmp_path: Path) -> None:
    loops = "{% for i in range(messages[0].content | length) %}{% for j in range(20000) %}{% endfor %}{% endfor %}"
    tokenizer = load(tmp_path, EACH + loops, seconds=0.3)
    tokenizer.render_chats([user("a")])  # looks at the template

    def seconds(*texts: str) -> float:
        """Processor time of the processes that end."""
        PROCESS.stop()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = tokenizer.render_chats([user(text) for text in texts])
        assert [isinstance(each, ErrorInfo) for each in found] == [len(text) > 1 for text in texts]
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    long = "a" * 2_000
    assert seconds("a", long, "b") < 1.5 * seconds(long)


def test_a_text_at_the_limit_is_rendered(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, EACH, characters=20)
    found = tokenizer.render_chats([user("a" * 20), user("a" * 21)])
    assert found[0] == "a" * 20
    assert isinstance(found[1], ErrorInfo)


@pytest.mark.field("chat_template_kwargs")
def test_a_row_within_the_limits_is_rendered_though_another_setting_exceeds_them(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, EACH + "{% if long or tools %}{{ 'a' * 30 }}{% endif %}", characters=20)
    rows = [user("a", template_kwargs={"long": False}), user("a", template_kwargs={"long": True})]
    first, *refused = tokenizer.render_chats([*rows, user("a" * 30, template_kwargs={"long": False})])
    assert first == "a"
    for error in refused:
        assert isinstance(error, ErrorInfo)
        assert "makes more than 20 characters" in error.message


def test_long_conversations_are_within_the_limits(tmp_path: Path) -> None:
    gathering = (
        "{% set ns = namespace(all=[]) %}{% for m in messages %}{% set ns.all = ns.all + [m] %}{% endfor %}"
        "{% for m in ns.all %}{{ m.content }}{% endfor %}"
    )
    tokenizer = load(tmp_path, gathering)
    turns = tuple({"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 10} for i in range(3_000))
    assert tokenizer.render_chats([ChatPrompt(turns)]) == ["word " * 30_000]
    assert tokenizer.render_chats([user("word " * 2_000_000)]) == ["word " * 2_000_000]


def test_a_process_that_ended_is_started_again(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, EACH)
    assert tokenizer.render_chats([user("a")]) == ["a"]
    PROCESS.stop()
    assert tokenizer.render_chats([user("b")]) == ["b"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].items }}",
        "{{ 'x' ~ messages[0].content.strip }}",
        "{{ messages | map(attribute='content') }}",
        "{{ '%s' % messages[0].keys }}",
        "{{ [raise_exception] | string }}",
    ],
)
def test_a_text_with_an_address_in_memory_is_refused(template: str, tmp_path: Path) -> None:
    """The text would be another one in each run."""
    (found,) = load(tmp_path, EACH + template).render_chats([user("Hi")])
    assert isinstance(found, ErrorInfo)
    assert "another address in each run" in found.message
    assert " at 0x" not in found.message, "errors of one cause are equal, in each run"


def test_an_address_that_the_row_gives_is_its_text(tmp_path: Path) -> None:
    text = "Why does it print <built-in method items of dict object at 0x7f0f8c2b1240>?"
    assert load(tmp_path, EACH).render_chats([user(text)]) == [text]


@pytest.mark.parametrize("template", ["{{ [1, 2] | random }}", "{{ lipsum() }}"])
def test_a_template_that_draws_at_random_is_refused(template: str, tmp_path: Path) -> None:
    (found,) = load(tmp_path, EACH + template).render_chats([user("Hi")])
    assert isinstance(found, ErrorInfo)
    assert "draws at random" in found.message


def test_a_template_beyond_its_limits_for_all_conversations_is_asked_once_what_it_writes(tmp_path: Path) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    written = load(tmp_path, EACH + endless, seconds=0.05).written
    assert written == ("", ("", ""), None, "")
