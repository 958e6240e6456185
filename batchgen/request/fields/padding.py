"""Keys of structured values that count as absent: nulls, and empty optional keys of messages.

Tables give every object the keys of all objects, with null where there is no value. A Parquet reader leaves those out;
JSON lines written from a table hold them. Templates and grammars would take them for values, so they are removed where
null has no meaning.
"""

from __future__ import annotations

from typing import Any

import orjson

from batchgen.request.checks import invalid

_SCHEMA_VALUES = frozenset({"default", "const", "enum", "examples"})
"""Keywords of a JSON Schema whose values are data, in which null is a value."""
_SCHEMA_NAMES = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
"""Keywords of a JSON Schema whose keys are names, which may be those of keywords."""


def without_nulls(name: str, value: Any) -> Any:
    """`value` without null keys at any depth; nulls in lists stay.

    Raises:
        RowError: `invalid_field` for a value of the field `name` that is nested too deeply.
    """
    return _cleaned(name, value, _data, b":null")


def schema_without_nulls(name: str, value: Any) -> Any:
    """A JSON Schema, or an object that contains some, without null keys; `default: null` and the like stay.

    Raises:
        RowError: as for `without_nulls`.
    """
    return _cleaned(name, value, _schema, b":null")


def message_without_padding(name: str, message: Any) -> Any:
    """A message without null keys and empty optional keys (`tool_calls: []`), at any depth.

    Its `content` stays as it is, since templates tell null and missing contents apart, and so do empty lists and
    objects in the arguments of a call.

    Raises:
        RowError: as for `without_nulls`.
    """
    return _cleaned(name, message, _message, b":null", b":[]", b":{}")


def _cleaned(name: str, value: Any, clean: Any, *signs: bytes) -> Any:
    """`clean(value)`, or `value` itself if its JSON has none of `signs`, which costs little on every row."""
    try:
        text = orjson.dumps(value)
        for sign in signs:
            if sign in text:
                break
        else:
            return value
    except TypeError:  # a value that orjson does not write, such as a large integer
        pass
    try:
        return clean(value)
    except RecursionError:
        raise invalid(name, "is nested too deeply") from None


def _data(value: Any) -> Any:
    if type(value) is dict:
        return {key: _data(item) for key, item in value.items() if item is not None}
    return [_data(item) for item in value] if type(value) in (list, tuple) else value


def _schema(value: Any) -> Any:
    if type(value) in (list, tuple):
        return [_schema(item) for item in value]
    if type(value) is not dict:
        return value
    schema = {}
    for key, item in value.items():
        if key in _SCHEMA_VALUES:
            schema[key] = item
        elif key in _SCHEMA_NAMES and type(item) is dict:
            schema[key] = {name: _schema(part) for name, part in item.items() if part is not None}
        elif item is not None:
            schema[key] = _schema(item)
    return schema


def _message(value: Any) -> Any:
    if type(value) is not dict:
        return value
    content = {"content": value["content"]} if _is_empty(value.get("content", "")) else {}
    return _optional(value) | content


def _is_empty(value: Any) -> bool:
    return value is None or (type(value) in (list, tuple, dict) and not value)


def _optional(value: Any) -> Any:
    if type(value) in (list, tuple):
        return [_optional(item) for item in value]
    if type(value) is not dict:
        return value
    kept = {}
    for key, item in value.items():
        if key == "arguments":
            item = _data(item)
            if item is not None:
                kept[key] = item
        elif not _is_empty(item := _optional(item)):
            kept[key] = item
    return kept
