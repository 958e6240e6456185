"""Resolved configuration of a job.

Precedence: flags, `BATCHGEN_*` variables, `--config FILE.toml`, `./batchgen.toml`, defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from batchgen.config.option_types import NAME_PATH, PATH, Option, coerce
from batchgen.config.options import BY_NAME, OPTIONS
from batchgen.config.sources import CODE_OPTIONS, given_options
from batchgen.config.units import Shard, Threshold, parse_shard
from batchgen.errors import RowError, UsageError
from batchgen.request.checks import check_unicode
from batchgen.request.params import SamplingParams
from batchgen.request.processors import LogitProcessor
from batchgen.request.raw_row import STDIN

__all__ = ["STDIN", "EngineConfig", "RunConfig", "resolve_config"]

_COMPRESSED = frozenset({".gz", ".zst"})
_OTHER_FORMATS = frozenset({".json", ".jsonl", ".csv", ".txt", ".gz", ".zst", ".arrow"})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configuration of the engine. None means that the value is derived from the model and the device.

    Text is parsed as on the command line (`kv_memory="4GiB"`).

    Raises:
        UsageError: a value is out of range or not supported.
    """

    model: str | None = None
    """Model folder or id; None is the demonstration model."""
    revision: str | None = None
    tokenizer: str | None = None
    """Tokenizer folder or id; None is the model's."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    attention: Literal["auto", "flash", "triton", "compiled", "torch"] = "auto"
    flash_library: str | None = None
    """Compiled library of vllm-flash-attn, or its folder."""
    quantization: Literal["none", "int8"] = "none"
    """int8: 8-bit weights and matrix products of the native decoder on a CPU."""
    quantization_bound: float = 0.05
    """Largest accepted loss of `quantization`: mean KL divergence of next-token distributions, in nats."""
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    max_model_len: int | None = None
    """Most tokens of prompt and completion together."""
    lora: tuple[tuple[str, str], ...] = ()
    """(name, folder) of the LoRA adapters that rows may select; a mapping is accepted, too."""
    media_root: str | None = None
    """Only folder whose files rows may name."""
    max_num_seqs: int | None = None
    max_tokens_per_step: int | None = None
    kv_memory: int | float | None = None
    """Memory of the KV cache. int: bytes; float: share of the device's memory in (0, 1]."""
    page_size: int = 16
    """Tokens per KV cache page."""
    cpu_threads: int | None = None
    seed: int = 0
    """Run seed, int64."""
    dedup: bool = True
    deterministic: bool = False
    """Whether a row's logits are bitwise identical regardless of the batch."""
    hidden_states_dtype: Literal["auto", "float32"] = "auto"
    """auto: the model's dtype, to which means are rounded; float32: means are not rounded."""
    stop_on_repeat: int | None = None
    """Number of tokens N: a sample ends when its last N tokens repeat a block of at most N/4 tokens."""
    lenient_schemas: bool = False
    """Whether schema keywords that cannot be enforced are ignored instead of refused."""
    repetition_penalty_scope: Literal["output", "prompt+output"] = "output"
    logprobs_mode: Literal["raw", "processed"] = "raw"
    logit_processor: tuple[tuple[str, str | LogitProcessor], ...] = ()
    """(name, "module:function" or the function itself); a mapping is accepted, too."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None or item.default is not None:
                object.__setattr__(self, item.name, coerce(BY_NAME[item.name], value, item.name))
        seqs, tokens = self.max_num_seqs, self.max_tokens_per_step
        if seqs is not None and tokens is not None and tokens < seqs:
            raise UsageError(
                f"`--max-tokens-per-step` ({tokens}) must be at least `--max-num-seqs` ({seqs}): every "
                "sequence computes a token in every step"
            )


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Resolved configuration of one job, created by `resolve_config`."""

    inputs: tuple[str, ...]
    """Paths, globs, or "-" for stdin, in order."""
    output: Path
    """Result file; with `shard`, the folder of the shards' files."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Run-wide sampling defaults that are set: `SamplingParams` field -> value."""
    sampling_defaults: Literal["model", "openai"] = "model"
    prompt_column: str | None = None
    id_column: str | None = None
    chat: bool | None = None
    """True: text prompts are wrapped as user messages. False: `messages` are refused. None: both are accepted."""
    system: str | None = None
    truncate: Literal["none", "left", "right"] = "none"
    carry: Literal["all", "none"] | tuple[str, ...] = "all"
    include_prompt: bool = False
    include_prompt_ids: bool = False
    shard: Shard | None = None
    limit: int | None = None
    """Number of rows to run after `offset`."""
    offset: int = 0
    """Number of rows to skip."""
    sample: int | None = None
    """Number of rows to select at random."""
    existing: Literal["resume", "overwrite", "resume-anyway"] = "resume"
    retry_errors: bool = False
    max_errors: Threshold = field(default_factory=Threshold)
    on_bad_row: Literal["error-row", "skip", "fail"] = "error-row"
    on_duplicate_id: Literal["error", "suffix", "allow"] = "error"
    commit_every: int = 2000
    """Most finished rows between two commits."""
    commit_seconds: float = 30.0
    """Longest time between two commits, in seconds."""
    max_time: float | None = None
    """Seconds after which the run stops."""
    max_output_bytes: int | None = None
    """Most bytes of results and hidden states together."""
    progress: Literal["auto", "bar", "plain", "json", "none"] = "auto"
    events: str | None = None
    """Path of the streaming events, or "-" for stdout."""
    report: str | None = None
    """Path of the report, or "-" for stdout."""
    dry_run: bool = False
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Option -> source of its value; absent: default."""

    def describe(self) -> dict[str, Any]:
        """JSON form of the configuration, with the origin of each value."""
        return {
            "inputs": list(self.inputs),
            "options": {
                option.name: {
                    "value": _json_value(self._value(option)),
                    "origin": self.origins.get(option.name, "default"),
                }
                for option in OPTIONS
                if option.supported and option.target != "meta"
            },
        }

    @staticmethod
    def restore(description: Mapping[str, Any], output: Path, changes: Mapping[str, Any]) -> RunConfig:
        """Configuration from the output of `describe`, with changed values for some options.

        Options that run code (logit processors, libraries) are read from `changes` only.

        Args:
            description: output of `describe`, from an output's footer.
            output: the result file.
            changes: option name (or `inputs`) -> value as on the command line; None changes nothing.

        Raises:
            UsageError: this version does not know an option, or a value is wrong.
        """
        described = description["options"].items()
        values: dict[str, Any] = {name: item["value"] for name, item in described if name not in CODE_OPTIONS}
        values |= {name: value for name, value in changes.items() if value is not None and name != "inputs"}
        unknown = sorted(values.keys() - BY_NAME.keys())
        if unknown:
            raise UsageError(f"the output was made with `{unknown[0]}`, which this version does not know")
        given = {
            name: coerce(BY_NAME[name], value, name)
            for name, value in values.items()
            if BY_NAME[name].target != "meta" and value not in (None, _json_value(BY_NAME[name].default))
        }
        if "shard" in given:
            given["shard"] = _shard(given["shard"], {})
        given.pop("output", None)
        by_target: dict[str, dict[str, Any]] = {"engine": {}, "sampling": {}, "run": {}}
        for name, value in given.items():
            by_target[BY_NAME[name].target or "run"][name] = value
        return RunConfig(
            inputs=tuple(changes.get("inputs") or description["inputs"]),
            output=output,
            engine=EngineConfig(**by_target["engine"]),
            sampling=by_target["sampling"],
            **by_target["run"],
        )

    def _value(self, option: Option) -> object:
        if option.target == "sampling":
            return self.sampling.get(option.name)
        return getattr(self.engine if option.target == "engine" else self, option.name)


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
    given = given_options(flags, env, cwd)
    values = {name: value for name, (value, _) in given.items() if BY_NAME[name].supported}
    _check_unicode(values)
    output = values.pop("output", None)
    if "shard" in values:
        values["shard"] = _shard(values["shard"], env)
    sampling = {name: values.pop(name) for name in list(values) if BY_NAME[name].target == "sampling"}
    engine = {name: values.pop(name) for name in list(values) if BY_NAME[name].target == "engine"}
    _check_sampling(sampling)
    _check_names(sampling, engine, values.get("events"))
    return RunConfig(
        inputs=inputs,
        output=_output_path(inputs, output, cwd),
        engine=EngineConfig(**engine),
        sampling=sampling,
        origins={name: origin for name, (_, origin) in given.items()},
        **values,
    )


def _shard(text: str, env: Mapping[str, str]) -> Shard:
    try:
        return parse_shard(text, env)
    except ValueError as problem:
        raise UsageError(f"`--shard` {problem}") from None


def _check_unicode(values: Mapping[str, Any]) -> None:
    """Refuse text that is not valid UTF-8, except in file names, which may be any bytes."""
    with _as_usage_error():
        for name, value in values.items():
            value_type = BY_NAME[name].value_type
            if value_type is not PATH:
                check_unicode([key for key, _ in value] if value_type is NAME_PATH else value, name)


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


def _output_path(inputs: tuple[str, ...], output: str | None, cwd: Path) -> Path:
    if not inputs:
        raise UsageError("name at least one input file, or - for stdin")
    if inputs.count(STDIN) > 1:
        raise UsageError("- (stdin) can be read only once")
    if output is None:
        return _default_output(inputs, cwd)
    if output == STDIN or not Path(output).name or Path(output).suffix.lower() in _OTHER_FORMATS:
        raise UsageError(f"`--output` must be a Parquet file such as results.parquet, got {output!r}")
    if any(name != STDIN and (cwd / name).resolve() == (cwd / output).resolve() for name in inputs):
        raise UsageError(f"`--output` {output} is an input file; give another name")
    return Path(output)


def _default_output(inputs: tuple[str, ...], cwd: Path) -> Path:
    name = inputs[0]
    if len(inputs) > 1 or name == STDIN:
        reason = "stdin has no name" if name == STDIN else "there are several inputs"
        raise UsageError(f"{reason}: name the result file with -o results.parquet")
    if any(sign in name for sign in "*?[") and not (cwd / name).exists():
        raise UsageError("an input pattern may name several files: name the result file with -o results.parquet")
    path = Path(name)
    if not path.name:
        raise UsageError(
            f"{path} is a folder: name its files, for example '{path / '*.jsonl'}', and -o results.parquet"
        )
    if path.suffix.lower() in _COMPRESSED:
        path = path.with_suffix("")
    return path.with_name(path.stem + ".out.parquet")


def _json_value(value: object) -> Any:
    if isinstance(value, tuple):
        return [_json_value(item) for item in value]
    return str(value) if isinstance(value, Path | Threshold | Shard) else value
