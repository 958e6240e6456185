"""Validation of the chat fields of a row: `messages`, `tools` and `chat_template_kwargs`.

Only the structure that every chat template relies on is checked. Which roles exist and how they must alternate is left
to the template.
"""

from __future__ import annotations

from typing import Any

from batchgen.errors import ErrorCode, RowError
from batchgen.request.checks import invalid, json_type, mapping, show

__all__ = ["messages", "template_kwargs", "tools"]

_MEDIA_PARTS = frozenset(
    {"image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url", "file"}
)

# Parameters of the renderer itself. A row must not set them: `chat_template` would replace the model's template.
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
    """Check a list of messages with a `role` and text `content`. An empty list passes; it becomes `empty_prompt` later.

    Raises:
        RowError: `invalid_field` for a malformed message, `unsupported_field` for image, audio or file parts.
    """
    if type(value) not in (list, tuple):
        raise invalid(name, f"must be a list of messages, got {json_type(value)}")
    complex_messages = [(index, message) for index, message in enumerate(value) if not _is_plain_text(message)]
    media = [part for index, message in complex_messages for part in _media_parts(name, index, message)]
    if media:
        problem = f"`{name}` has a part of type {show(media[0])}, which is not supported; send text parts only"
        raise RowError(ErrorCode.UNSUPPORTED_FIELD, problem, name)
    return tuple(value)


def _is_plain_text(message: Any) -> bool:
    """Whether a message is a role with a string as content, which needs no further check."""
    if type(message) is not dict:
        return False
    role = message.get("role")
    return type(role) is str and role != "" and type(message.get("content")) is str


def _media_parts(name: str, index: int, message: Any) -> list[str]:
    """Check one message and return the types of its media parts."""
    where = f"{name}[{index}]"
    if type(message) is not dict:
        raise RowError(ErrorCode.INVALID_FIELD, f"`{where}` must be an object, got {json_type(message)}", name)
    role, content = message.get("role"), message.get("content")
    if type(role) is not str or not role:
        raise RowError(ErrorCode.INVALID_FIELD, f"`{where}.role` must be a string such as user, got {show(role)}", name)
    if type(content) is str or (content is None and message.get("tool_calls")):
        return []
    if not isinstance(content, list | tuple):
        problem = f"`{where}.content` must be a string or a list of parts, got {json_type(content)}"
        raise RowError(ErrorCode.INVALID_FIELD, problem, name)
    return [
        kind for number, part in enumerate(content) if (kind := _media_type(name, f"{where}.content[{number}]", part))
    ]


def _media_type(name: str, where: str, part: Any) -> str | None:
    """Check one part of a message's content and return the type of a media part, None for text."""
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
    """Check a list of tool descriptions, each an object that the chat template renders."""
    if type(value) not in (list, tuple) or any(type(tool) is not dict for tool in value):
        raise invalid(name, f"must be a list of objects, got {show(value)}")
    return tuple(value)


def template_kwargs(name: str, value: Any) -> dict[str, Any]:
    """Check extra variables for the chat template; parameters of the renderer are refused."""
    reserved = sorted(_RESERVED_KWARGS & mapping(name, value).keys())
    if reserved:
        raise invalid(name, f"must not have `{reserved[0]}`: only variables of the chat template are allowed")
    return dict(value)
