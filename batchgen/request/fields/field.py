"""Declaration of a row field: what it is called, which values it has, where it may be written, and its option."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Literal, TypeVar

from batchgen.errors import ErrorCode, RowError
from batchgen.request.checks import Check, invalid, plain
from batchgen.request.fields.other_systems import close_meaning, meaning_of
from batchgen.request.fields.padding import schema_without_nulls, without_nulls

Place = Literal["row", "pairs", "params", "completions", "chat", "embeddings", "rerank"]
"""Where a field is allowed: on a native row, on one with `query` and `documents`, in `sampling_params` of these, or in
the body of a batch line.
"""

BODIES: tuple[Place, ...] = ("completions", "chat")
EVERYWHERE: tuple[Place, ...] = ("row", "pairs", "params", *BODIES)
ALL_BODIES: tuple[Place, ...] = (*BODIES, "embeddings", "rerank")

JsonText = Literal["object", "value", "text"]
"""How a table's text is read that is JSON, where the field accepts that value and the text itself.

"object": an object is read, and a list is refused, since either reading may be wrong. "value": it is read. "text": it
stays text, which is a prompt, or means the same as the value.
"""
NoOpTest = Callable[[Any], bool]
"""Value -> whether it requests nothing."""
_T = TypeVar("_T")
_KEY = "fields"
"""Key of the declared fields in the metadata of an attribute of `SamplingParams`."""
JSON_PARAMS = frozenset({"json_schema", "structural_tag", "custom_params"})
"""Parameters that are stored as JSON text."""


@dataclass(frozen=True, slots=True)
class Field:
    """One row field."""

    name: str
    check: Check
    """(name as spelled, value) -> normalised value; raises `invalid_field`."""
    places: tuple[Place, ...] = EVERYWHERE
    aliases: tuple[str, ...] = ()
    requests_nothing: NoOpTest = lambda value: False
    """For fields that are unsupported or unread: the test of values that request nothing, which alone are accepted."""
    supported: bool = True
    to_template: bool = False
    """Whether the value is a variable of the chat template, and unsupported by a template that does not read it."""
    carried: bool = False
    """Whether the field has no effect on generation and is carried to the output."""
    remedy: str = "remove it"
    """For unsupported fields: what to do instead, for the error message."""
    ids: bool = False
    """Whether a list is one of token ids, whose check refuses texts in it."""
    json_text: JsonText = "object"
    help: str | None = None
    """Help text of the option that sets a run-wide default, with an example; None: there is no such option."""
    metavar: str | None = None
    """Placeholder of the option's value, where it does not follow from `check`."""

    @property
    def spellings(self) -> tuple[str, ...]:
        """The name and the aliases."""
        return (self.name, *self.aliases)


def sampling(
    default: _T,
    check: Check,
    help: str | None = None,
    *,
    aliases: tuple[str, ...] = (),
    body_check: Check | None = None,
    metavar: str | None = None,
    places: tuple[Place, ...] = EVERYWHERE,
    json_text: JsonText = "object",
) -> _T:
    """Attribute of `SamplingParams` that declares a field.

    Args:
        default: the value of a row without the field.
        check: as in `Field`; the result of a check must pass it unchanged.
        help: as in `Field`.
        aliases: other names.
        body_check: check of values in OpenAI bodies, if it differs.
        metavar: as in `Field`.
        places: as in `Field`; none for a value that follows from other fields of a row.
        json_text: as in `Field`.
    """
    field = Field("", check, places, aliases=aliases, help=help, metavar=metavar, json_text=json_text)
    declared: tuple[Field, ...] = (field,)
    if body_check is not None:
        declared = (replace(field, places=("row", "pairs", "params")), replace(field, places=BODIES, check=body_check))
    return dataclasses.field(default=default, metadata={_KEY: declared})


def declared_fields(params: type[Any]) -> tuple[Field, ...]:
    """The fields that the attributes of `SamplingParams` declare; one whose values differ by place is listed twice."""
    return tuple(replace(field, name=item.name) for item in dataclasses.fields(params) for field in item.metadata[_KEY])


def accepting_aliases(params: type[_T]) -> type[_T]:
    """`params`, whose constructor accepts the aliases of its fields and names the right field for another name."""
    declared = declared_fields(params)
    names = {spelling: each.name for each in declared for spelling in each.spellings}
    own = frozenset(names.values())
    construct = params.__init__

    @wraps(construct)
    def init(self: Any, *args: Any, **values: Any) -> None:
        construct(self, *args, **(values if values.keys() <= own else _by_name(values, names)))

    params.__init__ = init  # type: ignore[method-assign]
    return params


def _by_name(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The values by the names of their fields; `RowError` for an unknown name or a field that is given twice."""
    by_name: dict[str, Any] = {}
    for key, value in values.items():
        if key not in names:
            meant = meaning_of(key, names) or close_meaning(key, names) or "remove it or correct its name"
            meant = "it is set for a whole run" if "--" in meant else meant  # by a flag
            raise RowError(ErrorCode.UNKNOWN_FIELD, f"`{key}` is not a field of SamplingParams; {meant}", key)
        if names[key] in by_name:
            raise invalid(key, "is given together with its alias; keep one of them")
        by_name[names[key]] = value
    return by_name


def stored_value(name: str, check: Check, value: Any) -> Any:
    """The form in which `SamplingParams` stores the value of a parameter; a value in that form stays as it is.

    Raises:
        RowError: `invalid_field`, by `check`, or because JSON cannot hold the value.
    """
    if name == "custom_params" and type(value) is str:
        return None if value == "{}" else value
    if name == "logit_bias" and type(value) is list:
        value = tuple(value)  # the stored pairs, read from JSON
    checked = check(name, plain(value))
    if name in JSON_PARAMS and type(checked) is dict:
        checked = without_nulls(name, checked) if name == "custom_params" else schema_without_nulls(name, checked)
        try:
            text = json.dumps(checked, ensure_ascii=False, separators=(",", ":"))
        except (TypeError, ValueError) as problem:
            raise invalid(name, f"must be JSON: {problem}") from None
        return None if name == "custom_params" and not checked else text
    if (name, checked) == ("top_k", 0):
        return -1
    return None if (name, checked) == ("suffix", "") else checked
