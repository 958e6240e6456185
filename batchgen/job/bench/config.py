"""What a benchmark is to measure: the command line's options, over those of a file."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from batchgen.errors import UsageError

__all__ = ["ALONE", "BenchConfig", "bench_config", "load_bench", "meant"]


ALONE: Final = ("plan", "startup", "job")
"""Workloads on which no engines are compared."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """A benchmark, resolved."""

    workloads: tuple[str, ...] = ()
    """Names or .toml files; none: as `find_workloads` has it."""
    model: str = "random:135m"
    peers: str = "auto"
    repeat: int = 5
    dtype: str = "auto"
    """As the engine takes it."""
    device: str = "auto"
    threads: int | None = None
    chart: Path | None = None
    """An .html or .png file to draw the figures to."""
    timeout: float = 900.0
    """Seconds that an engine has for one answer: to load (and convert) the model, or to generate one pass."""
    plan_size: str = "1000000x500"
    """ROWSxTOKENS of workload `plan`."""
    tuned: Path | None = None
    """Figures of an earlier run, whose settings engines keep."""
    peer_dtype: str = "best"
    """best: a peer takes float32 where the processor multiplies that faster than the asked dtype; asked: never."""


_KEYS: Final[dict[str, tuple[str, type | tuple[type, ...]]]] = {
    "workloads": ("workloads", list),
    "model": ("model", str),
    "peers": ("peers", list),
    "repeat": ("repeat", int),
    "dtype": ("dtype", str),
    "peer_dtype": ("peer_dtype", str),
    "device": ("device", str),
    "cpu_threads": ("threads", int),
    "timeout": ("timeout", (int, float)),
    "plan_size": ("plan_size", str),
}
"""Key of a file -> field of `BenchConfig`, and its type."""
_PEER_DTYPES: Final = ("best", "asked")
_TAKES: Final[dict[type | tuple[type, ...], str]] = {
    str: 'a text, as "cpu"',
    int: "a whole number",
    (int, float): "a number",
    list: 'a list of texts, as ["unique"]',
}


def meant(word: str, known: Iterable[str]) -> str:
    """For an error that refuses `word`: the known one that is most like it, if one is."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def bench_config(given: Mapping[str, Any], file: Path | None) -> BenchConfig:
    """The configuration of a file, if there is one, with what is given in its place.

    Args:
        given: fields of `BenchConfig`; None is not given.
        file: TOML, as `load_bench` reads it.

    Raises:
        UsageError: as `load_bench`, or a number is out of range.
    """
    config = BenchConfig() if file is None else load_bench(file)
    config = replace(config, **{name: value for name, value in given.items() if value is not None})
    for flag, value in (("--repeat", config.repeat), ("--cpu-threads", config.threads), ("--timeout", config.timeout)):
        if value is not None and not value >= 1:
            raise UsageError(f"{flag} must be at least 1, got {value}")
        if value == math.inf:
            raise UsageError(f"{flag} must be finite, got {value}; a day is 86400")
    if config.peer_dtype not in _PEER_DTYPES:
        raise UsageError(f"--peer-dtype must be {' or '.join(_PEER_DTYPES)}, got {config.peer_dtype!r}")
    return config


def load_bench(path: Path) -> BenchConfig:
    """Read a file of options under the command line's names, `peers` and `workloads` as lists.

    Raises:
        UsageError: it cannot be read, or a key is unknown or of another type.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config: {path} is not TOML: {error}") from None
    fields: dict[str, Any] = {}
    for key, value in values.items():
        if key not in _KEYS:
            raise UsageError(f"--config: {path}: unknown key `{key}`{meant(key, _KEYS)}; known: {', '.join(_KEYS)}")
        name, kind = _KEYS[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UsageError(f"--config: {path}: `{key}` has the wrong type, got {value!r}; it takes {_TAKES[kind]}")
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
            raise UsageError(f"--config: {path}: `{key}` must be a list of texts, got {value!r}")
        fields[name] = value
    if "peers" in fields:
        fields["peers"] = ",".join(fields["peers"]) or "none"
    if "workloads" in fields:
        fields["workloads"] = tuple(fields["workloads"])
    return BenchConfig(**fields)
