"""Value checks for row fields: each takes the field's name as the row spells it and a value, and returns the value
normalised (lists as tuples, whole numbers as floats where a float is meant) or raises `invalid_field`.

Ranges of the fields that `SamplingParams` holds are checked there; here are types, and the ranges of everything else.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson

from batchgen.errors import ErrorCode, RowError

__all__ = [
    "INT64_HIGH",
    "INT64_LOW",
    "Check",
    "boolean",
    "check_unicode",
    "floating",
    "ids",
    "integer",
    "invalid",
    "kind_of",
    "lists_of_ids",
    "mapping",
    "one_of",
    "show",
    "span",
    "string",
    "string_or_mapping",
    "strings",
]

Check = Callable[[str, Any], Any]

INT64_LOW, INT64_HIGH = -(2**63), 2**63 - 1
_MAX_TOKEN_ID = 2**31 - 1

_NUMBERS = {int, float}


class _Short(reprlib.Repr):
    """Shortened, with JSON's names for what it has names of its own for."""

    def repr_bool(self, value: bool, _: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, _value: None, _: int) -> str:
        return "null"


_short = _Short()
_short.maxstring = _short.maxother = 60

_KINDS = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    tuple: "a list",
    dict: "an object",
}


def show(value: Any) -> str:
    """`value` for an error message, at most about 60 characters of it."""
    try:
        return _short.repr(value)
    except ValueError:  # an integer too long to print
        return kind_of(value)


def kind_of(value: Any) -> str:
    """The JSON name of a value's type, for messages that must not quote the value (prompts)."""
    return _KINDS.get(type(value), type(value).__name__)


def invalid(name: str, problem: str) -> RowError:
    """An `invalid_field` error that reads "`name` problem"."""
    return RowError(ErrorCode.INVALID_FIELD, f"`{name}` {problem}", name)


def span(low: int, high: int) -> str:
    """A range of integers in words; an upper end that is merely the type's is not named."""
    return f"at least {low}" if high == INT64_HIGH else f"between {low} and {high}"


def boolean(name: str, value: Any) -> bool:
    """True or false, and nothing that merely looks like it."""
    if type(value) is not bool:
        raise invalid(name, f"must be true or false, got {show(value)}")
    return value


def string(name: str, value: Any) -> str:
    """A string of valid Unicode."""
    if type(value) is not str:
        raise invalid(name, f"must be a string, got {show(value)}")
    return value


def integer(low: int = INT64_LOW, high: int = INT64_HIGH) -> Check:
    """A check for whole numbers in [low, high]; booleans and floats are refused."""

    def check(name: str, value: Any) -> int:
        if type(value) is not int:
            raise invalid(name, f"must be an integer, got {show(value)}")
        if not INT64_LOW <= value <= INT64_HIGH:
            raise invalid(name, "must fit a signed 64-bit integer")
        if not low <= value <= high:
            raise invalid(name, f"must be {span(low, high)}, got {value}")
        return value

    return check


def floating(low: float = -math.inf, high: float = math.inf, *, low_open: bool = False) -> Check:
    """A check for finite numbers in [low, high], or (low, high]; whole numbers become floats."""

    def check(name: str, value: Any) -> float:
        if type(value) not in (int, float):
            raise invalid(name, f"must be a number, got {show(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise invalid(name, f"must be a finite number, got {show(value)}")
        if not low <= number <= high or (low_open and number == low):
            raise invalid(name, f"must be in {'(' if low_open else '['}{low:g}, {high:g}], got {show(value)}")
        return number

    return check


def strings(name: str, value: Any) -> tuple[str, ...]:
    """A string or a list of strings, none of them empty."""
    found = (value,) if type(value) is str else tuple(value) if type(value) in (list, tuple) else None
    if found is None or any(type(item) is not str for item in found):
        raise invalid(name, f"must be a string or a list of strings, got {show(value)}")
    if "" in found:
        raise invalid(name, "must not hold an empty string")
    return found


def ids(name: str, value: Any) -> tuple[int, ...]:
    """A list of token ids (0 to 2^31 - 1); the vocabulary's end is checked once the model is known."""
    if type(value) not in (list, tuple):
        raise invalid(name, f"must be a list of token ids, got {kind_of(value)}")
    # One pass in C over the types: this is the hot path of long prompts given as ids.
    if value and set(map(type, value)) != {int}:
        odd = next(item for item in value if type(item) is not int)
        raise invalid(name, f"must be a list of token ids, found {show(odd)} in it")
    if value and (min(value) < 0 or max(value) > _MAX_TOKEN_ID):
        odd = next(item for item in value if not 0 <= item <= _MAX_TOKEN_ID)
        raise RowError(ErrorCode.TOKEN_OUT_OF_RANGE, f"`{name}` holds {show(odd)}, which is no token id", name)
    return tuple(value)


def lists_of_ids(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """A list of token ids, taken as one list, or a list of such lists."""
    if type(value) in (list, tuple) and value and type(value[0]) in (list, tuple):
        return tuple(ids(name, item) for item in value)
    return (ids(name, value),)


def mapping(name: str, value: Any) -> dict[str, Any]:
    """An object."""
    if type(value) is not dict:
        raise invalid(name, f"must be an object, got {kind_of(value)}")
    return value


def string_or_mapping(name: str, value: Any) -> str | dict[str, Any]:
    """A string that is not empty, or an object."""
    if type(value) is not dict and (type(value) is not str or not value):
        raise invalid(name, f"must be a string or an object, got {show(value)}")
    return value


def one_of(*values: str) -> Check:
    """A check for one of a few words."""

    def check(name: str, value: Any) -> str:
        if type(value) is not str or value not in values:
            raise invalid(name, f"must be one of {', '.join(values)}, got {show(value)}")
        return value

    return check


def check_unicode(value: Any, name: str) -> None:
    """Refuse lone surrogates anywhere in `value`: they have no UTF-8 form, so no tokenizer and no file can hold them.

    Raises:
        RowError: `invalid_unicode`, naming the top-level field.
    """
    if type(value) is dict or (type(value) is list and value and type(value[0]) is dict):
        with suppress(TypeError):
            # Written in C it is a matter of a microsecond. What cannot be written may still be valid: the walk tells.
            orjson.dumps(value)
            return
    waiting = [value]
    while waiting:  # a stack of our own: rows may nest as deep as the JSON parser allows
        item = waiting.pop()
        kind = type(item)
        if kind is str:
            if not item.isascii():
                _check_text(item, name)
        elif kind is dict:
            waiting.extend(item)
            waiting.extend(item.values())
        elif kind in (list, tuple) and not set(map(type, item)) <= _NUMBERS:
            waiting.extend(item)


def _check_text(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        message = f"`{name}` holds a lone surrogate ({code}), which is not valid Unicode; write the whole character"
        raise RowError(ErrorCode.INVALID_UNICODE, message, name) from None
