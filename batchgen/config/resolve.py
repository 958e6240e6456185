"""Resolution of a job's configuration from its sources, in order of precedence: flags, `BATCHGEN_*` variables,
`--config FILE.toml`, `./batchgen.toml`, defaults.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from batchgen.config.engine_config import EngineConfig
from batchgen.config.option_types import NAME_PATH, Option, Reach, coerce
from batchgen.config.run_config import BY_NAME, OPTIONS, RunConfig, resolve_shard
from batchgen.config.units import STDIN, check_file_to_write
from batchgen.config.urls import check_readable, is_url, path_of
from batchgen.errors import RowError, UsageError
from batchgen.request.checks import check_unicode
from batchgen.request.fields.constraint import CONSTRAINT_KINDS
from batchgen.request.fields.params import SamplingParams
from batchgen.request.foreign_text import ForeignTextError, file_content, read_json, read_toml

_COMPRESSED = frozenset({".gz", ".zst"})
_OTHER_FORMATS = frozenset({".json", ".csv", ".tsv", ".txt", ".gz", ".zst", ".arrow"})
DEFAULT_FILE: Final = "batchgen.toml"
"""File in the current folder that is read by default. The command does not name it, so its options reach nothing."""
_DEFAULT_FILE_BYTES: Final = 1 << 20
"""Largest size of that file."""
_WOULD: Final[Mapping[Reach, str]] = {
    "code": "run code",
    "files": "read or write files",
    "network": "reach the network",
}
_PREFIX = "BATCHGEN_"
_OTHER_VARIABLES = frozenset({"BATCHGEN_TRACEBACK"})
"""Variables with the prefix that are not options."""


def resolve_config(flags: Mapping[str, Any], env: Mapping[str, str], cwd: Path) -> RunConfig:
    """Merge flags, environment, files and defaults.

    Args:
        flags: option name -> value from the command line: text, a bool for a boolean option, or a tuple of texts for a
            repeatable option. Options that are not set are absent. `inputs` is the tuple of positional arguments.
        env: environment variables.
        cwd: current folder.

    Raises:
        UsageError: an unknown key or variable, a wrong or unsupported value, or no default for the output's name.
    """
    inputs = tuple(flags.get("inputs", ()))
    chosen = _given_options(flags, env, cwd)
    values = {name: value for name, (value, _) in chosen.items()}
    _check_unicode(values)
    output = values.pop("output", None)
    if "shard" in values:
        values["shard"] = resolve_shard(values["shard"], env)
    sampling = {name: values.pop(name) for name in list(values) if BY_NAME[name].target == "sampling"}
    engine = {name: values.pop(name) for name in list(values) if BY_NAME[name].target == "engine"}
    _check_sampling(sampling)
    _check_names(sampling, engine, values.get("events"))
    if values.get("prompt_column") is not None and values.get("prompt_template") is not None:
        raise UsageError("`--prompt-column` and `--prompt-template` both say what the prompt is; leave one out")
    if output == STDIN and STDIN in (values.get("report"), values.get("events")):
        raise UsageError("`--output` - writes the results to stdout: give --report and --events a file")
    return RunConfig(
        inputs=inputs,
        output=_output_path(inputs, output, cwd, "shard" in values),
        engine=EngineConfig(**engine),
        sampling=sampling,
        origins={name: origin for name, (_, origin) in chosen.items()},
        **values,
    )


def _check_unicode(values: Mapping[str, Any]) -> None:
    """Refuse text that is not valid UTF-8, except in file names, which may be any bytes."""
    with _as_usage_error():
        for name, value in values.items():
            value_type = BY_NAME[name].value_type
            if value_type is NAME_PATH:
                check_unicode([key for key, _ in value], name)
            elif value_type.reach != "files":
                check_unicode(value, name)


def _check_sampling(sampling: Mapping[str, Any]) -> None:
    with _as_usage_error():
        SamplingParams(**sampling)


@contextmanager
def _as_usage_error() -> Iterator[None]:
    """Convert a `RowError` about a field to a `UsageError` about the option of the same name."""
    try:
        yield
    except RowError as problem:
        raise UsageError(re.sub(r"`(\w+)`", _as_flag, problem.info.message)) from None


def _as_flag(name: re.Match[str]) -> str:
    return f"`{BY_NAME[name[1]].flag}`" if name[1] in BY_NAME else name[0]


def _check_names(sampling: Mapping[str, Any], engine: Mapping[str, Any], events: str | None) -> None:
    """Refuse defaults that would be wrong in every row."""
    for name, source, kind in (
        ("lora_path", "lora", "adapter"),
        ("custom_logit_processor", "logit_processor", "processor"),
    ):
        known = [key for key, _ in engine.get(source, ())]
        if name in sampling and sampling[name] not in known:
            available, option = ", ".join(known) or "none", BY_NAME[source]
            raise UsageError(
                f"`{BY_NAME[name].flag}` names the {kind} {sampling[name]!r}, but the {kind}s of this run are: "
                f"{available}; add it with {option.flag} {option.metavar}"
            )
    if sampling.get("stream") and events is None:
        raise UsageError("`--stream` needs a destination for events: --events PATH, or - for stdout")


def _output_path(inputs: tuple[str, ...], output: str | None, cwd: Path, sharded: bool) -> Path:
    if not inputs:
        raise UsageError("name at least one input file, or - for stdin")
    if inputs.count(STDIN) > 1:
        raise UsageError("- (stdin) can be read only once")
    for name in inputs:
        try:
            check_readable(name)
        except ValueError as problem:
            raise UsageError(f"input {problem}") from None
    if output is None:
        return _default_output(inputs, cwd)
    if output == STDIN:
        if sharded:
            raise UsageError("`--output` - with --shard: shards are Parquet; name a folder such as results")
        return Path(STDIN)
    _check_output_name(output, sharded)
    local = [] if is_url(output) else [name for name in inputs if name != STDIN and not is_url(name)]
    if output in inputs or any((cwd / name).resolve() == (cwd / output).resolve() for name in local):
        raise UsageError(f"`--output` {output} is an input file; give another name")
    return path_of(output)


def _check_output_name(output: str, sharded: bool) -> None:
    if not Path(output).name or Path(output).suffix.lower() in _OTHER_FORMATS:
        raise UsageError(
            f"`--output` must be a Parquet file such as results.parquet, or .jsonl for JSON lines, got {output!r}"
        )
    if sharded and Path(output).suffix.lower() == ".jsonl":
        raise UsageError(
            f"`--output` {output} with --shard: shards are Parquet. Name a folder such as results, then run "
            "batchgen merge and batchgen export"
        )
    try:
        name = output.rstrip("/") if sharded else output  # shards are in a folder
        check_file_to_write(name.partition("://")[2] if is_url(name) else name)
    except ValueError as problem:
        raise UsageError(f"`--output` {problem}") from None


def _default_output(inputs: tuple[str, ...], cwd: Path) -> Path:
    name = inputs[0]
    if len(inputs) > 1 or name == STDIN:
        reason = "stdin has no name" if name == STDIN else "there are several inputs"
        raise UsageError(f"{reason}: name the result file with -o results.parquet")
    if any(sign in name for sign in "*?[") and not (cwd / name).exists():
        raise UsageError("an input pattern may name several files: name the result file with -o results.parquet")
    if is_url(name):
        raise UsageError("the input is at a URL: name the result file with -o results.parquet")
    path = Path(name)
    if not path.name:
        raise UsageError(f"{path} is a folder without a name: name the result file with -o results.parquet")
    stem = path.name
    if not (cwd / path).is_dir():
        stem = (path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path).stem
    made = path.with_name(f"{stem}.out.parquet")
    try:
        check_file_to_write(str(made))
    except ValueError:
        raise UsageError(
            "the input's name is too long for that of an output: name one with -o results.parquet"
        ) from None
    return made


def _given_options(flags: Mapping[str, Any], env: Mapping[str, str], cwd: Path) -> dict[str, tuple[Any, str]]:
    """Option name -> (value, origin) from the source with the highest precedence.

    Args:
        flags: as in `resolve_config`.
        env: environment variables.
        cwd: current folder.

    Raises:
        UsageError: an unknown key or variable, a wrong value, a file that cannot be read, or an option that runs code
            or names files and is set only by `./batchgen.toml`.
    """
    chosen: dict[str, tuple[Any, str]] = {}
    for option, value, label, origin, explicit in _sources(flags, env, cwd):
        if option.name in chosen or option.target == "meta":
            continue
        if not explicit and (reach := option.reach_of(value)) is not None:
            flag = f"--{value}" if option.choice_flags and value in option.choices else option.flags[0]
            raise UsageError(
                f"`{label}` would {_WOULD[reach]} because of a file in the current folder; name it with "
                f"{flag}, or the file with --config {DEFAULT_FILE}"
            )
        if not _overridden_constraint(option, origin, chosen):
            chosen[option.name] = (coerce(option, _read_at_path(option, value, label, cwd), label), origin)
    return chosen


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
        with _reading(str(file[0]), file[1]):
            data = file_content(named)
        yield from ((*setting, True) for setting in _options_of(data, str(file[0])))
    if os.path.lexists(default) and (named is None or named.resolve() != default.resolve()):
        shown = f"./{DEFAULT_FILE}"
        with _reading(shown, DEFAULT_FILE), _open_at_once(default) as stream:
            _check_default_file(stream, default, shown)
            data = stream.read(_DEFAULT_FILE_BYTES)
        yield from ((*setting, False) for setting in _options_of(data, shown))


@contextmanager
def _reading(shown: str, source: str) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise UsageError(f"`{source}`: cannot read {shown}: {problem.strerror}") from None
    except ForeignTextError as problem:
        raise UsageError(f"`{source}`: {shown} {problem}") from None


def _open_at_once(path: Path) -> BinaryIO:
    """Open a file for reading, without waiting for the writer of a pipe."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def _check_default_file(stream: BinaryIO, path: Path, shown: str) -> None:
    """Refuse a default file that may have been left for this user by another one.

    Raises:
        UsageError: it is not a regular file, too large, or it or the link to it belongs to neither this user nor root.
    """
    status = os.fstat(stream.fileno())
    remedy = f"name it with --config {DEFAULT_FILE} to use it, or run in another folder"
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{shown} is not a regular file, so it is not read unless it is named; {remedy}")
    owner = next((uid for uid in (path.lstat().st_uid, status.st_uid) if uid not in (os.geteuid(), 0)), None)
    if owner is not None:
        raise UsageError(
            f"{shown} belongs to another user (uid {owner}), so it is not read unless it is named; {remedy}"
        )
    if status.st_size > _DEFAULT_FILE_BYTES:
        raise UsageError(f"{shown} is larger than 1 MiB, so it is not read unless it is named; {remedy}")


def _overridden_constraint(option: Option, origin: str, chosen: Mapping[str, tuple[Any, str]]) -> bool:
    """Whether the option is a constraint and a source of higher precedence sets another one: a row has one."""
    higher = [chosen[kind][1] for kind in CONSTRAINT_KINDS if kind in chosen]
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
        return read_json(text)
    except ForeignTextError as problem:
        raise UsageError(f"`{option.env}` begins with [ but is not a JSON list: it {problem}") from None


def _options_of(data: bytes, shown: str) -> Iterator[tuple[Option, Any, str, str]]:
    try:
        table = read_toml(data)
    except ForeignTextError as problem:
        raise UsageError(f"{shown} {problem}") from None
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
