"""What a chat template writes around thoughts, answers and calls of tools, by conversations that it renders.

A model writes as its template does. What is in the template's source tells little: markers may be joined from parts,
and words of other formats may be in comments, in conditions or around other things.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, Final, NamedTuple

from batchgen.request.fields.prompts import ChatPrompt
from batchgen.text.calls import ToolCall
from batchgen.text.chat.conversation import assess
from batchgen.text.chat.forms import REASONING_KEYS, apply_form
from batchgen.text.chat.template import ChatTemplate
from batchgen.text.chat.template_process import OverLimit
from batchgen.text.families import BEFORE_ANSWERS

_QUESTION, _REASON, _RESULT = "Where is Quorn?", "I know it.", "Quorn is at 52.74."
_SYSTEM: Final = {"role": "system", "content": "Be brief."}
_USER: Final = {"role": "user", "content": _QUESTION}
_ANSWER: Final = {"role": "assistant", "content": "In Leicestershire."}
_THOUGHT: Final = {**_ANSWER, **dict.fromkeys(REASONING_KEYS, _REASON)}
_SETTINGS: Final[tuple[Mapping[str, Any], ...]] = (
    {}, {"enable_thinking": True}, {"enable_thinking": False}, {"thinking": True}, {"thinking": False},
)  # fmt: skip
CALL: Final = ToolCall("find_place", {"place": "Avebury"})
"""The call of the probe; its function has one argument, a string."""
_PARAMETERS: Final = {
    "type": "object",
    "properties": {"place": {"type": "string", "description": "Its name."}},
    "required": ["place"],
}
_TOOL: Final = {
    "type": "function",
    "function": {"name": CALL.name, "description": "Find a place.", "parameters": _PARAMETERS},
}
_IDS: Final = (f"functions.{CALL.name}:0", "abcdefghi")
"""Ids of the call: some templates write the id in place of the name, others take only one of nine letters."""


class Written(NamedTuple):
    """Texts that a template writes."""

    turns: str
    """Conversations without tools: before an answer with each setting that turns thoughts on or off, and with answers
    with and without thoughts; and each marker up to which it leaves out what an earlier answer holds."""
    answer: tuple[str, str]
    """What is between a question and an answer of text, and behind it."""
    call: str | None
    """What is between a question and the result of the call that follows it; None: it writes no call."""
    tools: str
    """Conversations with tools, in which nothing is called."""


def written(template: ChatTemplate) -> Written:
    """What a template writes; what it refuses is left out."""
    beginnings = ([_USER], [_SYSTEM, _USER])
    ended = ChatPrompt((), add_generation_prompt=False)
    plain = [(ended, [_USER, _ANSWER]), (ended, [_USER, _THOUGHT])]
    plain += [(ChatPrompt((), None, settings), each) for settings in _SETTINGS for each in beginnings]
    if isinstance(template.render_all(plain[:1])[0], OverLimit):  # each further text would take as long
        return Written("", ("", ""), None, "")
    texts = _texts(template, plain)
    earlier = _texts(template, [(ended, [_USER, _thinking(*each), _USER]) for each in BEFORE_ANSWERS.items()])
    shortened = [_ANSWER["content"] in text and _REASON not in text for text in earlier]
    before, _, after = texts[0].partition(_ANSWER["content"])
    return Written(
        "\n".join([*texts, *compress(BEFORE_ANSWERS, shortened)]),
        (_behind_question(before), after),
        next((text for each in _IDS if (text := _call(template, each)) is not None), None),
        "\n".join(_texts(template, [(ChatPrompt((), (_TOOL,)), each) for each in beginnings])),
    )


def _texts(template: ChatTemplate, asked: Sequence[tuple[ChatPrompt, Sequence[Mapping[str, Any]]]]) -> list[str]:
    """The text of each conversation; empty where the template refuses it."""
    return [text if isinstance(text, str) else "" for text in template.render_all(asked)]


def _thinking(marker: str, end: str) -> dict[str, str]:
    """An answer with thoughts in its text."""
    return {**_ANSWER, "content": f"{_REASON}{marker}{_ANSWER['content']}{end}"}


def _call(template: ChatTemplate, call_id: str) -> str | None:
    function = {"name": CALL.name, "arguments": dict(CALL.arguments)}
    calling = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }
    result = {"role": "tool", "content": _RESULT, "tool_call_id": call_id, "name": CALL.name}
    prompt = ChatPrompt((_USER, calling, result), (_TOOL,))
    try:
        text = template.render(prompt, apply_form(prompt.messages, assess(template, prompt).form))
    except (Exception, OverLimit):  # it has no such conversations
        return None
    between = _behind_question(text).partition(_RESULT)[0]
    return between if CALL.name in between else None


def _behind_question(text: str) -> str:
    return text.rpartition(_QUESTION)[2]
