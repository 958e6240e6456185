"""Numbers under a schema have at most 20 digits in a row, and every double and 64-bit integer can be written."""

from __future__ import annotations

import json
import struct
from random import Random
from typing import Any

import pytest

from batchgen.text.grammar.schemas.validation import Schema
from tests.cases import each
from tests.text.grammar.walk import Walk, compile_constraint_of, compile_schema

MOST = 20
PART = {"title": "a part, which only llguidance combines with others"}


def tag_of(schema: Any, **options: Any) -> Walk:
    return compile_constraint_of(
        "structural_tag", json.dumps({"format": {"type": "json_schema", "json_schema": schema, **options}})
    )


NUMBERS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"type": "integer"}, "", "", "9223372036854775807"),
    ({"type": "integer", "minimum": 3}, "", "", "9223372036854775807"),
    ({"type": "integer", "maximum": -3}, "-", "", "-9223372036854775808"),
    ({"type": "integer", "minimum": -(10**12)}, "", "", "9223372036854775807"),
    ({"type": "number"}, "", "", "1.7976931348623157e+308"),
    ({"type": "number"}, "-0.", "", "-5e-324"),
    ({"type": "number"}, "1e", "", "2.2250738585072014e-308"),
    ({"type": "number"}, "1.5E-", "", "0.00012345678901234567"),
    ({"type": "number", "minimum": 0}, "", "", "12.5"),
    ({"type": "number", "exclusiveMaximum": 2.5}, "-", "", "2.4"),
    ({"type": ["integer", "null"]}, "", "", "null"),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "", "", '"111111111111111111111111111111"'),
    ({"type": "array", "items": {"type": "integer"}}, "[1, ", "]", "[]"),
    ({"type": "object", "properties": {"[0-9]*": {"type": "number"}}}, '{"[0-9]*": ', "}", "{}"),
    ({"type": "object"}, '{"a": [null, ', "]}", '{"a": "111111111111111111111111111111"}'),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, "-", "", "18446744073709551615"),
    ({}, "", "", '"\\"111111111111111111111111111111"'),
    (
        {
            "type": "array",
            "prefixItems": [{"type": "string", "pattern": "^[0-9]+$"}, {"type": "integer"}],
            "minItems": 2,
        },
        '["1", ',
        "]",
        '["111111111111111111111111111111", 1]',
    ),
]
"""(schema, text before digits, text after them, another text)"""


@each("form", ["xgrammar", "llguidance", "tag"])
@each("schema, before, after, other", NUMBERS)
def test_a_number_ends_after_so_many_digits(
    schema: dict[str, Any], before: str, after: str, other: str, form: str
) -> None:
    if form == "tag":
        grammar = tag_of(schema)
    else:
        grammar = compile_schema(schema if form == "xgrammar" else {"allOf": [schema, PART], **_defs(schema)})
        assert grammar.backend == form
    longest, longer = (f"{before}{'7' * count}{after}" for count in (MOST, MOST + 1))
    assert (grammar.accepts(longest), grammar.accepts(longer)) == (True, False)
    assert grammar.accepts(other)
    assert Schema.parse(json.dumps(schema), "json_schema").satisfied_by(longest) is True


def _defs(schema: dict[str, Any]) -> dict[str, Any]:
    return {"$defs": schema["$defs"]} if "$defs" in schema else {}


@pytest.mark.parametrize("style", ["qwen_xml", "glm_xml"])
def test_a_number_of_a_tool_call_ends(style: str) -> None:
    grammar = tag_of({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, style=style)
    before, after = {
        "qwen_xml": ("<parameter=a>", "</parameter>"),
        "glm_xml": ("<arg_key>a</arg_key><arg_value>", "</arg_value>"),
    }[style]
    assert [grammar.accepts(f"{before}{'7' * count}{after}") for count in (1, MOST, MOST + 1)] == [True, True, False]


@pytest.mark.parametrize("schema", [{"type": "number"}, {}, {"allOf": [{"type": "number"}, PART]}], ids=str)
def test_every_double_and_integer_can_be_written(schema: dict[str, Any]) -> None:
    grammar, rng = compile_schema(schema), Random(0)
    for _ in range(300):
        bits = rng.getrandbits(64)
        double = struct.unpack("<d", struct.pack("<Q", bits))[0]
        scaled = (0.5 + rng.random()) * 10.0 ** rng.randint(-8, 22)
        for text in (repr(double), repr(scaled), format(scaled, ".17g"), str(bits), str(bits - 2**63)):
            if "n" not in text:  # infinite, or not a number
                assert grammar.accepts(text), text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer"},
        {"type": "number"},
        {"type": "number", "minimum": 0},
        {"type": "integer", "multipleOf": 7},
        {"type": "number", "multipleOf": 0.05},
        {"type": "integer", "multipleOf": 6, "minimum": 5},
        {"allOf": [{"type": "number"}, PART]},
        {"type": "array", "items": {"type": "number"}, "maxItems": 2},
    ],
    ids=str,
)
def test_a_model_that_prefers_digits_comes_to_an_end(schema: dict[str, Any]) -> None:
    grammar = compile_schema(schema)
    for digit in "079":
        assert len(grammar.text_of_preferred(digit + "].e+-[, 123456789", most=200)) < 200
