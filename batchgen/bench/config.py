"""Configuration of a benchmark: options of a TOML file, overridden by the command line."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from batchgen.errors import UsageError

__all__ = ["ENGINELESS_WORKLOADS", "BenchConfig", "bench_config", "did_you_mean", "load_bench"]


ENGINELESS_WORKLOADS: Final = ("plan", "startup", "job")
"""Workloads that run no engines: they measure the planner, the start of the command and the cost of a row."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """Options of `batchgen bench`."""

    workloads: tuple[str, ...] = ()
    """Names or .toml files; empty: the defaults of `find_workloads`."""
    model: str = "random:135m"
    peers: str = "auto"
    repeat: int = 5
    dtype: str = "auto"
    """See `EngineConfig.dtype`."""
    device: str = "auto"
    threads: int | None = None
    chart: Path | None = None
    """The .html or .png file to draw the figures to."""
    timeout: float = 900.0
    """Seconds within which an engine must load (and convert) the model, or generate one pass."""
    plan_size: str = "1000000x500"
    """ROWSxTOKENS of workload `plan`."""
    tuned: Path | None = None
    """Figures of an earlier run, whose settings are reused."""
    peer_dtype: str = "best"
    """best: a peer computes in float32 if the processor multiplies it faster than `dtype`; asked: always in `dtype`."""


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
"""Key of the TOML file -> (field of `BenchConfig`, its type)."""
_PEER_DTYPES: Final = ("best", "asked")
_TYPE_NAMES: Final[dict[type | tuple[type, ...], str]] = {
    str: 'a text such as "cpu"',
    int: "a whole number",
    (int, float): "a number",
    list: 'a list of texts such as ["unique"]',
}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Suffix of an error message about `word` that names the most similar known word; empty if none is similar."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def bench_config(given: Mapping[str, Any], file: Path | None) -> BenchConfig:
    """The configuration of a file or the defaults, overridden by the values in `given`.

    Args:
        given: fields of `BenchConfig`; None means not given.
        file: a TOML file for `load_bench`.

    Raises:
        UsageError: as `load_bench`, or a value is out of range.
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
    """Read a TOML file of options. Keys are named as on the command line; `peers` and `workloads` are lists.

    Raises:
        UsageError: the file cannot be read, a key is unknown, or a value has the wrong type.
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
            hint = did_you_mean(key, _KEYS)
            raise UsageError(f"--config: {path}: unknown key `{key}`{hint}; known: {', '.join(_KEYS)}")
        name, kind = _KEYS[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            expected = _TYPE_NAMES[kind]
            raise UsageError(f"--config: {path}: `{key}` has the wrong type, got {value!r}; it must be {expected}")
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
            raise UsageError(f"--config: {path}: `{key}` must be a list of texts, got {value!r}")
        fields[name] = value
    if "peers" in fields:
        fields["peers"] = ",".join(fields["peers"]) or "none"
    if "workloads" in fields:
        fields["workloads"] = tuple(fields["workloads"])
    return BenchConfig(**fields)
