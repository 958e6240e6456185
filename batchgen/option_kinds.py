"""How the value of an option is written and read: the same for flags, variables, TOML files and Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from batchgen.checks import INT64_HIGH, span
from batchgen.errors import UsageError
from batchgen.units import (
    parse_bool,
    parse_columns,
    parse_duration,
    parse_float,
    parse_int,
    parse_memory,
    parse_name_function,
    parse_name_path,
    parse_size,
    parse_threshold,
    parse_token_ids,
)

__all__ = [
    "BOOL",
    "COLUMNS",
    "DURATION",
    "MEMORY",
    "NAME_FUNCTION",
    "NAME_PATH",
    "PATH",
    "REAL",
    "SHARD",
    "SIZE",
    "SOME_TIME",
    "TEXT",
    "THRESHOLD",
    "TOKEN_IDS",
    "WORD",
    "Kind",
    "Option",
    "choice",
    "coerce",
    "flag",
    "whole",
]

Target = Literal["engine", "run", "sampling", "meta"]


@dataclass(frozen=True, slots=True)
class Kind:
    """How a value is written: `parse` raises `ValueError` with a message that follows the option's name."""

    metavar: str
    parse: Callable[[str], Any]
    scalars: tuple[type, ...] = (str,)
    """Types a TOML file or a Python caller may give besides the ones that `parse` reads."""
    joined: bool = False
    """Whether a list stands for its items with commas between them."""
    pairs: bool = False
    """Whether values are NAME=VALUE; a table, and pairs of name and value, are taken too, and no name twice."""
    objects: bool = False
    """Whether Python may give a function for the VALUE."""
    file: bool = False
    """Whether `@PATH` stands for the text of that file."""
    write: Callable[[Any], Any] | None = None
    """Makes text, or a list of it, of a table or list that may stand for the value in TOML, JSON and Python."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `built` false refuses all but the default until it is built."""

    name: str
    kind: Kind
    default: Any
    group: str
    help: str
    target: Target = "run"
    repeat: bool = False
    choices: tuple[str, ...] = ()
    built: bool = True
    switches: bool = False
    """Each choice is a flag of its own; `help` has a line for each."""
    short: str | None = None

    @property
    def flag(self) -> str:
        """`max_num_seqs` -> `--max-num-seqs`."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """`max_num_seqs` -> `BATCHGEN_MAX_NUM_SEQS`."""
        return "BATCHGEN_" + self.name.upper()

    @property
    def flags(self) -> tuple[str, ...]:
        """Every spelling on the command line, the positive one of a switch first."""
        if self.switches:
            return tuple(f"--{choice}" for choice in self.choices)
        if self.kind is BOOL:
            return self.flag, self.negative
        return (self.flag, self.short) if self.short else (self.flag,)

    @property
    def metavar(self) -> str:
        """What the help shows for the value: the choices, or the kind's word."""
        return "|".join(self.choices) or self.kind.metavar

    @property
    def negative(self) -> str:
        """The flag that says no: `--no-chat`, or `--stop-trim` for `--no-stop-trim`."""
        return self.flag.replace("--no-", "--", 1) if self.name.startswith("no_") else self.flag.replace("--", "--no-")


def whole(low: int, high: int = INT64_HIGH) -> Kind:
    """Whole numbers in [low, high]."""

    def parse(text: str) -> int:
        value = parse_int(text)
        if not low <= value <= high:
            raise ValueError(f"must be {span(low, high)}, got {value}")
        return value

    return Kind("N", parse, (str, int))


def _some_time(text: str) -> float:
    value = parse_duration(text)
    if not value:
        raise ValueError(f"must be more than 0 seconds, got {text!r}")
    return value


def _pick(*choices: str) -> Kind:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"takes one of {', '.join(choices)}; got {text!r}")
        return text

    return Kind("|".join(choices), parse)


def _word(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


def _carry(text: str) -> str | tuple[str, ...]:
    return text if text in ("all", "none") else parse_columns(text)


TEXT = Kind("TEXT", str)
WORD = Kind("NAME", _word)
PATH = Kind("PATH", _word, (str, os.PathLike))
BOOL = Kind("", parse_bool, (str, bool))
REAL = Kind("X", parse_float, (str, int, float))
SIZE = Kind("SIZE", parse_size, (str, int))
MEMORY = Kind("SIZE|SHARE", parse_memory, (str, int, float))
DURATION = Kind("DURATION", parse_duration, (str, int, float))
SOME_TIME = Kind("DURATION", _some_time, (str, int, float))
THRESHOLD = Kind("N|P%", parse_threshold, (str, int))
COLUMNS = Kind("all|none|COL,...", _carry, joined=True)
TOKEN_IDS = Kind("ID,...", parse_token_ids, (str, int), joined=True)
SHARD = Kind("auto|I/N", _word)
NAME_PATH = Kind("NAME=PATH", parse_name_path, (str, os.PathLike), pairs=True)
NAME_FUNCTION = Kind("NAME=module:function", parse_name_function, pairs=True, objects=True)


def choice(name: str, choices: str, group: str, help: str, target: Target = "run", **more: Any) -> Option:
    """An option of a few words, given as `a|b|c`; the first is the default."""
    names = tuple(choices.split("|"))
    return Option(name, _pick(*names), names[0], group, help, target, choices=names, **more)


def flag(name: str, group: str, help: str, target: Target = "run", default: bool = False, built: bool = True) -> Option:
    """A switch, off unless `default` says otherwise."""
    return Option(name, BOOL, default, group, help, target, built=built)


def coerce(option: Option, value: object, label: str) -> Any:
    """`value` as given by a flag, a variable, a TOML file or Python, parsed and checked.

    Raises:
        UsageError: names `label` and what it takes, or says that the value is not built yet.
    """
    try:
        result = _parse(option, value)
    except ValueError as problem:
        if not option.built:
            raise _not_built(label) from None
        raise UsageError(f"`{label}` {problem}") from None
    if not option.built and result != option.default:
        raise _not_built(label)
    return result


def _not_built(label: str) -> UsageError:
    return UsageError(f"`{label}` is not built yet; leave it out")


def _parse(option: Option, value: object) -> Any:
    if option.kind.write is not None:
        value = option.kind.write(value)
    if option.kind.pairs:
        return _parse_pairs(option.kind, value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        if option.repeat:
            return tuple(_parse_scalar(option.kind, item) for item in value)
        if not option.kind.joined:
            raise ValueError(f"takes one value, got a list: {list(value)!r}")
        return option.kind.parse(",".join(_text(option.kind, item) for item in value))
    parsed = _parse_scalar(option.kind, value)
    return (parsed,) if option.repeat else parsed


def _parse_pairs(kind: Kind, value: object) -> tuple[tuple[str, Any], ...]:
    if isinstance(value, Mapping):
        value = tuple(value.items())
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    pairs = tuple(_parse_pair(kind, item) for item in items)
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"names {twice!r} twice; give each a name of its own")
    return pairs


def _parse_pair(kind: Kind, item: object) -> Any:
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str):
        name, target = item
        if kind.objects and callable(target):
            return kind.parse(f"{name}=python:object")[0], target
        item = f"{name}={_text(kind, target)}"
    return _parse_scalar(kind, item)


def _parse_scalar(kind: Kind, value: object) -> Any:
    return kind.parse(_text(kind, value))


def _text(kind: Kind, value: object) -> str:
    wrong_bool = isinstance(value, bool) and bool not in kind.scalars
    if wrong_bool or not isinstance(value, kind.scalars):
        raise ValueError(f"takes {kind.metavar or 'true or false'}, got {value!r}")
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
