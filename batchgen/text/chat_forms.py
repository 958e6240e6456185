"""Forms of a conversation: the same messages, spelled as different chat templates need them.

Templates differ in what they expect of a message with tool calls and no text (a null content, none at all, or an empty
one), of a call's arguments (an object or JSON text) and of content parts (a list or one string). A form says which
spelling is used where the row's own is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

from batchgen.errors import ErrorCode, RowError

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates and APIs know the thoughts of a message; a message gets all that it has under each."""


class Form(NamedTuple):
    """A spelling of a conversation."""

    parts: Literal["own", "text"] = "own"
    """Content parts as given, or their texts joined by line feeds."""
    content: Literal["own", "null", "missing", "empty"] = "own"
    """Content of messages that have no text."""
    arguments: Literal["own", "object", "text"] = "own"
    """Arguments of tool calls; what cannot be converted keeps its form."""


def forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[Form]:
    """Forms in which these messages can be given, the row's own first."""
    parts = any(isinstance(message.get("content"), list | tuple) for message in messages)
    calls = any(message.get("tool_calls") for message in messages)
    blank = any(_may_vary(message) for message in messages)
    yield from map(
        Form._make,
        product(
            ("own", "text") if parts else ("own",),
            ("own", "null", "missing", "empty") if blank else ("own",),
            ("own", "object", "text") if calls else ("own",),
        ),
    )


def apply_form(messages: Sequence[Mapping[str, Any]], form: Form) -> list[dict[str, Any]]:
    """Copies of the messages in a form, of plain lists and dicts; keys with a null value are left out.

    Raises:
        RowError: `invalid_field`: a message holds a value that JSON does not have, or is nested too deeply.
    """
    try:
        return [_apply(message, index, form) for index, message in enumerate(messages)]
    except RecursionError:
        raise RowError(
            ErrorCode.INVALID_FIELD, "`messages` cannot be rendered: nested too deeply", "messages"
        ) from None


def _apply(message: Mapping[str, Any], index: int, form: Form) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    copy = {key: plain_json(value, f"messages[{index}]") for key, value in kept.items()}
    content = copy.get("content")
    if isinstance(content, list) and form.parts == "text":
        copy["content"] = "\n".join(str(part["text"]) for part in content)
    if form.content != "own" and _may_vary(message):
        copy.pop("content", None)
        if form.content != "missing":
            copy["content"] = None if form.content == "null" else ""
    if isinstance(copy.get("tool_calls"), list):
        copy["tool_calls"] = [_with_arguments(call, form.arguments) for call in copy["tool_calls"]]
    thoughts = next((copy[key] for key in REASONING_KEYS if copy.get(key)), None)
    return copy if thoughts is None else {**dict.fromkeys(REASONING_KEYS[:2], thoughts), **copy}


def _may_vary(message: Mapping[str, Any]) -> bool:
    """Whether a message has no text, which templates expect in different spellings."""
    content = message.get("content")
    return content is None or (not content and bool(message.get("tool_calls")))


def call_function(call: Any) -> dict[str, Any] | None:
    """The part of a tool call that holds its name and arguments; None if it has no such part."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return function if isinstance(function, dict) else None


def _with_arguments(call: Any, form: Literal["own", "object", "text"]) -> Any:
    function = call_function(call)
    if function is None or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if isinstance(arguments, str):
        found = parse_arguments(arguments)
        if not arguments.strip():  # no arguments: an empty text would leave a hole in a template's JSON
            arguments = "{}"
        arguments = found if form == "object" and found is not None else arguments
    elif form == "text":
        arguments = json.dumps(arguments, ensure_ascii=False)
    changed = {**function, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


def parse_arguments(text: str) -> dict[str, Any] | None:
    """The object that the JSON text of a call's arguments holds; None if it is not one."""
    try:
        found = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def plain_json(value: Any, field: str) -> Any:
    """A copy of plain JSON types: nothing else may reach a template, whose sandbox knows no other methods.

    Raises:
        RowError: `invalid_field`: a value in `field` is of a type that JSON does not have.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_json(item, field) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item, field) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):  # of a subclass, such as an enumeration
            return kind(value)
    what = f"`{field}` holds a {type(value).__name__}, which JSON does not have"
    raise RowError(ErrorCode.INVALID_FIELD, f"{what}; give text, numbers, lists and objects", field.partition("[")[0])
