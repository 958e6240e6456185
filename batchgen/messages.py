"""Checks for the chat fields of a row: `messages`, `tools` and `chat_template_kwargs`.

What a role may be and how messages must alternate is the chat template's business; here is only what every template
relies on.
"""

from __future__ import annotations

from typing import Any

from batchgen.checks import invalid, kind_of, mapping, show
from batchgen.errors import ErrorCode, RowError

__all__ = ["messages", "template_kwargs", "tools"]

_MEDIA_PARTS = frozenset(
    {"image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url", "file"}
)

# Parameters of the renderer itself. A row must not reach them: `chat_template` would replace the model's template.
_RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


def messages(name: str, value: Any) -> tuple[dict[str, Any], ...]:
    """A list of messages with a `role` and text `content`. An empty list passes: it is `empty_prompt`, found later.

    Raises:
        RowError: `invalid_field` for a malformed message, `unsupported_field` for image, audio or file parts.
    """
    if type(value) not in (list, tuple):
        raise invalid(name, f"must be a list of messages, got {kind_of(value)}")
    unusual = [(index, message) for index, message in enumerate(value) if not _is_text(message)]
    media = [part for index, message in unusual for part in _media_in(name, index, message)]
    if media:
        problem = f"`{name}` holds a part of type {show(media[0])}, which is not supported; send text parts only"
        raise RowError(ErrorCode.UNSUPPORTED_FIELD, problem, name)
    return tuple(value)


def _is_text(message: Any) -> bool:
    """Whether a message is the usual one, a role with a string, of which there is nothing more to check."""
    if type(message) is not dict:
        return False
    role = message.get("role")
    return type(role) is str and role != "" and type(message.get("content")) is str


def _media_in(name: str, index: int, message: Any) -> list[str]:
    """Check one message and return the types of its parts that are not text."""
    where = f"{name}[{index}]"
    if type(message) is not dict:
        raise RowError(ErrorCode.INVALID_FIELD, f"`{where}` must be an object, got {kind_of(message)}", name)
    role, content = message.get("role"), message.get("content")
    if type(role) is not str or not role:
        raise RowError(ErrorCode.INVALID_FIELD, f"`{where}.role` must be a string such as user, got {show(role)}", name)
    if type(content) is str or (content is None and message.get("tool_calls")):
        return []
    if not isinstance(content, list | tuple):
        problem = f"`{where}.content` must be a string or a list of parts, got {kind_of(content)}"
        raise RowError(ErrorCode.INVALID_FIELD, problem, name)
    return [kind for number, part in enumerate(content) if (kind := _part(name, f"{where}.content[{number}]", part))]


def _part(name: str, where: str, part: Any) -> str | None:
    """Check one part of a message's content; the type of a media part, or None for text."""
    kind = part.get("type") if type(part) is dict else None
    if type(kind) is not str:
        problem = f'`{where}` must be an object such as {{"type": "text", "text": "..."}}'
        raise RowError(ErrorCode.INVALID_FIELD, problem, name)
    if kind in _MEDIA_PARTS:
        return kind
    if kind != "text":
        raise RowError(ErrorCode.INVALID_FIELD, f"`{where}.type` must be text, got {show(kind)}", name)
    if type(part.get("text")) is not str:
        raise RowError(ErrorCode.INVALID_FIELD, f"`{where}.text` must be a string", name)
    return None


def tools(name: str, value: Any) -> tuple[dict[str, Any], ...]:
    """A list of tool descriptions, each an object that the chat template renders."""
    if type(value) not in (list, tuple) or any(type(tool) is not dict for tool in value):
        raise invalid(name, f"must be a list of objects, got {show(value)}")
    return tuple(value)


def template_kwargs(name: str, value: Any) -> dict[str, Any]:
    """Further variables for the chat template; none that would steer the renderer instead."""
    reserved = sorted(_RESERVED_KWARGS & mapping(name, value).keys())
    if reserved:
        raise invalid(name, f"must not hold `{reserved[0]}`: only variables of the chat template belong here")
    return dict(value)
