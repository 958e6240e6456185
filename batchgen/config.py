"""A job's configuration: flags > `BATCHGEN_*` environment > `--config FILE.toml` > `./batchgen.toml` > defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from batchgen.checks import check_unicode
from batchgen.errors import RowError, UsageError
from batchgen.layers import CODE, given_options
from batchgen.option_kinds import NAME_PATH, PATH, Option, coerce
from batchgen.options import BY_NAME, OPTIONS
from batchgen.params import SamplingParams
from batchgen.processors import LogitProcessor
from batchgen.units import Shard, Threshold, parse_shard

__all__ = ["STDIN", "EngineConfig", "RunConfig", "resolve_config"]

STDIN = "-"

_COMPRESSED = frozenset({".gz", ".zst"})
_OTHER_FORMATS = frozenset({".json", ".jsonl", ".csv", ".txt", ".gz", ".zst", ".arrow"})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine needs to know, by itself or inside a job. None means: chosen from the model and the device.

    Text is taken as the command line takes it (`kv_memory="4GiB"`).

    Raises:
        UsageError: a value is out of range, or not built yet.
    """

    model: str | None = None
    """Folder or id; None is the demonstration model."""
    revision: str | None = None
    tokenizer: str | None = None
    """Folder or id; None is the model's own."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    attention: Literal["auto", "flash", "triton", "compiled", "torch"] = "auto"
    flash_library: str | None = None
    """vllm-flash-attn's compiled library, or a folder that holds it."""
    quantization: Literal["none", "int8"] = "none"
    """int8: weights and products of the native decoder on a CPU."""
    quantization_bound: float = 0.05
    """Largest loss that is accepted: mean divergence of next-token distributions, in nats."""
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    max_model_len: int | None = None
    """Tokens of prompt and completion together."""
    lora: tuple[tuple[str, str], ...] = ()
    """Names and folders of the adapters that rows may ask for; a mapping is taken too."""
    media_root: str | None = None
    """The only folder in which rows may name files."""
    max_num_seqs: int | None = None
    max_tokens_per_step: int | None = None
    kv_memory: int | float | None = None
    """int: bytes; float: share of the device's memory in (0, 1]."""
    page_size: int = 16
    """Tokens in a page."""
    cpu_threads: int | None = None
    seed: int = 0
    """Run seed, int64."""
    dedup: bool = True
    deterministic: bool = False
    """Compute every row's logits to the same bits whatever runs beside it."""
    hidden_states_dtype: Literal["auto", "float32"] = "auto"
    """auto: hidden states are the model's own values, means rounded to its format; float32: means are not rounded."""
    stop_on_repeat: int | None = None
    """Tokens: a sample ends when its last so many are one block of at most a quarter of them, over and over."""
    lenient_schemas: bool = False
    """Leave out what cannot be enforced of a schema, instead of refusing its rows."""
    repetition_penalty_scope: Literal["output", "prompt+output"] = "output"
    logprobs_mode: Literal["raw", "processed"] = "raw"
    logit_processor: tuple[tuple[str, str | LogitProcessor], ...] = ()
    """(name, "module:function" or the function itself); a mapping is taken too."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None or item.default is not None:
                object.__setattr__(self, item.name, coerce(BY_NAME[item.name], value, item.name))
        seqs, tokens = self.max_num_seqs, self.max_tokens_per_step
        if seqs is not None and tokens is not None and tokens < seqs:
            raise UsageError(
                f"`--max-tokens-per-step` ({tokens}) must be at least `--max-num-seqs` ({seqs}): every sequence takes "
                "a token in every step"
            )


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One job, fully resolved. Built by `resolve_config`; tests may build one directly."""

    inputs: tuple[str, ...]
    """Paths, globs, or "-" for stdin, in order."""
    output: Path
    """The result file; with a shard the folder of the shards' files."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Run-wide sampling defaults that were given: `SamplingParams` field -> value."""
    sampling_defaults: Literal["model", "openai"] = "model"
    prompt_column: str | None = None
    id_column: str | None = None
    chat: bool | None = None
    """True wraps text prompts as user messages, False refuses conversations, None goes by the row."""
    system: str | None = None
    truncate: Literal["none", "left", "right"] = "none"
    carry: Literal["all", "none"] | tuple[str, ...] = "all"
    include_prompt: bool = False
    include_prompt_ids: bool = False
    shard: Shard | None = None
    limit: int | None = None
    """Rows."""
    offset: int = 0
    """Rows."""
    sample: int | None = None
    """Rows."""
    existing: Literal["resume", "overwrite", "resume-anyway"] = "resume"
    retry_errors: bool = False
    max_errors: Threshold = field(default_factory=Threshold)
    on_bad_row: Literal["error-row", "skip", "fail"] = "error-row"
    on_duplicate_id: Literal["error", "suffix", "allow"] = "error"
    commit_every: int = 2000
    """Rows."""
    commit_seconds: float = 30.0
    max_time: float | None = None
    """Seconds."""
    max_output_bytes: int | None = None
    """Of results and hidden states together."""
    progress: Literal["auto", "bar", "plain", "json", "none"] = "auto"
    events: str | None = None
    """Path, or "-" for stdout."""
    report: str | None = None
    """Path, or "-" for stdout."""
    dry_run: bool = False
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Option -> where its value came from; absent: default."""

    def describe(self) -> dict[str, Any]:
        """The effective configuration with the origin of each value, ready for JSON."""
        return {
            "inputs": list(self.inputs),
            "options": {
                option.name: {
                    "value": _plain(self._value(option)),
                    "origin": self.origins.get(option.name, "default"),
                }
                for option in OPTIONS
                if option.built and option.target != "meta"
            },
        }

    @staticmethod
    def restore(description: Mapping[str, Any], output: Path, changes: Mapping[str, Any]) -> RunConfig:
        """The configuration that `describe` described, with other values for some options.

        Logit processors and libraries are code, so they come from `changes` alone.

        Args:
            description: from an output's footer.
            output: the result file.
            changes: option name (or `inputs`) -> value, as the command line gives it; None changes nothing.

        Raises:
            UsageError: an option is unknown to this version, or a value is wrong.
        """
        described = description["options"].items()
        values: dict[str, Any] = {name: item["value"] for name, item in described if name not in CODE}
        values |= {name: value for name, value in changes.items() if value is not None and name != "inputs"}
        unknown = sorted(values.keys() - BY_NAME.keys())
        if unknown:
            raise UsageError(f"the output was made with `{unknown[0]}`, which this version does not know")
        given = {
            name: coerce(BY_NAME[name], value, name)
            for name, value in values.items()
            if BY_NAME[name].target != "meta" and value not in (None, _plain(BY_NAME[name].default))
        }
        if "shard" in given:
            given["shard"] = _shard(given["shard"], {})
        given.pop("output", None)
        by_target: dict[str, dict[str, Any]] = {"engine": {}, "sampling": {}, "run": {}}
        for name, value in given.items():
            by_target[BY_NAME[name].target][name] = value
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
    """Layer flags over environment over files over defaults.

    `flags` maps option names to what the command line gave (text, or bool for a switch, or a tuple of text for a
    repeatable option), without the options that were not given; `inputs` is the tuple of positional arguments.

    Raises:
        UsageError: an unknown key or variable, a value that is wrong or not built, or no way to name the output.
    """
    inputs = tuple(flags.get("inputs", ()))
    given = given_options(flags, env, cwd)
    values = {name: value for name, (value, _) in given.items() if BY_NAME[name].built}
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
    """Refuse text that is no UTF-8. The name of a file may be any bytes."""
    with _refused():
        for name, value in values.items():
            kind = BY_NAME[name].kind
            if kind is not PATH:
                check_unicode([known for known, _ in value] if kind is NAME_PATH else value, name)


def _check_sampling(sampling: Mapping[str, Any]) -> None:
    with _refused():
        SamplingParams(**sampling)


@contextmanager
def _refused() -> Iterator[None]:
    """What would be wrong with a row is wrong with the option of that name."""
    try:
        yield
    except RowError as problem:
        raise UsageError(re.sub(r"`(\w+)`", _as_flag, problem.info.message)) from None


def _as_flag(name: re.Match[str]) -> str:
    return f"`{BY_NAME[name[1]].flag}`" if name[1] in BY_NAME else name[0]


def _check_names(sampling: Mapping[str, Any], engine: Mapping[str, Any], events: str | None) -> None:
    """Refuse what would be wrong in every row that takes the default."""
    for name, giver, kind in (
        ("lora_path", "lora", "adapter"),
        ("custom_logit_processor", "logit_processor", "processor"),
    ):
        known = [known for known, _ in engine.get(giver, ())]
        if name in sampling and sampling[name] not in known:
            asked, ours, option = sampling[name], ", ".join(known) or "none", BY_NAME[giver]
            raise UsageError(
                f"`{BY_NAME[name].flag}` names the {kind} {asked!r}, and those of this run are: {ours}; "
                f"give it with {option.flag} {option.metavar}"
            )
    if sampling.get("stream") and events is None:
        raise UsageError("`--stream` needs a place for the events: --events PATH, or - for stdout")


def _output_path(inputs: tuple[str, ...], output: str | None, cwd: Path) -> Path:
    if not inputs:
        raise UsageError("name at least one input file, or - for stdin")
    if inputs.count(STDIN) > 1:
        raise UsageError("- (stdin) can be read only once")
    if output is None:
        return _default_output(inputs, cwd)
    if output == STDIN or not Path(output).name or Path(output).suffix.lower() in _OTHER_FORMATS:
        raise UsageError(f"`--output` is a Parquet file: give a name such as results.parquet, got {output!r}")
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


def _plain(value: object) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path | Threshold | Shard) else value
