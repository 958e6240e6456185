"""Where options come from: flags > `BATCHGEN_*` environment > `--config FILE.toml` > `./batchgen.toml`."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from batchgen.errors import UsageError
from batchgen.option_kinds import Option, coerce
from batchgen.options import BY_NAME, OPTIONS
from batchgen.params import CONSTRAINT_KINDS

__all__ = ["CODE", "DEFAULT_FILE", "given_options"]

CODE: Final = frozenset({"logit_processor", "flash_library"})
"""Options that run code: whoever starts the command names it, never a file that may be anybody's."""
DEFAULT_FILE: Final = "batchgen.toml"

_PREFIX = "BATCHGEN_"
_OTHER_VARIABLES = frozenset({"BATCHGEN_TRACEBACK"})
"""Variables of ours that are no options."""


def given_options(flags: Mapping[str, Any], env: Mapping[str, str], cwd: Path) -> dict[str, tuple[Any, str]]:
    """Option name -> its value from the strongest layer that gives one, and that layer.

    Args:
        flags: as `resolve_config` takes them.
        env: variables.
        cwd: the folder that the command runs in.

    Raises:
        UsageError: an unknown key or variable, a value that is wrong, a file that cannot be read, or code that nobody
            named.
    """
    given: dict[str, tuple[Any, str]] = {}
    for option, value, label, origin, asked in _layers(flags, env, cwd):
        if option.name in given or option.target == "meta":
            continue
        if option.name in CODE and not asked:
            raise UsageError(
                f"`{label}` would run code because of the folder that the command runs in; name it with "
                f"{option.flag}, or the file with --config {DEFAULT_FILE}"
            )
        if not _replaced(option, origin, given):
            given[option.name] = (coerce(option, _content(option, value, label, cwd), label), origin)
    return given


def _layers(
    flags: Mapping[str, Any], env: Mapping[str, str], cwd: Path
) -> Iterator[tuple[Option, Any, str, str, bool]]:
    """Every value given, strongest layer first: (option, value, its name there, origin, whether the command names it).

    Only the folder's own file is read without being named.
    """
    file: tuple[Any, str] | None = None
    for name, value in flags.items():
        if name == "config":
            file = (value, "--config")
        elif name != "inputs":
            yield BY_NAME[name], value, BY_NAME[name].flag, "flag", True
    for name, text in env.items():
        if not name.startswith(_PREFIX) or name in _OTHER_VARIABLES or not text:
            continue
        option = BY_NAME.get(name.removeprefix(_PREFIX).lower())
        if option is None or name != option.env:
            raise UsageError(f"unknown environment variable `{name}`{_suggest(name.upper(), [o.env for o in OPTIONS])}")
        if option.name == "config":
            file = file or (text, option.env)
        else:
            yield option, _env_value(option, text), name, f"environment {name}", True
    default = cwd / DEFAULT_FILE
    named = None if file is None else cwd / coerce(BY_NAME["config"], file[0], file[1])
    if file is not None and named is not None:
        yield from ((*found, True) for found in _read_file(named, str(file[0]), file[1]))
    if default.is_file() and (named is None or named.resolve() != default.resolve()):
        yield from ((*found, False) for found in _read_file(default, f"./{DEFAULT_FILE}", DEFAULT_FILE))


def _replaced(option: Option, origin: str, given: Mapping[str, tuple[Any, str]]) -> bool:
    """Whether a stronger layer gives a constraint of another kind: a row has one."""
    stronger = [given[kind][1] for kind in CONSTRAINT_KINDS if kind in given]
    return option.name in CONSTRAINT_KINDS and any(_layer(other) != _layer(origin) for other in stronger)


def _layer(origin: str) -> str:
    return "environment" if origin.startswith(f"environment {_PREFIX}") else origin


def _content(option: Option, value: Any, label: str, cwd: Path) -> Any:
    """The text of the file that `@PATH` names, where an option takes one; its name is no part of the job."""
    if not option.kind.file or not isinstance(value, str) or not value.startswith("@"):
        return value
    try:
        return (cwd / value[1:]).read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise UsageError(f"`{label}`: cannot read {value[1:]!r}: {problem.strerror}") from None
    except ValueError:
        raise UsageError(f"`{label}`: {value[1:]!r} is no text in UTF-8") from None


def _env_value(option: Option, text: str) -> Any:
    """A repeatable option's variable is one value, or a JSON list of several."""
    if not option.repeat or not text.startswith("["):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        raise UsageError(f"`{option.env}` begins with [ but is no JSON list: {problem}") from None


def _read_file(path: Path, shown: str, source: str) -> Iterator[tuple[Option, Any, str, str]]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise UsageError(f"`{source}`: cannot read {shown}: {problem.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise UsageError(f"{shown} is not valid TOML: {problem}") from None
    seen: set[str] = set()
    for key, value in table.items():
        option = BY_NAME.get(key.replace("-", "_"))
        if option is None or option.target == "meta":
            raise UsageError(f"unknown key `{key}` in {shown}{_suggest_key(key)}")
        if option.name in seen:
            raise UsageError(f"`{key}` stands twice in {shown}, with - and with _")
        seen.add(option.name)
        yield option, value, f"{key} in {shown}", shown


def _suggest_key(key: str) -> str:
    if key == "inputs":
        return "; input files are named on the command line"
    for option in OPTIONS:
        if option.switches and key.replace("_", "-") in option.choices:
            return f'; write {option.name} = "{key.replace("_", "-")}"'
    return _suggest(key.replace("-", "_"), [option.name for option in OPTIONS if option.target != "meta"])


def _suggest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean `{close[0]}`?" if close else ""
