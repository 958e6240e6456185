"""Configuration of the engine and of a job. Each option is declared once, as an attribute.

Its name, type, default, flag, variable, TOML key and help text follow from the attribute's declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from batchgen.config.option_types import (
    COLUMNS,
    DURATION,
    MEMORY,
    NAME,
    NAME_FUNCTION,
    NAME_PATH,
    NUMBER,
    PATH,
    POSITIVE_DURATION,
    SHARD,
    SIZE,
    TEXT,
    THRESHOLD,
    Group,
    Option,
    coerce,
    declared_options,
    int_range,
)
from batchgen.config.sampling_options import SAMPLING, SAMPLING_OPTIONS
from batchgen.config.units import Shard, Threshold, parse_shard
from batchgen.errors import UsageError
from batchgen.request.processors import LogitProcessor

INPUT, OUTPUT, MODEL, JOB, ENGINE = map(Group, ("Input", "Output", "Model", "Job", "Engine"))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configuration of the engine. None means that the value is derived from the model and the device.

    Text is parsed as on the command line (`kv_memory="4GiB"`).

    Raises:
        UsageError: a value is out of range or not supported.
    """

    model: str | None = MODEL.option(
        None,
        "Model folder or Hugging Face id; the default is a built-in demonstration model. Example: --model ./Qwen3-0.6B",
        PATH,
    )
    revision: str | None = MODEL.option(
        None, "Branch, tag or commit of the model on the Hugging Face Hub. Example: --revision main", NAME
    )
    tokenizer: str | None = MODEL.option(
        None, "Tokenizer folder or Hugging Face id; the default is the model's. Example: --tokenizer ./tok", PATH
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = MODEL.option(
        "auto", "Data type of the weights. Example: --dtype float32"
    )
    device: Literal["auto", "cuda", "cpu"] = MODEL.option("auto", "Device to run on. Example: --device cpu")
    attention: Literal["auto", "flash", "triton", "compiled", "torch"] = MODEL.option(
        "auto",
        "Attention backend: flash (vllm-flash-attn) or triton on a GPU, compiled (C++) on a CPU, torch on both; auto "
        "selects the fastest, which is measured at start on a GPU. Example: --attention torch",
    )
    flash_library: str | None = MODEL.option(
        None,
        "Compiled library of vllm-flash-attn or its folder; not needed if vLLM is installed. "
        "Example: --flash-library ./_vllm_fa3_C.abi3.so",
        PATH,
        runs_code=True,
    )
    quantization: Literal["none", "int8"] = MODEL.option(
        "none",
        "Quantize weights and matrix products of the native decoder to 8 bits on a CPU; the loss is measured at start "
        "and must not exceed --quantization-bound. Example: --quantization int8",
    )
    quantization_bound: float = MODEL.option(
        0.05,
        "Largest accepted loss of --quantization, as the mean KL divergence of next-token distributions in nats. "
        "Example: --quantization-bound 0.2",
        NUMBER,
    )
    model_impl: Literal["auto", "native", "transformers"] = MODEL.option(
        "auto",
        "Model implementation: the native decoder, or the transformers library for any model. "
        "Example: --model-impl transformers",
    )
    max_model_len: int | None = MODEL.option(
        None,
        "Most tokens of prompt and completion together; the default is the model's. Example: --max-model-len 4096",
        int_range(1),
    )
    lora: tuple[tuple[str, str], ...] = MODEL.option(
        (), "Load a LoRA adapter that rows select by NAME; repeatable. Example: --lora fr=./french-adapter", NAME_PATH
    )
    """(name, folder) of the LoRA adapters that rows may select; a mapping is accepted, too."""
    media_root: str | None = INPUT.option(
        None, "Only folder whose files rows may name in `input_embeds`. Example: --media-root ./embeddings", PATH
    )
    hidden_states_dtype: Literal["auto", "float32"] = OUTPUT.option(
        "auto",
        "Data type of hidden states; auto is the model's, float32 keeps means unrounded. "
        "Example: --hidden-states-dtype float32",
    )
    """auto: the model's dtype, to which means are rounded; float32: means are not rounded."""
    repetition_penalty_scope: Literal["output", "prompt+output"] = SAMPLING.option(
        "output",
        "Tokens that --repetition-penalty applies to: generated tokens, or prompt tokens as well (as in Hugging Face "
        "and vLLM). Example: --repetition-penalty-scope prompt+output",
    )
    logprobs_mode: Literal["raw", "processed"] = SAMPLING.option(
        "raw",
        "Distribution of logprobs: the model's (raw), or the one sampled from, after penalties, masks and filters "
        "(processed). Example: --logprobs-mode processed",
    )
    logit_processor: tuple[tuple[str, str | LogitProcessor], ...] = SAMPLING.option(
        (),
        "Python function that rows select by NAME in `custom_logit_processor`; repeatable. "
        "Example: --logit-processor calm=my_module:calm",
        NAME_FUNCTION,
        runs_code=True,
    )
    """(name, "module:function" or the function itself); a mapping is accepted, too."""
    stop_on_repeat: int | None = SAMPLING.option(
        None,
        "End a sample whose last N tokens repeat a block of at most N/4 tokens, with finish_reason repetition; off by "
        "default. Example: --stop-on-repeat 64",
        int_range(4, 2**20),
    )
    lenient_schemas: bool = SAMPLING.option(
        False,
        "Ignore JSON Schema keywords that cannot be enforced instead of refusing the row. Example: --lenient-schemas",
    )
    max_num_seqs: int | None = ENGINE.option(
        None,
        "Most sequences in the running batch; the default is 256, or --max-tokens-per-step if that is less. "
        "Example: --max-num-seqs 64",
        int_range(1),
    )
    max_tokens_per_step: int | None = ENGINE.option(
        None,
        "Most tokens computed in one step; the default depends on the device. Example: --max-tokens-per-step 2048",
        int_range(1),
    )
    kv_memory: int | float | None = ENGINE.option(
        None, "Memory of the KV cache, as a size or a share of the device's memory. Example: --kv-memory 85%", MEMORY
    )
    """Memory of the KV cache. int: bytes; float: share of the device's memory in (0, 1]."""
    page_size: int = ENGINE.option(16, "Tokens per KV cache page. Example: --page-size 32", int_range(1, 4096))
    cpu_threads: int | None = ENGINE.option(
        None,
        "Number of CPU threads; the default is the number of physical cores available. Example: --cpu-threads 8",
        int_range(1, 4096),
    )
    seed: int = ENGINE.option(
        0, "Run seed, from which the seeds of rows are derived. Example: --seed 42", int_range(-(2**63))
    )
    """Run seed, int64."""
    dedup: bool = ENGINE.option(
        True, "Compute identical prompts and identical greedy rows once; on by default. Example: --no-dedup"
    )
    deterministic: bool = ENGINE.option(
        False,
        "Compute bitwise identical logits for a row regardless of the batch, slightly slower. Example: --deterministic",
    )

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
    prompt_column: str | None = INPUT.option(
        None, "Field that contains the prompt. Example: --prompt-column question", NAME
    )
    id_column: str | None = INPUT.option(None, "Field that contains the id of the row. Example: --id-column uid", NAME)
    chat: bool | None = INPUT.option(
        None,
        "Apply the chat template to text prompts (--chat), or refuse rows with messages (--no-chat). Example: --chat",
    )
    """True: text prompts are wrapped as user messages. False: `messages` are refused. None: both are accepted."""
    system: str | None = INPUT.option(
        None, "System message for conversations without one. Example: --system 'Be brief.'", TEXT
    )
    truncate: Literal["none", "left", "right"] = INPUT.option(
        "none", "Side on which prompts that are too long are truncated. Example: --truncate left"
    )
    shard: Shard | None = INPUT.option(  # noqa: RUF009  # a field
        None, "Run part I of N of the input; auto reads the Slurm array variables. Example: --shard 0/16", SHARD
    )
    limit: int | None = INPUT.option(None, "Run the first N rows after --offset. Example: --limit 100", int_range(0))
    offset: int = INPUT.option(0, "Skip the first N rows. Example: --offset 1000", int_range(0))
    sample: int | None = INPUT.option(
        None, "Run N rows selected at random by --seed. Example: --sample 50", int_range(1)
    )
    on_bad_row: Literal["error-row", "skip", "fail"] = INPUT.option(
        "error-row",
        "Action for an invalid input row: write an error row, skip it, or stop the run. Example: --on-bad-row fail",
    )
    on_duplicate_id: Literal["error", "suffix", "allow"] = INPUT.option(
        "error",
        "Action for a repeated id: report an error, add a suffix, or allow it. Example: --on-duplicate-id suffix",
    )
    carry: Literal["all", "none"] | tuple[str, ...] = OUTPUT.option(
        "all",
        "Unknown fields of a row to write to the output: all as JSON in the column `extra`, none, or the named ones as "
        "separate columns. Example: --carry source,lang",
        COLUMNS,
    )
    include_prompt: bool = OUTPUT.option(
        False, "Write the text of each prompt to the output. Example: --include-prompt"
    )
    include_prompt_ids: bool = OUTPUT.option(
        False, "Write the token ids of each prompt to the output. Example: --include-prompt-ids"
    )
    report: str | None = OUTPUT.option(
        None, "Write counts and timings of the run as JSON to this file; - is stdout. Example: --report run.json", PATH
    )
    max_output_bytes: int | None = OUTPUT.option(
        None,
        "Most bytes of results and hidden states together; the run does not start, or stops, if they are exceeded. "
        "Example: --max-output-bytes 10GB",
        SIZE,
    )
    existing: Literal["resume", "overwrite", "resume-anyway"] = JOB.option(
        "resume",
        "Resume unfinished work; the default. Example: --resume\n"
        "Start over; replace an earlier result when the new one is complete. Example: --overwrite\n"
        "Continue although the input or an option has changed: reuse the rows that stay the same. "
        "Example: --resume-anyway",
        choice_flags=True,
    )
    reuse: str | None = JOB.option(
        None,
        "Take finished rows that stay the same from this output, finished or not. Example: --reuse old.parquet",
        PATH,
    )
    retry_errors: bool = JOB.option(False, "Run rows again that failed in an earlier run. Example: --retry-errors")
    max_errors: Threshold = JOB.option(  # noqa: RUF009  # a field
        Threshold(),
        "Most row errors before the run fails with exit code 3; by default it fails only if all rows have errors. "
        "Example: --max-errors 5%",
        THRESHOLD,
    )
    commit_every: int = JOB.option(
        2000, "Most finished rows between two commits to disk. Example: --commit-every 500", int_range(1)
    )
    commit_seconds: float = JOB.option(
        30.0, "Longest time between two commits to disk. Example: --commit-seconds 10", POSITIVE_DURATION
    )
    max_time: float | None = JOB.option(
        None,
        "Stop after this time with exit code 75; the same command resumes the run. Example: --max-time 2h",
        DURATION,
    )
    progress: Literal["auto", "bar", "plain", "json", "none"] = JOB.option(
        "auto", "Format of the progress display on stderr. Example: --progress plain"
    )
    events: str | None = JOB.option(
        None,
        "Write events of rows with `stream` to this file, one JSON line per token; - is stdout. "
        "Example: --events events.jsonl",
        PATH,
    )
    dry_run: bool = JOB.option(
        False, "Only check the input and print the plan, like `batchgen check`. Example: --dry-run"
    )
    sampling_defaults: Literal["model", "openai"] = SAMPLING.option(
        "model",
        "Defaults of temperature, top_p, top_k and min_p: the model's generation_config.json, or 1.0, 1.0, -1, 0.0. "
        "Example: --sampling-defaults openai",
    )
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
        code = {option.name for option in OPTIONS if option.runs_code}
        values: dict[str, Any] = {name: item["value"] for name, item in described if name not in code}
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
            given["shard"] = resolve_shard(given["shard"], {})
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


_WITHOUT_ATTRIBUTE = (
    Option(
        "output",
        PATH,
        "Result file; the default is INPUT with its suffix replaced by .out.parquet. Example: -o results.parquet",
        group=OUTPUT.title,
        target="run",
        short="-o",
    ),
    Option(
        "config", PATH, "Read options from this TOML file. Example: --config job.toml", group=JOB.title, target="meta"
    ),
    Option(
        "tensor_parallel",
        int_range(1),
        "Number of GPUs per model. Example: --tensor-parallel 2",
        1,
        group=MODEL.title,
        supported=False,
        target="run",
    ),
)
_OPTIONS = (
    *_WITHOUT_ATTRIBUTE,
    *declared_options(RunConfig, "run"),
    *SAMPLING_OPTIONS,
    *declared_options(EngineConfig, "engine"),
)
GROUPS = tuple(group.title for group in (INPUT, OUTPUT, MODEL, JOB, SAMPLING, ENGINE))
"""Sections of the help, in order."""
OPTIONS = tuple(sorted(_OPTIONS, key=lambda option: GROUPS.index(option.group)))
BY_NAME = {option.name: option for option in OPTIONS}


def resolve_shard(text: str, env: Mapping[str, str]) -> Shard:
    """The shard that the option `shard` names.

    Raises:
        UsageError: the text is wrong, or `auto` finds no Slurm array in the environment variables `env`.
    """
    try:
        return parse_shard(text, env)
    except ValueError as problem:
        raise UsageError(f"`--shard` {problem}") from None


def _json_value(value: object) -> Any:
    if isinstance(value, tuple):
        return [_json_value(item) for item in value]
    return str(value) if isinstance(value, Path | Threshold | Shard) else value
