"""Options of a benchmark, once for the command line and TOML files; flags override the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from batchgen.config.definitions import check_keys, read_definition
from batchgen.config.option_types import POSITIVE_DURATION, Group, ValueType, coerce, declared_options, int_range

ENGINELESS_WORKLOADS: Final = ("plan", "startup", "job", "ids", "eta", "forecast", "embed")
"""Workloads on which no engines generate: they measure the planner, the start of the command, the cost of a row, how
well the time left is estimated and that of whole jobs predicted, and embeddings."""

_OPTIONS: Final = Group("Options")
_NAMES: Final = ValueType("NAME", str)
_MODEL: Final = ValueType("MODEL", str)
_PEERS: Final = ValueType("PEERS", str, comma_separated=True)
_DTYPE: Final = ValueType("DTYPE", str)
_DEVICE: Final = ValueType("DEVICE", str)
_PLAN_SIZE: Final = ValueType("ROWSxTOKENS", str)
_FILE: Final = ValueType("FILE", Path, (str, Path), reach="files")


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """Options of `batchgen bench`, in the order of the help."""

    workloads: tuple[str, ...] = _OPTIONS.option(
        (),
        "Workloads: unique, shared-prefix, few-shot-tree, mixed-lengths (these four by default), multi-turn, "
        "n-samples, json-constrained, logprobs, hidden-states, many-loras, all (of these), demo (with --model demo), "
        "or a .toml file. For models with recurrent layers: hybrid-prefix, hybrid-unshared. For GPUs: w-nano, "
        "w-prefix, w-unshared, w-tree. Without peers: plan (planner only), startup (time to the help and to the first "
        "token), job (cost of a row outside the model), ids (cost of reading ids), eta (errors of the estimated time "
        "left), forecast (errors of batchgen plan). With peer sentence-transformers: embed (embeddings of random "
        "encoders, --model random:minilm by default or random:bert-base). Example: shared-prefix",
        _NAMES,
    )
    """Names or .toml files; empty: the defaults of `find_workloads`."""
    model: str = _OPTIONS.option(
        "random:135m",
        "Model folder or id, random weights of a size (random:5m, random:135m, random:0.6b, random:1b, random:8b; with "
        "recurrent layers random:5m-qwen3-next, random:135m-qwen3-next, random:135m-lfm2), or demo, the demonstration "
        "model. Example: --model random:5m",
        _MODEL,
    )
    peers: str = _OPTIONS.option(
        "auto",
        "Engines to compare with: auto (transformers if it can be imported), none, or names, optionally with the "
        "Python that runs each: transformers, transformers-continuous, vllm, vllm-zentorch, sglang, openvino, "
        "llama.cpp, baseline=FOLDER (another checkout of batchgen), deterministic (batchgen with that option) and "
        "first-come (batchgen with rows in input order). A peer that cannot run is reported on stderr and skipped. "
        "Example: --peers transformers=/opt/hf/bin/python",
        _PEERS,
    )
    repeat: int = _OPTIONS.option(5, "Number of interleaved repeats. Example: --repeat 3", int_range(1))
    dtype: str = _OPTIONS.option("auto", "Data type of the weights, as in run. Example: --dtype float32", _DTYPE)
    peer_dtype: Literal["best", "asked"] = _OPTIONS.option(
        "best",
        "Data type of peers: best uses float32 if the processor computes it faster than --dtype and reports it; asked "
        "uses --dtype or skips the peer. Example: --peer-dtype asked",
    )
    device: str = _OPTIONS.option("auto", "Device, as in run. Example: --device cpu", _DEVICE)
    cpu_threads: int | None = _OPTIONS.option(
        None, "Number of CPU threads of each engine. Example: --cpu-threads 2", int_range(1)
    )
    plan_size: str = _OPTIONS.option(
        "1000000x500",
        "Number of prompts of the workload plan and tokens of each; a token uses 4 bytes of temporary disk space. "
        "Example: --plan-size 100000x500",
        _PLAN_SIZE,
    )
    chart: Path | None = _OPTIONS.option(  # noqa: RUF009  # makes a field
        None, "Draw the results to a .png or .svg file, with matplotlib. Example: --chart bench.png", _FILE
    )
    timeout: float = _OPTIONS.option(
        900.0,
        "Most seconds to load and convert a model, or for one pass; a peer that exceeds them is stopped and skipped. "
        "Example: --timeout 3600",
        POSITIVE_DURATION,
    )
    tuned: Path | None = _OPTIONS.option(  # noqa: RUF009  # makes a field
        None,
        "JSON lines of an earlier run whose peer settings are reused for the same workload, model, dtype, device and "
        "threads; other settings are searched. Example: --tuned figures.jsonl",
        _FILE,
    )


OPTIONS: Final = declared_options(BenchConfig, "run")
_BY_NAME: Final = {option.name: option for option in OPTIONS}
_KEYS: Final = tuple(option.name for option in OPTIONS if option.reach_of() is None)
"""Keys of TOML files."""


def bench_config(flags: Mapping[str, Any], file: Path | None) -> BenchConfig:
    """The configuration of a TOML file or the defaults, overridden by those `flags` that are not None.

    Raises:
        UsageError: the file cannot be read, a key is unknown, or a value is wrong.
    """
    values: dict[str, Any] = {}
    if file is not None:
        table = read_definition(file, "--config: ", "")
        check_keys(table, _KEYS, f"--config: {file}")
        table |= {"peers": table["peers"] or "none"} if "peers" in table else {}
        values = {key: coerce(_BY_NAME[key], value, f"{key} in {file}") for key, value in table.items()}
    for name, value in flags.items():
        if value is not None:
            values[name] = coerce(_BY_NAME[name], value, _BY_NAME[name].flag)
    return BenchConfig(**values)
