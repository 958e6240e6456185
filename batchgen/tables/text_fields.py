"""Fields that a table holds as text: JSON in a column of strings, and in CSV every value.

A text that the field's own check refuses is read as JSON. Where text and value would both do, the field's declaration
decides (`Field.json_text`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from batchgen.errors import RowError
from batchgen.request.checks import Integer, invalid
from batchgen.request.fields.declared import LOOKUP, SOURCES, Place
from batchgen.request.fields.field import Field
from batchgen.request.rows.row_memory import parse_cell

_BLANK = " \t\r\n"
_STARTS = frozenset(f'[{{"{_BLANK}')
"""What JSON of a list, an object or a string may begin with."""
_PARAMS, _BODY = "sampling_params", "body"
"""Columns that contain fields."""
_LINE = ("custom_id", "method", "url")
_PROMPTS = ("text", "prompt")
_WORDS = {"True": True, "False": False}
"""Booleans as Python writes them to CSV."""


class TextFields:
    """Reads the text fields of the rows of one table."""

    def __init__(
        self,
        names: Collection[str],
        *,
        scalars: bool = False,
        named: Mapping[str, str] = MappingProxyType({}),
        place: Place = "row",
    ) -> None:
        """Args:
        names: the table's columns.
        scalars: whether numbers and booleans are text as well, as in CSV.
        named: columns that are read as another field, as in `NamedColumns.fields`.
        place: the place of the columns.
        """
        known = LOOKUP[place]
        self._fields = {name: known[field] for name in names if (field := named.get(name, name)) in known}
        self._containers = [name for name in (_PARAMS, _BODY) if name in names and place == "row"]
        self._scalars = scalars

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with the values that its text means.

        Raises:
            RowError: `invalid_field` for text that may be a string or JSON; `invalid_json` for a broken object.
        """
        values = row
        for name in self._fields:
            value = row.get(name)
            if type(value) is str and (value[:1] in _STARTS or self._scalars or value == "null"):
                read = self._value(name, self._fields[name], value)
                values = values if read is value else {**values, name: read}
        for name in self._containers:
            contained = _contained(name, row)
            values = values if contained is None else {**values, name: contained}
        return values

    def _value(self, name: str, field: Field, text: str) -> Any:
        structured = text.lstrip(_BLANK)[:1] in ("[", "{")
        if structured and field.name in _PROMPTS and conversation(text) is not None:
            remedy = f"name it with --prompt-column {name} to run it as messages"
            raise invalid(name, f"holds a conversation as JSON text; {remedy}")
        if structured:
            return _structured(name, field, text)
        if not (self._scalars or text[:1] == '"' or text == "null") or _accepts(field, name, text):
            return text
        value = _WORDS.get(text, _parsed(text))
        whole = type(value) is float and value.is_integer() and isinstance(field.check, Integer)
        return int(value) if whole else value


def _structured(name: str, field: Field, text: str) -> Any:
    """The value of a text that begins like a list or an object."""
    if not _accepts(field, name, text):
        try:
            return parse_cell(text.encode())
        except RowError as error:
            problem = f"`{name}` is text that is not JSON ({error.info.message})"
            raise RowError(error.info.code, problem, name) from None
    value = text if field.json_text == "text" else _parsed(text)
    if value is text or not _accepts(field, name, value):
        return text
    if type(value) is dict or field.json_text == "value":
        return value
    raise invalid(name, "is a string that is also JSON; give a list in a list column (Parquet), or in JSON lines")


def _contained(name: str, row: dict[str, Any]) -> dict[str, Any] | None:
    """The object that a container's text means, or with what its texts mean; None if it is right as it is."""
    value = row.get(name)
    if type(value) is str and value[:1] in _STARTS:
        # Any column may be called `body`; it is that of a batch line if the row looks like one.
        line, prompt = (any(row.get(key) is not None for key in keys) for keys in (_LINE, SOURCES))
        if name == _BODY and prompt and not line:
            return None
        value = _parsed(value)
        return value if type(value) is dict else None
    if type(value) is not dict or not any(type(item) is str and item[:1] in _STARTS for item in value.values()):
        return None
    place: Place = "params" if name == _PARAMS else "completions" if "prompt" in value else "chat"
    return TextFields(value, place=place).read(value)


def conversation(text: str) -> list[dict[str, Any]] | None:
    """The messages that a text is the JSON of, a list of objects with a role; None for any other text."""
    value = _parsed(text) if text.lstrip(_BLANK)[:1] == "[" else None
    if type(value) is not list or not value:
        return None
    return value if all(type(item) is dict and "role" in item for item in value) else None


def _parsed(text: str) -> Any:
    """The JSON value of a text, or the text if it is not JSON."""
    try:
        return parse_cell(text.encode())
    except (RowError, UnicodeEncodeError):
        return text


def _accepts(field: Field, name: str, value: Any) -> bool:
    try:
        field.check(name, value)
    except RowError:
        return False
    return True
