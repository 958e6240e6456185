"""Every small pattern and schema: the texts that a grammar allows, against `re` and `jsonschema`.

The normal run takes a sample; `-m slow` takes all and prints the figures (`-s`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import jsonschema
import pytest

from batchgen.errors import RowError
from batchgen.text.grammar.schemas.validation import Schema
from tests.text.grammar.walk import compile_pattern, compile_schema

REPEATS = ("", "*", "+", "?", "{2}", "{1,2}", "{,1}", "{2,}")
UNITS = tuple(atom + repeat for atom in ("a", "b", "[ab]", "[^a]", "(?:a|b0)") for repeat in REPEATS)
ANCHORS = (("", ""), ("^", "$"), ("^", ""), ("", "$"))
LETTERS = "ab0"
LONGEST = 4
TEXTS = ["".join(letters) for length in range(LONGEST + 1) for letters in product(LETTERS, repeat=length)]


def small_patterns() -> Iterator[str]:
    """Two repeated units, one after the other or one of them, repeated again."""
    for first, second, between, outer in product(UNITS, UNITS, ("", "|"), REPEATS):
        yield f"(?:{first}{between}{second}){outer}"


def check_patterns(patterns: list[str], *, in_schema: bool) -> Counter[str]:
    """Compare the texts of each pattern's grammar with those that `re` matches."""
    counts: Counter[str] = Counter()
    for number, pattern in enumerate(patterns):
        begin, end = ANCHORS[number % len(ANCHORS)] if in_schema else ("", "")
        whole = re.compile(pattern)
        if in_schema:
            is_open = bool(begin) != bool(end)
            whole = re.compile(".*" * (is_open and not begin) + pattern + ".*" * (is_open and not end))
            grammar = compile_schema({"type": "string", "pattern": f"{begin}{pattern}{end}"})
            found = {json.loads(text) for text in grammar.texts('ab0"', LONGEST + 2)}
            searched = re.compile(f"{begin}{pattern}{end}")
            assert all(searched.search(text) for text in found), pattern
        else:
            found = set(compile_pattern(pattern).texts(LETTERS, LONGEST))
        assert found == {text for text in TEXTS if whole.fullmatch(text)}, (begin, pattern, end)
        counts.update(patterns=1, texts=len(found))
    return counts


@pytest.mark.parametrize("in_schema", [False, True])
def test_a_sample_of_small_patterns(in_schema: bool) -> None:
    assert check_patterns(list(small_patterns())[:: 151 if in_schema else 101], in_schema=in_schema)["texts"] > 1000


@pytest.mark.slow
@pytest.mark.parametrize("in_schema", [False, True])
def test_all_small_patterns(in_schema: bool) -> None:
    counts = check_patterns(list(small_patterns()), in_schema=in_schema)
    print(f"\npatterns, in_schema={in_schema}: {dict(counts)}")
    assert counts["patterns"] >= 20_000


LEAVES: tuple[dict[str, Any], ...] = (
    {"type": "integer"},
    {"type": "integer", "minimum": -2, "maximum": 12},
    {"type": "integer", "multipleOf": 5},
    {"type": "integer", "exclusiveMinimum": 0, "multipleOf": 2},
    {"type": "number", "maximum": 2.5},
    {"type": "number", "minimum": 0, "multipleOf": 0.5},
    {"minimum": 1},
    {"type": "string", "maxLength": 2},
    {"type": "string", "minLength": 1, "pattern": "^a"},
    {"type": "string", "pattern": "^[ab]{1,3}$", "maxLength": 2},
    {"type": "string", "pattern": "b$"},
    {"pattern": "^(?:a|b0)?$"},
    {"type": "string", "format": "date"},
    {"type": ["string", "null"], "maxLength": 1},
    {"type": "boolean"},
    {"enum": ["a", 5, None, [1]]},
    {"const": {"a": 1}},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": {"const": 1}, "minItems": 1},
    {"type": "array", "uniqueItems": True, "maxItems": 1},
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]},
    {"properties": {"b": {"type": "null"}}, "required": ["b"]},
    {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 1},
    {"type": "object", "properties": {"b": {"type": "string"}}, "additionalProperties": False},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
    {"type": "object", "propertyNames": {"maxLength": 1}},
    {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 5}]},
    {"type": "object", "required": ["a"], "minProperties": 1},
    {},
)
JSON_LETTERS = '"}],: {[ab0125-.nultrefs'
LONGEST_JSON = 12


def small_schemas() -> Iterator[dict[str, Any]]:
    """Two leaves of `LEAVES`, put together in each way that schemas have."""
    for x, y in product(LEAVES, LEAVES):
        yield {"allOf": [x, y]}
        yield {**x, "anyOf": [y, {"type": "integer", "maximum": 1}]}
        yield {"$ref": "#/$defs/x", **y, "$defs": {"x": x}}
        yield {"oneOf": [x, y]}
        yield {"type": "array", "prefixItems": [x], "items": y, "minItems": 1}
        yield {"type": "object", "properties": {"a": x, "b": y}, "required": ["b"]}
        yield {**x, **y}


def check_schemas(schemas: list[dict[str, Any]]) -> Counter[str]:
    """Check that every text found is valid, and that the second opinion says so; count by compiler or refusal."""
    counts: Counter[str] = Counter()
    for schema in schemas:
        try:
            grammar = compile_schema(schema)
        except RowError as error:
            counts[error.info.code] += 1
            continue
        counts[grammar.backend] += 1
        validator = jsonschema.Draft202012Validator(schema)
        second = Schema.parse(json.dumps(schema), "json_schema")
        found = list(grammar.texts(JSON_LETTERS, LONGEST_JSON, most=12))
        drawn = (grammar.random_text(seed, steps=30) for seed in range(3))
        for text in {*found, *(text.decode(errors="replace") for text in drawn if text is not None)}:
            assert validator.is_valid(json.loads(text)), (schema, grammar.backend, text)
            assert second.satisfied_by(text) is True, (schema, grammar.backend, text)
            counts["texts"] += 1
    return counts


def test_a_sample_of_small_schemas() -> None:
    counts = check_schemas(list(small_schemas())[::83])
    assert min(counts["xgrammar"], counts["llguidance"], counts["texts"] // 5) > 10


@pytest.mark.slow
def test_all_small_schemas() -> None:
    schemas = list(small_schemas())
    assert len(schemas) >= 5_000
    print(f"\nschemas: {len(schemas)} {dict(check_schemas(schemas))}")
