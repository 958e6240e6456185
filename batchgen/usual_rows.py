"""A shorter way through the usual rows: a prompt of text or messages, an id, fields to carry, and options that an
earlier row had.

What options mean together is settled once, by the long way of `rows`; the rows after that hold only what is their own
against the rules. Whatever is unusual here, or wrong, goes the long way, which knows the words for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from batchgen.checks import check_unicode
from batchgen.errors import RowError
from batchgen.fields import LOOKUP, Place
from batchgen.messages import messages
from batchgen.openai_rows import ENVELOPE
from batchgen.prompts import ChatPrompt, Prompt, TextPrompt
from batchgen.request import ParsedRow
from batchgen.row_values import DECIDING, PLAIN, RowDefaults

__all__ = ["Usual", "usual_row"]

_MOST_SHAPES = 256
_LONGEST_NAMES = 512
"""Characters of the names of a shape that is kept."""
_CHAT_URL = "/v1/chat/completions"
_NESTED = "sampling_params"


class _Shape(NamedTuple):
    """What the names of a row's fields, or of a body's, say of it."""

    name: str | None
    """The field that holds its id."""
    prompt: str | None
    text: bool
    """Whether the prompt is text; else messages."""
    options: tuple[str, ...]
    extra: tuple[str, ...]
    """Unknown fields, to be carried."""
    nested: bool
    """Whether there are `sampling_params`."""
    body: bool
    """Whether it is a batch line."""


_shapes: dict[tuple[Place, tuple[Any, ...]], _Shape | None] = {}
"""By the names, in order."""


class Usual(NamedTuple):
    """A row of the usual form."""

    key: Hashable
    """What decides its parameters; they are to be kept under this once they are known."""
    row: ParsedRow | None
    """None where they are not known yet, or the row is to go the long way for another reason."""


def usual_row(value: Mapping[str, Any], row_index: int, defaults: RowDefaults) -> Usual | None:
    """The row, parsed; None for one of another form."""
    if type(value) is not dict or (shape := _shape_of(value, "row")) is None:
        return None
    whole, source, place = shape, value, "row"
    options: Any = value.get(_NESTED) if shape.nested else None
    if shape.body:
        source, place = value["body"], "chat"
        if shape.prompt or value.get("method") != "POST" or value.get("url") != _CHAT_URL or type(source) is not dict:
            return None
        if shape.options or shape.nested or (found := _shape_of(source, "chat")) is None:
            return None
        whole = found
    if whole.prompt is None or (options is not None and type(options) is not dict):
        return None
    given = tuple([(name, type(source[name]), source[name]) for name in whole.options])
    nested = tuple([(name, type(item), item) for name, item in options.items()]) if options else ()
    key = (place, given, nested)
    try:
        params = defaults.known(key)
    except TypeError:  # a value is a list or an object, and cannot be looked up
        return None
    if params is None:
        return Usual(key, None)
    name = value[shape.name] if shape.name is not None else f"row-{row_index}"
    prompt = _prompt(whole, source[whole.prompt], defaults)
    extra = {field: value[field] for field in shape.extra}
    if prompt is None or type(name) is not str or not name.isascii() or not all(map(_is_unicode, extra.values())):
        return Usual(key, None)
    return Usual(key, ParsedRow(row_index, name, (prompt,), params, extra, "openai-chat" if shape.body else "native"))


def _shape_of(fields: Mapping[str, Any], place: Place) -> _Shape | None:
    """What the names say; None where one of them is of no usual row."""
    key = (place, tuple(fields))
    if key in _shapes:
        return _shapes[key]
    shape = _new_shape(*key)
    if len(_shapes) >= _MOST_SHAPES:
        _shapes.clear()
    if sum(map(len, map(str, key[1]))) <= _LONGEST_NAMES:
        _shapes[key] = shape
    return shape


def _new_shape(place: Place, names: tuple[Any, ...]) -> _Shape | None:
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
        elif field.name in DECIDING and field.built:
            options.append(name)
        else:
            return None
    line = [name for name in ENVELOPE if name in extra]
    if len(found.keys() - {"id"}) > 1 or (line and len(line) < len(ENVELOPE)) or (place == "chat" and extra):
        return None  # two prompts, half of an envelope, or an unknown field in a body
    return _Shape(
        name=found.get("id"),
        prompt=found.get("text") or found.get("messages"),
        text="text" in found,
        options=tuple(options),
        extra=tuple(name for name in extra if name not in (*ENVELOPE, _NESTED)),
        nested=_NESTED in extra,
        body=bool(line),
    )


def _prompt(shape: _Shape, given: Any, defaults: RowDefaults) -> Prompt | None:
    """The row's one prompt; None for what is wrong, or is not left as it stands."""
    if shape.text:
        usual = type(given) is str and _is_unicode(given) and not defaults.chat
        return TextPrompt(given) if usual else None
    if not given or defaults.chat is False or defaults.system is not None or not _is_unicode(given):
        return None
    try:
        return ChatPrompt(messages("messages", given))
    except RowError:
        return None


def _is_unicode(value: Any) -> bool:
    kind = type(value)
    if kind in PLAIN or (kind is str and value.isascii()):
        return True
    try:
        check_unicode(value, "")
    except RowError:
        return False
    return True
