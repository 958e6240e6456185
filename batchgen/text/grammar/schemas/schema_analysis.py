"""Static checks of the values that a schema allows."""

from __future__ import annotations

import math
from typing import Any

from batchgen.text.grammar.schemas.formats import INTEGER_FORMATS
from batchgen.text.grammar.schemas.keywords import Json
from batchgen.text.grammar.schemas.rules import grown, reaches_itself
from batchgen.text.grammar.schemas.validation import Schema


def any_of(branches: list[Any]) -> Any:
    """Schema that allows what any of `branches` allows; False if there are none."""
    if not branches:
        return False
    return branches[0] if len(branches) == 1 else {"anyOf": branches}


def items_of(schema: Json) -> tuple[list[Any], Any, str]:
    """Schemas of an array's first items, schema of all other items (None if not given), and keyword of the latter."""
    items = schema.get("items")
    if isinstance(items, list):  # drafts before 2020-12
        return items, schema.get("additionalItems"), "additionalItems"
    first = schema.get("prefixItems", [])
    if items is not None:
        return first, items, "items"
    return first, schema.get("unevaluatedItems"), "unevaluatedItems"


def additional_properties_of(schema: Json) -> tuple[Any, str]:
    """Schema of undeclared properties (None if not given) and its keyword."""
    key = "additionalProperties"
    if key not in schema and "unevaluatedProperties" in schema:
        key = "unevaluatedProperties"
    return schema.get(key), key


def bounds_of(schema: Json) -> tuple[tuple[float, bool], tuple[float, bool]]:
    """((minimum, exclusive), (maximum, exclusive)); infinite where no bound is given."""
    bounds: list[tuple[float, bool]] = []
    for name, sign in (("inimum", 1), ("aximum", -1)):
        plain = schema.get("m" + name)
        exclusive = schema.get("exclusiveM" + name)
        draft4 = isinstance(exclusive, bool)
        both: list[Any] = [(plain, exclusive)] if draft4 else [(plain, False), (exclusive, True)]
        known = [(value, strict) for value, strict in both if value is not None]
        # The stricter of the two: the larger minimum, the smaller maximum; if equal, the exclusive one.
        bounds.append(max(known, key=lambda pair: (sign * pair[0], pair[1]), default=(-sign * math.inf, False)))
    if schema.get("type") == "integer" and schema.get("format") in INTEGER_FORMATS:
        least, most = INTEGER_FORMATS[schema["format"]]
        # The outermost of 64 bits are left out, since xgrammar cannot have them as bounds.
        bounds[0] = max(bounds[0], (max(least, 2 - 2**63), False))
        bounds[1] = min(bounds[1], (min(most, 2**63 - 2), False), key=lambda pair: (pair[0], not pair[1]))
    return bounds[0], bounds[1]


INT64 = (-(2**63), 2**63 - 1)
"""Least and greatest integer that xgrammar knows."""
_MAX_PROOF_STEPS = 8
"""Most nested steps of a proof."""


def valid_values(schema: Schema, part: Json) -> list[Any]:
    """Values of `const` or `enum` that satisfy the other keywords of the schema, each once."""
    values = [part["const"]] if "const" in part else part["enum"]
    others = {key: value for key, value in part.items() if key not in ("const", "enum")}
    if "const" in part and "enum" in part:
        others["enum"] = part["enum"]
    return [value for value in values if schema.satisfies(value, others)] if others else list(values)


def fits_int64(value: Any) -> bool:
    """Whether all integers in `value` fit 64 bits, as the grammar compiler requires."""
    if type(value) is int:
        return INT64[0] <= value <= INT64[1]
    if type(value) is list:
        return all(map(fits_int64, value))
    return all(map(fits_int64, value.values())) if type(value) is dict else True


def refers_to_itself(name: str, defs: Json) -> bool:
    """Whether definition `name` refers to itself with nothing in between, on which parsers do not terminate."""
    return reaches_itself(name, lambda target: _referenced(defs[target]))


def _referenced(schema: Any) -> list[str]:
    """Definitions that a compiled schema refers to directly."""
    if not isinstance(schema, dict):
        return []
    if "$ref" in schema:
        return [schema["$ref"].rsplit("/", 1)[1]]
    return [name for key in ("anyOf", "allOf") for branch in schema.get(key, ()) for name in _referenced(branch)]


def has_finite_value(written: Json) -> bool:
    """Whether a value of a schema, as written for a compiler, can end: not each one needs another one inside."""
    return _can_end(written, grown(written.get("$defs", {}), _can_end))


def _can_end(schema: Any, ending: set[str]) -> bool:
    if not isinstance(schema, dict) or "enum" in schema:
        return schema is not False
    if "$ref" in schema:
        return schema["$ref"].rsplit("/", 1)[1] in ending
    if "anyOf" in schema and not any(_can_end(part, ending) for part in schema["anyOf"]):
        return False
    if not all(_can_end(part, ending) for part in schema.get("allOf", ())):
        return False
    if schema.get("type") == "array":
        first, least = schema.get("prefixItems", []), schema.get("minItems", 0)
        needed = first[:least] + [schema.get("items", True)] * (least > len(first))
    elif schema.get("type") == "object":
        needed = [schema.get("properties", {}).get(name, True) for name in schema.get("required", ())]
    else:  # another type, or a choice of types, ends
        needed = []
    return all(_can_end(part, ending) for part in needed)


def may_overlap(schema: Schema, other: Any, made: Any, defs: Json) -> bool:
    """Whether a value that `made` allows may satisfy `other`; False only if it can be shown that none does.

    Args:
        schema: the whole schema document.
        other: a part of it.
        made: another part of it, in the form written for the compiler.
        defs: the `$defs` that `made` refers to.
    """
    return not _DisjointnessProof(schema, defs).excludes(other, made, _MAX_PROOF_STEPS)


class _DisjointnessProof:
    """Search for a proof that two schemas share no value."""

    def __init__(self, schema: Schema, defs: Json) -> None:
        self._schema = schema
        self._defs = defs

    def excludes(self, other: Any, made: Any, depth: int) -> bool:
        """Whether it can be shown within `depth` steps that no value of `made` satisfies `other`."""
        if other is False or made is False:
            return True
        if other is True or made is True or depth == 0:
            return False
        if "$ref" in made:
            return self.excludes(other, self._defs[made["$ref"].rsplit("/", 1)[1]], depth - 1)
        if "anyOf" in made:
            return all(self.excludes(other, branch, depth - 1) for branch in made["anyOf"])
        if "enum" in made:
            return not any(self._schema.satisfies(value, other) for value in made["enum"])
        if "$ref" in other:
            target = self._schema.resolve(other["$ref"])
            return target is not None and self.excludes(target, made, depth - 1)
        for key in ("anyOf", "oneOf"):
            if key in other and all(self.excludes(branch, made, depth - 1) for branch in other[key]):
                return True
        if any(self.excludes(branch, made, depth - 1) for branch in other.get("allOf", ())):
            return True
        if any(self.excludes(other, branch, depth - 1) for branch in made.get("allOf", ())):
            return True
        kinds = made.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return bool(kinds) and all(self._disjoint(other, made, kind, depth) for kind in kinds)

    def _disjoint(self, other: Json, made: Json, kind: str, depth: int) -> bool:
        """Whether types, ranges or properties exclude each other for values of type `kind`."""
        if not _types(other) & (
            {kind, "integer"} if kind == "number" else {kind, "number"} if kind == "integer" else {kind}
        ):
            return True
        if kind in ("integer", "number"):
            low, high = other.get("minimum", float("-inf")), other.get("maximum", float("inf"))
            return bool(made.get("minimum", float("-inf")) > high or made.get("maximum", float("inf")) < low)
        return kind == "object" and self._objects_disjoint(other, made, depth)

    def _objects_disjoint(self, other: Json, made: Json, depth: int) -> bool:
        declared, other_properties = made.get("properties", {}), other.get("properties", {})
        closed = made.get("additionalProperties") is False and "patternProperties" not in made
        if closed and any(name not in declared for name in other.get("required") or ()):
            return True
        for name in made.get("required", ()):
            if name in other_properties and self.excludes(other_properties[name], declared[name], depth - 1):
                return True
            if (
                name not in other_properties
                and other.get("additionalProperties") is False
                and not other.get("patternProperties")
            ):
                return True
        return False


def _types(schema: Json) -> set[str]:
    """Types that values of a schema may have."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
        return {names.get(type(value), "null") for value in values} | {
            "integer" for value in values if type(value) is float
        }
    named = schema.get("type", ["object", "array", "string", "number", "integer", "boolean", "null"])
    return {named} if isinstance(named, str) else set(named)
