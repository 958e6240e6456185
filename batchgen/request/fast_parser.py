"""Fast path of the row parser for common rows: one text or chat prompt, an id, unknown fields, and options that an
earlier row had as well.

The full parser checks a set of options once; later rows with the same options reuse its `SamplingParams`. All other
rows, and all rows that are wrong, go to the full parser, which writes the error messages.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from batchgen.errors import RowError
from batchgen.request.chat_checks import messages
from batchgen.request.checks import check_unicode
from batchgen.request.fields import LOOKUP, Place
from batchgen.request.openai_lines import ENVELOPE
from batchgen.request.prompts import ChatPrompt, Prompt, TextPrompt
from batchgen.request.row_values import NON_TEXT_TYPES, PARAM_FIELDS, RowDefaults
from batchgen.request.table import ParsedRow

__all__ = ["FastResult", "parse_fast"]

_MAX_LAYOUTS = 256
_MAX_NAME_CHARS = 512
"""Most characters of field names in a cached layout."""
_CHAT_URL = "/v1/chat/completions"
_NESTED = "sampling_params"


class _RowLayout(NamedTuple):
    """Roles of the fields of a row or of an OpenAI body, derived from their names."""

    name: str | None
    """Field that has the row's id."""
    prompt: str | None
    """Field that has the prompt."""
    text: bool
    """Whether the prompt is text; otherwise it is messages."""
    options: tuple[str, ...]
    """Fields that determine the `SamplingParams`."""
    extra: tuple[str, ...]
    """Unknown fields, which are carried to the output."""
    nested: bool
    """Whether the row has `sampling_params`."""
    body: bool
    """Whether the row is an OpenAI batch line."""


_layouts: dict[tuple[Place, tuple[Any, ...]], _RowLayout | None] = {}
"""Layouts by place and ordered field names; None if the fast path cannot parse such rows."""


class FastResult(NamedTuple):
    """Outcome of the fast path for a row with a known layout."""

    key: Hashable
    """Cache key of the row's `SamplingParams`, made of the values that determine them."""
    row: ParsedRow | None
    """The parsed row; None if its parameters are not cached yet or the full parser must handle the row."""


def parse_fast(value: Mapping[str, Any], row_index: int, defaults: RowDefaults) -> FastResult | None:
    """Parse a row by the fast path; None if its layout is not a common one."""
    if type(value) is not dict or (layout := _layout_of(value, "row")) is None:
        return None
    prompt_layout, source, place = layout, value, "row"
    options: Any = value.get(_NESTED) if layout.nested else None
    if layout.body:
        source, place = value["body"], "chat"
        if layout.prompt or value.get("method") != "POST" or value.get("url") != _CHAT_URL or type(source) is not dict:
            return None
        if layout.options or layout.nested or (found := _layout_of(source, "chat")) is None:
            return None
        prompt_layout = found
    if prompt_layout.prompt is None or (options is not None and type(options) is not dict):
        return None
    given = tuple([(name, type(source[name]), source[name]) for name in prompt_layout.options])
    nested = tuple([(name, type(item), item) for name, item in options.items()]) if options else ()
    key = (place, given, nested)
    try:
        params = defaults.cached_params(key)
    except TypeError:  # a list or an object is not hashable
        return None
    if params is None:
        return FastResult(key, None)
    name = value[layout.name] if layout.name is not None else f"row-{row_index}"
    prompt = _prompt(prompt_layout, source[prompt_layout.prompt], defaults)
    extra = {field: value[field] for field in layout.extra}
    if prompt is None or type(name) is not str or not name.isascii() or not all(map(_is_unicode, extra.values())):
        return FastResult(key, None)
    return FastResult(
        key, ParsedRow(row_index, name, (prompt,), params, extra, "openai-chat" if layout.body else "native")
    )


def _layout_of(fields: Mapping[str, Any], place: Place) -> _RowLayout | None:
    """Cached layout of a mapping's fields; None if the fast path cannot parse it."""
    key = (place, tuple(fields))
    if key in _layouts:
        return _layouts[key]
    layout = _new_layout(*key)
    if len(_layouts) >= _MAX_LAYOUTS:
        _layouts.clear()
    if sum(map(len, map(str, key[1]))) <= _MAX_NAME_CHARS:
        _layouts[key] = layout
    return layout


def _new_layout(place: Place, names: tuple[Any, ...]) -> _RowLayout | None:
    found: dict[str, str] = {}
    options, extra = [], []
    for name in names:
        if type(name) is not str or not name.isascii():
            return None
        field = LOOKUP[place].get(name)
        if field is None:
            extra.append(name)
        elif field.name in ("id", "text", "messages") and field.name not in found:
            found[field.name] = name
        elif field.name in PARAM_FIELDS and field.supported:
            options.append(name)
        else:
            return None
    line = [name for name in ENVELOPE if name in extra]
    if len(found.keys() - {"id"}) > 1 or (line and len(line) < len(ENVELOPE)) or (place == "chat" and extra):
        return None  # two prompts, an incomplete batch line, or an unknown field in a body
    return _RowLayout(
        name=found.get("id"),
        prompt=found.get("text") or found.get("messages"),
        text="text" in found,
        options=tuple(options),
        extra=tuple(name for name in extra if name not in (*ENVELOPE, _NESTED)),
        nested=_NESTED in extra,
        body=bool(line),
    )


def _prompt(layout: _RowLayout, given: Any, defaults: RowDefaults) -> Prompt | None:
    """The row's prompt; None if it is invalid or the run's defaults change it."""
    if layout.text:
        unchanged = type(given) is str and _is_unicode(given) and not defaults.chat
        return TextPrompt(given) if unchanged else None
    if not given or defaults.chat is False or defaults.system is not None or not _is_unicode(given):
        return None
    try:
        return ChatPrompt(messages("messages", given))
    except RowError:
        return None


def _is_unicode(value: Any) -> bool:
    kind = type(value)
    if kind in NON_TEXT_TYPES or (kind is str and value.isascii()):
        return True
    try:
        check_unicode(value, "")
    except RowError:
        return False
    return True
