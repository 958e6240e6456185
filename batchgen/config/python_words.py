"""Messages in the words of Python: arguments of `Engine` instead of flags, without what only the command line has."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, TypeVar

from batchgen.config.engine_config import ENGINE_OPTIONS
from batchgen.errors import BatchgenError, ErrorInfo, RowError, UnknownArgument
from batchgen.request.fields.other_systems import (
    ANSWERS,
    ARGUMENTS_OF_OTHERS,
    FLAGS_OF_OTHERS,
    MISSING_ARGUMENTS,
    answer_to,
)
from batchgen.request.fields.params import PARAMETERS, SAMPLING_FIELDS

_T = TypeVar("_T")

_OTHER_NAMES: Final = {
    **{flag[2:].replace("-", "_"): own[2:].replace("-", "_") for flag, own in FLAGS_OF_OTHERS.items()},
    **ARGUMENTS_OF_OTHERS,
}
"""Arguments of functions of other systems -> ours."""
_ENGINE: Final = frozenset(option.name for option in ENGINE_OPTIONS)
_CHOICES: Final = "|".join(sorted({choice for option in ENGINE_OPTIONS for choice in option.choices}))
_VALUE: Final = rf"'[^']*'|[^ ,;.()]*[A-Z0-9=:][^ ,;()]*[^ ,;.()]|(?:{_CHOICES})\b"
_OURS: Final = "(?:" + "|".join(name.replace("_", "-") for name in (*_ENGINE, *PARAMETERS)) + r")(?![a-z-])"
"""A flag, without its dashes, that has an argument in Python: of `Engine`, or of `SamplingParams`."""
_CLAUSE: Final = re.compile(
    rf" \([^()]*--(?!{_OURS})[^()]*\)|(?:;|,? or) (?:(?! or )[^;,()-]|-(?!-))*--(?!{_OURS})[^;,()]*(?:\([^()]*\))?"
)
"""A remark in parentheses, or an alternative, with a flag that only the command has."""
_NAME: Final = "--([a-z]+(?:-[a-z]+)*)"
_FLAG: Final = re.compile(rf"`{_NAME}(?: ([^`]*))?`|{_NAME}(?: ({_VALUE}))?")


def in_python(message: str) -> str:
    """A message for the command line as one for a caller of the Python API."""
    named: list[str] = []

    def argument(match: re.Match[str]) -> str:
        name, value = (match[1] or match[3]).replace("-", "_"), match[2] or match[4]
        whose = "Engine argument " if name in _ENGINE else "the command's "
        whose = "" if match[1] or name in PARAMETERS or (name in _ENGINE and named) else whose
        named.append(name)
        return f"{whose}`{name}={value}`" if value else f"{whose}`{name}`"

    return _FLAG.sub(argument, _CLAUSE.sub("", message)) if "--" in message else message


def in_python_info(info: ErrorInfo) -> ErrorInfo:
    """A row's error with its message as `in_python`."""
    return replace(info, message=in_python(info.message))


@contextmanager
def python_errors() -> Iterator[None]:
    """Give the errors that are raised their messages as `in_python`."""
    try:
        yield
    except BatchgenError as error:
        error.args = (in_python(str(error)),)
        if isinstance(error, RowError):
            error.info = in_python_info(error.info)
        raise


def with_python_errors(items: Iterator[_T]) -> Iterator[_T]:
    """The items, with the errors of their iteration as by `python_errors`."""
    with python_errors():
        yield from items


def refuse_unknown(names: Iterable[str], function: str, known: Sequence[str]) -> None:
    """Refuse the arguments of a function that it does not have.

    Raises:
        UnknownArgument: there are some; the message names the right one, or where the value belongs.
    """
    for name in names:
        if name not in known:
            raise UnknownArgument(f"`{name}` is not an argument of {function}; {_meant(name, known)}")


def _meant(name: str, known: Sequence[str]) -> str:
    """What to write in place of an argument."""
    own = _OTHER_NAMES.get(name)
    if own in known:
        return f"did you mean `{own}`?"
    if name in MISSING_ARGUMENTS:
        return MISSING_ARGUMENTS[name]
    if field := next((each.name for each in SAMPLING_FIELDS if name in each.spellings), None):
        return f"write generate(rows, SamplingParams({field}=...))"
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.7):
        return f"did you mean `{close[0]}`?"
    return in_python(answer_to(name)) if name in ANSWERS else f"its arguments are {', '.join(known)}"
