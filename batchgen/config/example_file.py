"""The file that `batchgen init` writes: every option with its help text, commented out."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from contextlib import suppress
from pathlib import Path

from batchgen.config.option_types import BOOL, Option
from batchgen.config.resolve import DEFAULT_FILE
from batchgen.config.run_config import GROUPS, OPTIONS
from batchgen.errors import OutputError, UsageError

_HEAD = """\
# Options of `batchgen run` and `batchgen check`, which read this file in the folder where they run.
# To set one, remove the # before its name: the values are the defaults, or examples where it is said.
# Flags and BATCHGEN_* variables override this file. More: batchgen help configuration
"""
_NAMED = f"""
# Options that reach files, code or the network
# They are refused here unless the command names this file: --config {DEFAULT_FILE}
"""
_EXAMPLE = "  # example"
_WIDTH = 110


def write_example(folder: Path) -> Path:
    """Write the file and return its path.

    Raises:
        UsageError: there is a file of that name, which is kept.
        OutputError: it cannot be written.
    """
    path = folder / DEFAULT_FILE
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(example_text())
    except FileExistsError:
        raise UsageError(f"{DEFAULT_FILE} exists and is kept; edit it, or run in another folder") from None
    except OSError as problem:
        raise OutputError(f"cannot write {DEFAULT_FILE}: {problem.strerror}") from None
    return path


def example_text() -> str:
    """The content of the file: the options that it may set by itself, by group, then those that need it named."""
    by_title: dict[str, str] = {f"\n# {group}\n": "" for group in GROUPS} | {_NAMED: ""}
    for option in OPTIONS:
        if option.target != "meta":
            value = _value(option)
            by_title[_NAMED if option.reach_of(json.loads(value)) else f"\n# {option.group}\n"] += _entry(option, value)
    return _HEAD + "".join(title + entries for title, entries in by_title.items())


def _entry(option: Option, value: str) -> str:
    text = option.help.replace("\n", " ") if option.choice_flags else option.help
    about = re.sub(r" ?Example: .*?(?= [A-Z]\w* |$)", "", text)
    lines = textwrap.wrap(about, _WIDTH - 2, break_on_hyphens=False)
    return "\n# " + "\n# ".join(lines) + f"\n#{option.name} = {value}{_EXAMPLE if _is_example(option) else ''}\n"


def _value(option: Option) -> str:
    """The default in TOML, or the value of the help text's example."""
    value = option.default
    if not _is_example(option):
        return json.dumps(value)
    words = shlex.split(option.help.rpartition("Example: ")[2])
    at = next(place for place, word in enumerate(words) if word in option.flags)
    if option.value_type is BOOL:
        value = words[at] != option.negative
    else:
        value = words[at + 1]
        with suppress(ValueError):
            number = json.loads(value)
            value = number if isinstance(number, int | float) and type(number) in option.value_type.scalars else value
    return json.dumps([value] if option.repeat else value, ensure_ascii=False)


def _is_example(option: Option) -> bool:
    return not isinstance(option.default, str | int | float)
