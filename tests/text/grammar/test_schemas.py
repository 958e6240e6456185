"""Schemas: texts of the grammar are valid under the schema according to `jsonschema`.

Random schemas with every keyword, alone and combined, test the assumptions about what the grammar compilers enforce.
"""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

import jsonschema
import pytest

from batchgen.errors import RowError
from batchgen.text.grammar.schemas.translations import enforceable_schemas
from batchgen.text.grammar.schemas.validation import Schema
from tests.text.grammar.walk import compile_constraint_of, compile_schema

DEFS = {
    "A": {
        "type": "object",
        "properties": {
            "v": {"type": "integer", "minimum": 3},
            "n": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]},
        },
        "required": ["v"],
    },
    "B": {"type": "array", "items": {"$ref": "#/$defs/C~1d"}, "maxItems": 2},
    "C/d": {"enum": ["u", 1]},
}
PATTERNS = ["^a+$", r"^\d{2}-\w+$", "[^x]{2}", r"\S", "^(foo|bar)?$", "a|b|c", "^[é-ü]{1,3}$"]
FORMATS = ["date", "time", "date-time", "ipv4", "ipv6", "uuid", "email", "hostname", "uri", "duration", "own"]
VALUES = [1, 2.5, "a", 'é"\\\n/', None, True, [1, 2], {"a": 1, "b": [None]}, -3, "", 1e-9]
KINDS = ["object", "object", "array", "string", "integer", "number", "boolean", "null", "enum", "const"]
KINDS += ["anyOf", "oneOf", "allOf", "ref", "any"]


class SchemaGenerator:
    """Generator of random schemas."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)

    def schema(self, depth: int = 0) -> dict[str, Any]:
        rng = self.rng
        kind = rng.choice(KINDS if depth < 3 else ["string", "integer", "number", "boolean", "null", "enum", "const"])
        made: dict[str, Any] = getattr(self, f"_{kind}")(depth)
        self._maybe(made, 0.1, title=lambda: "T")
        self._maybe(made, 0.02, **{"not": lambda: {"const": 3}})
        return made

    def _maybe(self, made: dict[str, Any], chance: float, **makers: Any) -> None:
        for key, make in makers.items():
            if self.rng.random() < chance:
                made[key] = make()

    def _some(self) -> int:
        return self.rng.randint(0, 4)

    def _type(self, name: str) -> dict[str, Any]:
        return self.rng.choice([{"type": name}] * 6 + [{"type": [name, "null"]}, {"type": [name, "string"]}, {}])

    def _object(self, depth: int) -> dict[str, Any]:
        rng, made = self.rng, self._type("object")

        def sub() -> dict[str, Any]:
            return self.schema(depth + 1)

        names = rng.sample(["a", "b", "c", "dé", "x y"], rng.randint(0, 4))
        self._maybe(made, 0.7, properties=lambda: {name: sub() for name in names})
        self._maybe(made, 0.5, required=lambda: rng.sample(["a", "b", "c", "dé"], rng.randint(0, 2)))
        self._maybe(made, 0.3, additionalProperties=lambda: rng.choice([True, False, sub()]))
        self._maybe(made, 0.2, minProperties=self._some, maxProperties=self._some)
        keys = [{"pattern": "^[a-z]+$"}, {"minLength": 2}, {"enum": ["a", "zz"]}, True, {"maxLength": 3}]
        self._maybe(made, 0.15, patternProperties=lambda: {rng.choice(["^x", "[ab]", "^q+$"]): sub()})
        self._maybe(made, 0.15, propertyNames=lambda: rng.choice(keys))
        self._maybe(made, 0.1, unevaluatedProperties=lambda: rng.choice([False, sub()]))
        self._maybe(made, 0.05, dependentRequired=lambda: {"a": ["b"]})
        return made

    def _array(self, depth: int) -> dict[str, Any]:
        rng, made = self.rng, self._type("array")

        def sub() -> dict[str, Any]:
            return self.schema(depth + 1)

        self._maybe(made, 0.6, items=lambda: rng.choice([sub(), sub(), True, False]))
        prefix = [rng.choice([sub(), True]) for _ in range(rng.randint(1, 3))]
        self._maybe(made, 0.3, prefixItems=lambda: prefix, minItems=self._some, maxItems=self._some)
        self._maybe(made, 0.1, uniqueItems=lambda: rng.choice([True, False]))
        self._maybe(made, 0.1, unevaluatedItems=lambda: rng.choice([False, sub()]))
        self._maybe(made, 0.05, contains=sub)
        return made

    def _string(self, depth: int) -> dict[str, Any]:
        made = self._type("string")
        self._maybe(made, 0.25, minLength=self._some, maxLength=self._some)
        self._maybe(made, 0.2, pattern=lambda: self.rng.choice(PATTERNS))
        self._maybe(made, 0.25, format=lambda: self.rng.choice(FORMATS))
        return made

    def _numeric(self, name: str) -> dict[str, Any]:
        rng, made = self.rng, self._type(name)
        keys = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
        self._maybe(
            made, 0.25, **dict.fromkeys(keys, lambda: rng.choice([self._whole(), round(rng.uniform(-5, 5), 2)]))
        )
        self._maybe(made, 0.05, multipleOf=lambda: 2)
        return made

    def _whole(self) -> int:
        return self.rng.randint(-20, 20)

    def _integer(self, depth: int) -> dict[str, Any]:
        return self._numeric("integer")

    def _number(self, depth: int) -> dict[str, Any]:
        return self._numeric("number")

    def _boolean(self, depth: int) -> dict[str, Any]:
        return {"type": "boolean"}

    def _null(self, depth: int) -> dict[str, Any]:
        return {"type": "null"}

    def _any(self, depth: int) -> dict[str, Any]:
        return {}

    def _enum(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {"enum": self.rng.sample(VALUES, self.rng.randint(1, 5))}
        self._maybe(made, 0.3, type=lambda: self.rng.choice(["string", "integer", ["string", "null"]]))
        return made

    def _const(self, depth: int) -> dict[str, Any]:
        made = {"const": self.rng.choice(VALUES)}
        self._maybe(made, 0.1, type=lambda: "string")
        return made

    def _branches(self, key: str, depth: int, most: int) -> dict[str, Any]:
        made: dict[str, Any] = {key: [self.schema(depth + 1) for _ in range(self.rng.randint(1, most))]}
        self._maybe(made, 0.1, type=lambda: "object")
        return made

    def _anyOf(self, depth: int) -> dict[str, Any]:
        return self._branches("anyOf", depth, 3)

    def _oneOf(self, depth: int) -> dict[str, Any]:
        return self._branches("oneOf", depth, 3)

    def _allOf(self, depth: int) -> dict[str, Any]:
        return self._branches("allOf", depth, 2)

    def _ref(self, depth: int) -> dict[str, Any]:
        targets = ["#/$defs/A", "#/$defs/B", "#", "#/$defs/C~1d", "#/$defs/A/properties/v"]
        made = {"$ref": self.rng.choice(targets)}
        self._maybe(made, 0.3, description=lambda: "a note")
        return made


@pytest.mark.field("json_schema")
@pytest.mark.parametrize("seed", range(3))
def test_random_schemas_are_enforced_or_refused(seed: int) -> None:
    generator = SchemaGenerator(seed)
    outcomes: Counter[str] = Counter()
    for _ in range(60):
        schema = {**generator.schema(), "$defs": DEFS}
        try:
            grammar = compile_schema(schema)
        except RowError as error:
            outcomes[error.info.code] += 1
            continue
        validator = jsonschema.Draft202012Validator(schema)
        checked = Schema.parse(json.dumps(schema), "json_schema")
        for number in range(6):
            text = grammar.random_text(number, steps=40)
            if text is not None:
                value = json.loads(text.decode(errors="replace"))
                assert validator.is_valid(value), (schema, grammar.backend, value)
                assert checked.satisfied_by(text.decode(errors="replace")) is True, (schema, grammar.backend, value)
                outcomes[grammar.backend] += 1
    assert outcomes["xgrammar"] > 150
    assert outcomes["unsupported_schema_keyword"] > 0


def test_random_schemas_compile_when_lenient() -> None:
    generator = SchemaGenerator(100)
    refused: set[str] = set()
    for _ in range(60):
        schema = {**generator.schema(), "$defs": DEFS}
        try:
            grammar = compile_schema(schema, lenient=True)
        except RowError as error:
            refused.add(error.info.code)
            continue
        text = grammar.random_text(0, steps=40)
        if text is not None:
            json.loads(text.decode(errors="replace"))
    assert refused <= {"invalid_grammar"}


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"type": "object", "properties": {"a": {}}, "required": ["a", "b"]}, ['{"a": 1, "b": 2}']),
        ({"minItems": 2}, ["[1, 2]", "[1, {}, null]"]),
        ({"type": "array", "maxItems": 2}, ["[]", "[1, 2]"]),
        ({"type": "object", "minProperties": 1}, ['{"a": 1}']),
        ({"type": "object"}, ["{}", '{"a": {"b": [1]}}']),
        ({"type": "array"}, ["[]", "[[], {}]"]),
        ({}, ["1", "null", '"a"', '{"a": [1, 2]}']),
        ({"type": "string", "minLength": 2}, ['"ab"', '"日本語"']),
        ({"enum": [1, "a"], "type": "string"}, ['"a"']),
        ({"type": "integer", "minimum": 0.5, "exclusiveMaximum": 3}, ["1", "2"]),
        ({"prefixItems": [{"type": "null"}, {"type": "boolean"}]}, ["[]", "[null]", "[null, true]"]),
    ],
    ids=str,
)
def test_the_grammar_accepts_valid_texts(schema: Any, texts: list[str]) -> None:
    grammar = compile_schema(schema)
    for text in texts:
        assert grammar.accepts(text), text


def test_the_path_of_the_keyword_is_named() -> None:
    schema = {"type": "object", "properties": {"list": {"items": {"type": "array", "uniqueItems": True}}}}
    with pytest.raises(RowError, match=r"`uniqueItems` \(at #/properties/list/items\)") as caught:
        compile_schema(schema)
    assert caught.value.info.param == "json_schema"


def test_a_long_chain_of_references_does_not_count_as_nesting() -> None:
    defs: dict[str, Any] = {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(600)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**defs, "d600": {"type": "null"}}}
    _, written = next(enforceable_schemas(json.dumps(schema), "json_schema"))
    assert len(written["$defs"]) == 601


def test_many_paths_to_one_definition_are_visited_once() -> None:
    defs: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(8)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**defs, "d8": {"type": "null"}}}
    _, written = next(enforceable_schemas(json.dumps(schema), "json_schema"))
    assert len(written["$defs"]) == 9
    assert compile_schema(schema).accepts("null")


NULL = {"type": "null"}
UNCHECKED: list[dict[str, Any]] = [
    {"type": "string", "format": "my-own"},
    {"type": "string", "minlength": 3},
    {"type": "string", "contentEncoding": "base64"},
    {"type": ["string", "array"], "items": {"type": "string", "nullable": True}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "pattern_": "^a"}}},
    {"$ref": "https://example.org/schema.json"},
    {"type": "string", "pattern": "[a[:alpha:]]"},
    {"type": ["string", "object"], "patternProperties": {"[[:alpha:]]": {}}},
]


@pytest.mark.parametrize("schema", UNCHECKED, ids=str)
def test_what_cannot_be_checked_is_refused_or_leaves_the_verdict_open(schema: dict[str, Any]) -> None:
    with pytest.raises(RowError, match="cannot be enforced") as caught:
        compile_schema(schema)
    assert caught.value.info.code == "unsupported_schema_keyword"
    assert compile_schema(schema, lenient=True).accepts('"ab"')
    second = Schema.parse(json.dumps(schema), "json_schema")
    assert second.satisfied_by('"ab"') is None
    if "https" not in str(schema):
        assert second.satisfied_by("1") is False, "what is checked still speaks against it"


def test_a_misspelt_keyword_is_named_with_the_right_one() -> None:
    with pytest.raises(RowError, match=r"`minlength`.*did you mean `minLength`\?"):
        compile_schema({"type": "string", "minlength": 3})
    with pytest.raises(RowError, match=r'`nullable`.*"null"'):
        compile_schema({"type": "string", "nullable": True})


def test_notes_do_not_constrain() -> None:
    schema = {"type": "string", "title": "T", "x-order": 1, "example": "a", "format": "password", "default": 3}
    assert compile_schema(schema).accepts('"ab"')
    assert Schema.parse(json.dumps(schema), "json_schema").satisfied_by('"ab"') is True


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "multipleOf": 3}, ["-3", "0", "12"], ["1", "13"]),
        ({"type": "number", "multipleOf": 0.1}, ["0.3", "1", "-2.7"], ["0.35"]),
        ({"type": "string", "pattern": "^a+$", "minLength": 2, "maxLength": 3}, ['"aa"', '"aaa"'], ['"a"', '"aaaa"']),
        ({"$ref": "#/$defs/n", "minimum": 5, "$defs": {"n": {"type": "integer", "maximum": 9}}}, ["5"], ["4", "10"]),
        (
            {
                "allOf": [
                    {"type": "object", "properties": {"a": {"type": "null"}}},
                    {"properties": {"b": {"type": "null"}}},
                ]
            },
            ["{}", '{"a": null, "b": null}', '{"b": null}'],
            ['{"c": 1}', '{"a": 1}'],
        ),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
            ['{"a": 1}', '{"b": 1}'],
            ["{}", '{"c": 1}'],
        ),
    ],
    ids=str,
)
def test_keywords_that_only_the_second_compiler_enforces(schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = compile_schema(schema)
    assert grammar.backend == "llguidance"
    assert {text: grammar.accepts(text) for text in (*good, *bad)} == {t: t in good for t in (*good, *bad)}
    second = Schema.parse(json.dumps(schema), "json_schema")
    assert all(second.satisfied_by(text) for text in good)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{}, {"anyOf": [{"$ref": "#"}]}], "minItems": 2},
    ],
    ids=str,
)
def test_a_value_without_end_is_refused_with_both_compilers(part: dict[str, Any]) -> None:
    step = {"type": "integer", "multipleOf": 5}
    for schema in (part, {"allOf": [part, {"title": "a part"}]}):
        with pytest.raises(RowError, match=r"without end|nothing in between") as caught:
            compile_schema(schema)
        assert caught.value.info.code == "invalid_grammar"
        assert compile_schema({"anyOf": [step, schema]}).backend == "llguidance"


@pytest.mark.parametrize("bounds", [(0, 0.5), (-0.5, 0), (0, 0.0005)])
@pytest.mark.parametrize("factor", [None, 0.05])
def test_zero_is_outside_of_an_open_range(bounds: tuple[float, float], factor: float | None) -> None:
    schema = {"type": "number", "exclusiveMinimum": bounds[0], "exclusiveMaximum": bounds[1]}
    if factor is not None:  # llguidance would allow 0
        with pytest.raises(RowError, match="too narrow"):
            compile_schema({**schema, "multipleOf": factor})
        return
    grammar = compile_schema(schema)
    assert grammar.backend == "xgrammar"
    assert not any(grammar.accepts(text) for text in ("0", "-0", "0.0"))


A, B = {"type": "boolean"}, {"type": "integer", "multipleOf": 5}
IN_BOTH_ORDERS = ('{"a": true, "b": true}', '{"b": true, "a": true}')
ORDERED: dict[str, Any] = {
    "type": "object",
    "properties": {"b": A, "a": A},
    "propertyOrdering": ["a", "b"],
    "required": ["a", "b"],
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (ORDERED, *IN_BOTH_ORDERS),
        ({**ORDERED, "properties": {"b": A, "a": B}}, '{"a": 5, "b": true}', '{"b": true, "a": 5}'),
        ({"type": "array", "items": ORDERED}, '[{"a": true, "b": true}]', '[{"b": true, "a": true}]'),
        ({"$ref": "#/$defs/x", "$defs": {"x": ORDERED}}, *IN_BOTH_ORDERS),
        ({**ORDERED, "anyOf": [{"required": ["b"]}, {"properties": {"b": A, "a": A}}]}, *IN_BOTH_ORDERS),
    ],
    ids=str,
)
def test_properties_come_in_the_order_that_the_schema_asks_for(schema: Any, good: str, bad: str) -> None:
    grammar = compile_schema(schema)
    assert (grammar.accepts(good), grammar.accepts(bad)) == (True, False)
    second = Schema.parse(json.dumps(schema), "json_schema")
    assert (second.satisfied_by(good), second.satisfied_by(bad)) == (True, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"propertyOrdering": ["a", "c", "b"]}, "`propertyOrdering`.*its names must be in `properties` next to it"),
        ({"propertyOrdering": "a"}, "`propertyOrdering`.*nothing here knows"),
        ({"propertyOrder": ["a"]}, "`propertyOrder`.*write `propertyOrdering`"),
    ],
)
def test_an_order_that_cannot_be_obeyed_is_refused(change: dict[str, Any], message: str) -> None:
    changed = {**ORDERED, **change}
    for schema in (changed, {"type": "array", "items": changed}):
        with pytest.raises(RowError, match=message):
            compile_schema(schema)
    with pytest.raises(RowError, match="not in a part of `allOf`"):
        compile_schema({"allOf": [{"properties": {"c": A}}, ORDERED]})
    schema = {**ORDERED, **change}
    assert any(compile_schema(schema, lenient=True).accepts(text) for text in IN_BOTH_ORDERS)
    assert Schema.parse(json.dumps(schema), "json_schema").satisfied_by(IN_BOTH_ORDERS[1]) in (False, None)


def test_properties_may_have_the_names_of_keywords() -> None:
    grammar = compile_schema({"type": "object", "properties": {"properties": A, "propertyOrdering": A}})
    assert grammar.accepts('{"properties": true, "propertyOrdering": true}')


def test_schemas_with_patterns_in_a_structural_tag() -> None:
    for schema, good, bad in (
        ({"type": "string", "pattern": "^a(?:b[0-9]+)?Z$"}, '"ab1Z"', '"a11Z"'),
        ({"type": "array", "items": {"type": "string", "format": "date"}}, '[ "2024-02-29"]', '["2023-02-29"]'),
    ):
        tag = {"format": {"type": "json_schema", "json_schema": schema}}
        grammar = compile_constraint_of("structural_tag", json.dumps(tag))
        assert (grammar.accepts(good), grammar.accepts(bad)) == (True, False), schema
        tag["format"]["style"] = "qwen_xml"
        with pytest.raises(RowError, match="no other options"):
            compile_constraint_of("structural_tag", json.dumps(tag))
