"""What can be said of a schema's values before any is generated."""

from __future__ import annotations

from typing import Any

from batchgen.text.validation import Schema

__all__ = ["leads_to_itself", "may_agree", "valid_values", "writable"]

_INT64 = (-(2**63), 2**63 - 1)
_DEPTH = 8
"""Steps of a proof."""

Json = dict[str, Any]


def valid_values(schema: Schema, part: Json) -> list[Any]:
    """The values of `const` or `enum` that satisfy whatever stands beside them, each once."""
    values = [part["const"]] if "const" in part else part["enum"]
    beside = {key: value for key, value in part.items() if key not in ("const", "enum")}
    if "const" in part and "enum" in part:
        beside["enum"] = part["enum"]
    return [value for value in values if schema.satisfies(value, beside)] if beside else list(values)


def writable(value: Any) -> bool:
    """Whether the grammar compiler keeps `value`: whole numbers of 64 bits."""
    if type(value) is int:
        return _INT64[0] <= value <= _INT64[1]
    if type(value) is list:
        return all(map(writable, value))
    return all(map(writable, value.values())) if type(value) is dict else True


def leads_to_itself(name: str, defs: Json) -> bool:
    """Whether definition `name` refers to itself with nothing in between: it says nothing, and no parser ends on it."""
    seen: set[str] = set()
    waiting = _referred(defs[name])
    while waiting:
        target = waiting.pop()
        if target == name:
            return True
        if target not in seen:
            seen.add(target)
            waiting += _referred(defs[target])
    return False


def _referred(schema: Any) -> list[str]:
    """The definitions that a written schema may be, without anything around them."""
    if not isinstance(schema, dict):
        return []
    if "$ref" in schema:
        return [schema["$ref"].rsplit("/", 1)[1]]
    return [name for branch in schema.get("anyOf", ()) for name in _referred(branch)]


def may_agree(schema: Schema, other: Any, made: Any, defs: Json) -> bool:
    """False if no value that `made` allows satisfies `other`; True where that cannot be shown.

    Args:
        schema: the document.
        other: a part of it.
        made: another part of it, as written for the compiler.
        defs: the `$defs` that `made` refers to.
    """
    return not _Proof(schema, defs).excludes(other, made, _DEPTH)


class _Proof:
    def __init__(self, schema: Schema, defs: Json) -> None:
        self._schema = schema
        self._defs = defs

    def excludes(self, other: Any, made: Any, depth: int) -> bool:
        """Whether it can be shown that no value of `made` satisfies `other`."""
        if other is False or made is False:
            return True
        if other is True or depth == 0:
            return False
        if "$ref" in made:
            return self.excludes(other, self._defs[made["$ref"].rsplit("/", 1)[1]], depth - 1)
        if "anyOf" in made:
            return all(self.excludes(other, branch, depth - 1) for branch in made["anyOf"])
        if "enum" in made:
            return not any(self._schema.satisfies(value, other) for value in made["enum"])
        if "$ref" in other:
            found = self._schema.resolve(other["$ref"])
            return found is not None and self.excludes(found, made, depth - 1)
        for key in ("anyOf", "oneOf"):
            if key in other and all(self.excludes(branch, made, depth - 1) for branch in other[key]):
                return True
        if any(self.excludes(branch, made, depth - 1) for branch in other.get("allOf", ())):
            return True
        return "type" in made and self._apart(other, made, depth)

    def _apart(self, other: Json, made: Json, depth: int) -> bool:
        """By type, range or property."""
        kind = made["type"]
        if not _types(other) & (
            {kind, "integer"} if kind == "number" else {kind, "number"} if kind == "integer" else {kind}
        ):
            return True
        if kind in ("integer", "number"):
            low, high = other.get("minimum", float("-inf")), other.get("maximum", float("inf"))
            return bool(made.get("minimum", float("-inf")) > high or made.get("maximum", float("inf")) < low)
        return kind == "object" and self._objects_apart(other, made, depth)

    def _objects_apart(self, other: Json, made: Json, depth: int) -> bool:
        declared, theirs = made.get("properties", {}), other.get("properties", {})
        closed = made.get("additionalProperties") is False and "patternProperties" not in made
        if closed and any(name not in declared for name in other.get("required") or ()):
            return True
        for name in made.get("required", ()):
            if name in theirs and self.excludes(theirs[name], declared[name], depth - 1):
                return True
            if name not in theirs and other.get("additionalProperties") is False and not other.get("patternProperties"):
                return True
        return False


def _types(schema: Json) -> set[str]:
    """The types that values of a schema may have."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
        return {names.get(type(value), "null") for value in values} | {
            "integer" for value in values if type(value) is float
        }
    named = schema.get("type", ["object", "array", "string", "number", "integer", "boolean", "null"])
    return {named} if isinstance(named, str) else set(named)
