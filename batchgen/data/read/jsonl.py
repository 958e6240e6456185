r"""Rows of JSON lines and plain text files. One line is one row; a bad line is an error row, never an exception.

Lines end at b"\n" only: U+2028 and similar are ordinary characters inside a JSON string.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO

import orjson

from batchgen.data.read.streams import DamagedStream
from batchgen.errors import ErrorCode, ErrorInfo, RowError
from batchgen.request.printable import printable
from batchgen.request.raw_row import RawRow
from batchgen.request.row_ids import readable_id

MAX_LINE_BYTES = 1 << 28
"""Longest line in bytes; a longer one is an error row, so that a file without line ends does not fill the memory."""

MAX_DEPTH = 200
"""Deepest nesting of arrays and objects, below the limit of every JSON writer used later."""

_MAX_PATH = 200
"""Most characters of a place in a row that an error names."""
_BLANK = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

RowFilter = Callable[[int], bool]
"""Predicate of row indexes: rows that are not wanted are counted, but not parsed."""


class _StrictJSONError(ValueError):
    """JSON that Python's decoder accepts and batchgen does not."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _StrictJSONError(f"the key {key[:80]!r} occurs twice in one object")
            seen.add(key)
    return result


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
    """Where the first number is that is not finite, as in `body.logit_bias.5` or `scores[2]`."""
    try:
        open_values: list[tuple[str, Iterator[tuple[str, Any]]]] = [("", iter([("", json.loads(text))]))]
    except (ValueError, RecursionError):  # JSON that has further faults
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
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_INTEGER = b"0" * 19
"""Found in an integer of more than 64 bits after every digit is replaced by zero."""


def parse_json_object(line: bytes) -> dict[str, Any]:
    """Object in one line of JSON, parsed strictly.

    Raises:
        RowError: `invalid_json` for anything but one object with unique keys and finite numbers, nested at most
            `MAX_DEPTH` deep; `invalid_unicode` for bytes that are not UTF-8 and for lone surrogates.
    """
    value = _parse_quickly(line)
    return _parse_strictly(line) if value is None else value


def _parse_quickly(line: bytes) -> dict[str, Any] | None:
    """Result of `_parse_strictly` for a line that a fast check finds valid; None for any other line, valid or not.

    To find repeated keys the value is serialised again and the colons counted: a dropped key loses one. Lines with
    escaped colons are therefore left to the strict parser, and so are integers past 64 bits, which orjson reads as
    floats. orjson itself refuses lone surrogates and numbers too large for a double.
    """
    try:
        value = orjson.loads(line)
    except ValueError:
        return None
    if type(value) is not dict or line.count(b"[") + line.count(b"{") > MAX_DEPTH:
        return None
    if b"\\u003" in line or _LONG_INTEGER in line.translate(_DIGITS_TO_ZERO):
        return None
    return value if orjson.dumps(value).count(b":") == line.count(b":") else None


def _parse_strictly(line: bytes) -> dict[str, Any]:
    text = _decode(line)
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise RowError(ErrorCode.INVALID_JSON, f"column {error.colno}: {error.msg}") from None
    except _BadNumberError as error:
        raise RowError(ErrorCode.INVALID_JSON, f"{_place_of_bad_number(text)} {error}") from None
    except _StrictJSONError as error:
        raise RowError(ErrorCode.INVALID_JSON, str(error)) from None
    except RecursionError:
        raise RowError(ErrorCode.INVALID_JSON, f"nested more than {MAX_DEPTH} deep") from None
    except ValueError:
        # The interpreter limits the digits of an integer that it converts, since that takes quadratic time.
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
    """Yield (line number, line, whether it ends in a newline) for every line that is not blank.

    A line that is too long is cut to `MAX_LINE_BYTES` and the rest skipped.
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
    keep: RowFilter | None,
    parse: Callable[[bytes], dict[str, Any]],
    whole_lines_only: bool,
) -> Iterator[RawRow | None]:
    """Yield one item per row: None for a row that `keep` rejects, else the row."""
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
                failed = RawRow.failed(index, source, number, info.code, info.message)
                yield failed._replace(id=readable_id(line)) if whole_lines_only else failed
        index += 1


def _truncated(info: ErrorInfo) -> ErrorInfo:
    """Error of a last line that neither parses nor ends in a newline, most likely because the file was cut."""
    return ErrorInfo(ErrorCode.TRUNCATED_INPUT, f"the file ends inside this row ({info.message})")


def json_rows(
    stream: BinaryIO,
    source: str,
    first_index: int = 0,
    keep: RowFilter | None = None,
    text_columns: frozenset[str] = frozenset(),
) -> Iterator[RawRow | None]:
    """Rows of a JSON lines stream, one item per line that is not blank; None for a row that `keep` rejects.

    A stream that is cut ends in one `truncated_input` row. JSON has no binary values, so `text_columns` has no effect.
    """
    return _rows(stream, source, first_index, keep, parse_json_object, whole_lines_only=True)


def text_rows(
    stream: BinaryIO,
    source: str,
    first_index: int = 0,
    keep: RowFilter | None = None,
    text_columns: frozenset[str] = frozenset(),
) -> Iterator[RawRow | None]:
    """Rows of a text stream: `{"text": line}` per line that is not blank, with its spaces; as `json_rows`."""
    return _rows(stream, source, first_index, keep, _parse_text, whole_lines_only=False)


def _parse_text(line: bytes) -> dict[str, Any]:
    return {"text": _decode(line).removesuffix("\n").removesuffix("\r")}
