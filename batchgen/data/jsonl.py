r"""Lines of text files: JSON objects, or prompts. One line is one row; a bad line is an error row, never an exception.

Lines end at b"\n" and nowhere else: U+2028 and its like are ordinary characters inside a JSON string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO

import orjson

from batchgen.data.rows import RawRow
from batchgen.data.streams import DamagedStream
from batchgen.errors import ErrorCode, ErrorInfo, RowError

__all__ = ["MAX_DEPTH", "MAX_LINE_BYTES", "json_rows", "parse_json_object", "text_rows"]

MAX_LINE_BYTES = 1 << 28
"""A longer line is an error row: a file without line ends must not fill the memory."""

MAX_DEPTH = 200
"""Deepest nesting of arrays and objects: below what every JSON writer downstream can write back."""

_BLANK = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

Keep = Callable[[int], bool]
"""Whether the row with this index is wanted; others are counted and not parsed."""


class _Refused(ValueError):
    """JSON that the grammar allows and batchgen does not."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"the key {key[:80]!r} stands twice in one object")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> float:
    raise _Refused(f"{name} is not JSON")


def _finite(literal: str) -> float:
    value = float(literal)
    if value in (float("inf"), float("-inf")):
        raise _Refused("a number is too large for a double")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite)
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG = b"0" * 19
"""What an integer that takes more than 64 bits holds, once every digit is a zero."""


def parse_json_object(line: bytes) -> dict[str, Any]:
    """Parse one line strictly.

    Raises:
        RowError: `invalid_json` for anything but one object with unique keys and finite numbers, nested at most
            `MAX_DEPTH` deep; `invalid_unicode` for bytes that are not UTF-8 and for surrogates without their pair.
    """
    value = _parse_quickly(line)
    return _parse_strictly(line) if value is None else value


def _parse_quickly(line: bytes) -> dict[str, Any] | None:
    """What `_parse_strictly` gives for a line that is quickly seen to be right; None for any other, right or wrong.

    Every key has a colon behind it. Written again, in C, the value has all colons of the line, unless one went with a
    key that stood twice, or came from an escape. What reads it takes neither half a surrogate pair nor a number that is
    too large for a double; of integers those past 64 bits would become one.
    """
    try:
        value = orjson.loads(line)
    except ValueError:
        return None
    if type(value) is not dict or line.count(b"[") + line.count(b"{") > MAX_DEPTH:
        return None
    if b"\\u003" in line or _LONG in line.translate(_DIGITS):
        return None
    return value if orjson.dumps(value).count(b":") == line.count(b":") else None


def _parse_strictly(line: bytes) -> dict[str, Any]:
    text = _decode(line)
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise RowError(ErrorCode.INVALID_JSON, f"column {error.colno}: {error.msg}") from None
    except _Refused as error:
        raise RowError(ErrorCode.INVALID_JSON, str(error)) from None
    except RecursionError:
        raise RowError(ErrorCode.INVALID_JSON, f"nested more than {MAX_DEPTH} deep") from None
    except ValueError:
        # The interpreter bounds the digits of an integer it converts, against quadratic time.
        raise RowError(ErrorCode.INVALID_JSON, "an integer has too many digits") from None
    if type(value) is not dict:
        raise RowError(ErrorCode.INVALID_JSON, f"expected a JSON object, got {_json_type(value)}")
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and _deeper_than(value, MAX_DEPTH):
        raise RowError(ErrorCode.INVALID_JSON, f"nested more than {MAX_DEPTH} deep")
    if _SURROGATE.search(text) and _has_surrogate(value):
        raise RowError(ErrorCode.INVALID_UNICODE, "a \\u escape is half of a surrogate pair without the other half")
    return value


def _decode(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise RowError(ErrorCode.INVALID_UNICODE, f"byte {error.start + 1} of the line is not UTF-8") from None


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _deeper_than(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent if isinstance(parent, list) else ())
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _has_surrogate(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (line number, line, whether it ends in a line end) for every line that is not blank.

    A line too long to hold comes cut to `MAX_LINE_BYTES`, its remainder skipped.
    """
    for number, line in enumerate(iter(partial(stream.readline, MAX_LINE_BYTES), b""), start=1):
        ended = line.endswith(b"\n")
        if not ended and len(line) == MAX_LINE_BYTES:
            for rest in iter(partial(stream.readline, MAX_LINE_BYTES), b""):
                if rest.endswith(b"\n"):
                    break
        content = line.removeprefix(_BOM) if number == 1 else line
        if content.strip(_BLANK):
            yield number, content, ended


def _rows(
    stream: BinaryIO,
    source: str,
    first_index: int,
    keep: Keep | None,
    parse: Callable[[bytes], dict[str, Any]],
    whole_lines_only: bool,
) -> Iterator[RawRow | None]:
    """Yield one item per row: None for a row that `keep` does not want, else the row."""
    index, number = first_index, 0
    lines = _lines(stream)
    while True:
        try:
            number, line, ended = next(lines)
        except StopIteration:
            return
        except DamagedStream as damage:
            problem = f"{damage}; rows from here on are missing"
            wanted = keep is None or keep(index)
            yield RawRow.failed(index, source, number + 1, ErrorCode.TRUNCATED_INPUT, problem) if wanted else None
            return
        if keep is not None and not keep(index):
            yield None
        elif len(line) >= MAX_LINE_BYTES:
            problem = f"the line is longer than {MAX_LINE_BYTES >> 20} MiB"
            yield RawRow.failed(index, source, number, ErrorCode.INVALID_JSON, problem)
        else:
            try:
                yield RawRow(index, source, number, parse(line))
            except RowError as error:
                info = error.info if ended or not whole_lines_only else _truncated(error.info)
                yield RawRow.failed(index, source, number, info.code, info.message)
        index += 1


def _truncated(info: ErrorInfo) -> ErrorInfo:
    """A last line without a line end that does not parse is most likely the rest of a copy that was cut."""
    return ErrorInfo(ErrorCode.TRUNCATED_INPUT, f"the file ends inside this row ({info.message})")


def json_rows(stream: BinaryIO, source: str, first_index: int = 0, keep: Keep | None = None) -> Iterator[RawRow | None]:
    """Rows of a JSON lines stream, one item per line that is not blank; None for a row that `keep` does not want.

    A stream cut short ends in one `truncated_input` row.
    """
    return _rows(stream, source, first_index, keep, parse_json_object, whole_lines_only=True)


def text_rows(stream: BinaryIO, source: str, first_index: int = 0, keep: Keep | None = None) -> Iterator[RawRow | None]:
    """Rows of a text stream, `{"text": line}` per line that is not blank, spaces kept."""
    return _rows(stream, source, first_index, keep, _parse_text, whole_lines_only=False)


def _parse_text(line: bytes) -> dict[str, Any]:
    return {"text": _decode(line).removesuffix("\n").removesuffix("\r")}
