"""Options that set run-wide defaults of sampling fields, derived from the fields' declarations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.config.option_types import (
    BOOL,
    JSON,
    NAME,
    NUMBER,
    TEXT,
    TEXT_FILE,
    TOKEN_IDS,
    Group,
    Option,
    ValueType,
    int_range,
    json_text,
)
from batchgen.config.units import parse_bool, parse_logit_bias
from batchgen.errors import RowError
from batchgen.request import checks
from batchgen.request.fields import field_checks
from batchgen.request.fields.field import Field
from batchgen.request.fields.hidden_states import hidden_states
from batchgen.request.fields.params import SAMPLING_FIELDS
from batchgen.request.foreign_text import ForeignTextError, read_json

SAMPLING = Group("Sampling defaults")

_TOKEN_RANGES = ("all", "prompt", "output", "last")


def _nonempty(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


def _logit_bias_items(value: object) -> object:
    """List of ID=X strings of a mapping or a list of pairs; other values unchanged."""
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, str) or not isinstance(value, Sequence):
        return value
    return [f"{item[0]}={item[1]}" if isinstance(item, list | tuple) and len(item) == 2 else item for item in value]


def _hidden_states(text: str) -> bool | dict[str, Any]:
    """Value of the field `return_hidden_states`, given as JSON or as a keyword for common values."""
    word = text.strip()
    if word in _TOKEN_RANGES:
        return {"tokens": word}
    if word == "mean":
        return {"pool": "mean"}
    if not word.startswith("{"):
        try:
            return parse_bool(word)
        except ValueError:
            raise ValueError(
                f"must be {', '.join(_TOKEN_RANGES)}, mean, true, false or a JSON object, got {text!r}"
            ) from None
    try:
        value: dict[str, Any] = read_json(word)
        hidden_states("return_hidden_states", value)
    except ForeignTextError as problem:
        raise ValueError(str(problem)) from None
    except RowError as problem:
        raise ValueError(problem.info.message.removeprefix("`return_hidden_states` ")) from None
    return value


_NONEMPTY = ValueType("TEXT", _nonempty)
_BY_METAVAR = {"NAME": NAME, "TEXT|@PATH": TEXT_FILE}
"""Value types that a field's declaration names."""
_BY_CHECK: dict[checks.Check, ValueType] = {
    checks.boolean: BOOL,
    checks.ids: TOKEN_IDS,
    checks.nonempty_ids: TOKEN_IDS,
    checks.strings: TEXT,
    field_checks.bad_words: TEXT,
    field_checks.choice: _NONEMPTY,
    checks.nonempty_string: _NONEMPTY,
    checks.mapping: JSON,
    checks.string_or_mapping: JSON,
    field_checks.logit_bias: ValueType("ID=X,...", parse_logit_bias, comma_separated=True, to_text=_logit_bias_items),
    hidden_states: ValueType("all|prompt|output|last|mean|JSON", _hidden_states, (str, bool), to_text=json_text),
}
"""Value types that follow from a field's check."""
_REPEATABLE = (checks.strings, field_checks.bad_words, field_checks.choice)


def _value_type(field: Field) -> ValueType:
    if isinstance(field.check, checks.Integer):
        return int_range(field.check.low, field.check.high)
    if isinstance(field.check, checks.Number):
        return NUMBER
    return _BY_METAVAR[field.metavar] if field.metavar is not None else _BY_CHECK[field.check]


SAMPLING_OPTIONS: tuple[Option, ...] = tuple(
    Option(field.name, _value_type(field), field.help, None, SAMPLING.title, "sampling", field.check in _REPEATABLE)
    for field in SAMPLING_FIELDS
    if field.help is not None and "params" in field.places
)
"""An option for each sampling field that has a help text: its run-wide default."""
