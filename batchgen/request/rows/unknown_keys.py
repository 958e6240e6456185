"""Most likely meaning of an unknown key: an option of another system, a misspelt field, or a column of the user's.

Hints come from the table of other systems' names first and from the spelling second.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from batchgen.errors import ErrorCode, RowError
from batchgen.request.fields.declared import ID_NAMES, LOOKUP, SOURCES, Place
from batchgen.request.fields.other_systems import (
    ANSWERS,
    CONTAINERS,
    FOREIGN,
    ORDINARY,
    answer_to,
    asked,
    close_meaning,
    meaning_of,
    snake_case,
)
from batchgen.request.printable import printable

MAX_CARRIED_OPTIONS = 256
"""Most keys whose rows are counted; a job with more names is not one with typing errors."""

MAX_NOTES = 20
"""Most carried keys that are printed; the JSON report has all."""

_WHERE: dict[Place, str] = {
    "row": "a row",
    "pairs": "a row",
    "params": "`sampling_params`",
    "completions": "a /v1/completions body",
    "chat": "a /v1/chat/completions body",
    "embeddings": "a /v1/embeddings body",
    "rerank": "a /v1/rerank body",
}
_PARAMS = "sampling_params"
_SHORTEST = 5
"""Fewest characters of a name that may be a misspelt field: shorter ones are close to too many."""
_LONGEST = 40
_CLOSENESS = 0.85
_MAX_DIFFERENCE = 2
"""Most characters that a misspelt name has more or fewer: `completion_tokens` is not `max_completion_tokens`."""
_PROMPTS = frozenset(name for source in SOURCES for name in LOOKUP["row"] if LOOKUP["row"][name].name == source)
_OPTIONS = (frozenset(LOOKUP["row"]) - _PROMPTS - frozenset(ID_NAMES)) | {_PARAMS}
"""Fields of a row that a key may be meant to be. A row without a prompt has its own error."""
_OPTIONS_BY_LENGTH = {
    length: [name for name in _OPTIONS | FOREIGN if abs(len(name) - length) <= _MAX_DIFFERENCE]
    for length in range(_LONGEST + 2 * _MAX_DIFFERENCE)
}
"""Length of a key -> the options that it may be a misspelling of."""
_KNOWN = frozenset(LOOKUP["row"]) | {_PARAMS, "body", "method", "url"}
_MAX_NAMES = 256
"""Most keys of one row that are compared with options."""
_MEDIA_KEYS = frozenset({"bytes", "path", "array", "sampling_rate"})
"""Keys of images and sounds in tables of Hugging Face."""
_ENCODED = ("data:image/", "data:audio/", "iVBORw0KGgo", "/9j/", "UklGR", "R0lGOD", "T2dnUw", "ZkxhQw")
"""Beginnings of `data:` URLs, and of base64 of PNG, JPEG, WebP or WAV, GIF, OGG and FLAC."""
_MEDIA_HINT = (
    "an image or a sound: give it as `image_data` or `audio_data`, or name it with --image-column or --audio-column"
)
_NONE: Mapping[str, Any] = MappingProxyType({})
_ordinary: set[str] = set()
"""Keys of recent rows that are ordinary columns: the layouts of wide tables are made again for each row."""
_INNER = frozenset(LOOKUP["params"]) | {name for name, answer in ANSWERS.items() if answer.verdict != "idle"}
_PLAIN_INNER = {name for name in _INNER - ORDINARY if len(name) >= _SHORTEST}
"""Options in an object, and those of them that are not ordinary words."""


def unknown_field(key: str, place: Place) -> RowError:
    """`unknown_field` error for a key that `place` does not have, with what to write instead."""
    message = f"`{_shown(key)}` is not a field of {_WHERE[place]}"
    meant = meaning_of(key, LOOKUP[place])
    if meant is None and (key in LOOKUP["row"] or key == _PARAMS):
        where = "the row itself" if place == "params" else "native rows, without `body`"
        meant = f"it is a field of {where}{', move it there' if place == 'params' else ''}"
    message += f"; {meant or close_meaning(key, LOOKUP[place]) or 'remove it or correct its name'}"
    return RowError(ErrorCode.UNKNOWN_FIELD, message, key)


def suspects(names: tuple[Any, ...]) -> tuple[str, ...]:
    """Those keys of a row that `carried_hint` has a hint for."""
    names = names[:_MAX_NAMES]
    unknown = set(names) - _KNOWN - _ordinary
    if not unknown:
        return ()
    asking = []
    for key in [name for name in names if name in unknown and type(name) is str]:
        if carried_hint(key) is not None:
            asking.append(key)
        elif len(key) <= _LONGEST:
            if len(_ordinary) >= 2 * _MAX_NAMES:
                _ordinary.clear()
            _ordinary.add(key)
    return tuple(asking)


def carried_hint(key: str) -> str | None:
    """Probable meaning of a key at the top level of a native row; None for a column of the user's."""
    return _carried_hint(key) if len(key) <= _LONGEST else None


@lru_cache(maxsize=128)
def _carried_hint(key: str) -> str | None:
    name = snake_case(key)
    if name in ORDINARY:
        return None
    if name in _OPTIONS and (len(name) >= _SHORTEST or "_" in name):
        return f"did you mean `{name}`?"
    if name in ANSWERS:
        return None if ANSWERS[name].verdict == "idle" else answer_to(name)
    if name in CONTAINERS:
        return "did you mean `sampling_params`?"
    near = _OPTIONS_BY_LENGTH.get(len(name), ())
    close = close_name(key, near if "_" in name else [option for option in near if option in _OPTIONS])
    return None if close is None else asked(close, _OPTIONS)


def close_name(key: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `key` is a misspelling of, if it is one."""
    written = snake_case(key[:_LONGEST])
    if not _SHORTEST <= len(key) <= _LONGEST:
        return None
    first, last, letters = written[0], written[-1], set(written)
    alike = [  # cheap tests first: few errors change both ends of a name, and each changes the set of letters by two
        name
        for name in names
        if (name[:1] == first or name[-1:] == last)
        and abs(len(name) - len(written)) <= _MAX_DIFFERENCE
        and len(letters.symmetric_difference(name)) <= 2 * _MAX_DIFFERENCE
    ]
    closest = difflib.get_close_matches(written, alike, n=1, cutoff=_CLOSENESS) if alike else []
    return closest[0] if closest else None


class CarriedOptions:
    """Counts the rows of a job in which a carried key looks like an option or has media, by key."""

    def __init__(self, meant: Sequence[str] = (), *, strict: bool = False) -> None:
        """`meant` are keys that are carried on purpose; `strict` refuses the others."""
        self.rows: dict[str, int] = {}
        self._meant = frozenset(meant)
        self._strict = strict

    def add(self, keys: Sequence[str], row: Mapping[str, Any], carried: Mapping[str, Any] = _NONE) -> None:
        """Count a row with these suspicious keys, and with media among what it carries.

        Raises:
            RowError: `unknown_field` for the first of them, if they are refused.
        """
        asking = [key for key in keys if _asks(key, row[key])]
        asking += [key for key, value in carried.items() if _is_media(value) and key not in keys]
        for key in asking:
            if key in self._meant:
                continue
            if self._strict:
                raise _refused(key)
            if key in self.rows or len(self.rows) < MAX_CARRIED_OPTIONS:
                self.rows[key] = self.rows.get(key, 0) + 1


def _asks(key: str, value: Any) -> bool:
    """Whether a carried value can be meant as an option: null is absent, and an object of options must hold one."""
    name = snake_case(key)
    if name not in CONTAINERS:
        return value is not None
    inner = _INNER if "_" in name else _PLAIN_INNER  # `arguments` and `options` are also names of ordinary columns
    return isinstance(value, Mapping) and any(snake_case(str(item)) in inner for item in value)


def _is_media(value: Any) -> bool:
    """Whether a carried value is most likely an image or a sound."""
    if type(value) is str:
        return value.startswith(_ENCODED)
    if isinstance(value, list | tuple):
        return bool(value) and _is_media(value[0])
    if isinstance(value, Mapping):
        return bool(value) and value.keys() <= _MEDIA_KEYS
    return hasattr(value, "getexif")  # a PIL image


def _refused(key: str) -> RowError:
    message = f"`{_shown(key)}` is not a field of a row; {carried_hint(key) or _MEDIA_HINT}"
    return RowError(ErrorCode.UNKNOWN_FIELD, f"{message} (--carry {_shown(key)} says that it is meant)", key)


def carried_notes(rows: Mapping[str, int], carry: str | Sequence[str]) -> list[dict[str, Any]]:
    """Key, number of rows and hint of each carried key that looks like an option or has media, the most frequent first.

    Args:
        rows: key -> number of rows.
        carry: the value of `--carry`.
    """
    fate = "carried" if carry == "all" else "left out"
    ranked = sorted(rows.items(), key=lambda item: (-item[1], item[0]))
    notes = []
    for key, count in ranked:
        hint = carried_hint(key) or _MEDIA_HINT
        mark = "" if hint.endswith("?") else ";"
        notes.append({"key": key, "rows": count, "hint": f"{hint}{mark} {fate}, not obeyed"})
    return notes


def carried_summary(notes: Sequence[Mapping[str, Any]]) -> str:
    """All of `carried_notes` in one line, without the hints."""
    rows = ", ".join(f"`{_shown(note['key'])}` in {_rows(note['rows'])}" for note in notes[:MAX_NOTES])
    more = f" and {len(notes) - MAX_NOTES} more" if len(notes) > MAX_NOTES else ""
    return f"not obeyed, though they look like options or media: {rows}{more}"


def note_line(note: Mapping[str, Any]) -> str:
    """One of `carried_notes` as a line of text."""
    return f"`{_shown(note['key'])}` in {_rows(note['rows'])}: {note['hint']}"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _shown(key: str) -> str:
    return printable(key[:80])[:80]
