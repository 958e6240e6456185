"""Checks for the fields whose values have a shape of their own; see `checks` for the plain ones."""

from __future__ import annotations

from typing import Any

from batchgen.checks import boolean, floating, ids, integer, invalid, kind_of, mapping, one_of, show, string, strings

__all__ = [
    "bad_words",
    "boolean_or_count",
    "choice",
    "completion",
    "completions",
    "embeddings",
    "hidden_states",
    "logit_bias",
    "media",
    "prompts",
    "response_format",
    "some_ids",
    "some_string",
    "texts",
]

_bias = floating(-100.0, 100.0)
_count = integer(0, 1 << 20)
_layer = integer(-1, 1 << 20)


def texts(name: str, value: Any) -> tuple[str, ...]:
    """A prompt or a list of prompts; messages never quote it."""
    if type(value) is str:
        return (value,)
    if type(value) not in (list, tuple):
        raise invalid(name, f"must be a string or a list of strings, got {kind_of(value)}")
    odd = next((item for item in value if type(item) is not str), None)
    if odd is not None or None in value:
        remedy = "; token ids belong in `input_ids`" if type(odd) in (int, list) else ""
        raise invalid(name, f"must be a string or a list of strings, found {kind_of(odd)} in it{remedy}")
    return tuple(value)


def prompts(name: str, value: Any) -> tuple[str, ...] | tuple[tuple[int, ...], ...]:
    """What `/v1/completions` takes: a string, strings, token ids, or lists of token ids."""
    if type(value) is list and value and type(value[0]) is int:
        return (ids(name, value),)
    if type(value) is list and value and type(value[0]) is list:
        return tuple(ids(name, item) for item in value)
    return texts(name, value)


def some_string(name: str, value: Any) -> str:
    """A string that is not empty."""
    if not string(name, value):
        raise invalid(name, "must not be empty")
    return str(value)


def some_ids(name: str, value: Any) -> tuple[int, ...]:
    """A list of token ids that is not empty."""
    found = ids(name, value)
    if not found:
        raise invalid(name, "must not be empty")
    return found


def boolean_or_count(name: str, value: Any) -> bool | int:
    """`logprobs` of a native row: true or false, or how many alternatives to return."""
    if type(value) is int:
        return int(_count(name, value))
    if type(value) is not bool:
        raise invalid(name, f"must be true, false or an integer, got {show(value)}")
    return value


def logit_bias(name: str, value: Any) -> dict[int, float]:
    """{token id, as JSON's string (Python may give a number): bias in [-100, 100]}."""
    found: dict[int, float] = {}
    for key, bias in mapping(name, value).items():
        text = str(key) if type(key) in (int, str) else ""
        if not (text.isascii() and text.isdigit() and len(text) <= 10):
            raise invalid(name, f"must have token ids as keys, got {show(key)}")
        if int(key) in found:
            raise invalid(name, f"names token {int(key)} twice")
        found[int(key)] = _bias(name, bias)
    return found


def bad_words(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A list of strings or lists of token ids, none of them empty."""
    if type(value) not in (list, tuple):
        raise invalid(name, f"must be a list, got {show(value)}")
    return tuple(some_string(name, item) if type(item) is str else some_ids(name, item) for item in value)


def choice(name: str, value: Any) -> tuple[str, ...]:
    """A list of the strings to choose from."""
    if type(value) not in (list, tuple) or not value:
        raise invalid(name, f"must be a list of strings, got {show(value)}")
    return strings(name, value)


def response_format(name: str, value: Any) -> dict[str, Any]:
    """`{"type": ...}` with what that type needs beside it."""
    found = mapping(name, value)
    kind = one_of("text", "json_object", "json_schema", "structural_tag")(name, found.get("type"))
    if kind == "json_schema" and type(found.get("json_schema")) is not dict:
        raise invalid(name, "of type json_schema needs a `json_schema` object")
    return found


def hidden_states(name: str, value: Any) -> bool | dict[str, Any]:
    """True, false, or {layers, tokens, pool}."""
    if type(value) is not dict:
        return boolean(name, value)
    for key, item in value.items():
        if key == "layers":
            if type(item) not in (list, tuple) or not item:
                raise invalid(name, f"must have a list of integers as `layers`, got {show(item)}")
            for layer in item:
                _layer(name, layer)
        elif key == "tokens":
            one_of("prompt", "output", "all", "last")(name, item)
        elif key == "pool":
            one_of("none", "last", "mean")(name, item)
        else:
            raise invalid(name, f"takes `layers`, `tokens` and `pool`, got {show(key)}")
    return value


def embeddings(name: str, value: Any) -> Any:
    """A [P, H] nested list of numbers, or the name of a tensor."""
    if type(value) is str:
        return some_string(name, value)
    if type(value) not in (list, tuple) or any(type(row) not in (list, tuple) for row in value):
        raise invalid(name, f"must be a nested list of numbers or a tensor's name, got {kind_of(value)}")
    number = floating()
    for row in value:
        if len(row) != len(value[0]):
            raise invalid(name, f"must have rows of one length, got {len(value[0])} and {len(row)}")
        for item in row:
            number(name, item)
    return value


def completion(name: str, value: Any) -> str | tuple[int, ...]:
    """A text to score: a string or token ids, not empty."""
    return some_string(name, value) if type(value) is str else some_ids(name, value)


def completions(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A list of texts to score."""
    if type(value) not in (list, tuple) or not value:
        raise invalid(name, f"must be a list of completions, got {kind_of(value)}")
    return tuple(completion(name, item) for item in value)


def media(name: str, value: Any) -> Any:
    """Paths, URLs, base64 or processor output: checked for its outer type only."""
    if type(value) not in (str, list, tuple, dict):
        raise invalid(name, f"must be a string, a list or an object, got {kind_of(value)}")
    return value
