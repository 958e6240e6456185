"""Checks of a row field's type and range.

A check receives the field's name as the row spells it and the value. It returns the normalised value (lists as tuples,
integers as floats where the field is a float) or raises `invalid_field`. `field_checks` has the structured values.
"""

from __future__ import annotations

import marshal
import math
import reprlib
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from batchgen.errors import ErrorCode, RowError

Check = Callable[[str, Any], Any]

MAX_STOP_CHARACTERS = 10_000
"""Longest stop string, whose beginnings are looked for at each token of a row with events; longest of `bad_words`."""
MAX_OPTION_SIZE = 1 << 23
"""Largest value of one option of a row, such as a schema or a list of words: its characters, and 8 for a number."""

INT64_LOW, INT64_HIGH = -(2**63), 2**63 - 1
_MAX_TOKEN_ID = 2**31 - 1

_EXACT_FLOATS = 2**53
"""Up to here every integer has its own float; above, a float may be another integer than the one that was written."""

_NUMBERS = {int, float}

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array
"""Token ids of a prompt, as an array of the type "i"."""


class _ShortRepr(reprlib.Repr):
    """Shortened `repr` with JSON's spelling of booleans and null."""

    def repr_bool(self, value: bool, _: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, _value: None, _: int) -> str:
        return "null"


_short_repr = _ShortRepr()
_short_repr.maxstring = _short_repr.maxother = 60

_JSON_TYPES = {
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
    """Text of `value` for an error message, at most about 60 characters."""
    try:
        return _short_repr.repr(value)
    except ValueError:  # an integer too long to print
        return json_type(value)


def json_type(value: Any) -> str:
    """JSON name of a value's type, for messages that must not quote the value (prompts)."""
    return _JSON_TYPES.get(type(value), type(value).__name__)


def error_at(code: ErrorCode, place: str, problem: str) -> RowError:
    """The error "`place` problem" of a field, where `place` is the field or a part of it, such as `image_data[1]`."""
    return RowError(code, f"`{place}` {problem}", place.partition("[")[0])


def invalid(place: str, problem: str) -> RowError:
    """The `invalid_field` error of a field, as `error_at`."""
    return error_at(ErrorCode.INVALID_FIELD, place, problem)


def invalid_grammar(field: str, problem: str) -> RowError:
    """The `invalid_grammar` error of a field, as `error_at`."""
    return error_at(ErrorCode.INVALID_GRAMMAR, field, problem)


def describe_range(low: int, high: int) -> str:
    """Text of an integer range for a message; an upper bound that is just the int64 limit is left out."""
    return f"at least {low}" if high == INT64_HIGH else f"between {low} and {high}"


def whole(value: Any) -> int | None:
    """An integer, or a float without a fraction up to 2^53, as an int; None for anything else.

    Data frames and JSON writers store integers as floats, so `8.0` is the integer 8 wherever an integer is expected.
    """
    if type(value) is int:
        return value
    if type(value) is float and value.is_integer() and abs(value) <= _EXACT_FLOATS:
        return int(value)
    return None


def boolean(name: str, value: Any) -> bool:
    """Check a boolean; 0, 1 and strings are refused."""
    if type(value) is not bool:
        raise invalid(name, f"must be true or false, got {show(value)}")
    return value


def string(name: str, value: Any) -> str:
    """Check a string."""
    if type(value) is not str:
        raise invalid(name, f"must be a string, got {show(value)}")
    return value


def nonempty_string(name: str, value: Any) -> str:
    """Check a non-empty string."""
    if not string(name, value):
        raise invalid(name, "must not be empty")
    return str(value)


@dataclass(frozen=True, slots=True)
class Integer:
    """Check for integers in [low, high]; `8.0` is 8, booleans and strings are refused."""

    low: int = INT64_LOW
    high: int = INT64_HIGH

    def __call__(self, name: str, value: Any) -> int:
        """Return `value` as an int, or raise `invalid_field`."""
        number = value if type(value) is int else whole(value)
        if number is None:
            raise invalid(name, f"must be an integer, got {show(value)}")
        if not INT64_LOW <= number <= INT64_HIGH:
            raise invalid(name, "must fit a signed 64-bit integer")
        if not self.low <= number <= self.high:
            raise invalid(name, f"must be {describe_range(self.low, self.high)}, got {number}")
        return number


@dataclass(frozen=True, slots=True)
class Number:
    """Check for finite numbers in [low, high], or (low, high]; integers become floats."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False

    def __call__(self, name: str, value: Any) -> float:
        """Return `value` as a float, or raise `invalid_field`."""
        if type(value) not in (int, float):
            raise invalid(name, f"must be a number, got {show(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise invalid(name, f"must be a finite number, got {show(value)}")
        if not self.low <= number <= self.high or (self.low_open and number == self.low):
            bracket = "(" if self.low_open else "["
            raise invalid(name, f"must be in {bracket}{self.low:g}, {self.high:g}], got {show(value)}")
        return number


def strings(name: str, value: Any) -> tuple[str, ...]:
    """Check a string or a list of strings, none of them empty."""
    texts = (value,) if type(value) is str else tuple(value) if type(value) in (list, tuple) else None
    if texts is None or any(type(item) is not str for item in texts):
        raise invalid(name, f"must be a string or a list of strings, got {show(value)}")
    if "" in texts:
        raise invalid(name, "must not contain an empty string")
    return texts


def short_strings(name: str, texts: tuple[str, ...]) -> None:
    """Refuse stop strings, or words, longer than `MAX_STOP_CHARACTERS`."""
    if any(len(text) > MAX_STOP_CHARACTERS for text in texts):
        raise invalid(name, f"has a string of more than {MAX_STOP_CHARACTERS} characters; shorten it")


def ids(name: str, value: Any) -> tuple[int, ...]:
    """Check a list of token ids (0 to 2^31 - 1); the vocabulary size is checked once the model is known."""
    if type(value) not in (list, tuple):
        raise invalid(name, f"must be a list of token ids, got {json_type(value)}")
    # One pass in C over the types, because prompts given as ids can be long.
    if value and set(map(type, value)) != {int}:
        odd = next((item for item in value if whole(item) is None), None)
        if odd is not None or None in value:
            raise invalid(name, f"must be a list of token ids, found {show(odd)} in it")
        value = [int(item) for item in value]
    if value and (min(value) < 0 or max(value) > _MAX_TOKEN_ID):
        odd = next(item for item in value if not 0 <= item <= _MAX_TOKEN_ID)
        raise error_at(ErrorCode.TOKEN_OUT_OF_RANGE, name, f"has {show(odd)}, which is not a token id")
    return tuple(value)


def nonempty_ids(name: str, value: Any) -> tuple[int, ...]:
    """Check a non-empty list of token ids."""
    if not (tokens := ids(name, value)):
        raise invalid(name, "must not be empty")
    return tokens


def token_id_lists(name: str, value: Any) -> tuple[TokenIds, ...]:
    """Check a list of token ids, or a list of such lists; the result is a tuple of lists either way."""
    if type(value) in (list, tuple) and value and type(value[0]) in (list, tuple):
        return tuple(_token_ids(name, item) for item in value)
    return (_token_ids(name, value),)


def _token_ids(name: str, value: Any) -> TokenIds:
    """Check a list of token ids as `ids` does, which reads those again that are not plain integers in its range."""
    if type(value) is list and value:
        import numpy as np  # here, because options use this module, and help needs no numpy

        try:
            # One pass in C: in version 2 of the format each integer of 32 bits is the letter i and four bytes, whatever
            # else is in the list begins with another letter. A list begins with a letter and its length.
            items = np.frombuffer(marshal.dumps(value, 2), [("letter", "u1"), ("value", "<i4")], offset=5)
        except ValueError:  # an object without such a form, or items of other sizes
            return array("i", ids(name, value))
        values = items["value"]
        if len(items) == len(value) and (items["letter"] == ord("i")).all() and values.min() >= 0:
            return array("i", values.astype(np.int32).tobytes())
    return array("i", ids(name, value))


def mapping(name: str, value: Any) -> dict[str, Any]:
    """Check a JSON object."""
    if type(value) is not dict:
        raise invalid(name, f"must be an object, got {json_type(value)}")
    return value


def string_or_mapping(name: str, value: Any) -> str | dict[str, Any]:
    """Check a non-empty string or a JSON object."""
    if type(value) is not dict and (type(value) is not str or not value):
        raise invalid(name, f"must be a string or an object, got {show(value)}")
    return value


def bounded(name: str, value: Any) -> Any:
    """The stored value of an option, refused if it exceeds `MAX_OPTION_SIZE`."""
    if type(value) in (str, tuple) and _size(value) > MAX_OPTION_SIZE:
        raise invalid(name, f"is too large; at most {MAX_OPTION_SIZE} characters, a number counting as 8")
    return value


def _size(value: Any) -> int:
    if type(value) is str:
        return len(value)
    return 8 + sum(map(_size, value)) if type(value) is tuple else 8


def one_of(*values: str) -> Check:
    """Return a check for one of a few strings."""

    def check(name: str, value: Any) -> str:
        if type(value) is not str or value not in values:
            raise invalid(name, f"must be one of {', '.join(values)}, got {show(value)}")
        return value

    return check


def plain(value: Any) -> Any:
    """A Python mapping as a dict and another iterable as a tuple, which checks take as they are in JSON."""
    if isinstance(value, Mapping):
        return value if type(value) is dict else dict(value)
    if type(value) in (list, tuple) or isinstance(value, str | bytes) or not isinstance(value, Iterable):
        return value
    return tuple(value)


def check_unicode(value: Any, name: str) -> None:
    """Refuse lone surrogates anywhere in `value`: they have no UTF-8 form, so they cannot be tokenised or written.

    Raises:
        RowError: `invalid_unicode`, naming the top-level field.
    """
    if type(value) is dict or (type(value) is list and value and type(value[0]) is dict):
        try:
            # orjson is fast. It also refuses some valid values (such as huge integers), so a failure proves nothing.
            orjson.dumps(value)
            return
        except TypeError:
            pass
    pending = [value]
    while pending:  # an explicit stack: rows may nest as deep as the JSON parser allows
        item = pending.pop()
        kind = type(item)
        if kind is str:
            if not item.isascii():
                _check_text(item, name)
        elif kind is dict:
            pending.extend(item)
            pending.extend(item.values())
        elif kind in (list, tuple) and not set(map(type, item)) <= _NUMBERS:
            pending.extend(item)


def _check_text(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        message = f"`{name}` contains a lone surrogate ({code}), which is not valid Unicode; write the whole character"
        raise RowError(ErrorCode.INVALID_UNICODE, message, name) from None


def out_of_range(param: str, token: int, vocab_size: int) -> RowError:
    """The `token_out_of_range` error of a field."""
    problem = f"holds token {token}; the model's vocabulary ends at {vocab_size - 1}"
    return error_at(ErrorCode.TOKEN_OUT_OF_RANGE, param, problem)
