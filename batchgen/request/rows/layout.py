"""Meaning of the keys of a row, derived once from their names, since most rows of a job have the same keys."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

from batchgen.request.fields.declared import CONSTRAINTS, LOOKUP, SOURCES, Field, Place
from batchgen.request.fields.media import MEDIA_FIELDS
from batchgen.request.fields.params import SAMPLING_FIELDS
from batchgen.request.rows.endpoints import ENVELOPE
from batchgen.request.rows.unknown_keys import suspects

Kind = Place | Literal["line"]
"""A place of fields, or the batch line around an OpenAI body."""
_CONTAINERS: dict[Kind, tuple[str, ...]] = {
    "row": ("sampling_params",),
    "pairs": ("sampling_params",),
    "params": (),
    "line": ENVELOPE,
    "completions": ("messages",),  # the prompt of the other endpoint has its own error
    "chat": ("prompt",),
    "embeddings": (),
    "rerank": (),
}
"""Keys that are not fields by kind."""
_OPTIONS = {item.name for item in SAMPLING_FIELDS} - {"seed"} | {*CONSTRAINTS, "logprobs", "top_logprobs", "model"}
"""Fields of a row that determine its parameter set. The seed is separate: rows with different seeds share one."""
CHAT_FIELDS = (
    *("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("tool_choice", "parallel_tool_calls"),
    *dict.fromkeys(field.name for known in LOOKUP.values() for field in known.values() if field.to_template),
)
"""Fields of a conversation."""
_SCORING = ("completion", "completions", "documents")
_MAX_KEY_BYTES = 1 << 16
"""Most bytes of values in the key of a cached parameter set."""
_PLAIN_MARSHAL = 2
"""Version of `marshal` that writes equal values of equal types as equal bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Fields and other keys of a mapping, derived from their names."""

    place: Place
    fields: tuple[tuple[str, Field | None], ...]
    """(key, its field or None) in the row's order, without keys that contain fields."""
    others: tuple[tuple[str, Field | None], ...]
    """The same without fields that determine the parameter set."""
    names: tuple[str, ...]
    """Keys of the fields that determine the parameter set."""
    options: Callable[[Mapping[str, Any]], Any]
    """Returns the values of these fields."""
    containers: tuple[str, ...]
    """Keys that contain fields, or that no field of this place may have."""
    sources: tuple[str, ...]
    """Canonical names of the prompt fields."""
    scoring: tuple[str, ...]
    """Keys of texts to score, and of documents."""
    unsupported: tuple[Field, ...]
    to_template: tuple[Field, ...]
    """Fields that are variables of the chat template."""
    carried: tuple[str, ...]
    """Names of fields that are carried to the output."""
    has_chat_fields: bool
    has_media_fields: bool
    may_be_line: bool
    """Whether a row may be an OpenAI batch line."""
    suspects: tuple[str, ...]
    """Carried keys that look like an option."""


def new_layout(kind: Kind, names: tuple[Any, ...]) -> Layout:
    """The layout of a mapping with these keys."""
    place: Place = "row" if kind == "line" else kind
    entries = tuple((name, LOOKUP[place].get(name)) for name in names if name not in _CONTAINERS[kind])
    known = [field for _, field in entries if field is not None]
    options = [key for key, field in entries if field is not None and field.name in _OPTIONS]
    return Layout(
        place,
        entries,
        others=tuple(entry for entry in entries if entry[0] not in options),
        names=tuple(options),
        options=itemgetter(*options) if options else lambda source: None,
        containers=tuple(name for name in names if name in _CONTAINERS[kind]),
        sources=tuple(name for name in SOURCES if any(field.name == name for field in known)),
        scoring=tuple(key for key, field in entries if field is not None and field.name in _SCORING),
        unsupported=tuple(field for field in known if not field.supported),
        to_template=tuple(field for field in known if field.to_template),
        carried=tuple(field.name for field in known if field.carried),
        has_chat_fields=any(field.name in CHAT_FIELDS for field in known),
        has_media_fields=any(field.name in MEDIA_FIELDS.values() for field in known),
        may_be_line=kind == "row" and any(name in ENVELOPE for name in names),
        suspects=suspects(names) if place in ("row", "pairs") else (),
    )


def params_key(
    layout: Layout, source: Mapping[str, Any], inner: Layout | None = None, nested: Any = None
) -> Hashable | None:
    """Key of a row's parameter set in a run; None for values that are not plain JSON.

    Types are part of it, because `logprobs: true` and `logprobs: 1` are equal in Python but differ in meaning. The
    layouts are not: with their unknown keys, which may be long, they would live as long as the cached set.
    """
    generates = [source[key] is None for key in layout.scoring] if layout.scoring else None
    within = (None, None) if inner is None else (inner.names, inner.options(nested))
    values = (layout.options(source), generates, within[1])
    try:
        data = marshal.dumps(values, _PLAIN_MARSHAL)
    except ValueError:
        return None
    return (layout.place, layout.names, within[0], data) if len(data) <= _MAX_KEY_BYTES else None
