"""Validation of finished texts against schemas and patterns, independent of the grammar compiler.

Nothing here uses the network (a `$ref` to another document is not found). Patterns have a time limit, since a
backtracking matcher may run forever on a text that does not match.
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

_SECONDS = 1.0
"""Time limit in seconds for one pattern in one text."""
_FORMATS = jsonschema.FormatChecker(formats=("date", "ipv4", "ipv6", "uuid"))
"""Formats that need no further packages, so that every installation gives the same result."""


def pattern_found(pattern: str, text: str, *, on_failure: bool = True) -> bool:
    """Whether `pattern` matches somewhere in `text`; `on_failure` if the search times out or the pattern is invalid."""
    try:
        return regex.search(pattern, text, timeout=_SECONDS) is not None
    except (TimeoutError, regex.error):
        return on_failure


def matches_whole(pattern: str, text: str) -> bool:
    """Whether `pattern` matches all of `text`; False if the search times out."""
    try:
        return regex.fullmatch(pattern, text, timeout=_SECONDS) is not None
    except (TimeoutError, regex.error):
        return False


class Schema:
    """A JSON Schema in the draft it declares, 2020-12 by default."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._validators = _with_time_limit(validator_for(root, default=jsonschema.Draft202012Validator))
        self._validator = self._validators(root, registry=referencing.Registry(), format_checker=_FORMATS)

    @classmethod
    def parse(cls, text: str, field: str) -> Schema:
        """Parse JSON text and check it against its metaschema.

        Raises:
            RowError: `invalid_grammar`: the text is not a valid schema; the message names `field`.
        """
        try:
            root = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError) as error:
            raise _invalid(field, f"is not valid JSON: {error}") from None
        if type(root) not in (dict, bool):
            raise _invalid(field, "must be an object, true or false")
        declared = root.get("$schema") if isinstance(root, dict) else None
        if declared is not None and validator_for(root, default=None) is None:
            raise _invalid(
                field, f"declares the unknown draft {str(declared)[:200]!r}; use one of the drafts 3 to 2020-12"
            )
        try:
            validator_for(root, default=jsonschema.Draft202012Validator).check_schema(root)
        except jsonschema.SchemaError as error:
            raise _invalid(field, f"is not a JSON Schema: {error.message[:300]} at {error.json_path[:200]}") from None
        except RecursionError:
            raise _invalid(field, "is nested too deeply") from None
        return cls(root)

    def resolve(self, target: str) -> Any:
        """Subschema that a `$ref` such as `#/$defs/a` names; None if it does not exist."""
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
        """Whether `value` is valid under the whole schema, or under its part `schema`."""
        validator = self._validator if schema is None else self._validator.evolve(schema=schema)
        try:
            return bool(validator.is_valid(value))
        except (referencing.exceptions.Unresolvable, RecursionError, ArithmeticError):
            return False

    def satisfied_by(self, text: str) -> bool:
        """Whether `text` is valid JSON and its value satisfies the schema."""
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return False
        return self.satisfies(value)


def _with_time_limit(base: Any) -> Any:
    """Validator class `base` with a time limit for patterns."""

    def pattern(validator: Any, wanted: str, instance: Any, schema: Any) -> Iterator[Any]:
        if validator.is_type(instance, "string") and not pattern_found(wanted, instance, on_failure=False):
            yield jsonschema.ValidationError(f"{instance!r} does not match {wanted!r}")

    def pattern_properties(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if not validator.is_type(instance, "object"):
            return
        for expression, part in wanted.items():
            for name, value in instance.items():
                if pattern_found(expression, name):
                    yield from validator.descend(value, part, path=name, schema_path=expression)

    return jsonschema.validators.extend(base, {"pattern": pattern, "patternProperties": pattern_properties})


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Object with the given pairs; a repeated key is an error, since one value would be ignored."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated[:80]!r} occurs twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _invalid(field: str, problem: str) -> RowError:
    return RowError(ErrorCode.INVALID_GRAMMAR, f"`{field}` {problem}", field)
