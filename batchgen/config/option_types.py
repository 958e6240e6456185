"""Definition of an option and of its value types, which are the same for flags, variables, TOML files and Python."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from batchgen.config import units
from batchgen.config.urls import check_stored
from batchgen.errors import UsageError
from batchgen.request.checks import INT64_HIGH, describe_range, json_type
from batchgen.request.foreign_text import ForeignTextError, read_json

_T = TypeVar("_T")
_KEY = "option"
"""Key of a declared option in the metadata of an attribute."""

Target = Literal["engine", "run", "sampling", "meta"]
"""Part of the configuration that an option sets; `meta` options are read while it is resolved."""

Reach = Literal["code", "files", "network"]
"""What a value reaches beyond the rows: code that it runs, files that it lets the job read, write or replace, or places
on the network that it lets rows fetch from."""


@dataclass(frozen=True, slots=True)
class ValueType:
    """Type of an option's value. `parse` raises `ValueError` with a message that follows the option's name."""

    metavar: str
    """Placeholder of the value in help texts."""
    parse: Callable[[str], Any]
    scalars: tuple[type, ...] = (str,)
    """Types that a TOML file or a Python caller may give; they are converted to text for `parse`."""
    comma_separated: bool = False
    """Whether a list is accepted as its items joined by commas."""
    named_pairs: bool = False
    """Whether values are NAME=VALUE with unique names; a mapping or (name, value) pairs are accepted, too."""
    accepts_functions: bool = False
    """Whether the VALUE may be a function in Python."""
    accepts_file: bool = False
    """Whether `@PATH` is replaced by the text of that file."""
    to_text: Callable[[Any], Any] | None = None
    """Converts a mapping or list from TOML, JSON or Python to text or a list of texts."""
    reach: Reach | None = None
    """What every value of this type reaches; None: nothing."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of `batchgen run`."""

    name: str
    value_type: ValueType
    help: str
    default: Any = None
    group: str = ""
    target: Target = "run"
    repeat: bool = False
    """Whether the option may be given several times; its value is a tuple."""
    choices: tuple[str, ...] = ()
    choice_flags: bool = False
    """Whether each choice is a separate flag; `help` has one line for each."""
    short: str | None = None
    reach: Reach | None = None
    """What the values reach; None: what those of the value type do."""

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
        """All spellings on the command line; of a boolean option, the positive one first."""
        if self.choice_flags:
            return tuple(f"--{choice}" for choice in self.choices)
        if self.value_type is BOOL:
            return self.flag, self.negative
        return (self.flag, self.short) if self.short else (self.flag,)

    def reach_of(self, value: object = None) -> Reach | None:
        """What a value reaches; None: nothing, so that `./batchgen.toml`, which may be anybody's, may give it.

        Args:
            value: as given by a source; `@PATH` reads a file if the option accepts one.
        """
        names_file = self.value_type.accepts_file and isinstance(value, str) and value.startswith("@")
        return "files" if names_file else self.reach or self.value_type.reach

    @property
    def metavar(self) -> str:
        """Placeholder of the value in the help: the choices, or that of the value type."""
        return "|".join(self.choices) or self.value_type.metavar

    @property
    def negative(self) -> str:
        """Flag that sets false: `--no-chat`, or `--stop-trim` for `--no-stop-trim`."""
        return self.flag.replace("--no-", "--", 1) if self.name.startswith("no_") else self.flag.replace("--", "--no-")


def int_range(low: int, high: int = INT64_HIGH) -> ValueType:
    """Value type of integers in [low, high]."""

    def parse(text: str) -> int:
        value = units.parse_int(text)
        if not low <= value <= high:
            raise ValueError(f"must be {describe_range(low, high)}, got {value}")
        return value

    return ValueType("N", parse, (str, int))


def _positive_duration(text: str) -> float:
    value = units.parse_duration(text)
    if not value:
        raise ValueError(f"must be more than 0 seconds, got {text!r}")
    return value


def _one_of(*choices: str) -> ValueType:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}; got {text!r}")
        return text

    return ValueType("|".join(choices), parse)


def _nonempty(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


def _path(text: str) -> str:
    return units.check_local(_nonempty(text))


def _stored(text: str) -> str:
    return check_stored(_nonempty(text))


def _file_to_write(text: str) -> str:
    return units.check_file_to_write(_nonempty(text))


def _carry(text: str) -> str | tuple[str, ...]:
    return text if text in ("all", "none") else units.parse_columns(text)


def _count(text: str) -> int:
    return 0 if text == "auto" else cast("int", int_range(1, 1 << 16).parse(text))


def _json_object(text: str) -> str:
    """Check that the text is a JSON object and return it unchanged."""
    try:
        value = read_json(text)
    except ForeignTextError as problem:
        raise ValueError(f"must be a JSON object, or @PATH of a file that contains one; this {problem}") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, or @PATH of a file that contains one; this is {json_type(value)}")
    return text


def json_text(value: object) -> object:
    """JSON text of a mapping; other values unchanged."""
    if not isinstance(value, Mapping):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"has a value that JSON cannot represent: {problem}") from None


TEXT = ValueType("TEXT", str)
NAME = ValueType("NAME", _nonempty)
FILE = ValueType("PATH", _file_to_write, (str, os.PathLike), reach="files")
PATH = ValueType("PATH", _path, (str, os.PathLike), reach="files")
STORED_PATH = ValueType("PATH|URL", _stored, (str, os.PathLike), reach="files")
URL_PREFIX = ValueType("URL", _nonempty, reach="network")
BOOL = ValueType("", units.parse_bool, (str, bool))
NUMBER = ValueType("X", units.parse_float, (str, int, float))
SIZE = ValueType("SIZE", units.parse_size, (str, int))
MEMORY = ValueType("SIZE|SHARE", units.parse_memory, (str, int, float))
TOTAL_SHARE = ValueType("SHARE", units.parse_total_share, (str, int, float))
DURATION = ValueType("DURATION", units.parse_duration, (str, int, float))
POSITIVE_DURATION = ValueType("DURATION", _positive_duration, (str, int, float))
CLOCK = ValueType("TIME", units.parse_clock, (str, date))
THRESHOLD = ValueType("N|P%", units.parse_threshold, (str, int))
CARRY = ValueType("all|none|COL,...", _carry, comma_separated=True)
COLUMNS = ValueType("COL,...", units.parse_columns, comma_separated=True)
TOKEN_IDS = ValueType("ID,...", units.parse_token_ids, (str, int), comma_separated=True)
TEXT_FILE = ValueType("TEXT|@PATH", _nonempty, accepts_file=True)
COUNT = ValueType("auto|N", _count, (str, int))
JSON = ValueType("JSON|@PATH", _json_object, accepts_file=True, to_text=json_text)
SHARD = ValueType("auto|I/N", _nonempty)
NAME_PATH = ValueType("NAME=PATH", units.parse_name_path, (str, os.PathLike), named_pairs=True, reach="files")
NAME_FUNCTION = ValueType(
    "NAME=module:function", units.parse_name_function, named_pairs=True, accepts_functions=True, reach="code"
)


@dataclass(frozen=True, slots=True)
class Group:
    """Section of the help."""

    title: str

    def option(
        self,
        default: _T,
        help: str,
        value_type: ValueType | None = None,
        *,
        choice_flags: bool = False,
        reach: Reach | None = None,
    ) -> _T:
        """Attribute of a configuration that declares an option of this section.

        Args:
            default: the attribute's default.
            help: as in `Option`.
            value_type: type of the value; None if it follows from the annotation, a bool or a `Literal`.
            choice_flags: as in `Option`.
            reach: as in `Option`.
        """
        declared = {"group": self.title, "help": help, "choice_flags": choice_flags, "reach": reach}
        return dataclasses.field(default=default, metadata={_KEY: (value_type, declared)})


def declared_options(config: type[Any], target: Target) -> tuple[Option, ...]:
    """The options that the attributes of a configuration declare, in order."""
    annotations = get_type_hints(config)
    options = []
    for item in dataclasses.fields(config):
        if _KEY in item.metadata:
            value_type, declared = item.metadata[_KEY]
            annotation = annotations[item.name]
            choices = get_args(annotation) if value_type is None and get_origin(annotation) is Literal else ()
            kind = value_type or (_one_of(*choices) if choices else BOOL)
            options.append(
                Option(
                    item.name,
                    kind,
                    default=item.default,
                    target=target,
                    repeat=kind.named_pairs or item.default == (),
                    choices=choices,
                    **declared,
                )
            )
    return tuple(options)


def coerce(option: Option, value: object, label: str) -> Any:
    """Parse and check a value given by a flag, a variable, a TOML file or Python.

    Raises:
        UsageError: the value is wrong; the message begins with `label`.
    """
    try:
        return _parse(option, value)
    except ValueError as problem:
        raise UsageError(f"`{label}` {problem}") from None


def _parse(option: Option, value: object) -> Any:
    if option.value_type.to_text is not None:
        value = option.value_type.to_text(value)
    if option.value_type.named_pairs:
        return _parse_pairs(option.value_type, value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        if option.repeat:
            return tuple(_parse_scalar(option.value_type, item) for item in value)
        if not option.value_type.comma_separated:
            raise ValueError(f"must be one value, got a list: {list(value)!r}")
        return option.value_type.parse(",".join(_text(option.value_type, item) for item in value))
    parsed = _parse_scalar(option.value_type, value)
    return (parsed,) if option.repeat else parsed


def _parse_pairs(kind: ValueType, value: object) -> tuple[tuple[str, Any], ...]:
    if isinstance(value, Mapping):
        value = tuple(value.items())
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    pairs = tuple(_parse_pair(kind, item) for item in items)
    names = [name for name, _ in pairs]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ValueError(f"names {duplicate!r} twice; use a different name for each")
    return pairs


def _parse_pair(kind: ValueType, item: object) -> Any:
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str):
        name, target = item
        if kind.accepts_functions and callable(target):
            return kind.parse(f"{name}=python:object")[0], target
        item = f"{name}={_text(kind, target)}"
    return _parse_scalar(kind, item)


def _parse_scalar(kind: ValueType, value: object) -> Any:
    return kind.parse(_text(kind, value))


def _text(kind: ValueType, value: object) -> str:
    wrong_bool = isinstance(value, bool) and bool not in kind.scalars
    if wrong_bool or not isinstance(value, kind.scalars):
        raise ValueError(f"must be {kind.metavar or 'true or false'}, got {value!r}")
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
