"""Translation of a JSON Schema document for a grammar compiler: what the translations for all compilers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from difflib import get_close_matches
from itertools import product
from typing import Any

from batchgen.errors import ErrorCode, RowError
from batchgen.text.grammar.schemas.formats import FORMATS, IMPLIED_PATTERNS, is_known_format
from batchgen.text.grammar.schemas.keywords import (
    ASSERTIONS,
    ORDER,
    UNSUPPORTED_KEYWORDS,
    Json,
    is_order,
    unknown_keywords,
)
from batchgen.text.grammar.schemas.patterns import PatternError, explicit_pattern
from batchgen.text.grammar.schemas.schema_analysis import (
    any_of,
    fits_int64,
    may_overlap,
    refers_to_itself,
    valid_values,
)
from batchgen.text.grammar.schemas.validation import Schema

_MAX_DEPTH = 200
"""Deepest nesting of a schema."""
_REMEDIES = {
    "nullable": 'write `"type": [..., "null"]`',
    "propertyOrder": "write `propertyOrdering`, a list of names",
    "uniqueItems": "change the schema, or allow it with --lenient-schemas: finished texts are checked for it",
}


class SchemaWriter(ABC):
    """Translator of one schema document. Each `$ref` target becomes one of the result's `$defs`.

    Args:
        schema: the document.
        field: name of its field, for messages.
        lenient: leave out keywords that cannot be enforced instead of refusing them.
    """

    def __init__(self, schema: Schema, field: str, *, lenient: bool) -> None:
        self._schema = schema
        self._field = field
        self._lenient = lenient
        self._names: dict[tuple[str, bool], str] = {}
        """(target of a `$ref`, whether it is written as a part of a conjunction) -> name of its definition."""
        self._pending: list[tuple[str, bool]] = []
        self._defs: Json = {}
        self._one_ofs: list[tuple[str, list[Any], list[Any]]] = []
        """(path, branches, translated branches) of each oneOf."""
        self._depth = 0

    def write(self) -> Json:
        """The translated document.

        Raises:
            RowError: `invalid_grammar`: no text can satisfy it; `unsupported_schema_keyword`: a keyword cannot be
                enforced.
        """
        root = self._any(self._schema.root, "#")
        while self._pending:
            target, is_part = key = self._pending.pop()
            part = self._schema.resolve(target)
            if part is None:
                raise self._invalid("#", f"`$ref` names {target[:200]}, which does not exist")
            self._defs[self._names[key]] = self._any(part, target, is_part=is_part)
        if ("#", False) in self._names:
            self._defs[self._names["#", False]] = root
            root = {"$ref": f"#/$defs/{self._names['#', False]}"}
        if root is False or False in self._defs.values():
            raise self._invalid("#", "no value can satisfy it")
        for (target, _), name in self._names.items():
            if refers_to_itself(name, self._defs):
                raise self._invalid(target, "refers to itself with nothing in between")
        self._check_choices()
        return {**root, "$defs": self._defs} if self._defs else root

    @abstractmethod
    def _object(self, schema: Json, path: str, is_part: bool) -> Any:
        """Translation of a schema that is an object; `is_part`: another one constrains the same value."""

    def _check_choices(self) -> None:
        """Check that no text of one branch of a oneOf, which is compiled as anyOf, may satisfy another branch."""
        for path, branches, written in self._one_ofs:
            for (i, result), (j, other) in product(enumerate(written), enumerate(branches)):
                if i != j and result is not False and may_overlap(self._schema, other, result, self._defs):
                    problem = f"a value of branch {i} may satisfy branch {j} too; make them exclude each other"
                    self._unsupported(path, "oneOf", problem)

    def _any(self, schema: Any, path: str, *, is_part: bool = False) -> Any:
        """Translation of any (sub)schema; False if no value satisfies it."""
        if schema is False:
            return False
        if schema is True:
            return {}
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._invalid(path, f"is more than {_MAX_DEPTH} levels deep")
        try:
            self._check_keywords(schema, path, is_part)
            return self._object(schema, path, is_part)
        finally:
            self._depth -= 1

    def _check_keywords(self, schema: Json, path: str, is_part: bool) -> None:
        for key in unknown_keywords(schema):
            near = get_close_matches(key.lower(), [known.lower() for known in ASSERTIONS], 1, 0.8)
            hint = next((f"; did you mean `{known}`?" for known in ASSERTIONS if [known.lower()] == near), "")
            self._unsupported(path, key, f"nothing here knows or checks it{hint}")
        dependent = (key for key in ("dependentRequired", "dependentSchemas", "dependencies") if schema.get(key))
        for key in (*(key for key in UNSUPPORTED_KEYWORDS if key in schema), *dependent):
            self._unsupported(path, key, "grammars cannot express it")
        if schema.get("uniqueItems", False) is not False and schema.get("maxItems", 2) > 1:
            self._unsupported(path, "uniqueItems", "grammars cannot compare items")
        if "contains" in schema:
            self._unsupported(path, "contains", "grammars cannot count items")
        order: Any = schema.get(ORDER)
        if order and is_order(order) and (is_part or not set(order) <= set(schema.get("properties", ()))):
            self._unsupported(path, ORDER, "its names must be in `properties` next to it, and not in a part of `allOf`")
        if path != "#" and "$id" in schema:
            self._unsupported(path, "$id", "only the document itself may have one")

    def _ref(self, target: Any, path: str, *, is_part: bool = False) -> Any:
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            self._unsupported(path, "$ref", f"{target!r} is not a reference within the schema (#/...)")
            return {}
        key = (target, is_part)
        if key not in self._names:
            self._names[key] = f"r{len(self._names)}"
            if key != ("#", False):  # the root is being translated already
                self._pending.append(key)
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _anyof(self, branches: list[Any], path: str, *, is_part: bool = False) -> Any:
        written = [self._any(branch, f"{path}/anyOf/{i}", is_part=is_part) for i, branch in enumerate(branches)]
        return any_of([branch for branch in written if branch is not False])

    def _oneof(self, branches: list[Any], path: str, *, is_part: bool = False) -> Any:
        written = [self._any(branch, f"{path}/oneOf/{i}", is_part=is_part) for i, branch in enumerate(branches)]
        self._one_ofs.append((path, branches, written))
        return any_of([branch for branch in written if branch is not False])

    def _values(self, schema: Json, path: str) -> Any:
        """Translation of const or enum: the values that satisfy all other keywords."""
        values = valid_values(self._schema, schema)
        for value in values:
            if not fits_int64(value):
                raise self._invalid(path, "an integer of const or enum does not fit 64 bits")
        return {"enum": values} if values else False

    def _patterns_of(self, schema: Json, path: str) -> dict[str, str]:
        """`pattern` and `format` of strings -> a pattern as it is given, or that describes the format."""
        patterns: dict[str, str] = {}
        named: Any = schema.get("format")
        if named in FORMATS and FORMATS[named].pattern is not None:
            patterns["format"] = FORMATS[named].pattern or ""
        elif named in FORMATS or (named is not None and not is_known_format(schema)):
            problem = f"no grammar for {named} is known" if named in FORMATS else f"the format {named!r} is unknown"
            self._unsupported(path, "format", problem)
        if "pattern" in schema and schema["pattern"] != IMPLIED_PATTERNS.get(named):
            patterns["pattern"] = schema["pattern"]
        return patterns

    def _explicit(self, pattern: str, key: str, path: str) -> str | None:
        """`pattern` for a grammar; None if a lenient translation leaves it out."""
        try:
            return explicit_pattern(pattern, json_string=True)
        except PatternError as error:
            if error.invalid:
                raise self._invalid(path, f"`{key}` {error}") from None
            self._unsupported(path, key, str(error))
            return None

    def _unsupported(self, path: str, keyword: str, reason: str) -> None:
        if not self._lenient:
            where = "" if path == "#" else f" (at {path[:200]})"
            message = f"`{self._field}` uses `{keyword[:80]}`{where}, which cannot be enforced: {reason}; "
            remedy = _REMEDIES.get(keyword, "change the schema, or allow it with --lenient-schemas")
            raise RowError(ErrorCode.UNSUPPORTED_SCHEMA_KEYWORD, message + remedy, self._field)

    def _invalid(self, path: str, problem: str) -> RowError:
        where = "" if path == "#" else f" at {path[:200]}"
        return RowError(ErrorCode.INVALID_GRAMMAR, f"`{self._field}` cannot be used{where}: {problem}", self._field)
