"""Keywords of JSON Schema: which speak of which type, and what several of them say together."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["ASSERTIONS", "HEADS", "NEVER", "OF_TYPE", "Json", "bounds_of", "either", "items_of", "others_of"]

Json = dict[str, Any]

OF_TYPE: dict[str, tuple[str, ...]] = {
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
OF_TYPE["integer"] = OF_TYPE["number"]
HEADS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
NEVER = ("not", "if", "$dynamicRef", "$recursiveRef")
ASSERTIONS = frozenset({*HEADS, *NEVER, "type", *(key for keys in OF_TYPE.values() for key in keys)})


def either(branches: list[Any]) -> Any:
    """Any of these schemas; False where there are none."""
    if not branches:
        return False
    return branches[0] if len(branches) == 1 else {"anyOf": branches}


def items_of(schema: Json) -> tuple[list[Any], Any, str]:
    """The schemas of an array's first items, and of all others (None: nothing is said of them), with their keyword."""
    given = schema.get("items")
    if isinstance(given, list):  # drafts before 2020-12
        return given, schema.get("additionalItems"), "additionalItems"
    first = schema.get("prefixItems", [])
    if given is not None:
        return first, given, "items"
    return first, schema.get("unevaluatedItems"), "unevaluatedItems"


def others_of(schema: Json) -> tuple[Any, str]:
    """The schema of properties that are not declared (None: nothing is said of them), with its keyword."""
    key = "additionalProperties"
    if key not in schema and "unevaluatedProperties" in schema:
        key = "unevaluatedProperties"
    return schema.get(key), key


def bounds_of(schema: Json) -> tuple[tuple[float, bool], tuple[float, bool]]:
    """((least, exclusive), (most, exclusive)); infinite where nothing is said."""
    found: list[tuple[float, bool]] = []
    for name, sign in (("inimum", 1), ("aximum", -1)):
        plain = schema.get("m" + name)
        exclusive = schema.get("exclusiveM" + name)
        draft4 = isinstance(exclusive, bool)
        given: list[Any] = [(plain, exclusive)] if draft4 else [(plain, False), (exclusive, True)]
        known = [(value, strict) for value, strict in given if value is not None]
        # The stricter of the two: the larger minimum, the smaller maximum; of equals the exclusive one.
        found.append(max(known, key=lambda pair: (sign * pair[0], pair[1]), default=(-sign * math.inf, False)))
    return found[0], found[1]
