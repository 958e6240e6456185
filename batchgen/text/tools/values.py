"""Values of arguments that are written without JSON: types of schemas, literals of Python and of Gemma."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from batchgen.text.calls import (
    CallError,
    Format,
    constant,
    json_part,
    optional,
    read_json_at,
    sequence,
    skip_blanks,
)

_MAX_DEPTH: Final = 100
_CONSTANTS: Final = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_WORD: Final = re.compile(r"[A-Za-z_]\w*")
_NUMBER: Final = re.compile(r"[+-]?(?:(?:0|[1-9]\d*)(?!\d)\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_DIGITS: Final = re.compile(r"[+-]?\d{1,4000}")
_PYTHON_STRING: Final = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|\n|.)", re.DOTALL)
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/"}
_PYTHON_TYPES: Final[dict[str, Any]] = {
    "string": str, "boolean": bool, "integer": int, "number": (int, float), "array": list, "object": dict,
    "null": type(None),
}  # fmt: skip


def property_schemas(parameters: Any) -> Mapping[str, Any]:
    """The schemas of the properties that a schema of arguments names, each with its definitions."""
    if not isinstance(parameters, Mapping):
        return {}
    parameters = resolved(parameters, parameters)
    named = parameters.get("properties")
    if not isinstance(named, Mapping):
        return {}
    shared = _definitions(parameters)
    return {
        name: {**shared, **schema} if shared and isinstance(schema, Mapping) else schema
        for name, schema in named.items()
    }


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a chain of references inside a document leads to, with the document's definitions."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        part: Any = root
        for step in filter(None, reference[1:].split("/")):
            part = part.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping):
            break
        schema = {**_definitions(root), **part}
    return schema


def types_of(schema: Any) -> frozenset[str]:
    """Names of the types that a schema allows; none if it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    schema = resolved(schema, schema)
    named = schema.get("type")
    names = [named] if isinstance(named, str) else [name for name in _list_of(named) if isinstance(name, str)]
    if not names:
        for value in [schema["const"]] if "const" in schema else _list_of(schema.get("enum")):
            names += [name for name in _PYTHON_TYPES if _is(value, name)]
    branches = [types_of({**_definitions(schema), **each}) for each in _branches(schema)]
    if not names and branches and all(branches):
        return frozenset().union(*branches)
    return frozenset(names)


def key_text(text: str, name: str, schema: Any) -> str:
    """The text in front of a value, with the name of its key, and what the format writes of its type."""
    types = {"number" if each == "integer" else each for each in types_of(schema)}
    kind = types.pop() if len(types) == 1 else "object"
    return text.format(name, string=str(kind == "string").lower(), type=kind)


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _branches(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [each for each in _list_of(schema.get("anyOf") or schema.get("oneOf")) if isinstance(each, Mapping)]


def _list_of(value: Any) -> list[Any]:
    """A list of a schema; empty for anything else, as a row that only describes its tools may have."""
    return list(value) if isinstance(value, list | tuple) else []


def _is(value: Any, name: str) -> bool:
    kind = _PYTHON_TYPES.get(name)
    if kind is None or (isinstance(value, bool) and name != "boolean"):
        return False
    return isinstance(value, kind) or (name == "integer" and isinstance(value, float) and value.is_integer())


def typed(text: str, schema: Any) -> Any:
    """The value of a text in which strings have no quotes: what its schema says it is, else a string."""
    types = types_of(schema)
    if types == {"string"}:
        return text
    stripped = text.strip()
    if _DIGITS.fullmatch(stripped) and types & {"integer", "number"} and "string" not in types:
        return int(stripped)
    if not types and stripped.startswith("+"):
        return text
    try:
        value, end = LITERALS.read(stripped, 0)
        if end == len(stripped) and (not types or any(_is(value, name) for name in types)):
            return value
    except (CallError, RecursionError):
        pass
    return text


class Literals(NamedTuple):
    """A reader of values that are JSON, Python, or an object with bare keys and marked strings."""

    quote: str | None = None
    """Text around strings, inside which nothing has a meaning; None: quotes as in JSON and Python."""

    def read(self, text: str, at: int, depth: int = 0) -> tuple[Any, int]:
        """The value at a position, and where it ends.

        Raises:
            CallError: there is none.
        """
        at = skip_blanks(text, at)
        if depth > _MAX_DEPTH:
            raise CallError("the arguments are nested too deeply")
        if self.quote is not None and text.startswith(self.quote, at):
            begin = at + len(self.quote)
            end = text.find(self.quote, begin)
            if end < 0:
                raise CallError("a string is not ended")
            return text[begin:end], end + len(self.quote)
        letter = text[at : at + 1]
        if letter in ("'", '"'):
            return _quoted(text, at)
        if letter in ("[", "("):
            return self._items(text, at + 1, "]" if letter == "[" else ")", depth)
        if letter == "{":
            return self.pairs(text, at + 1, "}", ":", depth)
        return _scalar(text, at)

    def _items(self, text: str, at: int, close: str, depth: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        while not text.startswith(close, at := skip_blanks(text, at)):
            value, at = self.read(text, at, depth + 1)
            items.append(value)
            at = _comma(text, at, close)
        return items, at + len(close)

    def pairs(self, text: str, at: int, close: str, between: str, depth: int = 0) -> tuple[dict[str, Any], int]:
        """Keys and values up to `close`, and where they end; `between`: what is between a key and its value.

        Raises:
            CallError: there are none.
        """
        pairs: dict[str, Any] = {}
        while not text.startswith(close, at := skip_blanks(text, at)):
            key, at = self._key(text, at, between)
            if key in pairs:
                raise CallError(f"the argument {key[:60]!r} is given twice")
            at = skip_blanks(text, at)
            if not text.startswith(between, at):
                raise CallError(f"{between!r} does not follow {key[:60]!r}")
            pairs[key], at = self.read(text, at + len(between), depth + 1)
            at = _comma(text, at, close)
        return pairs, at + len(close)

    def _key(self, text: str, at: int, between: str) -> tuple[str, int]:
        if text[at : at + 1] in ("'", '"') or (self.quote is not None and text.startswith(self.quote, at)):
            key, end = self.read(text, at)
            return str(key), end
        end = text.find(between, at)
        key = text[at:end].strip()
        if end < 0 or not re.fullmatch(r"[\w.$-]+", key):
            raise CallError("the name of an argument is missing")
        return key, end


def _comma(text: str, at: int, close: str) -> int:
    """The position behind the comma after an item; that of `close` where there is none."""
    at = skip_blanks(text, at)
    if text.startswith(",", at):
        return at + 1
    if not text.startswith(close, at):
        raise CallError(f"{close!r} is missing")
    return at


def _quoted(text: str, at: int) -> tuple[str, int]:
    match = _PYTHON_STRING.match(text, at)
    if match is None:
        raise CallError("a string is not ended")
    if match[2] is not None:
        try:
            return read_json_at(match[0], 0)[0], match.end()  # for pairs of surrogates
        except ValueError:
            pass
    body = match[1] if match[1] is not None else match[2]
    return _ESCAPE.sub(_unescaped, body), match.end()


def _unescaped(match: re.Match[str]) -> str:
    what = match[1]
    if len(what) > 1:
        code = int(what[1:], 16)
        return match[0] if 0xD800 <= code < 0xE000 else chr(code)
    return "" if what == "\n" else _ESCAPES.get(what, match[0])


def _scalar(text: str, at: int) -> tuple[Any, int]:
    word = _WORD.match(text, at)
    if word is not None and word[0] in _CONSTANTS:
        return _CONSTANTS[word[0]], word.end()
    match = _NUMBER.match(text, at)
    if match is None:
        raise CallError("a value is missing")
    try:
        value: Any = int(match[0])
    except ValueError:
        value = read_json_at(repr(float(match[0])), 0)[0]  # refuses infinity
    return value, match.end()


LITERALS: Final = Literals()


class Values(NamedTuple):
    """Grammars of values in a format without JSON."""

    string: Callable[[Any], Format]
    """Schema of a string -> its part."""
    true_false_null: tuple[str, str, str] = ("true", "false", "null")
    nested: bool = False
    """Whether objects and lists have the format's own strings and bare keys inside; else they are JSON."""

    def part(self, schema: Any) -> Format:
        """The part of a value."""
        schema = resolved(schema, schema) if isinstance(schema, Mapping) else schema
        if isinstance(schema, Mapping) and ("const" in schema or "enum" in schema):
            values = [schema["const"]] if "const" in schema else list(schema["enum"])
            return {"type": "or", "elements": [self._value(value) for value in values]}
        types = types_of(schema)
        if types == {"string"}:
            return self.string(schema)
        if types and types <= {"boolean", "null"}:
            true, false, null = self.true_false_null
            words = [*((true, false) if "boolean" in types else ()), *((null,) if "null" in types else ())]
            return {"type": "or", "elements": [constant(word) for word in words]}
        if self.nested and types == {"object"}:
            return sequence(constant("{"), self.object(schema, "{}:", comma=","), constant("}"))
        if self.nested and types == {"array"}:
            return self._list(schema)
        if self.nested and types and not types <= {"integer", "number"}:
            return self._union(schema, types)
        return json_part(schema)

    def _value(self, value: Any) -> Format:
        if isinstance(value, str):
            return self.string({"const": value})
        if value is None or isinstance(value, bool):
            true, false, null = self.true_false_null
            return sequence(constant(null if value is None else true if value else false))
        return sequence(constant(json.dumps(value, ensure_ascii=False)))

    def _union(self, schema: Any, types: frozenset[str]) -> Format:
        branches = [{**_definitions(schema), **each} for each in _branches(schema)]
        branches = branches or [{**schema, "type": name} for name in sorted(types)]
        return {"type": "or", "elements": [self.part(branch) for branch in branches]}

    def _list(self, schema: Mapping[str, Any]) -> Format:
        item = self.part({**_definitions(schema), **items} if isinstance(items := schema.get("items"), Mapping) else {})
        low, high = int(schema.get("minItems", 0)), schema.get("maxItems")
        more = sequence(constant(","), item)
        rest = {"type": "repeat", "min": max(0, low - 1), "max": -1 if high is None else int(high) - 1, "content": more}
        inside = sequence(item, rest)
        if high == 0:
            return sequence(constant("[]"))
        return sequence(constant("["), inside if low else optional(inside), constant("]"))

    def object(self, schema: Any, key: str, close: str = "", comma: str = "") -> Format | None:
        """The part of an object's keys and values; None for an object without any.

        Args:
            schema: the object's schema.
            key: text in front of a value, with `{}` for the name of its key, and perhaps `{string}` for whether the
                value is a string, or `{type}` for its type.
            close: text behind a value, perhaps with `{}`, too.
            comma: text between a value and the next key.
        """
        schema = resolved(schema, schema) if isinstance(schema, Mapping) else {}
        required = set(schema.get("required") or ())
        pairs: list[tuple[Format, bool]] = []
        for name, each in property_schemas(schema).items():
            begin = key_text(key, name, each)
            pairs.append((sequence(constant(begin), self.part(each), constant(close.format(name))), name in required))
        return _joined(pairs, comma)


def _joined(pairs: list[tuple[Format, bool]], comma: str) -> Format | None:
    """Parts of which some may be missing, with a separator between those that are there; None for none.

    `pairs`: (part, whether it must be there).
    """
    if not pairs:
        return None
    if not comma:
        return sequence(*(part if must else optional(part) for part, must in pairs))
    (first, needed), rest = pairs[0], pairs[1:]
    following = [(sequence(constant(comma), part), must) for part, must in rest]
    here = sequence(first, *(part if must else optional(part) for part, must in following))
    if needed:
        return here
    without = _joined(rest, comma)
    if without is None:
        return optional(here)
    return {"type": "or", "elements": [here, without]}
