"""Sources of option values, in order of precedence: flags, `BATCHGEN_*` variables, `--config FILE.toml`,
`./batchgen.toml`.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from batchgen.config.option_types import Option, coerce
from batchgen.config.options import BY_NAME, OPTIONS
from batchgen.errors import UsageError
from batchgen.request.params import CONSTRAINT_KINDS

__all__ = ["CODE_OPTIONS", "DEFAULT_FILE", "given_options"]

CODE_OPTIONS: Final = frozenset({"logit_processor", "flash_library"})
"""Options that run code: the command must name them, because `./batchgen.toml` may come from another user."""
DEFAULT_FILE: Final = "batchgen.toml"
"""File in the current folder that is read by default."""

_PREFIX = "BATCHGEN_"
_OTHER_VARIABLES = frozenset({"BATCHGEN_TRACEBACK"})
"""Variables with the prefix that are not options."""


def given_options(flags: Mapping[str, Any], env: Mapping[str, str], cwd: Path) -> dict[str, tuple[Any, str]]:
    """Option name -> (value, origin) from the source with the highest precedence.

    Args:
        flags: as in `resolve_config`.
        env: environment variables.
        cwd: current folder.

    Raises:
        UsageError: an unknown key or variable, a wrong value, a file that cannot be read, or an option that runs code
            and is set only by `./batchgen.toml`.
    """
    given: dict[str, tuple[Any, str]] = {}
    for option, value, label, origin, explicit in _sources(flags, env, cwd):
        if option.name in given or option.target == "meta":
            continue
        if option.name in CODE_OPTIONS and not explicit:
            raise UsageError(
                f"`{label}` would run code because of a file in the current folder; name it with "
                f"{option.flag}, or the file with --config {DEFAULT_FILE}"
            )
        if not _overridden_constraint(option, origin, given):
            given[option.name] = (coerce(option, _read_at_path(option, value, label, cwd), label), origin)
    return given


def _sources(
    flags: Mapping[str, Any], env: Mapping[str, str], cwd: Path
) -> Iterator[tuple[Option, Any, str, str, bool]]:
    """All values, highest precedence first: (option, value, its name in the source, origin, whether it is explicit).

    Only values of `./batchgen.toml` read by default are not explicit.
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


def _overridden_constraint(option: Option, origin: str, given: Mapping[str, tuple[Any, str]]) -> bool:
    """Whether the option is a constraint and a source of higher precedence sets another one: a row has one."""
    higher = [given[kind][1] for kind in CONSTRAINT_KINDS if kind in given]
    return option.name in CONSTRAINT_KINDS and any(_source_of(other) != _source_of(origin) for other in higher)


def _source_of(origin: str) -> str:
    return "environment" if origin.startswith(f"environment {_PREFIX}") else origin


def _read_at_path(option: Option, value: Any, label: str, cwd: Path) -> Any:
    """Replace `@PATH` by the text of that file if the option accepts one; the path is not part of the job."""
    if not option.value_type.accepts_file or not isinstance(value, str) or not value.startswith("@"):
        return value
    try:
        return (cwd / value[1:]).read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise UsageError(f"`{label}`: cannot read {value[1:]!r}: {problem.strerror}") from None
    except ValueError:
        raise UsageError(f"`{label}`: {value[1:]!r} is not UTF-8 text") from None


def _env_value(option: Option, text: str) -> Any:
    """Value of an environment variable; for a repeatable option one value, or a JSON list of several."""
    if not option.repeat or not text.startswith("["):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        raise UsageError(f"`{option.env}` begins with [ but is not a JSON list: {problem}") from None


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
            raise UsageError(f"`{key}` is given twice in {shown}, with - and with _; keep one of them")
        seen.add(option.name)
        yield option, value, f"{key} in {shown}", shown


def _suggest_key(key: str) -> str:
    if key == "inputs":
        return "; give input files on the command line"
    for option in OPTIONS:
        if option.choice_flags and key.replace("_", "-") in option.choices:
            return f'; write {option.name} = "{key.replace("_", "-")}"'
    return _suggest(key.replace("-", "_"), [option.name for option in OPTIONS if option.target != "meta"])


def _suggest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean `{close[0]}`?" if close else ""
