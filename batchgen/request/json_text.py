"""JSON text to values, strictly: unique keys, finite numbers, bounded depth, whole characters. Names what is wrong."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import orjson

from batchgen.errors import ErrorCode, RowError
from batchgen.request.checks import Check, json_type
from batchgen.request.foreign_text import (
    ESCAPED_SURROGATE,
    MAX_DEPTH,
    ForeignTextError,
    check_depth,
    count_of,
    has_surrogate,
    read_json,
    read_quickly,
    repeated_key,
)
from batchgen.request.printable import printable

_MAX_PATH = 200
"""Most characters of a place in a row that an error names."""
_CUT = re.compile(r"(?:-|t(?:ru?)?|f(?:al?|als)?|n(?:ul?)?|\.|[eE][+-]?|\\?|\\?u?[0-9a-fA-F]{0,4})\s*\Z")
"""What a cut text may end with, from the place of the decoder's error on: the beginning of a number, word or escape."""
_ONE_BY_ONE = "write one object per line (jq -c . FILE), or run the file with --input-format json"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (key := repeated_key(pairs)) is not None:
        raise RowError(ErrorCode.INVALID_JSON, f"the key {key[:80]!r} occurs twice in one object")
    return dict(pairs)


class _BadNumberError(ValueError):
    """A number that JSON or a double does not have."""


def _refuse_constant(name: str) -> float:
    raise _BadNumberError(f"is {name}, which is not JSON; write null, or leave it out")


def _finite(literal: str) -> float:
    value = float(literal)
    if value in (float("inf"), float("-inf")):
        raise _BadNumberError("is a number too large for a double; write it as a string")
    return value


def _place_of_bad_number(text: str) -> str:
    """Place of the first number that is not finite, such as `body.logit_bias.5` or `scores[2]`."""
    try:
        open_values: list[tuple[str, Iterator[tuple[str, Any]]]] = [("", iter([("", read_json(text))]))]
    except ForeignTextError:  # JSON that has further faults
        return "a value"
    while open_values:
        path, items = open_values[-1]
        step, value = next(items, ("", None))
        if value is None and step == "":
            open_values.pop()
        elif type(value) is float and not math.isfinite(value):
            place = printable((path + step)[:_MAX_PATH].removeprefix("."))
            return f"`{place}`" if place else "the row"
        elif type(value) is dict:
            open_values.append((path + step, ((f".{key}", item) for key, item in value.items())))
        elif type(value) is list:
            open_values.append((path + step, ((f"[{index}]", item) for index, item in enumerate(value))))
    return "a value"


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite)


def parse_json_object(line: bytes) -> dict[str, Any]:
    """Object in one line of JSON, parsed strictly.

    Raises:
        RowError: `invalid_json` for anything but one object with unique keys and finite numbers, nested at most
            `MAX_DEPTH` deep; `invalid_unicode` for bytes that are not UTF-8 and for lone surrogates.
    """
    value = _parse_quickly(line)
    if type(value) is not dict:
        value = _parse_strictly(line)
        if type(value) is list and value and all(type(item) is dict for item in value):
            problem = f"expected a JSON object, got an array of {len(value)} objects; {_ONE_BY_ONE}"
            raise RowError(ErrorCode.INVALID_JSON, problem)
        if type(value) is not dict:
            kind = {list: "an array", int: "a number"}.get(type(value), json_type(value))
            raise RowError(ErrorCode.INVALID_JSON, f"expected a JSON object, got {kind}")
    return value


def parse_json(text: bytes) -> Any:
    """Any one value of JSON, parsed as strictly as `parse_json_object`.

    Raises:
        RowError: as `parse_json_object`.
    """
    value = _parse_quickly(text)
    return _parse_strictly(text) if value is None else value


def text_remedy(error: RowError, check: Check, name: str, value: Any, other: str = "") -> RowError:
    """The error of a field's value, with the remedy if the value is the JSON text of one that the field accepts.

    Args:
        error: what `check` said.
        check: the check of the field.
        name: the field as the row spells it.
        value: the refused value.
        other: what else helps.
    """
    if type(value) is not str or value.lstrip()[:1] not in ("[", "{"):
        return error
    try:
        check(name, parsed := parse_json(value.encode()))
    except (RowError, UnicodeEncodeError):
        return error
    remedy = f"which is JSON text: write the {'list' if type(parsed) is list else 'object'} itself{other}"
    return RowError(error.info.code, f"{error.info.message}, {remedy}", error.info.param)


def is_cut(line: bytes) -> bool:
    """Whether a line that is not JSON may be the beginning of JSON: its text ended, and nothing else is wrong."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return False
        text = line[: error.start].decode()
    try:
        _DECODER.decode(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string") or (
            error.msg != "Extra data" and _CUT.match(text, error.pos) is not None
        )
    except (ValueError, RecursionError, RowError):
        pass
    return False


def _parse_quickly(text: bytes) -> Any:
    """Result of `_parse_strictly` for text that a fast check finds valid; None for any other text, valid or not.

    To find repeated keys the colons are counted, of which a dropped key loses one: an object with as many keys has no
    other ones, else the value is serialised again. Texts with escaped colons are left to the strict parser. orjson
    refuses lone surrogates and numbers too large for a double.
    """
    value = read_quickly(text)
    if value is None or count_of(text, b"[{") > MAX_DEPTH or (b"\\" in text and b"\\u003" in text):
        return None
    colons = count_of(text, b":")
    is_whole = (type(value) is dict and len(value) == colons) or orjson.dumps(value).count(b":") == colons
    return value if is_whole else None


def _parse_strictly(line: bytes) -> Any:
    text = decode_utf8(line)
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise RowError(ErrorCode.INVALID_JSON, _described(error)) from None
    except _BadNumberError as error:
        raise RowError(ErrorCode.INVALID_JSON, f"{_place_of_bad_number(text)} {error}") from None
    except RecursionError:
        raise RowError(ErrorCode.INVALID_JSON, f"nested more than {MAX_DEPTH} deep") from None
    except ValueError:
        # The interpreter limits the digits of an integer that it converts, since that takes quadratic time.
        raise RowError(ErrorCode.INVALID_JSON, "an integer has too many digits") from None
    try:
        check_depth(value, count_of(line, b"[{"))
    except ForeignTextError:
        raise RowError(ErrorCode.INVALID_JSON, f"nested more than {MAX_DEPTH} deep") from None
    if ESCAPED_SURROGATE.search(text) and has_surrogate(value):
        raise RowError(ErrorCode.INVALID_UNICODE, "a \\u escape is half of a surrogate pair without the other half")
    return value


def _described(error: json.JSONDecodeError) -> str:
    """The decoder's error; objects that are run together are named for what they are."""
    gap, rest = error.doc[: error.pos], error.doc[error.pos : error.pos + 2].lstrip("\ufeff")[:1]
    if error.msg == "Extra data" and rest == "{" and gap.rstrip().endswith("}"):
        if "\r" in gap[len(gap.rstrip()) :]:
            return (
                f"column {error.colno}: the lines end in a carriage return only, so that the file is one line; "
                r"convert it (tr '\r' '\n'), or run the file with --input-format json"
            )
        return f"column {error.colno}: several objects are run together in one line; {_ONE_BY_ONE}"
    return f"column {error.colno}: {error.msg}"


def decode_utf8(line: bytes) -> str:
    """The text of a line.

    Raises:
        RowError: `invalid_unicode`.
    """
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise RowError(ErrorCode.INVALID_UNICODE, f"byte {error.start + 1} of the line is not UTF-8") from None
