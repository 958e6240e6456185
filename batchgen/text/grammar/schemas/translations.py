"""Translations of JSON Schemas to what a grammar compiler enforces: `enforceable_schemas`, and the one for xgrammar.

xgrammar follows only the first of `$ref`, `const`, `enum`, `anyOf`, `oneOf`, `allOf` and `type` in a schema; it
silently ignores other keywords next to it and keywords that it does not know. `XgrammarWriter` therefore rewrites a
schema: either every text of the resulting grammar satisfies the original, or the error names the keyword that prevents
it. The result may allow less than the original, never more:

- without `additionalProperties`, an object with `properties` has only those; an object without `properties` may have
  any;
- `pattern` must match the whole string, unless it is anchored at one end only, and strings with a length limit have no
  escapes;
- properties allowed only by `patternProperties` do not occur together with declared ones.

Drafts 4 to 2020-12 are supported. Tests check the assumptions about what xgrammar enforces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

from batchgen.errors import ErrorCode, RowError
from batchgen.text.grammar.schemas.guidance_schemas import GuidanceWriter
from batchgen.text.grammar.schemas.keywords import (
    ASSERTIONS,
    HEAD_KEYWORDS,
    KEYWORDS_OF_TYPE,
    UNSUPPORTED_KEYWORDS,
    Json,
)
from batchgen.text.grammar.schemas.patterns import explicit_pattern, pattern_width
from batchgen.text.grammar.schemas.schema_analysis import INT64, additional_properties_of, any_of, bounds_of, items_of
from batchgen.text.grammar.schemas.schema_writer import SchemaWriter
from batchgen.text.grammar.schemas.validation import Schema, pattern_found

TAG_FIELDS = ("structural_tag", "tools")
"""Fields whose schemas become parts of structural tags."""
_NUMBER_LIMIT = 1e15
_DECIMALS = 6
"""Decimals to which xgrammar enforces the bounds of numbers."""


class XgrammarWriter(SchemaWriter):
    """Translator for xgrammar. Strings with a length limit become patterns in a `structural_tag`.

    The tokens of a tag may contain characters that JSON strings must escape.
    """

    def _object(self, schema: Json, path: str, is_part: bool) -> Any:
        head = next((key for key in HEAD_KEYWORDS if key in schema), None)
        if head in ("const", "enum"):
            return self._values(schema, path)
        if head is None:
            return self._typed(schema, path)
        conflicting = [key for key in schema if key in ASSERTIONS and key != head and key not in UNSUPPORTED_KEYWORDS]
        for key in conflicting:
            self._unsupported(path, key, f"it occurs with `{head}`, and only one of the two can be enforced")
        return getattr(self, f"_{head.strip('$').lower()}")(schema[head], path)

    def _allof(self, branches: list[Any], path: str) -> Any:
        if len(branches) > 1:
            self._unsupported(path, "allOf", "its branches cannot be combined; merge them")
        return self._any(branches[0], f"{path}/allOf/0")

    def _typed(self, schema: Json, path: str) -> Any:
        keys = [key for key in schema if key in ASSERTIONS and key != "type" and key not in UNSUPPORTED_KEYWORDS]
        named = schema.get("type")
        if named is None:
            # Keywords do not constrain values of other types, so any one type that all keywords apply to will do.
            kinds = [
                kind for kind in ("object", "array", "string", "number") if set(keys) & set(KEYWORDS_OF_TYPE[kind])
            ]
            if not kinds:
                return {}
            if len(kinds) > 1:
                self._unsupported(path, keys[0], "the schema has no `type`")
            named = kinds[0]
        types = [named] if isinstance(named, str) else list(named)
        if "number" in types and "integer" in types:
            types.remove("integer")
        write = {"object": self._of_object, "array": self._of_array, "string": self._of_string}
        result = [write.get(kind, self._of_scalar)({**schema, "type": kind}, path) for kind in types]
        return any_of([one for one in result if one is not False])

    def _of_scalar(self, schema: Json, path: str) -> Any:
        kind = schema["type"]
        if kind not in ("integer", "number"):
            return {"type": kind}
        if "multipleOf" in schema:
            self._unsupported(path, "multipleOf", "no compiler can count in these steps")
        low, high = bounds_of(schema)
        return self._integer(low, high, path) if kind == "integer" else self._number(low, high, path)

    def _integer(self, low: tuple[float, bool], high: tuple[float, bool], path: str) -> Any:
        written: Json = {"type": "integer"}
        if low[0] != -math.inf:
            written["minimum"] = math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
        if high[0] != math.inf:
            written["maximum"] = math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
        for key in ("minimum", "maximum"):
            if key in written and not INT64[0] < written[key] < INT64[1]:
                self._unsupported(path, key, "it does not fit 64 bits")
                del written[key]
        if written.get("minimum", -math.inf) > written.get("maximum", math.inf):
            return False
        return written

    def _number(self, low: tuple[float, bool], high: tuple[float, bool], path: str) -> Any:
        if low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1])):
            return False
        written: Json = {"type": "number"}
        for (value, exclusive), name in ((low, "Minimum"), (high, "Maximum")):
            if not math.isfinite(value):
                continue
            key = f"exclusive{name}" if exclusive else name.lower()
            if abs(value) >= _NUMBER_LIMIT or round(value, _DECIMALS) != value:
                self._unsupported(path, key, f"bounds of numbers are enforced to {_DECIMALS} decimals")
            else:
                written[key] = value
        if low[1] and high[1] and high[0] - low[0] < 2 * 10**-_DECIMALS:
            self._unsupported(path, "exclusiveMaximum", "the range is too narrow")
            written.pop("exclusiveMaximum", None)
        return written

    def _of_string(self, schema: Json, path: str) -> Any:
        low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
        if high is not None and low > high:
            return False
        patterns = self._patterns_of(schema, path)
        if len(patterns) == 2:
            self._unsupported(path, "pattern", "it occurs with `format`, and only one of the two can be enforced")
        for key, pattern in patterns.items():
            explicit = self._explicit(pattern, key, path)
            if explicit is None:
                break
            least, most = pattern_width(pattern)
            for name, bound, is_met in (
                ("minLength", low, low <= least),
                ("maxLength", high, high is None or most <= high),
            ):
                if bound is not None and not is_met:
                    self._unsupported(path, name, f"it occurs with `{key}`, and only one of the two can be enforced")
            return {"type": "string", "pattern": explicit}
        if not low and high is None:
            return {"type": "string"}
        if self._field in TAG_FIELDS:
            limit = "" if high is None else str(int(high))
            return {"type": "string", "pattern": explicit_pattern(f".{{{low},{limit}}}", json_string=True)}
        written: Json = {"type": "string", "minLength": low}
        return written if high is None else {**written, "maxLength": int(high)}

    def _of_array(self, schema: Json, path: str) -> Any:
        first, rest, rest_key = items_of(schema)
        low, high = int(schema.get("minItems", 0)), schema.get("maxItems")
        written = [self._any(item, f"{path}/prefixItems/{i}") for i, item in enumerate(first)]
        if False in written:  # the array must end before such an item
            limit = written.index(False)
            written, rest, high = written[:limit], False, min(limit, limit if high is None else high)
        if rest is None:
            rest = not written or low > len(written)
        others = self._any(rest, f"{path}/{rest_key}")
        most = len(written) if others is False else math.inf
        if high is not None:
            most = min(most, int(high))
        if low > most:
            return False
        if most < len(written):
            written, others = written[: int(most)], False
        result: Json = {"type": "array"}
        if written:
            result["prefixItems"] = written
        result["items"] = others
        if low:
            result["minItems"] = low
        if others is not False and most != math.inf:
            result["maxItems"] = int(most)
        return result

    def _of_object(self, schema: Json, path: str) -> Any:
        properties = {
            name: self._any(value, f"{path}/properties/{name}") for name, value in schema.get("properties", {}).items()
        }
        others, others_key = additional_properties_of(schema)
        required = list(dict.fromkeys(schema.get("required") or ()))
        for name in required:
            if name not in properties and "patternProperties" not in schema and others is not False:
                properties[name] = self._any(True if others is None else others, f"{path}/{others_key}")
            if properties.get(name, False) is False:
                if "patternProperties" in schema and name not in properties:
                    self._unsupported(path, "required", f"{name!r} is not in `properties`")
                    continue
                return False
        forbidden = [name for name, result in properties.items() if result is False]
        if forbidden and others not in (False, None):
            self._unsupported(path, "properties", f"{forbidden[0]!r} is forbidden, but others are allowed")
        properties = {name: result for name, result in properties.items() if result is not False}
        if properties or forbidden:
            result = self._declared_object(schema, properties, others, others_key, path)
        else:
            result = self._open_object(schema, others, others_key, path)
        if result is False:
            return False
        if required and "properties" in result:
            result["required"] = [name for name in required if name in result["properties"]]
        return self._with_property_counts(schema, result, path)

    def _declared_object(self, schema: Json, properties: Json, others: Any, others_key: str, path: str) -> Any:
        """Translation of an object with declared properties; others are allowed only if the schema says so."""
        for pattern in schema.get("patternProperties", {}):
            if any(pattern_found(pattern, name) for name in properties):
                self._unsupported(path, "patternProperties", f"{pattern!r} also matches declared properties")
        names = schema.get("propertyNames", True)
        if any(not self._schema.satisfies(name, names) for name in properties):
            self._unsupported(path, "propertyNames", "it forbids a declared property")
        additional = False if others in (None, False) else self._any(others, f"{path}/{others_key}")
        if additional is not False:
            for key in ("patternProperties", "propertyNames"):
                if key in schema:
                    self._unsupported(path, key, f"it occurs with `properties` and `{others_key}`")
        return {"type": "object", "properties": properties, "additionalProperties": additional}

    def _open_object(self, schema: Json, others: Any, others_key: str, path: str) -> Any:
        """Translation of an object without declared properties: by patterns, by names, or unrestricted."""
        patterns = schema.get("patternProperties", {})
        if patterns and "propertyNames" in schema:
            self._unsupported(path, "propertyNames", "it occurs with `patternProperties`")
        if len(patterns) > 1:
            self._unsupported(path, "patternProperties", "only one pattern can be enforced")
        for pattern, value in patterns.items():
            result = self._any(value, f"{path}/patternProperties")
            key = self._explicit(pattern, "pattern", path)
            if result is False or key is None:
                return {"type": "object", "maxProperties": 0, "additionalProperties": True}
            return {"type": "object", "patternProperties": {key: result}, "additionalProperties": False}
        additional = self._any(True if others is None else others, f"{path}/{others_key}")
        result = {"type": "object", "additionalProperties": additional}
        if additional is not False and schema.get("propertyNames", True) is not True:
            names = self._property_names(schema["propertyNames"], path)
            if names is False:
                return {"type": "object", "maxProperties": 0, "additionalProperties": True}
            result["propertyNames"] = names
        return result

    def _property_names(self, schema: Any, path: str) -> Any:
        """Translation of `propertyNames`: a pattern, an enum or lengths."""
        if schema is False:
            return False
        result = self._any({"type": "string", **schema} if "$ref" not in schema else schema, f"{path}/propertyNames")
        if result is False or set(result) <= {"type", "pattern"} or set(result) == {"enum"}:
            return result
        if set(result) <= {"type", "minLength", "maxLength"}:
            most = result.get("maxLength", "")
            text = f".{{{result['minLength']},{most}}}"
            return {"type": "string", "pattern": explicit_pattern(text, json_string=True)}
        self._unsupported(path, "propertyNames", "only `pattern`, `enum` and lengths can be enforced")
        return {"type": "string"}

    def _with_property_counts(self, schema: Json, result: Json, path: str) -> Any:
        low, high = int(schema.get("minProperties", 0)), schema.get("maxProperties")
        closed = result.get("additionalProperties") is False and "patternProperties" not in result
        if closed and low > len(result.get("properties", {})):
            return False
        if low > 1 and not closed:
            self._unsupported(path, "minProperties", "undeclared names may occur twice")
            low = 0
        if low:
            result["minProperties"] = low
        if high is not None:
            if len(result.get("required", ())) > high or low > high:
                return False
            result["maxProperties"] = int(high)
        return result


Backend = Literal["xgrammar", "llguidance"]
WRITERS: dict[Backend, type[SchemaWriter]] = {"xgrammar": XgrammarWriter, "llguidance": GuidanceWriter}
"""Grammar compiler -> translator of schemas for it, the preferred one first."""


def enforceable_schemas(text: str, field: str, *, lenient: bool = False) -> Iterator[tuple[Backend, Json]]:
    """Yield the schemas to compile for `text` and the compilers for them, the first choice first.

    Use the first that compiles. A structural tag is for xgrammar alone.

    Args:
        text: JSON text of a schema.
        field: name of its field, for messages.
        lenient: where no compiler enforces the whole schema, leave out what it does not enforce.

    Raises:
        RowError: `invalid_grammar`: the text is not a valid schema; `unsupported_schema_keyword`: a keyword cannot be
            enforced, or nothing that was yielded compiles.
    """
    schema = Schema.parse(text, field)
    backends: list[Backend] = ["xgrammar"] if field in TAG_FIELDS else list(WRITERS)
    refusal: RowError | None = None
    for backend in backends:
        try:
            yield backend, WRITERS[backend](schema, field, lenient=False).write()
        except RowError as error:
            if error.info.code != ErrorCode.UNSUPPORTED_SCHEMA_KEYWORD:
                raise
            refusal = error
    if lenient:
        for backend in reversed(backends):
            yield backend, WRITERS[backend](schema, field, lenient=True).write()
    if refusal is not None:
        raise refusal
