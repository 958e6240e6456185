"""Options of a benchmark, once for the command line and TOML files; flags override the file."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from batchgen.errors import UsageError
from batchgen.request.foreign_text import ForeignTextError, file_content, read_toml

ENGINELESS_WORKLOADS: Final = ("plan", "startup", "job", "eta")
"""Workloads that run no engines: they measure the planner, the start of the command, the cost of a row and how well the
time left is estimated."""


WORKLOADS_HELP: Final = (
    "Workloads: unique, shared-prefix, few-shot-tree, mixed-lengths (these four by default), multi-turn, n-samples, "
    "json-constrained, logprobs, hidden-states, many-loras, all (of these), demo (with --model demo), or a .toml file. "
    "For GPUs: w-nano, w-prefix, w-unshared, w-tree. Without peers: plan (planner only), startup (time to the help and "
    "to the first token), job (cost of a row outside the model), eta (errors of the estimated time left). "
    "Example: shared-prefix"
)


@dataclass(frozen=True, slots=True)
class BenchOption:
    """An option of the command line, and of TOML files unless it names a file."""

    metavar: str
    help: str
    value_type: type = str
    minimum: int | None = None
    engines_only: bool = True
    """Whether it has no effect on `ENGINELESS_WORKLOADS`."""
    name: str = ""
    """Field of `BenchConfig` and key of TOML files; the flag has hyphens."""

    @property
    def flag(self) -> str:
        """The flag of the command line."""
        return "--" + self.name.replace("_", "-")


def _option(default: Any, *about: Any, **more: Any) -> Any:
    """Field of `BenchConfig` that declares an option; what follows `default` are the arguments of `BenchOption`."""
    return field(default=default, metadata={"option": BenchOption(*about, **more)})


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """Options of `batchgen bench`, in the order of the help."""

    workloads: tuple[str, ...] = ()
    """Names or .toml files; empty: the defaults of `find_workloads`."""
    model: str = _option(
        "random:135m", "MODEL",
        "Model folder or id, random weights of a size (random:5m, random:135m, random:0.6b, random:1b, random:8b), or "
        "demo, the demonstration model. Default: random:135m. Example: --model random:5m",
    )  # fmt: skip
    peers: str = _option(
        "auto", "PEERS",
        "Engines to compare with: auto (transformers if it can be imported), none, or names, optionally with the "
        "Python that runs each: transformers, transformers-continuous, vllm, vllm-zentorch, sglang, openvino, "
        "llama.cpp, baseline=FOLDER (another checkout of batchgen), deterministic (batchgen with that option) and "
        "first-come (batchgen with rows in input order). A peer that cannot run is reported on stderr and skipped. "
        "Default: auto. Example: --peers transformers=/opt/hf/bin/python",
    )  # fmt: skip
    repeat: int = _option(
        5, "N", "Number of interleaved repeats. Default: 5. Example: --repeat 3", int, 1, engines_only=False
    )
    dtype: str = _option(
        "auto", "DTYPE", "Data type of the weights, as in run. Default: auto. Example: --dtype float32"
    )
    peer_dtype: str = _option(
        "best", "best|asked",
        "Data type of peers: best uses float32 if the processor computes it faster than --dtype and reports it; asked "
        "uses --dtype or skips the peer. Default: best. Example: --peer-dtype asked",
    )  # fmt: skip
    device: str = _option("auto", "DEVICE", "Device, as in run. Default: auto. Example: --device cpu")
    cpu_threads: int | None = _option(
        None, "N", "Number of CPU threads of each engine. Example: --cpu-threads 2", int, 1
    )
    plan_size: str = _option(
        "1000000x500", "ROWSxTOKENS",
        "Number of prompts of the workload plan and tokens of each; a token uses 4 bytes of temporary disk space. "
        "Default: 1000000x500. Example: --plan-size 100000x500", engines_only=False,
    )  # fmt: skip
    chart: Path | None = _option(  # noqa: RUF009  # makes a field
        None, "FILE", "Draw the results to a .png or .svg file, with matplotlib. Example: --chart bench.png", Path,
        engines_only=False,
    )  # fmt: skip
    timeout: float = _option(
        900.0, "SECONDS",
        "Most seconds to load and convert a model, or for one pass; a peer that exceeds them is stopped and skipped. "
        "Default: 900. Example: --timeout 3600", float, 1,
    )  # fmt: skip
    tuned: Path | None = _option(  # noqa: RUF009  # makes a field
        None, "FILE",
        "JSON lines of an earlier run whose peer settings are reused for the same workload, model, dtype, device and "
        "threads; other settings are searched. Example: --tuned figures.jsonl", Path,
    )  # fmt: skip


OPTIONS: Final = tuple(replace(f.metadata["option"], name=f.name) for f in fields(BenchConfig) if f.metadata)
_LISTS: Final = ("workloads", "peers")
"""Keys of TOML files whose values are lists of texts."""
_KEYS: Final = {"workloads": str} | {o.name: o.value_type for o in OPTIONS if o.value_type is not Path}
"""Key of TOML files -> type of its value, or of a list's items."""
_PEER_DTYPES: Final = ("best", "asked")
_TYPE_NAMES: Final = {
    list: 'a list of texts such as ["unique"]', str: 'a text such as "cpu"', int: "a whole number", float: "a number"
}  # fmt: skip


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Suffix of an error message about `word` that names the most similar known word; empty if none is similar."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def bench_config(flags: Mapping[str, Any], file: Path | None) -> BenchConfig:
    """The configuration of a file for `load_bench` or the defaults, overridden by those `flags` that are not None.

    Raises:
        UsageError: as `load_bench`, or a value is out of range.
    """
    config = BenchConfig() if file is None else load_bench(file)
    config = replace(config, **{name: value for name, value in flags.items() if value is not None})
    for option in OPTIONS:
        value = getattr(config, option.name)
        if option.minimum is not None and value is not None:
            if not value >= option.minimum:
                raise UsageError(f"{option.flag} must be at least {option.minimum}, got {value}")
            if value == math.inf:
                raise UsageError(f"{option.flag} must be finite, got {value}; a day is 86400")
    if config.peer_dtype not in _PEER_DTYPES:
        raise UsageError(f"--peer-dtype must be {' or '.join(_PEER_DTYPES)}, got {config.peer_dtype!r}")
    return config


def read_definition(path: Path, flag: str, what: str) -> dict[str, Any]:
    """The table of a TOML file of the user's, named as `what`. Error messages begin with `flag`.

    Raises:
        UsageError: the file cannot be read, or is not TOML.
    """
    try:
        return read_toml(file_content(path))
    except OSError as error:
        raise UsageError(f"{flag}cannot read {what}{path}: {error.strerror}") from None
    except ForeignTextError as error:
        raise UsageError(f"{flag}{path} {error}") from None


def check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Check that a table has no key but `known` ones. Error messages begin with `where`.

    Raises:
        UsageError: it has another one.
    """
    known = list(known)
    for key in sorted(table.keys() - set(known)):
        raise UsageError(f"{where}: unknown key `{key}`{did_you_mean(key, known)}; known: {', '.join(known)}")


def load_bench(path: Path) -> BenchConfig:
    """Read a TOML file of options. Keys are named as on the command line; `peers` and `workloads` are lists.

    Raises:
        UsageError: the file cannot be read, a key is unknown, or a value has the wrong type.
    """
    values = read_definition(path, "--config: ", "")
    check_keys(values, _KEYS, f"--config: {path}")
    for key, value in values.items():
        kind = list if key in _LISTS else _KEYS[key]
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool):
            raise UsageError(
                f"--config: {path}: `{key}` has the wrong type, got {value!r}; it must be {_TYPE_NAMES[kind]}"
            )
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
            raise UsageError(f"--config: {path}: `{key}` must be a list of texts, got {value!r}")
    if "peers" in values:
        values["peers"] = ",".join(values["peers"]) or "none"
    if "workloads" in values:
        values["workloads"] = tuple(values["workloads"])
    return BenchConfig(**values)
