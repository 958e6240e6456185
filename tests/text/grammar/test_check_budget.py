"""Checks of finished texts end: a verdict within the budget, None beyond it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchgen.text.grammar.kinds import KINDS
from batchgen.text.grammar.schemas import validation
from batchgen.text.grammar.schemas.validation import CHECK_SECONDS, Schema

pytestmark = pytest.mark.field("json_schema", "regex")


def nested(depth: int) -> dict[str, Any]:
    """Alternatives that are tried twice at each level."""
    parts = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(depth)}
    return {"$defs": {**parts, f"a{depth}": {"type": "string"}}, "$ref": "#/$defs/a0"}


PATTERN, TEXT = "^[ab]+[ab]+[ab]+[cd]$", "a" * 1000
"""A pattern whose search in the text takes some milliseconds."""
MANY: dict[str, tuple[Any, Any]] = {
    "anyOf of $refs": (nested(6), 1),
    "oneOf": (json.loads(json.dumps(nested(6)).replace("anyOf", "oneOf")), "text"),
    "not": (json.loads(json.dumps(nested(6)).replace("anyOf", "allOf")), "text"),
    "enum": ({"items": {"enum": list(range(1000))}}, [999] * 4),
    "many items": ({"items": {"type": "integer", "minimum": 0}}, list(range(100))),
}
"""Name -> schema and value whose check takes more than 100 steps."""
SLOW: dict[str, tuple[Any, Any]] = {
    "pattern": ({"pattern": PATTERN}, TEXT),
    "patternProperties": ({"patternProperties": {PATTERN: False}}, {TEXT: 1}),
    "many patterns": ({"items": {"not": {"pattern": PATTERN}}}, [TEXT + str(number) for number in range(5)]),
}
"""Name -> schema and value whose check takes some milliseconds."""


@pytest.mark.parametrize("name", [*MANY, *SLOW])
def test_a_check_that_takes_too_long_gives_no_verdict(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schema, value = {**MANY, **SLOW}[name]
    check = Schema(schema)
    assert check.satisfied_by(json.dumps(value)) is not None
    monkeypatch.setattr(validation, *(("CHECK_STEPS", 100) if name in MANY else ("CHECK_SECONDS", 1e-4)))
    assert check.satisfied_by(json.dumps(value)) is None
    assert CHECK_SECONDS < 1.0, "the limit of a run"


DRAFTS = [f"http://json-schema.org/draft-0{number}/schema#" for number in (4, 6, 7)] + [
    "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
]


@pytest.mark.parametrize("draft", DRAFTS)
def test_parts_that_declare_a_draft_are_checked_as_the_whole(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"$schema": draft, "multipleOf": 0.1, "pattern": PATTERN, "items": {"$ref": "#"}}
    for schema in (part, {"items": part}, {"items": {"$schema": DRAFTS[-1], "not": {"not": part}}}):
        check = Schema(schema)
        found = [check.satisfied_by(json.dumps([value])) for value in (0.3, "aaac", 0.35, TEXT)]
        assert found == [True, True, False, False], schema
        with monkeypatch.context() as limited:
            limited.setattr(validation, "CHECK_SECONDS", 1e-4)
            assert check.satisfied_by(json.dumps([TEXT])) is None


def test_a_pattern_that_takes_too_long_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    check = KINDS["regex"].check
    assert check is not None
    assert [check(PATTERN)(text) for text in ("aaac", TEXT)] == [True, False]
    monkeypatch.setattr(validation, "CHECK_SECONDS", 1e-4)
    assert check(PATTERN)(TEXT) is None


def test_the_steps_end_at_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema({"properties": {"a": {"type": "integer"}, "b": {"minimum": 1}}})
    monkeypatch.setattr(validation, "CHECK_STEPS", 3)
    assert schema.satisfied_by('{"a": 1, "b": 2}') is True
    assert schema.satisfied_by('{"a": 1, "b": 0}') is False
    monkeypatch.setattr(validation, "CHECK_STEPS", 2)
    assert schema.satisfied_by('{"a": 1, "b": 2}') is None


UNUSUAL: dict[str, tuple[str, dict[str, Any], bool | None]] = {
    "half a pair, a string": (r'"\ud83d"', {"type": "string", "maxLength": 1}, True),
    "half a pair, no integer": (r'"\ud83d"', {"type": "integer"}, False),
    "half a pair, no match": (r'"\ud83d"', {"pattern": "a"}, False),
    "half a pair, no address": (r'"a@\ud83d.de"', {"format": "email"}, False),
    "half a pair, twice": (r'["\ud83d", "\ud83d"]', {"uniqueItems": True}, False),
    "half a pair, a key": (r'{"\ud83d": 1}', {"propertyNames": {"maxLength": 1}}, True),
    "long integer": ("1" * 301, {"type": "integer", "minimum": 0.5}, True),
    "long integer, too large": ("1" * 4300, {"type": "integer", "maximum": 1e300}, False),
    "long integer, a multiple": ("1" * 400 + "0", {"multipleOf": 0.1}, True),
    "longer integer": ("1" * 4301, {"type": "integer"}, None),
    "deep": ("[" * 201 + "]" * 201, {"type": "array"}, None),
    "unfinished": ("[" * 150, {"type": "integer"}, False),
}
"""Name -> text, schema and verdict."""


@pytest.mark.parametrize(("text", "schema", "verdict"), UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_values_are_judged_as_far_as_they_can_be_read(
    text: str, schema: dict[str, Any], verdict: bool | None
) -> None:
    assert Schema(schema).satisfied_by(text) is verdict


def test_unique_items_are_found_in_time_that_grows_with_their_number() -> None:
    schema = Schema({"uniqueItems": True})
    many = [{"a": [number, str(number)]} for number in range(20_000)]
    assert schema.satisfied_by(json.dumps(many)) is True
    assert schema.satisfied_by(json.dumps([*many, many[0]])) is False
    for value, unique in (([1, True], True), ([1, 1.0], False), ([[1], {"1": 1}, "1", None, 0, False], True)):
        assert schema.satisfied_by(json.dumps(value)) is unique, value
