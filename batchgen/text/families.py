"""How model families write their thoughts, by the table in `families.toml`, and which of them a model is.

A model is known by the response template of its tokenizer, if it has one, else by what its chat template writes and by
its vocabulary. Families that write alike have the same markers under their own names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, Final, NamedTuple

import regex

from batchgen.errors import UsageError
from batchgen.request.foreign_text import read_toml

AUTO: Final = "auto"
OFF: Final = "off"
FROM_TEMPLATE: Final = "response_template"
"""Name of a format that the tokenizer's response template gives."""


class ReasoningFormat(NamedTuple):
    """The markers around thoughts. They belong neither to the thoughts nor to the answer."""

    name: str
    starts: tuple[str, ...]
    """Begin the thoughts, while nothing but blanks is written; in a format of channels also later."""
    ends: tuple[str, ...]
    """End the thoughts. The first one is written when a budget is spent."""
    answers: tuple[str, ...] = ()
    """Begin the answer behind the thoughts."""
    closers: tuple[str, ...] = ()
    """End an answer that one of `answers` begins."""
    header: str | None = None
    """For a format of channels, in which thoughts and answers may alternate: the text between two of them."""
    calls: tuple[str, ...] = ()
    """In a format of channels, begin a call of a tool, which is a part of the answer with the marker itself."""
    heads: str | None = None
    """In a format of channels, a regular expression of all texts that begin a part, with the group `thoughts` for
    thoughts and `call` for the recipient of a call; None: `starts` and `answers`."""
    body: str = ""
    """In a format of channels, the text that ends the head of a call."""
    gap: str = ""
    """Line breaks that templates write between thoughts and answer."""
    opened: bool = False
    """Whether outputs begin with thoughts where the prompt says nothing: for a model named by the user."""

    def next_parts(self, *, calls: bool) -> tuple[str, ...]:
        """In a format of channels, the markers that may begin a part; `calls`: an answer must be a call."""
        return (*self.starts, *(self.calls if calls else self.answers)[:1])

    def close(self, *, calls: bool) -> str:
        """The text that ends the thoughts and begins the answer; `calls`: which must be a call."""
        if self.header is None:
            return self.ends[0]
        return f"{self.ends[0]}{self.header}{self.next_parts(calls=calls)[-1]}"

    @property
    def begins(self) -> str:
        """In a format of channels, the regular expression of what begins a part: `heads`, or the markers themselves."""
        starts, answers = ("|".join(map(regex.escape, texts)) for texts in (self.starts, self.answers))
        return self.heads or f"(?:{regex.escape(self.header or '')})?(?:(?P<thoughts>{starts})|{answers})"

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        return (*self.starts, *self.ends, *self.answers, *self.closers, *self.calls)


class _Family(NamedTuple):
    format: ReasoningFormat
    spelled: tuple[str, ...] = ()
    """Texts of which its chat template writes one, or which all are added tokens of its vocabulary."""
    tells: tuple[str, ...] = ()
    """Texts that its chat template writes."""
    reads: str | None = None
    """A variable that its chat template reads."""


def _family(table: Mapping[str, Any]) -> _Family:
    """A family as its table describes it."""
    values = dict(table)
    if tag := values.pop("tag", None):
        start, end = f"<{tag}>", f"</{tag}>"
        values = {"spelled": [start, end], "starts": [start], "ends": [end], "gap": "\n\n", **values}
    if "heads" in values:
        values["heads"] = "|".join(values["heads"])
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    known_by = {key: values.pop(key) for key in ("spelled", "tells", "reads") if key in values}
    return _Family(ReasoningFormat(**values), **known_by)


TABLES: Final = read_toml(files("batchgen.text").joinpath("families.toml").read_bytes())
"""`thoughts` and `fim`: the families' markers, and their prompts to fill in the middle."""
_FAMILIES: Final = tuple(map(_family, TABLES["thoughts"]))
"""In order: a model is of the first family whose texts its template writes."""

MARKERS: Final = tuple(
    dict.fromkeys((start, end) for form, *_ in _FAMILIES for start in form.starts for end in form.ends)
)
"""Pairs of markers that begin and end thoughts in a family."""

BEFORE_ANSWERS: Final = {
    mark: "".join(form.closers[:1]) if mark in form.answers else ""
    for form, *_ in _FAMILIES
    for mark in (*form.ends, *form.answers)
}
"""Markers at which thoughts end or answers begin, with what ends such an answer."""

NAMES: Final = tuple(dict.fromkeys(family.format.name for family in _FAMILIES))
"""Names of the families, for the option `--reasoning`."""


def named_format(name: str) -> ReasoningFormat:
    """The format of a family, given by the option `--reasoning`.

    Raises:
        UsageError: no family has the name.
    """
    form = next((family.format for family in _FAMILIES if family.format.name == name), None)
    if form is None:
        raise UsageError(f"`--reasoning` must be {AUTO}, {OFF} or one of {', '.join(NAMES)}, got {name!r}")
    return form


def find_format(written: str, reads: Callable[[str], bool], is_added: Callable[[str], bool]) -> ReasoningFormat | None:
    """The format in which a model writes its thoughts; None if it has none that is known.

    Args:
        written: what its chat template writes of conversations without tools.
        reads: whether its chat template reads a variable.
        is_added: whether a text is an added token of the vocabulary.
    """
    for family in _FAMILIES:
        spelled = any(text in written for text in family.spelled) or all(map(is_added, family.spelled))
        tells = all(text in written for text in family.tells) and (family.reads is None or reads(family.reads))
        if tells and (spelled or not family.spelled):
            return family.format._replace(opened=False)
    return None


def response_format(template: Mapping[str, Any]) -> ReasoningFormat | None:
    """The markers that a response template of the library names as texts; None if it has none, or patterns."""
    fields = template.get("fields")
    if not isinstance(fields, Mapping):
        return None
    names = ("thinking", "reasoning", "reasoning_content")
    thoughts = next((fields[name] for name in names if isinstance(fields.get(name), Mapping)), None)
    if thoughts is None:
        return None
    starts, ends = _texts(thoughts.get("open")), _texts(thoughts.get("close"))
    if not starts or not ends:
        return None
    content = fields.get("content")
    content = content if isinstance(content, Mapping) else {}
    if "open_pattern" in content or "close_pattern" in content:
        return None
    answers = _texts(content.get("open"))
    # An answer that begins with a marker, too, is one of the parts of an output of channels.
    headers = _texts(template.get("start_anchor")) if answers else ()
    closers = () if headers else _texts(content.get("close"))
    return ReasoningFormat(FROM_TEMPLATE, starts, ends, answers, closers, headers[0] if headers else None)


def _texts(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(text, str) and text for text in values):
        return ()
    return tuple(values)
