"""Conversations as a chat template wants them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from batchgen.errors import ErrorCode, RowError
from batchgen.prompts import ChatPrompt

__all__ = ["PARTS_PROBE", "check_read", "prepare_messages", "reads_parts", "to_be_read"]

PARTS_PROBE = [
    {"role": "user", "content": [{"type": "text", "text": "first-part"}, {"type": "text", "text": "second-part"}]}
]
"""A conversation to try a template with; see `reads_parts`."""


def reads_parts(rendered: str) -> bool:
    """Whether a template that rendered `PARTS_PROBE` as this reads content parts, rather than printing the list."""
    return "first-part" in rendered and "second-part" in rendered and "'text'" not in rendered.replace('"', "'")


def prepare_messages(messages: tuple[Mapping[str, Any], ...], *, keep_parts: bool) -> list[dict[str, Any]]:
    """Copies of `messages` in the form that templates are written for.

    Text parts are joined by newlines unless the template reads parts itself, no content becomes an empty one, and the
    JSON text of a tool call's arguments the object it stands for, since templates print arguments as JSON themselves.

    Raises:
        RowError: `invalid_field`, for arguments that are no JSON object.
    """
    prepared = []
    for index, message in enumerate(messages):
        copy = dict(message)
        content = copy.get("content")
        if content is None:  # beside tool calls; templates that print it would print None
            copy["content"] = ""
        if isinstance(content, list | tuple) and not keep_parts:
            copy["content"] = "\n".join(part["text"] for part in content)
        if isinstance(copy.get("tool_calls"), list):
            copy["tool_calls"] = [_tool_call(call, index) for call in copy["tool_calls"]]
        prepared.append(copy)
    return prepared


def to_be_read(prompt: ChatPrompt) -> list[tuple[str, str]]:
    """(field, name) of what reaches the prompt only through a template that reads that name."""
    asked = [("tools", "tools")] if prompt.tools else []
    asked += [("chat_template_kwargs", name) for name in prompt.template_kwargs]
    if any(message.get("tool_calls") for message in prompt.messages):
        asked.append(("messages", "tool_calls"))
    return asked


def check_read(template: str, asked: Iterable[tuple[str, str]]) -> None:
    """Refuse what the template would leave out without a word: what it never names cannot reach the prompt.

    Raises:
        RowError: `unsupported_field`, for what `to_be_read` found.
    """
    for field, name in asked:
        # By the word, wherever it stands: a template that does read it is never refused.
        if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template):
            what = f"`{field}`" if name == field else f"`{field}` gives {name!r}, which"
            message = f"{what} cannot reach the prompt: the model's chat template does not read it; leave it out"
            raise RowError(ErrorCode.UNSUPPORTED_FIELD, message, field)


def _tool_call(call: Any, index: int) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        where = f"messages[{index}].tool_calls"
        raise RowError(ErrorCode.INVALID_FIELD, f"`{where}` has arguments that are no JSON object", "messages")
    return {**call, "function": {**function, "arguments": parsed}}
