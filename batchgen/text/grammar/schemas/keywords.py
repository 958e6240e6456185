"""Keywords of JSON Schema: which ones constrain values, which are notes, and which subschemas they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from batchgen.text.grammar.schemas.formats import is_known_format
from batchgen.text.grammar.schemas.patterns import has_one_reading

Json = dict[str, Any]

KEYWORDS_OF_TYPE: dict[str, tuple[str, ...]] = {
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies",
    ),
    "array": (
        "items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems",
        "contains", "minContains", "maxContains",
    ),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "boolean": (),
    "null": (),
}  # fmt: skip
"""Type -> keywords that apply to it alone."""
KEYWORDS_OF_TYPE["integer"] = KEYWORDS_OF_TYPE["number"]
HEAD_KEYWORDS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords of which xgrammar follows the first that a schema has, ignoring all others."""
UNSUPPORTED_KEYWORDS = ("not", "if", "$dynamicRef", "$recursiveRef")
"""Keywords that no grammar can enforce."""
ASSERTIONS = frozenset(
    {*HEAD_KEYWORDS, *UNSUPPORTED_KEYWORDS, "type", *(key for keys in KEYWORDS_OF_TYPE.values() for key in keys)}
)
"""Keywords that constrain values."""
NOTES = frozenset(
    {
        "$schema", "$id", "id", "$comment", "$defs", "definitions", "$anchor", "$dynamicAnchor", "$recursiveAnchor",
        "$vocabulary", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
        # `if` decides whether these say anything
        "then", "else",
        # of OpenAPI, and of tools that show or write schemas
        "discriminator", "example", "externalDocs", "xml", "enumNames", "enumDescriptions", "markdownDescription",
        "errorMessage", "strict",
    }
)  # fmt: skip
"""Keywords that say something about a schema and constrain no value, as those that begin with `x-`."""
_KNOWN = ASSERTIONS | NOTES
ORDER = "propertyOrdering"
"""Keyword of Gemini's schemas: names of properties in the order in which they are written."""

_OF_ONE = (
    "additionalProperties", "unevaluatedProperties", "propertyNames", "items", "additionalItems", "unevaluatedItems",
    "contains", "not", "if", "then", "else",
)  # fmt: skip
_OF_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OF_NAMES = ("properties", "patternProperties", "dependentSchemas", "dependencies")


def unknown_keywords(schema: Json) -> Iterator[str]:
    """Keywords of one schema object that no draft knows, or whose form is unknown."""
    extra = {ORDER} if is_order(schema.get(ORDER)) else set()
    if schema.get("contentEncoding") == schema.get("format"):
        extra.add("contentEncoding")  # says the same
    return (key for key in schema if key not in _KNOWN and key not in extra and not key.startswith("x-"))


def is_order(value: Any) -> bool:
    """Whether a value of `propertyOrdering` has the form of one: a list of names."""
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def subschemas(schema: Json) -> Iterator[Any]:
    """Schemas directly inside a schema object that constrain the value or a part of it."""
    for key in _OF_ONE:
        if isinstance(schema.get(key), dict | bool):
            yield schema[key]
    for key in _OF_LIST:
        if isinstance(schema.get(key), list):
            yield from schema[key]
    for key in _OF_NAMES:
        if isinstance(schema.get(key), dict):
            yield from schema[key].values()


def unchecked_keywords(root: Any, resolve: Callable[[str], Any]) -> Iterator[str]:
    """Keywords of a schema document that the check of finished texts knows nothing of.

    Args:
        root: the document.
        resolve: target of a `$ref` -> its schema, or None.
    """
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield from unknown_keywords(schema)
        if "format" in schema and not is_known_format(schema):
            yield "format"
        patterns = [schema["pattern"]] if "pattern" in schema else []
        if not all(map(has_one_reading, (*patterns, *schema.get("patternProperties", ())))):
            yield "pattern"
        if isinstance(schema.get("$ref"), str):
            waiting.append(resolve(schema["$ref"]))
        waiting.extend(subschemas(schema))
