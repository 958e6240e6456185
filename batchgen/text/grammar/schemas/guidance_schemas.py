"""Translation of JSON Schemas to what llguidance enforces.

llguidance follows a schema together with the keywords next to `$ref`, `anyOf` and `allOf`, and knows `multipleOf` and
strings with both a pattern and a length; it ignores keywords that it does not know. `GuidanceWriter` writes patterns,
formats, references and closed objects as for xgrammar, so that a schema has the same meaning with both. A schema that
llguidance cannot follow does not compile.
"""

from __future__ import annotations

import math
from typing import Any

from batchgen.text.grammar.schemas.keywords import ASSERTIONS, KEYWORDS_OF_TYPE, UNSUPPORTED_KEYWORDS, Json
from batchgen.text.grammar.schemas.schema_analysis import (
    additional_properties_of,
    bounds_of,
    has_finite_value,
    items_of,
)
from batchgen.text.grammar.schemas.schema_writer import SchemaWriter
from batchgen.text.grammar.schemas.validation import pattern_found

_COMBINATORS = ("$ref", "allOf", "anyOf", "oneOf")
_EXACT_INTEGER = 2**53
"""Bounds from here on are not exact as floats."""
_MOST_MULTIPLE = 2**63 - 2**10
"""Largest bound of 64 bits that a float has."""


class GuidanceWriter(SchemaWriter):
    """Translator for llguidance."""

    def write(self) -> Json:
        """The translated document; see `SchemaWriter.write`."""
        written = super().write()
        if not has_finite_value(written):
            raise self._invalid("#", "every value that it allows contains another one without end")
        return written

    def _object(self, schema: Json, path: str, is_part: bool) -> Any:
        if "const" in schema or "enum" in schema:
            return self._values(schema, path)
        keys = [key for key in schema if key in ASSERTIONS and key not in UNSUPPORTED_KEYWORDS]
        combinators = [key for key in keys if key in _COMBINATORS]
        if len(keys) == 1 and combinators not in ([], ["allOf"]) and not is_part:
            return self._branches(keys[0], schema[keys[0]], path, is_part=False)
        is_shared = is_part or bool(combinators)
        parts = [self._own(schema, path, is_shared)] if len(keys) > len(combinators) else []
        for key in combinators:
            if key == "allOf":
                parts += [self._any(part, f"{path}/allOf/{i}", is_part=True) for i, part in enumerate(schema[key])]
            else:
                parts.append(self._branches(key, schema[key], path, is_part=True))
        if not is_part and combinators:
            parts.append(self._closing(schema))
        if False in parts:
            return False
        parts = [part for part in parts if part]
        return parts[0] if len(parts) == 1 else {"allOf": parts} if parts else {}

    def _branches(self, key: str, value: Any, path: str, *, is_part: bool) -> Any:
        if key == "$ref":
            return self._ref(value, path, is_part=is_part)
        write = self._anyof if key == "anyOf" else self._oneof
        return write(value, path, is_part=is_part)

    def _closing(self, schema: Json) -> Json:
        """Schema that forbids properties that no part of `schema` declares; empty if a part speaks of others."""
        names: dict[str, bool] = {}
        if not self._declare(schema, names, set()) or not names:
            return {}
        return {"properties": names, "additionalProperties": False}

    def _declare(self, schema: Any, names: dict[str, bool], seen: set[int]) -> bool:
        """Add the properties that a schema and its parts declare to `names`; False if one of them allows others."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return True
        seen.add(id(schema))
        if "additionalProperties" in schema or "patternProperties" in schema:
            return False
        names.update(dict.fromkeys((*schema.get("properties", ()), *(schema.get("required") or ())), True))
        parts = [part for key in ("allOf", "anyOf", "oneOf") for part in schema.get(key, ())]
        if isinstance(schema.get("$ref"), str):
            parts.append(self._schema.resolve(schema["$ref"]))
        return all(self._declare(part, names, seen) for part in parts)

    def _own(self, schema: Json, path: str, is_shared: bool) -> Any:
        """Translation of the keywords of types; `is_shared`: other schemas constrain the same value."""
        written: Json = {"type": schema["type"]} if "type" in schema else {}
        for kind, write in (
            ("number", self._numbers),
            ("string", self._strings),
            ("array", self._arrays),
            ("object", self._objects),
        ):
            if any(key in schema for key in KEYWORDS_OF_TYPE[kind]):
                part = write(schema, path, is_shared)
                if part is False:
                    return False
                written |= part
        return written

    def _numbers(self, schema: Json, path: str, is_shared: bool) -> Any:
        low, high = bounds_of(schema)
        written: Json = {}
        for (value, is_exclusive), name in ((low, "Minimum"), (high, "Maximum")):
            if not math.isfinite(value):
                continue
            key = f"exclusive{name}" if is_exclusive else name.lower()
            if abs(value) >= _EXACT_INTEGER:
                self._unsupported(path, key, "bounds from 2^53 on are not exact")
            else:
                written[key] = value
        for (value, is_exclusive), (other, _) in ((low, high), (high, low)):
            if value == 0 and is_exclusive and abs(other) < 1 and schema.get("type") != "integer":
                # llguidance allows 0 here, unless the other bound has a digit before the point.
                self._unsupported(path, "exclusiveMinimum", "the range between 0 and the other bound is too narrow")
                written = {}
        if "multipleOf" in schema:
            written["multipleOf"] = schema["multipleOf"]
            # Digits cannot be counted here: such a number may not end after the most digits that there may be.
            if not math.isfinite(low[0]):
                written["minimum"] = -_MOST_MULTIPLE
            if not math.isfinite(high[0]):
                written["maximum"] = _MOST_MULTIPLE
        return written

    def _strings(self, schema: Json, path: str, is_shared: bool) -> Any:
        written: Json = {key: int(schema[key]) for key in ("minLength", "maxLength") if key in schema}
        explicit = [self._explicit(pattern, key, path) for key, pattern in self._patterns_of(schema, path).items()]
        patterns = [{"pattern": f"^(?:{pattern})$"} for pattern in explicit if pattern is not None]
        if len(patterns) == 1:
            written |= patterns[0]
        elif patterns:
            written["allOf"] = patterns
        return written

    def _arrays(self, schema: Json, path: str, is_shared: bool) -> Any:
        first, rest, rest_key = items_of(schema)
        if rest_key == "unevaluatedItems" and rest is not None and is_shared:
            self._unsupported(path, rest_key, "it occurs with other keywords that declare items")
            rest = None
        written: Json = {key: int(schema[key]) for key in ("minItems", "maxItems") if key in schema}
        if first:
            written["prefixItems"] = [self._any(item, f"{path}/prefixItems/{i}") for i, item in enumerate(first)]
            if rest is None and not is_shared and schema.get("minItems", 0) <= len(first):
                rest = False
        if rest is not None:
            written["items"] = self._any(rest, f"{path}/{rest_key}")
        return written

    def _objects(self, schema: Json, path: str, is_shared: bool) -> Any:
        properties = {
            name: self._any(value, f"{path}/properties/{name}") for name, value in schema.get("properties", {}).items()
        }
        required = list(dict.fromkeys(schema.get("required") or ()))
        others, others_key = additional_properties_of(schema)
        if others_key == "unevaluatedProperties" and others not in (None, True) and is_shared:
            self._unsupported(path, others_key, "it occurs with other keywords that declare properties")
            others = None
        written: Json = {}
        if "patternProperties" in schema:
            written |= self._pattern_properties(schema, properties, others, is_shared, path)
            others = False
        if "propertyNames" in schema:
            self._unsupported(path, "propertyNames", "it occurs with keywords that need llguidance")
        if others is None and not is_shared and (properties or required):
            properties |= {name: True for name in required if name not in properties}
            others = False
        if others is not None:
            written["additionalProperties"] = self._any(others, f"{path}/{others_key}")
        if schema.get("minProperties", 0) > 1 and (is_shared or others is not False):
            self._unsupported(path, "minProperties", "undeclared names may occur twice")
        written |= {key: int(schema[key]) for key in ("minProperties", "maxProperties") if key in schema}
        if properties:
            written["properties"] = properties
        return {**written, "required": required} if required else written

    def _pattern_properties(self, schema: Json, properties: Json, others: Any, is_shared: bool, path: str) -> Json:
        """Translation of one pattern of names, where all other names are declared or forbidden."""
        patterns = schema["patternProperties"]
        if is_shared or len(patterns) > 1 or others not in (None, False):
            self._unsupported(path, "patternProperties", "only one pattern can be enforced, without other open names")
        written: Json = {}
        for pattern, value in list(patterns.items())[:1]:
            if any(pattern_found(pattern, name) for name in properties):
                self._unsupported(path, "patternProperties", f"{pattern!r} also matches declared properties")
            key = self._explicit(pattern, "patternProperties", path)
            if key is not None:
                written[f"^(?:{key})$"] = self._any(value, f"{path}/patternProperties")
        return {"patternProperties": written}
