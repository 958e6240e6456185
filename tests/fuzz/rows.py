"""Fuzzers of files of text: JSON lines, JSON documents, OpenAI batch lines, and CSV.

An independent, slow reading says how many rows a file has, and which lines are JSON.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from random import Random
from typing import Any

from batchgen.data.read.delimited import delimited_rows
from batchgen.data.read.jsonl import json_line_rows, json_rows
from batchgen.errors import ErrorCode, InputError
from batchgen.request.fields.declared import LOOKUP
from batchgen.request.json_text import MAX_DEPTH
from batchgen.request.rows.raw_row import RawRow
from tests.fuzz.fuzzer import MAX_BYTES, Fuzzer
from tests.fuzz.mutations import any_value, dump, load, mutate_bytes, mutate_value
from tests.fuzz.parsing import check_cached, check_error, check_row, require
from tests.rows import CHAT, COMPLETIONS, HELLO

READING = frozenset({ErrorCode.INVALID_JSON, ErrorCode.INVALID_UNICODE, ErrorCode.TRUNCATED_INPUT})
_BOM, _BLANK = b"\xef\xbb\xbf", b" \t\r\n"
_DOCUMENT = re.compile(rb"\[[ \t\r\n]*[{\]]")  # an array of rows; any other line is a row that is refused
_KEYS = (*LOOKUP["row"], "sampling_params", "note", "Temperature", "max_length")
_BODY_KEYS = (*LOOKUP["chat"], *LOOKUP["completions"], "note", "n_probs")
_LINE_KEYS = ("custom_id", "method", "url", "body", "note", "id")
_TOKENS = (
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\n", b"\r\n", b"\\", b"\\u", b"\\ud83d", b"\\ude00", b"\\u003a",
    b"null", b"true", b"false",
    b"NaN", b"-Infinity", b"1e999", b"1E400", b"-0", b"0.1", b"00", b"9" * 20, b"9" * 5000, b"[" * 200,
    b"{\"a\":" * 199, b"[" * 3000,
    b'"text": "a"', b'{"text": "a"}', b'{"a":1,"a":2}', _BOM, b"\x00", b"\xff", b"\xed\xa0\x80", b"\xe2\x80\xa8",
    b"\x0c",
    *(f'"{name}": '.encode() for name in LOOKUP["row"]),
)  # fmt: skip


def rows_of(reader: Callable[..., Any], data: bytes, codes: frozenset[ErrorCode] = READING) -> list[RawRow]:
    """What a reader makes of a file, each row with a value or an error that can be written, of one of `codes`."""
    found: list[RawRow] = list(reader(io.BytesIO(data), "in"))
    for index, row in enumerate(found):
        require(row is not None and row.index == index, "rows are counted in order:", row)
        require((row.value is None) != (row.error is None), "a row has a value or an error:", row)
        if row.error is not None:
            check_error(row.error)
            require(row.error.code in codes, "an unreadable row has a reader's error:", row)
            (row.id or "").encode()
    return found


def strict_value(line: bytes) -> Any:
    """The object in a line of JSON, by Python's own reader; None for what is refused."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    try:
        value = json.loads(line.decode(), object_pairs_hook=unique)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if type(value) is dict and _depth(value) <= MAX_DEPTH else None


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _outcome(rows: Iterable[RawRow]) -> Hashable:
    """Checks the values of rows as rows; which outcomes there are."""
    kinds: list[Hashable] = []
    for row in rows:
        kinds.append(row.error.code if row.error is not None else check_row(row.value))
    return frozenset(kinds[:2])


def check_lines(data: bytes) -> Hashable:
    rows = rows_of(json_line_rows, data)
    text = data.removeprefix(_BOM)
    if _DOCUMENT.match(text.lstrip(_BLANK)):
        return "document", _check_document(rows, text), _outcome(rows)
    found = enumerate((line.removeprefix(_BOM) for line in text.split(b"\n")), 1)
    lines = [(number, line) for number, line in found if line.strip(_BLANK)]
    require(
        [row.line for row in rows] == [number for number, _ in lines], "every line that is not blank is a row:", data
    )
    for row, (_, line) in zip(rows, lines, strict=True):
        expected = strict_value(line)
        if row.value is None:
            require(expected is None, "a line that is strict JSON is read:", line)
        else:
            require(json.dumps(row.value) == json.dumps(expected), "a value is what the line says:", line)
    return _outcome(rows)


def _check_document(rows: list[RawRow], text: bytes) -> str:
    """An array of objects has a row for each element."""
    try:
        elements = json.loads(text)
    except (ValueError, RecursionError):
        return "not JSON"
    require(len(rows) == len(elements), "every element of an array is a row:", text)
    for row, element in zip(rows, elements, strict=True):
        if type(element) is dict and row.value is not None:
            require(json.dumps(row.value) == json.dumps(element), "a value is what the element says:", element)
        elif type(element) is not dict:
            require(row.error is not None, "an element that is not an object is an error row:", element)
    return "JSON"


def check_documents(data: bytes) -> Hashable:
    rows = rows_of(json_rows, data)
    text = data.removeprefix(_BOM)
    kind = _check_document(rows, text) if text.lstrip(_BLANK)[:1] == b"[" else "objects"
    value = strict_value(text)
    if value is not None:
        require([row.value for row in rows] == [value], "one object is one row:", data)
    return kind, _outcome(rows)


def check_delimited(data: bytes) -> Hashable:
    try:
        rows = rows_of(delimited_rows, data, READING | {ErrorCode.INVALID_FIELD})  # of a cell that may be two things
    except InputError as error:
        return "input error", str(error).partition(":")[2][:20]
    return _outcome(rows)


def check_engine(reader: Callable[..., Any], data: bytes) -> Hashable:
    """As `jobs.check_engine`, which imports torch."""
    from tests.fuzz import jobs

    return jobs.check_engine(reader, data)


def check_job(name: str, data: bytes) -> Hashable:
    """As `jobs.check_job`."""
    from tests.fuzz import jobs

    return jobs.check_job(name, data)


def check_again(reader: Callable[..., Any], data: bytes) -> Hashable:
    """Rows mean the same alone, and when only some of them are wanted."""
    try:
        rows = rows_of(reader, data, READING | {ErrorCode.INVALID_FIELD})
    except InputError:
        return None
    for row in rows:
        if row.error is None:
            check_cached(row.value)
    some = list(reader(io.BytesIO(data), "in", 0, lambda index: index % 2 == 1))
    expected = [row if row.index % 2 else None for row in rows]
    require(repr(some) == repr(expected), "a row is the same when others are not wanted:", data)
    return None


def _native(rng: Random) -> dict[str, Any]:
    row: dict[str, Any] = {rng.choice(("text", "text", "text", "prompt")): rng.choice(("a", "Hello", ["a", "b"], ""))}
    if rng.random() < 0.2:
        row = {"messages": HELLO}
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        row[rng.choice(_KEYS)] = any_value(rng, _KEYS)
    return row


def _line(rng: Random) -> dict[str, Any]:
    chat = rng.random() < 0.5
    body: dict[str, Any] = (
        {"messages": HELLO} if chat else {"prompt": rng.choice(("a", ["a", "b"], [1, 2], [[1], [2]]))}
    )
    for _ in range(rng.choice((0, 1, 2, 3))):
        body[rng.choice(_BODY_KEYS)] = any_value(rng, _BODY_KEYS)
    return {"custom_id": f"r{rng.randrange(4)}", "method": "POST", "url": CHAT if chat else COMPLETIONS, "body": body}


def _make(row: Callable[[Random], dict[str, Any]], rng: Random, *, document: bool = False) -> bytes:
    texts = [dump(row(rng)) for _ in range(rng.choice((1, 1, 2, 5)))]
    return b"[" + b",\n".join(texts) + b"]" if document else b"\n".join(texts) + rng.choice((b"", b"\n", b"\r\n"))


def _mutate(words: tuple[str, ...], row: Callable[[Random], dict[str, Any]], data: bytes, rng: Random) -> bytes:
    """Change one line: as a value if it is JSON, or its bytes."""
    if rng.random() < 0.5:
        return mutate_bytes(data, rng, _TOKENS)[:MAX_BYTES]
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    try:
        lines[at] = dump(mutate_value(load(lines[at].strip(b",[] \r")), rng, words))
    except ValueError:
        lines[at] = dump(row(rng))
    if rng.random() < 0.1:
        lines.insert(at, rng.choice(lines))
    return b"\n".join(lines)[:MAX_BYTES]


_CELLS = (
    b"text",
    b"id",
    b"temperature",
    b"messages",
    b"a",
    b"1",
    b'"',
    b'""',
    b",",
    b";",
    b"\n",
    b"\r",
    b"\r\n",
    b"[1]",
    b"{",
    b"\xff",
    b"\0",
)


def _table(rng: Random) -> bytes:
    names = rng.sample(_KEYS, rng.randint(1, 4))
    rows = [
        [rng.choice(("a", "1", "true", '"x"', "[1]", '"a, b"', "", "é", '{""a"": 1}')) for _ in names]
        for _ in range(rng.randint(0, 4))
    ]
    return "\n".join(",".join(row) for row in [names, *rows]).encode()


def _fuzzer(name: str, check: Any, reader: Any, words: tuple[str, ...], row: Any, *, document: bool = False) -> Fuzzer:
    deeper = (
        (4, partial(check_again, reader)),
        (100, partial(check_engine, reader)),
        (20_000, partial(check_job, name)),
    )
    return Fuzzer(name, check, partial(_make, row, document=document), partial(_mutate, words, row), deeper)


FUZZERS = (
    _fuzzer("json-lines", check_lines, json_line_rows, _KEYS, _native),
    _fuzzer("json-documents", check_documents, json_rows, _KEYS, _native, document=True),
    _fuzzer("openai-lines", check_lines, json_line_rows, (*_BODY_KEYS, *_LINE_KEYS), _line),
    Fuzzer(
        "delimited",
        check_delimited,
        _table,
        lambda data, rng: mutate_bytes(data, rng, _CELLS)[:MAX_BYTES],
        ((4, partial(check_again, delimited_rows)), (100, partial(check_engine, delimited_rows))),
    ),
)
