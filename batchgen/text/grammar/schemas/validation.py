"""Validation of finished texts against schemas and patterns, independent of the grammar compilers.

Nothing here uses the network (a `$ref` to another document is not found). A text's check has a limit of steps, since
alternatives within alternatives double the work with each level, and of time, since a backtracking matcher may run
forever on a text that does not match. What nothing here can check makes a verdict None, never true.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

import jsonschema
import referencing
import regex
from jsonschema.validators import validator_for

from batchgen.request.checks import invalid_grammar
from batchgen.request.foreign_text import ForeignTextError, read_json
from batchgen.text.grammar.schemas.formats import FORMATS, INTEGER_FORMATS
from batchgen.text.grammar.schemas.keywords import ORDER, is_order, unchecked_keywords
from batchgen.text.grammar.schemas.patterns import has_one_reading, with_escaped_braces

CHECK_STEPS = 50_000
"""Most keywords of a schema that are evaluated on the values of one text; a list of values counts as more."""
CHECK_SECONDS = 0.8
"""Processor time in seconds for the check of one text."""
_STEP_VALUES = 16
"""Elements of a keyword's list, or of the value, that count as one step."""


class _OverBudget(Exception):
    """The check of a text takes more than its budget."""


class _Budget:
    """What is left for the check of one text."""

    def __init__(self) -> None:
        self._steps = CHECK_STEPS
        self._deadline = time.thread_time() + CHECK_SECONDS

    @property
    def seconds(self) -> float:
        """Processor time that is left."""
        return max(self._deadline - time.thread_time(), 1e-6)

    def spend(self, *values: Any) -> None:
        """Count one step, and further ones for long lists and objects."""
        self._steps -= 1 + sum(len(value) for value in values if isinstance(value, list | dict)) // _STEP_VALUES
        if self._steps < 0 or time.thread_time() > self._deadline:
            raise _OverBudget


_budget: ContextVar[_Budget] = ContextVar("_budget")
"""The budget of the text that is checked."""


def _format_checker() -> jsonschema.FormatChecker:
    """Checker of exactly the formats that are known here, so that every installation gives the same result."""
    checker = jsonschema.FormatChecker(formats=())
    for name, known in FORMATS.items():
        checker.checks(name)(lambda value, check=known.check: not isinstance(value, str) or check(value))
    for name, (low, high) in INTEGER_FORMATS.items():
        checker.checks(name)(lambda value, low=low, high=high: type(value) is not int or low <= value <= high)
    return checker


_FORMAT_CHECKER = _format_checker()


def pattern_found(pattern: str, text: str) -> bool:
    """Whether `pattern` matches somewhere in `text`; true if the search times out or the pattern is invalid."""
    try:
        return regex.search(_judged(pattern), text, timeout=CHECK_SECONDS) is not None
    except (TimeoutError, regex.error):
        return True


def matches_whole(pattern: str, text: str) -> bool | None:
    """Whether `pattern` matches all of `text`; None if the search times out."""
    try:
        return regex.fullmatch(_judged(pattern), text, timeout=CHECK_SECONDS) is not None
    except TimeoutError:
        return None
    except regex.error:
        return False


def _found(pattern: str, text: str) -> bool:
    """Whether a schema's pattern matches somewhere in `text`; False if it is invalid."""
    try:
        return regex.search(_judged(pattern), text, timeout=_budget.get().seconds) is not None
    except TimeoutError:
        raise _OverBudget from None
    except regex.error:
        return False


@lru_cache(maxsize=1024)
def _judged(pattern: str) -> str:
    """`pattern` for the `regex` package, which reads a lone brace such as that of `a{e}` as a fuzzy match."""
    return with_escaped_braces(pattern)


class Schema:
    """A JSON Schema in the draft it declares, 2020-12 by default."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._validators = _with_own_checks(validator_for(root, default=jsonschema.Draft202012Validator))
        self._validator = self._validators(root, registry=referencing.Registry(), format_checker=_FORMAT_CHECKER)
        self._unchecked: bool | None = None

    @classmethod
    def parse(cls, text: str, field: str) -> Schema:
        """Parse JSON text and check it against its metaschema. `properties` are in the order that the schema asks for.

        Raises:
            RowError: `invalid_grammar`: the text is not a valid schema; the message names `field`.
        """
        try:
            root = read_json(text, constants=False, unique_keys=True)
        except ForeignTextError as error:
            raise invalid_grammar(field, str(error)) from None
        if type(root) not in (dict, bool):
            raise invalid_grammar(field, "must be an object, true or false")
        declared = root.get("$schema") if isinstance(root, dict) else None
        if declared is not None and validator_for(root, default=None) is None:
            raise invalid_grammar(
                field, f"declares the unknown draft {str(declared)[:200]!r}; use one of the drafts 3 to 2020-12"
            )
        try:
            with warnings.catch_warnings(action="ignore"):  # of patterns that a later Python may read differently
                validator_for(root, default=jsonschema.Draft202012Validator).check_schema(root)
        except jsonschema.SchemaError as error:
            raise invalid_grammar(
                field, f"is not a JSON Schema: {error.message[:300]} at {error.json_path[:200]}"
            ) from None
        except RecursionError:
            raise invalid_grammar(field, "is nested too deeply") from None
        _put_in_order(root)
        return cls(root)

    def resolve(self, target: str) -> Any:
        """Subschema that a `$ref` such as `#/$defs/a` names; None if it does not exist."""
        try:
            registry = referencing.Registry().with_resource("", referencing.Resource.opaque(self.root))
            part = registry.resolver().lookup(target).contents
        except (referencing.exceptions.Unresolvable, ValueError, KeyError, IndexError, TypeError):
            return None
        return part if type(part) in (dict, bool) else None

    def satisfies(self, value: Any, schema: Any = None) -> bool:
        """Whether `value` is valid under the whole schema, or under its part `schema`; False if that is unknown."""
        return bool(self._verdict(value, self._validator if schema is None else self._validator.evolve(schema=schema)))

    def satisfied_by(self, text: str) -> bool | None:
        """Whether `text` is valid JSON and its value satisfies the schema.

        None: it breaks no keyword that is checked, but the schema has others, or it cannot be followed to its end, or
        not within `CHECK_STEPS` and `CHECK_SECONDS`.
        """
        try:
            value = read_json(text, constants=False, unwritable=True)
        except ForeignTextError as error:
            return None if error.is_limit else False
        if self._unchecked is None:
            self._unchecked = any(True for _ in unchecked_keywords(self.root, self.resolve))
        verdict = self._verdict(value, self._validator)
        return None if verdict and self._unchecked else verdict

    def _verdict(self, value: Any, validator: Any) -> bool | None:
        token = _budget.set(_Budget())
        try:
            return bool(validator.is_valid(value))
        except (referencing.exceptions.Unresolvable, RecursionError, ArithmeticError, _OverBudget):
            return None
        finally:
            _budget.reset(token)


@cache
def _with_own_checks(base: Any) -> Any:
    """Validator class `base` with a budget, with exact decimals, and with errors that are not collected."""

    def pattern(validator: Any, wanted: str, instance: Any, schema: Any) -> Iterator[Any]:
        if not validator.is_type(instance, "string") or not has_one_reading(wanted):
            return
        if not _found(wanted, instance):
            yield jsonschema.ValidationError(f"{instance!r} does not match {wanted!r}")

    def pattern_properties(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if not validator.is_type(instance, "object"):
            return
        for expression, part in wanted.items():
            for name, value in instance.items():
                if has_one_reading(expression) and _found(expression, name):
                    yield from validator.descend(value, part, path=name, schema_path=expression)

    def multiple_of(validator: Any, factor: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if validator.is_type(instance, "number") and not _is_multiple(instance, factor):
            yield jsonschema.ValidationError(f"{instance!r} is not a multiple of {factor!r}")

    def unique_items(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if wanted and validator.is_type(instance, "array") and len(set(map(_comparable, instance))) < len(instance):
            yield jsonschema.ValidationError("two elements are equal")

    def any_of(validator: Any, parts: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if all(next(validator.descend(instance, part), None) is not None for part in parts):
            yield jsonschema.ValidationError("none of the alternatives holds")

    def property_ordering(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if validator.is_type(instance, "object") and is_order(wanted):
            order = dict.fromkeys(wanted)
            if [name for name in order if name in instance] != [name for name in instance if name in order]:
                yield jsonschema.ValidationError(f"the properties are not in the order {wanted!r}")

    checks = {**base.VALIDATORS, "pattern": pattern, "patternProperties": pattern_properties, "multipleOf": multiple_of}
    checks[ORDER] = property_ordering
    checks |= {name: check for name, check in (("uniqueItems", unique_items), ("anyOf", any_of)) if name in checks}
    made = jsonschema.validators.extend(base, {name: _counted(check) for name, check in checks.items()})
    names = [(each.alias, each.name) for each in made.__attrs_attrs__ if each.init]

    def evolve(validator: Any, **changes: Any) -> Any:
        """The validator of a part; the library takes its own class, without a budget, if the part declares a draft."""
        part = changes.setdefault("schema", validator.schema)
        declares = isinstance(part, dict) and "$schema" in part
        chosen = _with_own_checks(validator_for(part, default=base)) if declares else made
        for alias, name in names:
            if alias not in changes:
                changes[alias] = getattr(validator, name)
        return chosen(**changes)

    made.evolve = evolve
    return made


def _counted(check: Callable[..., Any]) -> Callable[..., Any]:
    def counted(validator: Any, wanted: Any, instance: Any, schema: Any) -> Any:
        _budget.get().spend(wanted, instance)
        return check(validator, wanted, instance, schema)

    return counted


def _comparable(value: Any) -> Any:
    """A hashable value that is equal for equal JSON values: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        return (dict, frozenset((key, _comparable(item)) for key, item in value.items()))
    if isinstance(value, list):
        return (list, *map(_comparable, value))
    return (bool, value) if isinstance(value, bool) else value


def _is_multiple(value: float, factor: float) -> bool:
    """Whether a number is a whole multiple of another, as both are written in decimals."""
    return (isinstance(value, int) or math.isfinite(value)) and (
        Fraction(repr(value)) / Fraction(repr(factor))
    ).denominator == 1


def _put_in_order(root: Any) -> None:
    """Put the properties of a document's schemas into the order of their `propertyOrdering`."""
    waiting = [root]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            order: Any = part.get(ORDER)
            declared = part.get("properties")
            if is_order(order) and isinstance(declared, dict):
                part["properties"] = {name: declared[name] for name in (*order, *declared) if name in declared}
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
