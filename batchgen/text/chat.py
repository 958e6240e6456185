"""Conversations as a chat template wants them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from batchgen.errors import ErrorCode, RowError
from batchgen.prompts import ChatPrompt

__all__ = ["PARTS_PROBE", "check_read", "prepare_messages", "reads_parts"]

PARTS_PROBE = [
    {"role": "user", "content": [{"type": "text", "text": "first-part"}, {"type": "text", "text": "second-part"}]}
]
"""A conversation to try a template with; see `reads_parts`."""


def reads_parts(rendered: str) -> bool:
    """Whether a template that rendered `PARTS_PROBE` as this reads content parts, rather than printing the list."""
    return "first-part" in rendered and "second-part" in rendered and "'text'" not in rendered.replace('"', "'")


def prepare_messages(messages: tuple[Mapping[str, Any], ...], *, keep_parts: bool) -> list[dict[str, Any]]:
    """Copies of `messages` in the form that templates are written for.

    Text parts are joined by newlines unless the template reads parts itself, and the JSON text of a tool call's
    arguments becomes the object it stands for, since templates print arguments as JSON themselves.

    Raises:
        RowError: `invalid_field`, for arguments that are no JSON object.
    """
    prepared = []
    for index, message in enumerate(messages):
        copy = dict(message)
        content = copy.get("content")
        if isinstance(content, list | tuple) and not keep_parts:
            copy["content"] = "\n".join(part["text"] for part in content)
        if isinstance(copy.get("tool_calls"), list):
            copy["tool_calls"] = [_tool_call(call, index) for call in copy["tool_calls"]]
        prepared.append(copy)
    return prepared


def check_read(template: str, prompt: ChatPrompt) -> None:
    """Refuse what the template would leave out without a word: what it never names cannot reach the prompt.

    Raises:
        RowError: `unsupported_field`, for `tools` or a key of `chat_template_kwargs`.
    """
    given = [("tools", "tools")] if prompt.tools else []
    given += [("chat_template_kwargs", name) for name in prompt.template_kwargs]
    for field, name in given:
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
