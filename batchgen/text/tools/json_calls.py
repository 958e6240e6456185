"""Formats whose calls have their arguments as a JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from batchgen.request.foreign_text import read_json
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


@dataclass(frozen=True)
class JsonCalls(ToolFormat):
    """Calls that are JSON objects with a name and arguments, or a list of them.

    Attributes:
        begins: texts in front of an object or a list; models write the first one.
        end: text behind it.
        listed: whether the calls are in a list.
        keys: names of the keys of a name and of arguments.
        numbered: name of a key in front of them that counts the calls; None: there is none.
    """

    begins: tuple[str, ...] = ()
    end: str = ""
    listed: bool = False
    keys: tuple[str, str] = ("name", "arguments")
    numbered: str | None = None

    @cached_property
    def _starts(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.begins)))

    def _find(self, text: str, schemas: Schemas) -> list[Span]:
        return super()._find(text, schemas) or (self._whole(text, schemas) if self.whole else [])

    def _read(self, text: str, match: re.Match[str], schemas: Schemas) -> tuple[tuple[ToolCall, ...], int]:
        return self._read_at(text, match.end())

    def _read_at(self, text: str, at: int) -> tuple[tuple[ToolCall, ...], int]:
        value, end = read_json_at(text, at)
        calls = self._calls(value)
        while (at := skip_blanks(text, end)) < len(text):
            separated = self.whole and text[at] in ";,"
            if not (separated or (self.end and text[at] == "{")):  # some models write calls as JSON lines
                break
            value, end = read_json_at(text, at + separated)
            calls += self._calls(value)
        return calls, behind(text, end, (self.end.strip(), *(("```",) if self.whole and self.end else ())))

    def _whole(self, text: str, schemas: Schemas) -> list[Span]:
        """The calls of a text that is nothing else; a text that is not JSON, or names no function, is an answer."""
        begin = skip_blanks(text, 0)
        named = re.compile(rf'\[?\s*\{{[^{{}}\[\]]*?"{self.keys[0]}"\s*:\s*"((?:[^"\\]|\\.)*)"').match(text, begin)
        if named is None or _unquoted(named[1]) not in schemas:
            return []
        try:
            calls, end = self._read_at(text, begin)
            if skip_blanks(text, end) < len(text):
                raise CallError("text follows the calls")
        except (CallError, RecursionError) as error:
            return [Span(begin, named.end(), error=str(error))]
        return [Span(begin, end, calls)]

    def _calls(self, value: Any) -> tuple[ToolCall, ...]:
        values = value if isinstance(value, list) else [value]
        if not values:
            raise CallError("the list of calls is empty")
        return tuple(call_of(each, self.keys[0]) for each in values)

    def _text_of(self, call: ToolCall, number: int) -> str:
        begin, end = self._around_each
        return f"{begin}{self._head(call.name)}{dumps(call.arguments)}}}{end}"

    def _tag(self, function: Function) -> tuple[str, Format, str]:
        begin, end = self._around_each
        return begin + self._head(function.name), json_part(function.parameters), "}" + end

    @property
    def _joined(self) -> tuple[str, str, str]:
        begin, end = ("", "") if self.whole else (self.begins[0], self.end)
        return (f"{begin}[", ", ", f"]{end}") if self.listed else super()._joined

    @property
    def _around_each(self) -> tuple[str, str]:
        return ("", "") if self.listed or self.whole else (self.begins[0], self.end)

    def _head(self, name: str) -> str:
        number = "" if self.numbered is None else f'"{self.numbered}": "0", '
        return f'{{{number}"{self.keys[0]}": {json.dumps(name)}, "{self.keys[1]}": '


def call_of(value: Any, key: str = "name") -> ToolCall:
    """The call that a JSON value describes; `key`: where its name is.

    Raises:
        CallError: it describes none.
    """
    value = value.get("function", value) if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping) or not isinstance(value.get(key), str):
        raise CallError(f"an object with `{key}` is needed")
    arguments = next((value[name] for name in ("arguments", "parameters") if name in value), None)
    if arguments is None and not value.keys() <= {key, "id", "type", "tool_call_id", "arguments", "parameters"}:
        raise CallError("an object with `arguments` is needed")
    written = value.get("id")
    return ToolCall(value[key], arguments_of(arguments), written if isinstance(written, str) else None)


def _unquoted(text: str) -> Any:
    try:
        return read_json(f'"{text}"')
    except ValueError:
        return None


def _known(written: str, functions: Schemas) -> str:
    """The one of the row's functions that a text can name: perhaps behind `functions` and in front of a number.

    Raises:
        CallError: it is none, or may be several.
    """
    names = (written, re.sub(r"^functions[._:/-]+", "", written))
    known = {each for name in names for each in (name, re.sub(r"[._:/-]\d+$", "", name)) if each in functions}
    if len(known) != 1:
        raise CallError(f"{written[:60]!r} names {'several' if known else 'none'} of the row's functions")
    return known.pop()


@dataclass(frozen=True)
class NamedCalls(ToolFormat):
    """Calls whose name is in front of a JSON object of arguments.

    Attributes:
        middle: text between the name and the arguments.
        end: text behind the arguments.

    `pattern` has the groups `name`, or `near` where only the row's functions can tell the name, and `id` if the model
    writes ids.
    """

    middle: str = ""
    end: str = ""
    other_ends: tuple[str, ...] = ()
    """Further texts that may be in place of `end`."""
    counted: bool = False
    """Whether a number follows the name."""

    def _read(self, text: str, match: re.Match[str], schemas: Schemas) -> tuple[tuple[ToolCall, ...], int]:
        groups = match.groupdict()
        name = groups["name"].strip() if groups.get("name") else _known(groups["near"].strip(), schemas)
        value, end = read_json_at(text, match.end())
        call = ToolCall(name, arguments_of(value), groups.get("id"))
        return (call,), behind(text, end, (self.end.strip(), *self.other_ends)) if self.end else end

    def _text_of(self, call: ToolCall, number: int) -> str:
        name = f"{call.name}:{number}" if self.counted else call.name
        return f"{self.begin}{name}{self.middle}{dumps(call.arguments)}{self.end}"

    def _tag(self, function: Function) -> tuple[str, Format, str]:
        begin, content = self.begin + check_name(function.name), json_part(function.parameters)
        if not self.counted:
            return begin + self.middle, content, self.end
        number = {"type": "regex", "pattern": "[0-9]{1,2}"}
        return f"{begin}:", sequence(number, constant(self.middle), content), self.end
