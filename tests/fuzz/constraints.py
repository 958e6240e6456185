"""Fuzzers of constraints: `[field, value]` with schemas, patterns (those of stops too), grammars, tags and choices.

A constraint is refused, or compiled in the helper process; a text that it lets the model finish satisfies it.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from random import Random
from typing import Any

from batchgen.errors import ErrorCode, RowError
from batchgen.request.rows.parser import parse_row
from batchgen.request.rows.values import RowDefaults
from tests.fuzz.fuzzer import MAX_BYTES, Fuzzer
from tests.fuzz.jobs import engine
from tests.fuzz.mutations import TEXTS, any_value, dump, load, mutate_bytes, mutate_value
from tests.fuzz.parsing import check_error, require

_REFUSALS = {
    ErrorCode.INVALID_GRAMMAR, ErrorCode.UNSUPPORTED_SCHEMA_KEYWORD, ErrorCode.INVALID_FIELD, ErrorCode.GRAMMAR_ERROR,
    ErrorCode.UNSUPPORTED_FIELD, ErrorCode.INVALID_UNICODE,
}  # fmt: skip
_SCHEMA_WORDS = (
    "type", "properties", "required", "items", "prefixItems", "anyOf", "oneOf", "allOf", "not", "if", "then", "else",
    "enum", "const",
    "pattern", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "format", "$ref",
    "$defs", "definitions", "#/$defs/a", "#/$defs/b", "#", "additionalProperties", "patternProperties", "propertyNames",
    "minItems",
    "maxItems", "uniqueItems", "minProperties", "maxProperties", "contains", "dependentRequired",
    "unevaluatedProperties", "$schema",
    "$id", "$anchor", "title", "description", "default", "object", "string", "integer", "number", "boolean", "null",
    "array", "a", "b",
    "date", "date-time", "email", "uuid", "ipv4", "uri", "regex", "[0-9]+", "^a+$", "(a|b)*", "nullable",
)  # fmt: skip
_PATTERN_WORDS = tuple(
    word.encode()
    for word in (
        "(", ")", "[", "]", "{", "}", "|", "*", "+", "?", "^", "$", ".", "\\", "\\d", "\\w", "\\s", "\\b", "\\B", "\\A",
        "\\Z", "\\1", "\\g<1>", "(?:",
        "(?=", "(?!", "(?<=", "(?<!", "(?P<a>", "(?P=a)", "(?i)", "(?s:", "(?>", "(?R)", "(?1)", "(?(1)a|b)", "[^",
        "[a-z]", "[z-a]", "[[:alpha:]]",
        "{2}", "{2,}", "{,3}", "{1000}", "*?", "++", "(a|b)*", "(a|ab)+$", "\\p{L}", "\\x41",
        "\\u00e9", "\\U0001F600", "\\N{DASH}",
        "é", "日", "😀", "\n", "a", "ab", "(?r)", "(?e)(a){e<=1}", "\\K", "\\G", "\\X", "\\R",
    )
)  # fmt: skip
_GRAMMAR_WORDS = tuple(
    word.encode()
    for word in (
        "root ::= ", "a ::= ", "b ::= ", "root", " a", " b", '"x"', '""', '"\\n"', "[a-z]", "[^a]", "|", "*", "+", "?",
        "(", ")", "{2,3}", "{,5}", "\n", "#",
        "(=", "Regex(", "TagDispatch(", '"\\u00e9"', '"\\xff"', '"', "[", "]", "é", "::=", "{1000}", "lookahead",
    )
)  # fmt: skip
_TAG_WORDS = (
    "type", "format", "structural_tag", "begin", "end", "content", "tag", "tags", "triggers", "triggered_tags",
    "sequence", "elements",
    "or", "any_text", "const_string", "value", "json_schema", "regex", "pattern", "grammar", "<a>", "</a>",
    "structures", "schema",
    "at_least_one", "stop_after_first", "tags_with_separator", "separator", "qwen_xml_parameter", "excludes", "token",
)  # fmt: skip
_SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]},
    {"type": "array", "items": {"type": "number", "minimum": 0}, "maxItems": 3},
    {"enum": ["a", 1, None, {"b": []}]},
    {
        "$defs": {"a": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/a"}}]}},
        "$ref": "#/$defs/a",
    },
    {"type": "string", "pattern": "^a+[0-9]{2}$"},
    {"allOf": [{"type": "object"}, {"properties": {"a": {"const": "b"}}, "additionalProperties": False}]},
    {"type": ["string", "null"], "format": "date"},
)
_PATTERNS = ("a+", "[0-9]{4}-[0-9]{2}", "(yes|no)", "(a|b)*c", "\\w+@\\w+", "^[^\\n]*$", "é+|日")
_GRAMMARS = ('root ::= "a" | "b"', 'root ::= a*\na ::= [a-z] | b\nb ::= "(" a ")"', 'root ::= "x"{2,3}')
_TAGS: tuple[Any, ...] = (
    {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"},
    },
    {
        "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}],
        "triggers": ["<a"],
    },
    {"type": "structural_tag", "format": {"type": "sequence", "elements": [{"type": "const_string", "value": "a"}]}},
)


def _row(data: bytes) -> dict[str, Any] | None:
    try:
        found = load(data)
    except ValueError:
        return None
    if type(found) is not list or len(found) != 2 or type(found[0]) is not str:
        return None
    return {"text": "a", "max_new_tokens": 24, "temperature": 1, "seed": 1, "top_k": -1, found[0]: found[1]}


def _check(data: bytes) -> Hashable:
    row = _row(data)
    if row is None:
        return None
    try:
        parse_row(row, 0, RowDefaults())
    except RowError as error:
        check_error(error.info)
        return error.info.code
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (done,) = engine().generate([row])
    if done.error is not None:
        check_error(done.error)
        require(done.error.code in _REFUSALS, "a constraint is refused as such:", done.error)
        return done.error.code, done.error.message[:40]
    finished = done.finish_reason == "stop" and done.stop_kind in ("eos", "grammar")
    require(
        done.constraint_ok is not False or not finished, "a finished text satisfies its constraint:", (row, done.text)
    )
    return done.finish_reason, done.constraint_ok


def _make_schema(rng: Random) -> bytes:
    return dump(["json_schema", rng.choice(_SCHEMAS)])


def _make_pattern(rng: Random) -> bytes:
    return dump([rng.choice(("regex", "regex", "stop_regex")), rng.choice(_PATTERNS)])


def _make_grammar(rng: Random) -> bytes:
    field = rng.choice(("ebnf", "ebnf", "structural_tag", "choice", "response_format"))
    by_field: dict[str, Any] = {
        "ebnf": rng.choice(_GRAMMARS),
        "structural_tag": rng.choice(_TAGS),
        "choice": [rng.choice(TEXTS) for _ in range(rng.randint(1, 4))],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": rng.choice(_SCHEMAS)}},
    }
    return dump([field, by_field[field]])


def _mutate_schema(data: bytes, rng: Random) -> bytes:
    row = load_pair(data)
    if row is None:
        return _make_schema(rng)
    field, value = row
    if type(value) is str or rng.random() < 0.02:
        value = any_value(rng, _SCHEMA_WORDS, 4)
    for _ in range(rng.choice((1, 1, 2, 4))):
        value = mutate_value(value, rng, _SCHEMA_WORDS)
    return dump([field, value])[:MAX_BYTES]


def _mutate_pattern(data: bytes, rng: Random) -> bytes:
    row = load_pair(data)
    if row is None or type(row[1]) is not str:
        return _make_pattern(rng)
    text = mutate_bytes(row[1].encode("utf-8", "replace"), rng, _PATTERN_WORDS).decode("utf-8", "replace")
    return dump([row[0], text])[:MAX_BYTES]


def _mutate_grammar(data: bytes, rng: Random) -> bytes:
    row = load_pair(data)
    if row is None:
        return _make_grammar(rng)
    field, value = row
    if type(value) is str:
        value = mutate_bytes(value.encode("utf-8", "replace"), rng, _GRAMMAR_WORDS).decode("utf-8", "replace")
    else:
        value = mutate_value(value, rng, _TAG_WORDS if field == "structural_tag" else _SCHEMA_WORDS)
    return dump([field, value])[:MAX_BYTES]


def load_pair(data: bytes) -> tuple[str, Any] | None:
    """The field and value of an input; None if it has none."""
    try:
        found = load(data)
    except ValueError:
        return None
    return (found[0], found[1]) if type(found) is list and len(found) == 2 and type(found[0]) is str else None


FUZZERS = (
    Fuzzer("schemas", _check, _make_schema, _mutate_schema),
    Fuzzer("patterns", _check, _make_pattern, _mutate_pattern),
    Fuzzer("grammars", _check, _make_grammar, _mutate_grammar),
)
