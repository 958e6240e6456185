"""The reader of JSON and TOML that is not a row: files of a model, configurations, fields that hold JSON as text.

No other module calls the decoders on foreign text: they raise errors of several types about it, and give values that
break what is done with them later. `json_text` reads rows, more strictly, with the same limits.

`typed` is the view of a file's object: the types of the keys that are used are stated and checked at once.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Final

import orjson

from batchgen.request.checks import json_type

MAX_DEPTH: Final = 200
"""Deepest nesting of arrays and objects, below the limit of every JSON writer and every recursion used later."""
MAX_DIGITS: Final = 300
"""Most digits of an integer: it still fits a double, and is converted in no time."""
MAX_FILE_BYTES: Final = 256 << 20
"""Largest file that is read as a whole."""
_BOM: Final = b"\xef\xbb\xbf"
ESCAPED_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_LONG_INTEGER: Final = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")
_SHIFTS: Final = (1, 2, 4, 8, 3)
"""Sum of 18: an integer of more than 64 bits has at least 19 digits."""
_DIGITS_TO_ZERO: Final = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_TEXT: Final = 2048
"""Bytes from which a text is looked through by numpy, which takes longer to call and less for each byte."""


class ForeignTextError(ValueError):
    """A text that cannot be read: the message is what to say after its name, such as "is not JSON: ..."."""

    def __init__(self, problem: str, *, is_limit: bool = False) -> None:
        """`is_limit`: the text is of its format, but past a limit of this reader."""
        super().__init__(problem)
        self.is_limit = is_limit


def read_json(text: bytes | str, *, constants: bool = True, unique_keys: bool = False, unwritable: bool = False) -> Any:
    """The value of a JSON text, as Python's decoder gives it.

    Args:
        text: UTF-8, with or without a byte-order mark.
        constants: whether NaN and Infinity are numbers, as in files that Python wrote.
        unique_keys: whether a key may occur only once in an object; else the last value counts.
        unwritable: whether strings may have half of a surrogate pair, and integers as many digits as the interpreter
            converts: for a value that is only looked at, or that batchgen wrote, with names that are not UTF-8.

    Raises:
        ForeignTextError: it is not JSON, is nested more than `MAX_DEPTH` deep, has an integer of more than `MAX_DIGITS`
            digits or half of a surrogate pair.
    """
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text.removeprefix(_BOM)
    value = None if unique_keys else read_quickly(data)
    if value is None:
        value = _decoded(data, constants, unique_keys, unwritable)
    check_depth(value, count_of(data, b"[{"))
    return value


def read_quickly(data: bytes) -> Any:
    """The value of a text that the fast decoder reads as Python's does; None for any other, and for null."""
    try:
        value = orjson.loads(data)
    except ValueError:
        return None
    # It reads longer integers as doubles.
    return None if has_long_integer(data) else value


def has_long_integer(data: bytes) -> bool:
    """Whether a text has so many digits in a row that they may not fit 64 bits."""
    if len(data) < _LONG_TEXT:
        return b"0" * (1 + sum(_SHIFTS)) in data.translate(_DIGITS_TO_ZERO)
    import numpy as np  # here, because help needs no numpy

    digits = np.frombuffer(data, np.uint8) - np.uint8(ord("0")) < 10
    for shift in _SHIFTS:
        digits = digits[:-shift] & digits[shift:]
    return bool(digits.any())


def count_of(data: bytes, signs: bytes) -> int:
    """How often any of some ASCII signs is in a text."""
    if len(data) < _LONG_TEXT:
        return sum(map(data.count, signs))
    import numpy as np

    read = np.frombuffer(data, np.uint8)
    return sum(int(np.count_nonzero(read == sign)) for sign in signs)


def _decoded(data: bytes, constants: bool, unique_keys: bool, unwritable: bool) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ForeignTextError(f"is not JSON: byte {error.start + 1} is not UTF-8") from None
    try:
        hook = _unique if unique_keys else None
        value = json.loads(text, parse_constant=None if constants else _refused, object_pairs_hook=hook)
    except json.JSONDecodeError as error:
        raise ForeignTextError(f"is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    except ForeignTextError:
        raise
    except ValueError:  # the interpreter limits the digits of an integer that it converts
        raise _too_long() from None
    if not unwritable:
        _check_values(value, text)
    return value


def _refused(name: str) -> Any:
    raise ForeignTextError(f"is not JSON: {name} is not one of its numbers")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    key = repeated_key(pairs)
    if key is not None:
        raise ForeignTextError(f"is not JSON: the key {key[:80]!r} occurs twice in one object")
    return dict(pairs)


def repeated_key(pairs: list[tuple[str, Any]]) -> str | None:
    """The first key that occurs twice among the pairs of an object; a dictionary would lose one of its values."""
    seen: set[str] = set()
    if len(dict(pairs)) < len(pairs):
        for key, _ in pairs:
            if key in seen:
                return key
            seen.add(key)
    return None


def _too_long() -> ForeignTextError:
    return ForeignTextError(f"has an integer of more than {MAX_DIGITS} digits", is_limit=True)


def _too_deep() -> ForeignTextError:
    return ForeignTextError(f"is nested more than {MAX_DEPTH} deep", is_limit=True)


def _check_values(value: Any, text: str) -> None:
    """Refuse an integer that is too long, and a string with half of a surrogate pair."""
    if _has_long_integer(value, text):
        raise _too_long()
    if ESCAPED_SURROGATE.search(text) and has_surrogate(value):
        problem = "has a \\u escape that is half of a surrogate pair without the other half"
        raise ForeignTextError(problem, is_limit=True)


def check_depth(value: Any, brackets: int) -> None:
    """Check the nesting of a value whose text has so many opening brackets.

    Raises:
        ForeignTextError: it is too deep.
    """
    if brackets <= MAX_DEPTH:
        return
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent) if isinstance(child, dict | list)]
        if not level:
            return
    raise _too_deep()


def _children(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []


def _has_long_integer(value: Any, text: str) -> bool:
    """Whether the value of `text` has an integer of more than `MAX_DIGITS` digits."""
    waiting, most = [value] if _LONG_INTEGER.search(text) else [], 10**MAX_DIGITS
    while waiting:
        item = waiting.pop()
        if type(item) is int and abs(item) >= most:
            return True
        waiting += _children(item)
    return False


def has_surrogate(value: Any) -> bool:
    """Whether a string of a JSON value cannot be encoded."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def read_json_file(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        OSError: it cannot be read.
        ForeignTextError: as `read_json` and `file_content`.
    """
    return read_json(file_content(path))


def file_content(path: Path) -> bytes:
    """The content of a file of at most `MAX_FILE_BYTES`.

    Raises:
        OSError: it cannot be read.
        ForeignTextError: it is larger.
    """
    with path.open("rb") as stream:
        data = stream.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ForeignTextError(f"is larger than {MAX_FILE_BYTES >> 20} MiB", is_limit=True)
    return data


def read_toml(data: bytes) -> dict[str, Any]:
    """The table of a TOML text in UTF-8.

    Raises:
        ForeignTextError: it is not TOML, or past a limit as in `read_json`.
    """
    try:
        text = data.decode()
        table = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ForeignTextError(f"is not valid TOML: {error}") from None
    except ValueError:
        raise _too_long() from None
    if _has_long_integer(table, text):
        raise _too_long()
    check_depth(table, text.count("[") + text.count("{") + text.count("."))
    return table


Kinds = Mapping[str, type | tuple[type, ...]]
"""Key -> type, or types, of its value; `NoneType` among them: the key may be absent."""


def typed(value: Any, kinds: Kinds) -> dict[str, Any]:
    """An object whose keys that are used have the types that they need; booleans are not integers.

    Raises:
        ForeignTextError: it is not an object, lacks a key, or has one of another type.
    """
    if not isinstance(value, dict):
        raise ForeignTextError(f"must hold an object, and holds {json_type(value)}")
    for key, kind in kinds.items():
        allowed = kind if isinstance(kind, tuple) else (kind,)
        if type(value.get(key)) not in allowed:
            wanted = " or ".join(_NAMES.get(each, each.__name__) for each in allowed if each is not NoneType)
            problem = f"has {json_type(value[key])}" if key in value else "has nothing"
            raise ForeignTextError(f"{problem} as `{key}`, which must be {wanted}")
    return value


_NAMES: Final[Mapping[type, str]] = {
    str: "a string", int: "an integer", float: "a number", bool: "true or false", dict: "an object", list: "a list",
}  # fmt: skip
