"""JSON Schemas as the grammar compiler can enforce them.

xgrammar follows one keyword of a schema ($ref, const, enum, anyOf, oneOf, allOf, type: the first that is there) and
silently passes over what stands beside it, and over keywords it does not know. `enforceable` therefore writes a
schema anew: either every text of the grammar made from the result satisfies the original, or the keyword that stands in
the way is named. What is written may allow less than the original, never more:

- without `additionalProperties`, an object with `properties` has those alone; one without any has any;
- `pattern` is matched whole, and strings of a given length are written without escapes;
- properties that only `patternProperties` allows are not written beside declared ones.

Drafts 4 to 2020-12. Knows nothing of xgrammar itself: what it enforces was found by trying, and tests hold it to that.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

from batchgen.errors import ErrorCode, RowError
from batchgen.text.grammar_patterns import PatternError, explicit_pattern
from batchgen.text.schema_formats import FORMATS, NATIVE_FORMATS, NEVER_EMPTY, UNENFORCED_FORMATS
from batchgen.text.schema_keywords import (
    ASSERTIONS,
    HEADS,
    NEVER,
    OF_TYPE,
    Json,
    bounds_of,
    either,
    items_of,
    others_of,
)
from batchgen.text.schema_values import leads_to_itself, may_agree, valid_values, writable
from batchgen.text.validation import Schema, finds

__all__ = ["enforceable"]

_INT64 = (-(2**63), 2**63 - 1)
_NUMBER_LIMIT = 1e15
_DECIMALS = 6
"""Digits after the point to which xgrammar keeps the bounds of numbers."""
_DEPTH = 200
"""Levels of a schema."""


def enforceable(text: str, field: str = "json_schema", *, lenient: bool = False) -> Json:
    """The schema to compile for `text`.

    Args:
        text: JSON of a schema.
        field: where it stands, for messages. In a `structural_tag` strings of a given length are written as patterns,
            since the tokens of a tag may hold what JSON strings must escape.
        lenient: leave out what cannot be enforced instead of refusing it.

    Raises:
        RowError: `invalid_grammar` for what is no schema, `unsupported_schema_keyword` for what cannot be enforced.
    """
    return _Writer(Schema.parse(text, field), field, lenient).write()


class _Writer:
    """Writes one document. `$ref` targets become `$defs` of the result, each once."""

    def __init__(self, schema: Schema, field: str, lenient: bool) -> None:
        self._schema = schema
        self._field = field
        self._lenient = lenient
        self._names: dict[str, str] = {}
        self._waiting: list[str] = []
        self._defs: Json = {}
        self._choices: list[tuple[str, list[Any], list[Any]]] = []
        """(place, branches, branches as written) of each oneOf."""
        self._depth = 0

    def write(self) -> Json:
        root = self._any(self._schema.root, "#")
        while self._waiting:
            target = self._waiting.pop()
            found = self._schema.resolve(target)
            if found is None:
                raise self._invalid("#", f"`$ref` names {target[:200]}, which is not there")
            self._defs[self._names[target]] = self._any(found, target)
        if "#" in self._names:
            self._defs[self._names["#"]] = root
            root = {"$ref": f"#/$defs/{self._names['#']}"}
        if root is False or False in self._defs.values():
            raise self._invalid("#", "no value can satisfy it")
        for target, name in self._names.items():
            if leads_to_itself(name, self._defs):
                raise self._invalid(target, "refers to itself with nothing in between")
        self._check_choices()
        return {**root, "$defs": self._defs} if self._defs else root

    def _check_choices(self) -> None:
        """Hold oneOf, which is compiled as anyOf, to what it says: no text of one branch may satisfy another."""
        for at, branches, written in self._choices:
            for (i, made), (j, other) in product(enumerate(written), enumerate(branches)):
                if i != j and made is not False and may_agree(self._schema, other, made, self._defs):
                    problem = f"what branch {i} allows may satisfy branch {j} too; make them exclude each other"
                    self._unsupported(at, "oneOf", problem)

    def _any(self, schema: Any, at: str) -> Any:
        """The written form of any (sub)schema; False where nothing satisfies it."""
        if schema is False:
            return False
        if schema is True:
            return {}
        self._depth += 1
        if self._depth > _DEPTH:
            raise self._invalid(at, f"is more than {_DEPTH} levels deep")
        try:
            return self._object(schema, at)
        finally:
            self._depth -= 1

    def _object(self, schema: Json, at: str) -> Any:
        for key in NEVER:
            if key in schema:
                self._unsupported(at, key, "grammars have no such thing")
        if at != "#" and "$id" in schema:
            self._unsupported(at, "$id", "only the document itself may have one")
        head = next((key for key in HEADS if key in schema), None)
        if head in ("const", "enum"):
            return self._values(schema, at)
        if head is None:
            return self._typed(schema, at)
        beside = [key for key in schema if key in ASSERTIONS and key != head and key not in NEVER]
        for key in beside:
            self._unsupported(at, key, f"it stands beside `{head}`, and only one of the two can be followed")
        return getattr(self, f"_{head.strip('$').lower()}")(schema[head], at)

    def _ref(self, target: Any, at: str) -> Any:
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            self._unsupported(at, "$ref", f"{target!r} is no place in the schema itself (#/...)")
            return {}
        if target not in self._names:
            self._names[target] = f"r{len(self._names)}"
            if target != "#":  # the root is being written already
                self._waiting.append(target)
        return {"$ref": f"#/$defs/{self._names[target]}"}

    def _anyof(self, branches: list[Any], at: str) -> Any:
        written = [self._any(branch, f"{at}/anyOf/{i}") for i, branch in enumerate(branches)]
        return either([branch for branch in written if branch is not False])

    def _oneof(self, branches: list[Any], at: str) -> Any:
        written = [self._any(branch, f"{at}/oneOf/{i}") for i, branch in enumerate(branches)]
        self._choices.append((at, branches, written))
        return either([branch for branch in written if branch is not False])

    def _allof(self, branches: list[Any], at: str) -> Any:
        if len(branches) > 1:
            self._unsupported(at, "allOf", "only one branch can be followed; merge them")
        return self._any(branches[0], f"{at}/allOf/0")

    def _values(self, schema: Json, at: str) -> Any:
        """What const or enum allow: the values that satisfy everything beside them."""
        values = valid_values(self._schema, schema)
        for value in values:
            if not writable(value):
                raise self._invalid(at, "an integer of const or enum does not fit 64 bits")
        return {"enum": values} if values else False

    def _typed(self, schema: Json, at: str) -> Any:
        keys = [key for key in schema if key in ASSERTIONS and key != "type" and key not in NEVER]
        named = schema.get("type")
        if named is None:
            # A keyword says nothing about values of other types: any one type that all keywords speak of will do.
            kinds = [kind for kind in ("object", "array", "string", "number") if set(keys) & set(OF_TYPE[kind])]
            if not kinds:
                return {}
            if len(kinds) > 1:
                self._unsupported(at, keys[0], "the schema has no `type`")
            named = kinds[0]
        types = [named] if isinstance(named, str) else list(named)
        if "number" in types and "integer" in types:
            types.remove("integer")
        write = {"object": self._of_object, "array": self._of_array, "string": self._of_string}
        made = [write.get(kind, self._of_scalar)({**schema, "type": kind}, at) for kind in types]
        return either([one for one in made if one is not False])

    def _of_scalar(self, schema: Json, at: str) -> Any:
        kind = schema["type"]
        if kind not in ("integer", "number"):
            return {"type": kind}
        if "multipleOf" in schema:
            self._unsupported(at, "multipleOf", "grammars cannot count")
        low, high = bounds_of(schema)
        return self._integer(low, high, at) if kind == "integer" else self._number(low, high, at)

    def _integer(self, low: tuple[float, bool], high: tuple[float, bool], at: str) -> Any:
        written: Json = {"type": "integer"}
        if low[0] != -math.inf:
            written["minimum"] = math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
        if high[0] != math.inf:
            written["maximum"] = math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
        for key in ("minimum", "maximum"):
            if key in written and not _INT64[0] < written[key] < _INT64[1]:
                self._unsupported(at, key, "it does not fit 64 bits")
                del written[key]
        if written.get("minimum", -math.inf) > written.get("maximum", math.inf):
            return False
        return written

    def _number(self, low: tuple[float, bool], high: tuple[float, bool], at: str) -> Any:
        if low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1])):
            return False
        written: Json = {"type": "number"}
        for (value, exclusive), name in ((low, "Minimum"), (high, "Maximum")):
            if not math.isfinite(value):
                continue
            key = f"exclusive{name}" if exclusive else name.lower()
            if abs(value) >= _NUMBER_LIMIT or round(value, _DECIMALS) != value:
                self._unsupported(at, key, f"a bound of a number is kept to {_DECIMALS} decimals")
            else:
                written[key] = value
        if low[1] and high[1] and high[0] - low[0] < 2 * 10**-_DECIMALS:
            self._unsupported(at, "exclusiveMaximum", "the range is too narrow")
            written.pop("exclusiveMaximum", None)
        return written

    def _of_string(self, schema: Json, at: str) -> Any:
        low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
        if high is not None and low > high:
            return False
        named = schema.get("format")
        given = [key for key in ("format", "pattern") if key in schema]
        if named is not None and named not in FORMATS and named not in NATIVE_FORMATS:
            given.remove("format")  # one of the user's own: a note, as JSON Schema has it
            if named in UNENFORCED_FORMATS:
                self._unsupported(at, "format", f"{named} is none that a grammar is known for")
        if len(given) == 2:
            self._unsupported(at, "pattern", "it stands beside `format`, and only one of the two can be followed")
        if given:
            if high is not None or low > (named in NEVER_EMPTY and given[0] == "format"):
                key = "maxLength" if high is not None else "minLength"
                problem = f"it stands beside `{given[0]}`, and only one of the two can be followed"
                self._unsupported(at, key, problem)
            return self._patterned(schema, given[0], at)
        if not low and high is None:
            return {"type": "string"}
        if self._field == "structural_tag":
            most = "" if high is None else str(int(high))
            return {"type": "string", "pattern": explicit_pattern(f".{{{low},{most}}}", json_string=True)}
        written: Json = {"type": "string", "minLength": low}
        return written if high is None else {**written, "maxLength": int(high)}

    def _patterned(self, schema: Json, key: str, at: str) -> Any:
        if schema.get("format") in NATIVE_FORMATS and key == "format":
            return {"type": "string", "format": schema["format"]}
        pattern = FORMATS[schema["format"]] if key == "format" else schema["pattern"]
        try:
            return {"type": "string", "pattern": explicit_pattern(pattern, json_string=True)}
        except PatternError as error:
            if error.invalid:
                raise self._invalid(at, f"`{key}` {error}") from None
            self._unsupported(at, key, str(error))
            return {"type": "string"}

    def _of_array(self, schema: Json, at: str) -> Any:
        for key in ("contains", "uniqueItems"):
            if schema.get(key, False) is not False:
                self._unsupported(at, key, "grammars cannot compare items")
        first, rest, rest_key = items_of(schema)
        low, high = int(schema.get("minItems", 0)), schema.get("maxItems")
        written = [self._any(item, f"{at}/prefixItems/{i}") for i, item in enumerate(first)]
        if False in written:  # the array ends before such an item
            limit = written.index(False)
            written, rest, high = written[:limit], False, min(limit, limit if high is None else high)
        if rest is None:
            rest = not written or low > len(written)
        others = self._any(rest, f"{at}/{rest_key}")
        most = len(written) if others is False else math.inf
        if high is not None:
            most = min(most, int(high))
        if low > most:
            return False
        if most < len(written):
            written, others = written[: int(most)], False
        made: Json = {"type": "array"}
        if written:
            made["prefixItems"] = written
        made["items"] = others
        if low:
            made["minItems"] = low
        if others is not False and most != math.inf:
            made["maxItems"] = int(most)
        return made

    def _of_object(self, schema: Json, at: str) -> Any:
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            if schema.get(key):
                self._unsupported(at, key, "grammars have no such thing")
        properties = {
            name: self._any(value, f"{at}/properties/{name}") for name, value in schema.get("properties", {}).items()
        }
        others, others_key = others_of(schema)
        required = list(dict.fromkeys(schema.get("required") or ()))
        for name in required:
            if name not in properties and "patternProperties" not in schema and others is not False:
                properties[name] = self._any(True if others is None else others, f"{at}/{others_key}")
            if properties.get(name, False) is False:
                if "patternProperties" in schema and name not in properties:
                    self._unsupported(at, "required", f"{name!r} is not in `properties`")
                    continue
                return False
        barred = [name for name, made in properties.items() if made is False]
        if barred and others not in (False, None):
            self._unsupported(at, "properties", f"{barred[0]!r} is ruled out, and others are open")
        properties = {name: made for name, made in properties.items() if made is not False}
        if properties or barred:
            made = self._closed(schema, properties, others, others_key, at)
        else:
            made = self._open(schema, others, others_key, at)
        if made is False:
            return False
        if required and "properties" in made:
            made["required"] = [name for name in required if name in made["properties"]]
        return self._counted(schema, made, at)

    def _closed(self, schema: Json, properties: Json, others: Any, others_key: str, at: str) -> Any:
        """An object with declared properties; with others only where it says so."""
        for pattern in schema.get("patternProperties", {}):
            if any(finds(pattern, name) for name in properties):
                self._unsupported(at, "patternProperties", f"{pattern!r} speaks of declared properties too")
        names = schema.get("propertyNames", True)
        if any(not self._schema.satisfies(name, names) for name in properties):
            self._unsupported(at, "propertyNames", "it rules out a declared property")
        extra = False if others in (None, False) else self._any(others, f"{at}/{others_key}")
        if extra is not False:
            for key in ("patternProperties", "propertyNames"):
                if key in schema:
                    self._unsupported(at, key, f"it stands beside `properties` and `{others_key}`")
        return {"type": "object", "properties": properties, "additionalProperties": extra}

    def _open(self, schema: Json, others: Any, others_key: str, at: str) -> Any:
        """An object without declared properties: patterns, names or anything."""
        patterns = schema.get("patternProperties", {})
        if patterns and "propertyNames" in schema:
            self._unsupported(at, "propertyNames", "it stands beside `patternProperties`")
        if len(patterns) > 1:
            self._unsupported(at, "patternProperties", "only one pattern can be followed")
        for pattern, value in patterns.items():
            made = self._any(value, f"{at}/patternProperties")
            key = self._patterned({"pattern": pattern}, "pattern", at).get("pattern")
            if made is False or key is None:
                return {"type": "object", "maxProperties": 0, "additionalProperties": True}
            return {"type": "object", "patternProperties": {key: made}, "additionalProperties": False}
        extra = self._any(True if others is None else others, f"{at}/{others_key}")
        made = {"type": "object", "additionalProperties": extra}
        if extra is not False and schema.get("propertyNames", True) is not True:
            names = self._names_of(schema["propertyNames"], at)
            if names is False:
                return {"type": "object", "maxProperties": 0, "additionalProperties": True}
            made["propertyNames"] = names
        return made

    def _names_of(self, schema: Any, at: str) -> Any:
        """`propertyNames`: of a string only, or a list of them."""
        if schema is False:
            return False
        made = self._any({"type": "string", **schema} if "$ref" not in schema else schema, f"{at}/propertyNames")
        if made is False or made == {"type": "string"}:
            return made
        if set(made) <= {"type", "pattern"}:
            return made
        if set(made) == {"enum"}:
            return made
        if set(made) <= {"type", "minLength", "maxLength"}:
            most = made.get("maxLength", "")
            text = f".{{{made['minLength']},{most}}}"
            return {"type": "string", "pattern": explicit_pattern(text, json_string=True)}
        self._unsupported(at, "propertyNames", "only `pattern`, `enum` and lengths can be followed")
        return {"type": "string"}

    def _counted(self, schema: Json, made: Json, at: str) -> Any:
        low, high = int(schema.get("minProperties", 0)), schema.get("maxProperties")
        closed = made.get("additionalProperties") is False and "patternProperties" not in made
        if closed and low > len(made.get("properties", {})):
            return False
        if low > 1 and not closed:
            self._unsupported(at, "minProperties", "names that are not declared may come twice")
            low = 0
        if low:
            made["minProperties"] = low
        if high is not None:
            if len(made.get("required", ())) > high or low > high:
                return False
            made["maxProperties"] = int(high)
        return made

    def _unsupported(self, at: str, keyword: str, why: str) -> None:
        if not self._lenient:
            where = "" if at == "#" else f" (at {at[:200]})"
            message = f"`{self._field}` uses `{keyword}`{where}, which cannot be enforced: {why}; "
            remedy = "change the schema, or allow it with --lenient-schemas"
            raise RowError(ErrorCode.UNSUPPORTED_SCHEMA_KEYWORD, message + remedy, self._field)

    def _invalid(self, at: str, problem: str) -> RowError:
        where = "" if at == "#" else f" at {at[:200]}"
        return RowError(ErrorCode.INVALID_GRAMMAR, f"`{self._field}` cannot be used{where}: {problem}", self._field)
