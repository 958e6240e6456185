"""Formats whose calls name each argument apart: in tags, as calls of Python, and as Gemma writes them."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice, takewhile
from typing import Any, Final, Literal

from batchgen.errors import ErrorCode, RowError
from batchgen.text.calls import (
    CallError,
    Format,
    Function,
    Schemas,
    Span,
    ToolCall,
    ToolFormat,
    arguments_of,
    behind,
    check_name,
    constant,
    dumps,
    json_part,
    read_json_at,
    sequence,
    skip_blanks,
)
from batchgen.text.tools.values import LITERALS, Literals, Values, key_text, property_schemas, resolved, typed, types_of

_KEYWORDS_OF_OBJECTS: Final = (
    "anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "propertyNames", "minProperties", "maxProperties",
    "dependentRequired", "dependentSchemas", "dependencies", "const", "enum",
)  # fmt: skip
RAW_STRING: Final = "raw_string"
"""Type of a part that is a string without quotes and escapes; the grammar compiler has none of this type."""
_MAX_PARTS: Final = 256
"""Most texts inside a value that are looked at as its end, or as the beginning of an argument."""
_CALL: Final = re.compile(r"[\s,;]*([A-Za-z_][\w.-]*)\s*\(")


def _checked(function: Function) -> Any:
    """The schema of a function's arguments, all of which the format can name.

    Raises:
        RowError: `unsupported_schema_keyword`, or `invalid_field` for a name.
    """
    schema = function.parameters if isinstance(function.parameters, Mapping) else {}
    schema = resolved(schema, schema)
    names = property_schemas(schema)
    missing = [name for name in schema.get("required") or () if name not in names]
    keyword = next((key for key in _KEYWORDS_OF_OBJECTS if key in schema), "required" if missing else None)
    if keyword is not None:
        message = f"`tools` uses `{keyword}` (in the parameters of {function.name[:60]!r}), which cannot be enforced: "
        remedy = "the model writes calls without JSON; describe each argument in `properties`"
        raise RowError(ErrorCode.UNSUPPORTED_SCHEMA_KEYWORD, message + remedy, "tools")
    for name in names:
        check_name(name)
    return schema


def raw_string(end: str, quote: str, schema: Any) -> Format:
    """The part of a string without escapes, between quotes; `end`: what is not in it."""
    if "const" in schema:
        return sequence(constant(f"{quote}{schema['const']}{quote}"))
    return sequence(constant(quote), {"type": RAW_STRING, "json_schema": schema, "excludes": [end]}, constant(quote))


def raw_string_format(schema: Any, excludes: Sequence[str]) -> Format:
    """The format of a part `RAW_STRING`, given the translation of its schema for a structural tag."""
    pattern = schema.get("pattern") if isinstance(schema, Mapping) else None
    return (
        {"type": "any_text", "excludes": list(excludes)} if pattern is None else {"type": "regex", "pattern": pattern}
    )


def python_string(schema: Any) -> Format:
    """The part of a string with the quotes and escapes of JSON, which Python has, too."""
    return sequence(constant(dumps(schema["const"]))) if "const" in schema else json_part(schema)


@dataclass(frozen=True)
class TagCalls(ToolFormat):
    """Calls with a tag for each argument, in which strings have no quotes.

    In `begin` and `key`, `{}` is a name, and other braces have what is written there.

    Attributes:
        wrap: texts in front of a call and behind it; they may be missing.
        key: text in front of a value, perhaps with `{string}` (whether it is a string) or `{type}`.
        close: text behind a value, perhaps with `{}`: then values may have tags inside.
        end: text of a call's end.
        extra: regular expression of what may be in front of a call, too.
    """

    needs: Literal["nothing", "functions", "arguments"] = "arguments"
    wrap: tuple[str, str] = ("", "")
    key: str = ""
    close: str = ""
    end: str = ""
    extra: str = ""
    padded: bool = False
    """Whether there is a line break in front of and behind each value."""

    @cached_property
    def _starts(self) -> re.Pattern[str]:
        wrap = f"(?:{_pattern(self.wrap[0])}\\s*)?" if self.wrap[0] else ""
        return re.compile(f"{self.extra}{wrap}{_pattern(self.begin, 'name')}")

    @cached_property
    def _parts(self) -> re.Pattern[str]:
        """The beginning of a value, or the end of the call, with the group `finish`."""
        end, wrap = _pattern(self.end), _pattern(self.wrap[1])
        finish = rf"{end}(?:\s*{wrap})?|{wrap}" if wrap else end
        return re.compile(f"(?P<finish>{finish})|{_pattern(self.key, 'key')}")

    def _read(self, text: str, match: re.Match[str], schemas: Schemas) -> tuple[tuple[ToolCall, ...], int]:
        name, at = match["name"].strip(), skip_blanks(text, match.end())
        lines = "\n" in text[match.end() - 1 : at]
        known, arguments = schemas.get(name) or {}, dict[str, Any]()
        if text.startswith("{", at):  # some models write the arguments as JSON
            value, at = read_json_at(text, at)
            arguments, at = dict(arguments_of(value)), skip_blanks(text, at)
        while (part := self._parts.match(text, at)) is None or part["finish"] is None:
            if part is None:
                raise CallError("an argument or the end of the call is missing")
            key = part["key"].strip()
            if key in arguments:
                raise CallError(f"the argument {key[:60]!r} is given twice")
            arguments[key] = None  # it is given
            value, at = self._value(text, part, lines, known, arguments)
            if self.padded:
                value = value.removeprefix("\n").removesuffix("\n")
            is_text = part.groupdict().get("string") == "true" or part.groupdict().get("type") == "string"
            arguments[key] = value if is_text else self._read_value(value, known.get(key, {}))
            at = skip_blanks(text, at)
        return (ToolCall(name, arguments),), part.end()

    def _value(
        self, text: str, start: re.Match[str], lines: bool, known: Container[str], named: Container[str]
    ) -> tuple[str, int]:
        """The text of a value, and where its argument ends, also where the text that closes it is left out.

        Then the next argument or the end of the call ends it. They are a part of the value in the middle of a line, if
        the call has its arguments on `lines`, and if that argument is given before or behind it.

        Raises:
            CallError: the value has no end, or what looks like an argument may be one or a part of the value.
        """
        begin, close = start.end(), self._close(text, start)
        end = len(text) if close is None else close[0]
        if close is not None:
            value, twice = text[begin:end], ("\n" if self.padded and lines else "") + text[slice(*close)]
            if value.rstrip().endswith(twice) and not value.lstrip().startswith(start[0]):
                raise CallError("the end of a value is written twice")
            if "{}" in self.close:
                return value, close[1]
        for part in islice(self._parts.finditer(text, begin, end), _MAX_PARTS):
            before = text[begin : part.start()].rstrip(" \t")
            at_line = not before or before.endswith("\n")
            if part["finish"] is not None:
                splits = self._may_follow(text, part.end())
            else:
                key = part["key"].strip()
                rest = takewhile(lambda each: each["finish"] is None, self._parts.finditer(text, end))
                splits = key in known and key not in named and all(each["key"].strip() != key for each in rest)
                if at_line and (key not in known or key == start["key"].strip()):
                    raise CallError(f"{part[0][:60]!r} inside a value may begin an argument")
            if splits and (at_line or not lines):
                value = text[begin : part.start()].removesuffix("\n")
                if self.close.partition("{}")[0].strip() in value:
                    raise CallError("text follows the end of a value")
                return value, part.start()
        if close is None:
            raise CallError("an argument or the end of the call is missing")
        return text[begin:end], close[1]

    def _close(self, text: str, start: re.Match[str]) -> tuple[int, int] | None:
        """Where the end of a value begins and ends, behind which is what may follow it; None if it is left out."""
        close, end = self.close.strip().format(start["key"]), start.end()
        for _ in range(_MAX_PARTS):
            begin = text.find(close, end)
            end = begin + len(close)
            if begin < 0:
                break
            if (at := skip_blanks(text, end)) == len(text) or self._parts.match(text, at) is not None:
                return begin, end
        return None

    def _may_follow(self, text: str, at: int) -> bool:
        """Whether what is at a position can be behind a call."""
        at = skip_blanks(text, at)
        after = self.around[1].strip()
        return at == len(text) or bool(after and text.startswith(after, at)) or self._starts.match(text, at) is not None

    def _read_value(self, text: str, schema: Any) -> Any:
        """What a text is: with tags inside a list of items or an object, else what its schema says."""
        pairs: list[tuple[str, str]] = []
        at = skip_blanks(text, 0)
        while "{}" in self.close and (part := self._parts.match(text, at)) is not None and part["finish"] is None:
            close = self._close(text, part)
            if close is None:
                raise CallError(f"the end of {part[0][:60]!r} is missing")
            pairs.append((part["key"], text[part.end() : close[0]]))
            at = skip_blanks(text, close[1])
        if not pairs:
            return typed(text, schema)
        if at < len(text):
            raise CallError("a value has tags and other text")
        schema = resolved(schema, schema) if isinstance(schema, Mapping) else {}
        if {key for key, _ in pairs} == {"item"} and "object" not in types_of(schema):
            return [self._read_value(value, schema.get("items", {})) for _, value in pairs]
        known = property_schemas(schema)
        return {key: self._read_value(value, known.get(key, {})) for key, value in pairs}

    def _text_of(self, call: ToolCall, number: int) -> str:
        pairs = [
            key_text(self.key, key, {"const": value})
            + (value if isinstance(value, str) else dumps(value))
            + self.close.format(key)
            for key, value in call.arguments.items()
        ]
        return "".join([self._begin(call.name), *pairs, self.end, self.wrap[1]])

    def _begin(self, name: str) -> str:
        return self.wrap[0] + self.begin.format(name, number=1)

    def _tag(self, function: Function) -> tuple[str, Format, str]:
        values = Values(partial(raw_string, self.close.partition("{}")[0].strip(), ""))
        content = values.object(_checked(function), self.key, self.close)
        return self._begin(check_name(function.name)), content or sequence(), self.end + self.wrap[1]


def _pattern(text: str, group: str = "") -> str:
    """Regular expression of a text of `TagCalls`, in which blanks and quotes may be missing."""
    names = {"{}": rf"(?P<{group}>[^\s\"<>/{{][^\"<>\n{{]*)", '"': '"?'}
    pieces = re.split(r'(\{\w*\}|\s+|")', text.strip())
    return "".join(
        names.get(each)
        or (rf"(?P<{each[1:-1]}>\w*)" if each[:1] == "{" else r"\s*" if each.isspace() else re.escape(each))
        for each in pieces
    )


@dataclass(frozen=True)
class PythonCalls(ToolFormat):
    """Calls as Python writes them, with named arguments.

    Attributes:
        finish: regular expression of what is behind all calls.
    """

    finish: str = ""

    def _find(self, text: str, schemas: Schemas) -> list[Span]:
        if not self.whole:
            return super()._find(text, schemas)
        # A list may be a part of an answer, or call nothing that the row describes.
        begin = self._starts.match(text, skip_blanks(text, 0))
        name = None if begin is None else _CALL.match(text, begin.end())
        if begin is None or name is None or name[1] not in schemas:
            return []
        first = next(self._at_starts(text, schemas))
        if first.calls and skip_blanks(text, first.end) < len(text):
            return [Span(begin.start(), begin.end(), error="text follows the calls")]
        return [first]

    def _read(self, text: str, match: re.Match[str], schemas: Schemas) -> tuple[tuple[ToolCall, ...], int]:
        at, calls = match.end(), list[ToolCall]()
        while (named := _CALL.match(text, at)) is not None:
            arguments, at = LITERALS.pairs(text, named.end(), ")", "=")
            calls.append(ToolCall(named[1], arguments))
        finish = re.compile(self.finish).match(text, at)
        if not calls or finish is None:
            raise CallError("the end of the calls is missing" if calls else "a call is missing")
        return tuple(calls), finish.end()

    def _text_of(self, call: ToolCall, number: int) -> str:
        return f"{call.name}({', '.join(f'{key}={_python(value)}' for key, value in call.arguments.items())})"

    def _tag(self, function: Function) -> tuple[str, Format, str]:
        values = Values(python_string, ("True", "False", "None"))
        content = values.object(_checked(function), "{}=", comma=", ")
        return f"{check_name(function.name)}(", content or sequence(), ")"


def _python(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, bool) else dumps(value)


@dataclass(frozen=True)
class GemmaCalls(ToolFormat):
    """Calls with bare keys and marked strings.

    Attributes:
        end: text behind the arguments.
        quote: text around strings.
    """

    end: str = ""
    quote: str = ""

    @cached_property
    def _starts(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.begin) + r"\s*(?P<name>[\w.:/-]+)\s*\{")

    def _read(self, text: str, match: re.Match[str], schemas: Schemas) -> tuple[tuple[ToolCall, ...], int]:
        arguments, at = Literals(self.quote).pairs(text, match.end(), "}", ":")
        return (ToolCall(match["name"], arguments),), behind(text, at, (self.end,))

    def _text_of(self, call: ToolCall, number: int) -> str:
        return f"{self.begin}{call.name}{self._written(call.arguments)}{self.end}"

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{key}:{self._written(each)}" for key, each in value.items()) + "}"
        if isinstance(value, list):
            return f"[{','.join(map(self._written, value))}]"
        return dumps(value)

    def _tag(self, function: Function) -> tuple[str, Format, str]:
        values = Values(partial(raw_string, self.quote, self.quote), nested=True)
        content = values.object(_checked(function), "{}:", comma=",")
        return f"{self.begin}{check_name(function.name)}{{", content or sequence(), f"}}{self.end}"
