"""The formats of calls: those of `formats.toml`, and those that the response template of a tokenizer describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from typing import Any, Final, Literal

from batchgen.request.foreign_text import read_json, read_toml
from batchgen.text.calls import CallError, Schemas, Span, ToolCall, ToolFormat
from batchgen.text.tools.json_calls import JsonCalls, NamedCalls, call_of
from batchgen.text.tools.keyed_calls import GemmaCalls, PythonCalls, TagCalls

_KINDS: Final[Mapping[str, type[ToolFormat]]] = {
    "json": JsonCalls, "named": NamedCalls, "tags": TagCalls, "python": PythonCalls, "gemma": GemmaCalls,
}  # fmt: skip
_FIELD: Final = "tool_calls"
_CALL: Final = ToolCall("get_weather", {"city": "Paris", "days": 3})
_PARAMETERS: Final = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
_TOOL: Final = {"type": "function", "function": {"name": _CALL.name, "parameters": _PARAMETERS}}


def _formats(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, ToolFormat]:
    """The formats as their tables describe them."""
    formats, others = dict[str, ToolFormat](), dict[str, tuple[str, ...]]()
    for name, table in tables.items():
        values = {**tables.get(table.get("like", ""), {}), **table}
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        values.pop("like", None)
        others[name] = values.pop("others", ())
        formats[name] = _KINDS[values.pop("kind")](**values)
    return {
        name: replace(each, others=tuple(formats[other] for other in others[name])) for name, each in formats.items()
    }


_TABLES: Final = read_toml(files("batchgen.text.tools").joinpath("formats.toml").read_bytes())
DESCRIBED: Final[Mapping[str, str]] = _TABLES.pop("described")
"""Words with which a prompt describes a format, for templates that write no calls -> its name."""
FORMATS: Final = _formats(_TABLES)
"""Name -> format."""


def known_format(template: Mapping[str, Any]) -> str | None:
    """Name of the format whose calls a response template reads; None if it is none that is known."""
    for name, form in FORMATS.items():
        try:
            calls = _parsed(form.write([_CALL]), template, [_TOOL])
        except (CallError, ValueError):
            continue
        if [(call.name, call.arguments) for call in calls] == [(_CALL.name, _CALL.arguments)]:
            return name
    return None


def has_calls(template: Mapping[str, Any] | None) -> bool:
    """Whether a response template describes calls."""
    fields = template.get("fields") if isinstance(template, Mapping) else None
    return isinstance(fields, Mapping) and isinstance(fields.get(_FIELD), Mapping)


def _parsed(text: str, template: Mapping[str, Any], tools: list[Any]) -> list[ToolCall]:
    """The calls of a text.

    Raises:
        CallError: the library refuses it.
    """
    from transformers.utils.chat_parsing import parse_response  # slow to import, and most models need it not

    fields = {name: field for name, field in template["fields"].items() if name in (_FIELD, "content")}
    try:
        parsed = parse_response(text, {**template, "fields": fields}, prefix="", tools=tools).get(_FIELD)
    except Exception as error:
        raise CallError(str(error).splitlines()[0][:200] if str(error) else type(error).__name__) from None
    return [call_of(value) for value in (parsed if isinstance(parsed, list) else [parsed])]


@dataclass(frozen=True)
class TemplateCalls(ToolFormat):
    """Calls in the format of a response template, parsed by the library.

    Attributes:
        template: JSON text of the response template.
    """

    template: str = ""
    needs: Literal["nothing", "functions", "arguments"] = "arguments"

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        field = read_json(self.template)["fields"][_FIELD]
        return _pattern(field, "open"), _pattern(field, "close")

    def _find(self, text: str, schemas: Schemas) -> list[Span]:
        spans: list[Span] = []
        at, (begin, end) = 0, self._patterns
        template = read_json(self.template)
        tools = [
            {"type": "function", "function": {"name": name, "parameters": {"properties": each}}}
            for name, each in schemas.items()
        ]
        while (match := begin.search(text, at)) is not None and match.end() > at:
            close = end.search(text, match.end())
            at = len(text) if close is None else close.end()
            try:
                spans.append(Span(match.start(), at, tuple(_parsed(text[match.start() : at], template, tools))))
            except CallError as error:
                spans.append(Span(match.start(), at, error=str(error)))
        return spans


def _pattern(field: Mapping[str, Any], name: str) -> re.Pattern[str]:
    value = field.get(name)
    texts = [value] if isinstance(value, str) else value
    written = "|".join(map(re.escape, texts)) if isinstance(texts, list) else field.get(f"{name}_pattern")
    return re.compile(written if isinstance(written, str) and written else r"\Z", re.DOTALL)
