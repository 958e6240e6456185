"""Checks of fields with structured values; `checks` has the plain types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.request.checks import (
    Check,
    Integer,
    Number,
    TokenIds,
    boolean,
    ids,
    invalid,
    json_type,
    mapping,
    nonempty_ids,
    nonempty_string,
    one_of,
    short_strings,
    show,
    string_or_mapping,
    strings,
    token_id_lists,
    whole,
)
from batchgen.request.fields.media import MediaMessages, media_part
from batchgen.request.fields.padding import message_without_padding, schema_without_nulls, without_nulls

MAX_ID_CHARACTERS = 65_536
"""Longest id of a row."""

_bias_id = Integer(0, 1 << 31)
_bias_value = Number(-100.0, 100.0)
_count = Integer(0, 1 << 20)
_FORMAT_KEYS = {
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
    "structural_tag": {"type", "format", "structures", "triggers"},
}
"""Keys of a `response_format` by its type."""
_JSON_SCHEMA_KEYS = {"name", "description", "schema", "strict"}
"""Keys of the `json_schema` of a `response_format`, unless it is the schema itself."""
DTYPE_PATTERNS = {
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?[0-9]*\.?[0-9]+",
    "bool": "True|False",
    "str": r"\"[\w\s]*\"",
}
"""Values of `dtype` with the pattern of the whole text: literals of Python's types, as in SGLang."""
_TOOL_SCHEMAS = ("parameters", "input_schema", "inputSchema")
"""Names of the schema of a tool's arguments: OpenAI's, Anthropic's and MCP's."""
_TEXTS = frozenset({"text", "input_text", "output_text"})
"""Types of parts of a message that are text: of OpenAI's chat completions, and of its responses."""
_NO_STREAM_OPTIONS = frozenset({"include_obfuscation"})
"""Keys that ask for nothing about the events: padding against eavesdroppers of a network."""

# Parameters of the renderer itself. A row must not set them: `chat_template` would replace the model's template.
_RESERVED_KWARGS = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations",
    "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Events of a sample that have token counts (`usage`)."""

    include_usage: bool = False
    """The last one."""
    continuous_usage_stats: bool = False
    """All."""


def row_id(name: str, value: Any) -> str:
    """Check an id: a string that is not too long, or an integer, which becomes its decimal text."""
    if type(value) is str:
        if len(value) > MAX_ID_CHARACTERS:
            raise invalid(name, f"has {len(value)} characters; an id has at most {MAX_ID_CHARACTERS}")
        return value
    number = whole(value)
    if number is None and type(value) is float and value.is_integer():
        problem = f"is {show(value)}, a float too large for every digit to be right; write it as a string or an integer"
        raise invalid(name, problem)
    try:
        if number is not None:
            return str(number)
    except ValueError:  # the interpreter limits the digits that it converts
        pass
    raise invalid(name, f"must be a string or an integer, got {show(value)}")


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Check a text prompt or a list of them; error messages never quote a prompt."""
    if type(value) is str:
        return (value,)
    if type(value) not in (list, tuple):
        raise invalid(name, f"must be a string or a list of strings, got {json_type(value)}")
    odd = next((item for item in value if type(item) is not str), None)
    if odd is not None or None in value:
        remedy = "; token ids belong in `input_ids`" if type(odd) in (int, list) else ""
        raise invalid(name, f"must be a string or a list of strings, found {json_type(odd)} in it{remedy}")
    return tuple(value)


def documents(name: str, value: Any) -> tuple[str, ...]:
    """Check a list of texts, or of objects with a `text`."""
    if type(value) not in (list, tuple):
        raise invalid(name, f"must be a list of strings, got {json_type(value)}")
    return texts(name, [item.get("text") if type(item) is dict else item for item in value])


def prompts(name: str, value: Any) -> tuple[str, ...] | tuple[TokenIds, ...]:
    """Check the `prompt` of `/v1/completions`: a string, strings, token ids, or lists of token ids."""
    if type(value) is list and value and type(value[0]) in (int, float, list):
        return token_id_lists(name, value)
    return texts(name, value)


def boolean_or_count(name: str, value: Any) -> bool | int:
    """Check `logprobs` of a native row: a boolean, or the number of alternatives to return."""
    if type(value) in (int, float):
        return int(_count(name, value))
    if type(value) is not bool:
        raise invalid(name, f"must be true, false or an integer, got {show(value)}")
    return value


def logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Check {token id: bias in [-100, 100]} and sort it by id; the ids are strings in JSON, or integers in Python.

    A tuple of (id, bias), the result of an earlier check, is accepted, too.
    """
    biases: dict[int, float] = {}
    if type(value) is dict:
        value = without_nulls(name, value)
    checked = type(value) is tuple and all(type(item) in (tuple, list) and len(item) == 2 for item in value)
    for key, bias in value if checked else mapping(name, value).items():
        text = str(key) if type(key) in (int, str) else ""
        if not (text.isascii() and text.isdigit() and len(text) <= 10):
            raise invalid(name, f"must have token ids as keys, got {show(key)}")
        token = _bias_id(name, int(key))
        if token in biases:
            raise invalid(name, f"names token {token} twice")
        biases[token] = _bias_value(name, bias)
    return tuple(sorted(biases.items()))


def bad_words(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Check a list of strings or lists of token ids, none of them empty."""
    if type(value) not in (list, tuple):
        raise invalid(name, f"must be a list, got {show(value)}")
    if any(item in ("", [], ()) for item in value):
        raise invalid(name, "must not contain an empty string or list")
    short_strings(name, tuple(item for item in value if type(item) is str))
    return tuple(item if type(item) is str else ids(name, item) for item in value)


def choice(name: str, value: Any) -> tuple[str, ...]:
    """Check a non-empty list of strings."""
    if type(value) not in (list, tuple) or not value or any(type(item) is not str for item in value):
        raise invalid(name, f"must be a list of strings, got {show(value)}")
    return strings(name, value)


def response_format(name: str, value: Any) -> dict[str, Any]:
    """Check `{"type": ...}` and the other keys that this type requires."""
    cleaned: dict[str, Any] = schema_without_nulls(name, mapping(name, value))
    kind = one_of(*_FORMAT_KEYS)(name, cleaned.get("type"))
    if kind == "json_schema" and type(cleaned.get("json_schema")) is not dict:
        raise invalid(name, "of type json_schema needs a `json_schema` object")
    if cleaned.get("json_schema") == {} and "schema" in value["json_schema"]:
        cleaned = {**cleaned, "json_schema": {"schema": None}}  # OpenAI's wrapper without a schema, not the schema {}
    _reject_other_keys(cleaned, _FORMAT_KEYS[kind], name, f"of type {kind} has no key")
    inner = cleaned.get("json_schema") or {}
    if "schema" in inner or "name" in inner:
        problem = "has a `json_schema` with `name`, `description`, `schema` and `strict`, not"
        _reject_other_keys(inner, _JSON_SCHEMA_KEYS, name, problem)
    return cleaned


_STRUCTURED: dict[str, tuple[str, Check]] = {
    "json": ("json_schema", string_or_mapping),
    "regex": ("regex", nonempty_string),
    "choice": ("choice", choice),
    "grammar": ("ebnf", nonempty_string),
    "json_object": ("json_schema", boolean),
    "structural_tag": ("structural_tag", string_or_mapping),
}
"""Keys of vLLM's `structured_outputs`: the constraint that each is here, and the check of its values."""


def structured_outputs(name: str, value: Any) -> dict[str, Any]:
    """Check vLLM's object with one constraint, and give that constraint by its name here."""
    present = {key: item for key, item in mapping(name, value).items() if item is not None and item is not False}
    known = ", ".join(_STRUCTURED)
    _reject_other_keys(present, set(_STRUCTURED), name, f"has one of the keys {known}, not")
    if len(present) != 1:
        raise invalid(name, f"must have one of the keys {known}, got {len(present)} of them")
    ((key, item),) = present.items()
    kind, check = _STRUCTURED[key]
    checked = check(name, item)
    return {kind: {"type": "object"} if key == "json_object" else checked}


def _reject_other_keys(value: dict[str, Any], known: set[str], name: str, problem: str) -> None:
    """Refuse keys that would be ignored."""
    odd = next((key for key in value if key not in known), None)
    if odd is not None:
        remedy = "; use type json_schema to give a schema" if "schema" in odd else ""
        raise invalid(name, f"{problem} {show(odd)}{remedy}")


def completion(name: str, value: Any) -> str | tuple[int, ...]:
    """Check a text to score: a non-empty string or list of token ids."""
    return nonempty_string(name, value) if type(value) is str else nonempty_ids(name, value)


def completions(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Check a non-empty list of texts to score."""
    if type(value) not in (list, tuple) or not value:
        raise invalid(name, f"must be a list of completions, got {json_type(value)}")
    return tuple(completion(name, item) for item in value)


def python_type(name: str, value: Any) -> str:
    """Check `dtype`: the name of a Python type, or in Python the type itself."""
    return str(one_of(*DTYPE_PATTERNS)(name, value.__name__ if type(value) is type else value))


def anything(name: str, value: Any) -> Any:
    """Accept every value: the field says nothing about the text."""
    return value


def stream_options(name: str, value: Any) -> StreamOptions | None:
    """Check an object of `include_usage` and `continuous_usage_stats`; None if it asks for nothing."""
    if type(value) is StreamOptions:
        return value
    present = {key: item for key, item in mapping(name, value).items() if item is not None}
    known = StreamOptions.__dataclass_fields__
    for key, item in present.items():
        if key not in known and key not in _NO_STREAM_OPTIONS:
            raise invalid(name, f"has the keys `include_usage` and `continuous_usage_stats`, got {show(key)}")
        if type(item) is not bool:
            raise invalid(name, f"has `{key}`, which must be true or false, got {show(item)}")
    options = StreamOptions(**{key: item for key, item in present.items() if key in known})
    return options if options != StreamOptions() else None


def functions(name: str, value: Any) -> Any:
    """Check only the outer type of OpenAI's oldest form of tools."""
    if type(value) not in (list, tuple, dict):
        raise invalid(name, f"must be a list, got {json_type(value)}")
    return value


def messages(name: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    """Check a list of messages with a `role` and `content`, and remove their null and empty optional keys.

    An empty list passes; it becomes `empty_prompt` later. Messages with images or sounds become `MediaMessages`.

    Raises:
        RowError: `invalid_field` for a malformed message, `unsupported_field` for video and file parts.
    """
    if type(value) not in (list, tuple):
        remedy = "; write the message as a list of one" if type(value) is dict and "role" in value else ""
        raise invalid(name, f"must be a list of messages, got {json_type(value)}{remedy}")
    media, cleaned = False, list(value)
    for index, message in enumerate(value):
        # A role with a string as content needs no further check.
        if type(message) is dict and len(message) == 2 and type(message.get("content")) is str:
            role = message.get("role")
            if type(role) is str and role:
                continue
        checked = message_without_padding(name, message)
        parts = _content_parts(f"{name}[{index}]", checked)
        cleaned[index] = checked if parts is None else {**checked, "content": parts}
        media = media or any(part["type"] != "text" for part in parts or ())
    return MediaMessages(cleaned) if media else tuple(cleaned)


def _content_parts(where: str, message: Any) -> list[Any] | None:
    """Check one message and return the parts of its content; None if they stay as they are."""
    if type(message) is not dict:
        raise invalid(where, f"must be an object, got {json_type(message)}")
    role, content = message.get("role"), message.get("content")
    if type(role) is not str or not role:
        remedy = "; rename `from` to `role` and `value` to `content`" if "from" in message and role is None else ""
        raise invalid(f"{where}.role", f"must be a string such as user, got {show(role)}{remedy}")
    if type(content) is str or (content is None and message.get("tool_calls")):
        return None
    if not isinstance(content, list | tuple):
        raise invalid(f"{where}.content", f"must be a string or a list of parts, got {json_type(content)}")
    parts = [_part(f"{where}.content[{number}]", part) for number, part in enumerate(content)]
    return parts if any(checked is not part for checked, part in zip(parts, content, strict=True)) else None


def _part(where: str, part: Any) -> Any:
    """Check one part of a message's content; what is not `text` is returned in the form that templates know."""
    kind = part.get("type") if type(part) is dict else None
    if type(kind) is not str:
        raise invalid(where, 'must be an object such as {"type": "text", "text": "..."}')
    if kind not in _TEXTS:
        if (media := media_part(where, part)) is not None:
            return media
        problem = f"must be text, image_url, input_audio or another part of media, got {show(kind)}"
        raise invalid(f"{where}.type", problem)
    if type(part.get("text")) is not str:
        raise invalid(f"{where}.text", "must be a string")
    return part if kind == "text" else {**part, "type": "text"}


def tools(name: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    """Check a list of tool descriptions, each an object that the chat template renders, and remove their null keys."""
    if type(value) not in (list, tuple) or any(type(tool) is not dict for tool in value):
        raise invalid(name, f"must be a list of objects, got {show(value)}")
    return tuple(standard_tool(name, tool) for tool in schema_without_nulls(name, value))


def standard_tool(name: str, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool with its schema as `parameters` of its function, where APIs have it under another name or next to it.

    Raises:
        RowError: `invalid_field`: it has two schemas.
    """
    function = tool.get("function")
    is_wrapped = type(function) is dict
    inner: Mapping[str, Any] = function if type(function) is dict else tool
    schemas = [
        (part, key) for part in ((inner, tool) if is_wrapped else (tool,)) for key in _TOOL_SCHEMAS if key in part
    ]
    odd = next((key for key, value in inner.items() if type(value) is dict and "properties" in value), None)
    if not schemas and odd is not None:
        raise invalid(name, f"has a tool with its schema in {show(odd)}; name it `parameters`")
    if not schemas or (schemas[0][0] is inner and [key for _, key in schemas] == ["parameters"]):
        return tool
    if len(schemas) > 1:
        shown = [f"`{'function.' * (is_wrapped and part is inner)}{key}`" for part, key in schemas[:2]]
        raise invalid(name, f"has a tool with {' and '.join(shown)}; keep one of them")
    part, key = schemas[0]
    described = {known: item for known, item in inner.items() if known not in ("type", key)} | {"parameters": part[key]}
    others = {known: item for known, item in tool.items() if known not in (*inner, key)} if is_wrapped else {}
    return {**others, "type": "function", "function": described}


def template_kwargs(name: str, value: Any) -> dict[str, Any]:
    """Check extra variables for the chat template; parameters of the renderer are refused."""
    variables: dict[str, Any] = without_nulls(name, mapping(name, value))
    if reserved := sorted(_RESERVED_KWARGS & variables.keys()):
        raise invalid(name, f"must not have `{reserved[0]}`: only variables of the chat template are allowed")
    return dict(variables)
