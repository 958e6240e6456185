"""Schemas and patterns as validators read them: the second opinion on what a grammar let through.

Nothing here reaches the network (a `$ref` to elsewhere is simply not found) or runs without end (patterns have a limit
of time, since a backtracking matcher may take for ever on a text that does not match).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import referencing
import regex
from jsonschema.validators import validator_for

from batchgen.errors import ErrorCode, RowError

__all__ = ["Schema", "finds", "matches_whole"]

_SECONDS = 1.0
"""Longest search for one pattern in one text."""
_FORMATS = jsonschema.FormatChecker(formats=("date", "ipv4", "ipv6", "uuid"))
"""Formats that are checked without further packages, so that every installation says the same."""


def finds(pattern: str, text: str, *, unsure: bool = True) -> bool:
    """Whether `pattern` matches somewhere in `text`; `unsure` where the search takes too long, or it is no pattern."""
    try:
        return regex.search(pattern, text, timeout=_SECONDS) is not None
    except (TimeoutError, regex.error):
        return unsure


def matches_whole(pattern: str, text: str) -> bool:
    """Whether `pattern` matches all of `text`; a search that takes too long is no match."""
    try:
        return regex.fullmatch(pattern, text, timeout=_SECONDS) is not None
    except (TimeoutError, regex.error):
        return False


class Schema:
    """A JSON Schema in the draft it declares, 2020-12 by default."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._validators = _in_time(validator_for(root, default=jsonschema.Draft202012Validator))
        self._validator = self._validators(root, registry=referencing.Registry(), format_checker=_FORMATS)

    @classmethod
    def parse(cls, text: str, field: str) -> Schema:
        """Read JSON text and hold it to its metaschema.

        Raises:
            RowError: `invalid_grammar`, naming `field` and what is wrong.
        """
        try:
            root = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError) as error:
            raise _invalid(field, f"is no JSON: {error}") from None
        if type(root) not in (dict, bool):
            raise _invalid(field, "must be an object, true or false")
        declared = root.get("$schema") if isinstance(root, dict) else None
        if declared is not None and validator_for(root, default=None) is None:
            raise _invalid(
                field, f"declares the draft {str(declared)[:200]!r}, which is not known; drafts 3 to 2020-12"
            )
        try:
            validator_for(root, default=jsonschema.Draft202012Validator).check_schema(root)
        except jsonschema.SchemaError as error:
            raise _invalid(field, f"is no JSON Schema: {error.message[:300]} at {error.json_path[:200]}") from None
        except RecursionError:
            raise _invalid(field, "is nested too deeply") from None
        return cls(root)

    def resolve(self, target: str) -> Any:
        """The subschema that a `$ref` such as `#/$defs/a` names; None where there is none."""
        try:
            found = (
                referencing.Registry()
                .with_resource("", referencing.Resource.opaque(self.root))
                .resolver()
                .lookup(target)
                .contents
            )
        except (referencing.exceptions.Unresolvable, ValueError, KeyError, IndexError, TypeError):
            return None
        return found if type(found) in (dict, bool) else None

    def satisfies(self, value: Any, schema: Any = None) -> bool:
        """Whether `value` is valid under the whole schema, or under `schema`, a part of it."""
        validator = self._validator if schema is None else self._validator.evolve(schema=schema)
        try:
            return bool(validator.is_valid(value))
        except (referencing.exceptions.Unresolvable, RecursionError, ArithmeticError):
            return False

    def satisfied_by(self, text: str) -> bool:
        """Whether `text` is JSON and its value valid."""
        try:
            value = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return False
        return self.satisfies(value)


def _in_time(base: Any) -> Any:
    """The validator class with patterns that end."""

    def pattern(validator: Any, wanted: str, instance: Any, schema: Any) -> Iterator[Any]:
        if validator.is_type(instance, "string") and not finds(wanted, instance, unsure=False):
            yield jsonschema.ValidationError(f"{instance!r} does not match {wanted!r}")

    def pattern_properties(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if not validator.is_type(instance, "object"):
            return
        for expression, part in wanted.items():
            for name, value in instance.items():
                if finds(expression, name):
                    yield from validator.descend(value, part, path=name, schema_path=expression)

    return jsonschema.validators.extend(base, {"pattern": pattern, "patternProperties": pattern_properties})


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a schema; of two keys that are the same one would be passed over."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:80]!r} stands twice in one object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _invalid(field: str, problem: str) -> RowError:
    return RowError(ErrorCode.INVALID_GRAMMAR, f"`{field}` {problem}", field)
