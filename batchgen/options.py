"""The one table of `batchgen run` options: flags, environment, TOML, checks and the CLI reference derive from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from batchgen.errors import UsageError
from batchgen.units import (
    Threshold,
    parse_bool,
    parse_columns,
    parse_duration,
    parse_float,
    parse_int,
    parse_memory,
    parse_name_function,
    parse_name_path,
    parse_size,
    parse_threshold,
    parse_token_ids,
)

__all__ = ["BY_NAME", "GROUPS", "OPTIONS", "Kind", "Option", "coerce"]

Target = Literal["engine", "run", "sampling", "meta"]

_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Kind:
    """How a value is written: `parse` raises `ValueError` with a message that follows the option's name."""

    metavar: str
    parse: Callable[[str], Any]
    scalars: tuple[type, ...] = (str,)
    """Types a TOML file or a Python caller may give besides the ones that `parse` reads."""
    joined: bool = False
    """Whether a list stands for its items with commas between them."""
    pairs: bool = False
    """Whether values are NAME=VALUE; a table, and pairs of name and value, are taken too, and no name twice."""
    objects: bool = False
    """Whether Python may give a function for the VALUE."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `built` false refuses all but the default until it is built."""

    name: str
    kind: Kind
    default: Any
    group: str
    help: str
    target: Target = "run"
    repeat: bool = False
    choices: tuple[str, ...] = ()
    built: bool = True
    switches: bool = False
    """Each choice is a flag of its own; `help` has a line for each."""
    short: str | None = None

    @property
    def flag(self) -> str:
        """`max_num_seqs` -> `--max-num-seqs`."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """`max_num_seqs` -> `BATCHGEN_MAX_NUM_SEQS`."""
        return "BATCHGEN_" + self.name.upper()

    @property
    def flags(self) -> tuple[str, ...]:
        """Every spelling on the command line, the positive one of a switch first."""
        if self.switches:
            return tuple(f"--{choice}" for choice in self.choices)
        if self.kind is BOOL:
            return self.flag, self.negative
        return (self.flag, self.short) if self.short else (self.flag,)

    @property
    def metavar(self) -> str:
        """What the help shows for the value: the choices, or the kind's word."""
        return "|".join(self.choices) or self.kind.metavar

    @property
    def negative(self) -> str:
        """The flag that says no: `--no-chat`, or `--stop-trim` for `--no-stop-trim`."""
        return self.flag.replace("--no-", "--", 1) if self.name.startswith("no_") else self.flag.replace("--", "--no-")


def _whole(low: int, high: int = _INT64_MAX) -> Kind:
    def parse(text: str) -> int:
        value = parse_int(text)
        if not low <= value <= high:
            bound = f"at least {low}" if high == _INT64_MAX else f"between {low} and {high}"
            raise ValueError(f"must be {bound}, got {value}")
        return value

    return Kind("N", parse, (str, int))


def _number(low: float, high: float) -> Kind:
    def parse(text: str) -> float:
        value = parse_float(text)
        if not low <= value <= high:
            raise ValueError(f"must be between {low:g} and {high:g}, got {value:g}")
        return value

    return Kind("X", parse, (str, int, float))


def _pick(*choices: str) -> Kind:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"takes one of {', '.join(choices)}; got {text!r}")
        return text

    return Kind("|".join(choices), parse)


def _word(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


def _carry(text: str) -> str | tuple[str, ...]:
    return text if text in ("all", "none") else parse_columns(text)


TEXT = Kind("TEXT", str)
WORD = Kind("NAME", _word)
PATH = Kind("PATH", _word, (str, os.PathLike))
BOOL = Kind("", parse_bool, (str, bool))
REAL = Kind("X", parse_float, (str, int, float))
SIZE = Kind("SIZE", parse_size, (str, int))
MEMORY = Kind("SIZE|SHARE", parse_memory, (str, int, float))
DURATION = Kind("DURATION", parse_duration, (str, int, float))
THRESHOLD = Kind("N|P%", parse_threshold, (str, int))
COLUMNS = Kind("all|none|COL,...", _carry, joined=True)
TOKEN_IDS = Kind("ID,...", parse_token_ids, (str, int), joined=True)
SHARD = Kind("auto|I/N", _word)
NAME_PATH = Kind("NAME=PATH", parse_name_path, (str, os.PathLike), pairs=True)
NAME_FUNCTION = Kind("NAME=module:function", parse_name_function, pairs=True, objects=True)


def _choice(name: str, choices: str, group: str, help: str, target: Target = "run", **more: Any) -> Option:
    names = tuple(choices.split("|"))
    return Option(name, _pick(*names), names[0], group, help, target, choices=names, **more)


def _flag(
    name: str, group: str, help: str, target: Target = "run", default: bool = False, built: bool = True
) -> Option:
    return Option(name, BOOL, default, group, help, target, built=built)


MODEL, ENGINE, SAMPLING, INPUT, JOB, OUTPUT = "Model", "Engine", "Sampling defaults", "Input", "Job", "Output"
GROUPS = (MODEL, ENGINE, SAMPLING, INPUT, JOB, OUTPUT)

OPTIONS: tuple[Option, ...] = (
    # What is set here is read by the layers themselves.
    Option("config", PATH, None, JOB, "TOML file of options. Example: --config job.toml", "meta"),
    Option(
        "output",
        PATH,
        None,
        OUTPUT,
        "Result file; by default INPUT with its suffix replaced by .out.parquet. Example: -o results.parquet",
        short="-o",
    ),
    # Model
    Option(
        "model",
        PATH,
        None,
        MODEL,
        "Model folder or Hugging Face id; without it the demonstration model runs. Example: --model ./Qwen3-0.6B",
        "engine",
    ),
    Option("revision", WORD, None, MODEL, "Branch, tag or commit of a model id. Example: --revision main", "engine"),
    Option("tokenizer", PATH, None, MODEL, "Tokenizer folder or id. Example: --tokenizer ./tok", "engine"),
    _choice(
        "dtype", "auto|bfloat16|float16|float32", MODEL, "Number format of weights. Example: --dtype float32", "engine"
    ),
    _choice("device", "auto|cuda|cpu", MODEL, "Where to compute. Example: --device cpu", "engine"),
    _choice(
        "attention",
        "auto|flash|triton|compiled|torch",
        MODEL,
        "Kernels: flash is vllm-flash-attn, triton ours, both for GPUs; compiled is C++ for the CPU; auto takes the "
        "fastest, on a GPU measured at start. "
        "Example: --attention torch",
        "engine",
    ),
    Option(
        "flash_library",
        PATH,
        None,
        MODEL,
        "Compiled library of vllm-flash-attn, or a folder that holds it; an installed vLLM needs none. "
        "Example: --flash-library ./_vllm_fa3_C.abi3.so",
        "engine",
    ),
    _choice(
        "quantization",
        "none|int8",
        MODEL,
        "Weights and products of our decoder on a CPU in eight bits: faster, and less exact; the loss is measured at "
        "start and held to a bound. Example: --quantization int8",
        "engine",
    ),
    Option(
        "quantization_bound",
        REAL,
        0.05,
        MODEL,
        "Largest loss that --quantization may bring: mean divergence of next-token distributions from those of the "
        "full weights, in nats. Example: --quantization-bound 0.2",
        "engine",
    ),
    _choice(
        "model_impl",
        "auto|native|transformers",
        MODEL,
        "Our decoder, or any model of the transformers library. Example: --model-impl transformers",
        "engine",
    ),
    Option(
        "max_model_len",
        _whole(1),
        None,
        MODEL,
        "Longest prompt and completion, in tokens; by default the model's. Example: --max-model-len 4096",
        "engine",
    ),
    Option(
        "lora",
        NAME_PATH,
        (),
        MODEL,
        "LoRA adapter that rows ask for by NAME, repeatable. Example: --lora fr=./french-adapter",
        "engine",
        repeat=True,
    ),
    Option("tensor_parallel", _whole(1), 1, MODEL, "GPUs per model. Example: --tensor-parallel 2", built=False),
    # Engine
    Option(
        "max_num_seqs",
        _whole(1),
        None,
        ENGINE,
        "Most samples generated at once; chosen by device by default. Example: --max-num-seqs 64",
        "engine",
    ),
    Option(
        "max_tokens_per_step",
        _whole(1),
        None,
        ENGINE,
        "Most tokens computed in one step; chosen by device by default. Example: --max-tokens-per-step 2048",
        "engine",
    ),
    Option(
        "kv_memory",
        MEMORY,
        None,
        ENGINE,
        "Memory for keys and values: a size, or a share of the device's memory. Example: --kv-memory 4GiB or 85%",
        "engine",
    ),
    Option("page_size", _whole(1, 4096), 16, ENGINE, "Tokens in a KV page. Example: --page-size 32", "engine"),
    Option(
        "cpu_threads",
        _whole(1, 4096),
        None,
        ENGINE,
        "Threads for computing on the CPU; by default its physical cores, as many as a container may use. Example: "
        "--cpu-threads 8",
        "engine",
    ),
    Option(
        "seed",
        _whole(-_INT64_MAX - 1),
        0,
        ENGINE,
        "Run seed, from which rows derive theirs. Example: --seed 42",
        "engine",
    ),
    _flag(
        "dedup",
        ENGINE,
        "Compute identical prompts, and identical greedy rows, once. Example: --no-dedup",
        "engine",
        default=True,
    ),
    _flag(
        "deterministic",
        ENGINE,
        "Logits that are the same bits whatever else runs with a row; a little slower. Example: --deterministic",
        "engine",
    ),
    # Run-wide defaults of the row fields of the same name
    _choice(
        "sampling_defaults",
        "model|openai",
        SAMPLING,
        "Where unset sampling fields come from: the model's generation_config.json, or 1.0, 1.0, -1, 0.0. "
        "Example: --sampling-defaults openai",
    ),
    Option("temperature", REAL, None, SAMPLING, "0 is greedy. Example: --temperature 0.7", "sampling"),
    Option("top_p", REAL, None, SAMPLING, "Nucleus share in (0, 1]. Example: --top-p 0.95", "sampling"),
    Option("top_k", _whole(-1, 2**31), None, SAMPLING, "-1 or 0: all. Example: --top-k 40", "sampling"),
    Option("min_p", REAL, None, SAMPLING, "Share of the likeliest, in [0, 1]. Example: --min-p 0.05", "sampling"),
    Option(
        "max_new_tokens",
        _whole(0, 2**31),
        None,
        SAMPLING,
        "Most tokens to generate; 128 by default. Example: --max-new-tokens 512",
        "sampling",
    ),
    Option(
        "min_new_tokens",
        _whole(0, 2**31),
        None,
        SAMPLING,
        "Fewest tokens to generate. Example: --min-new-tokens 8",
        "sampling",
    ),
    Option("stop", TEXT, None, SAMPLING, "Stop string, repeatable. Example: --stop END", "sampling", repeat=True),
    Option(
        "stop_token_ids",
        TOKEN_IDS,
        None,
        SAMPLING,
        "Token ids that end a row. Example: --stop-token-ids 2,13",
        "sampling",
    ),
    Option("ignore_eos", BOOL, None, SAMPLING, "Go on past end-of-sequence. Example: --ignore-eos", "sampling"),
    Option("no_stop_trim", BOOL, None, SAMPLING, "Keep the stop in the text. Example: --no-stop-trim", "sampling"),
    Option(
        "skip_special_tokens",
        BOOL,
        None,
        SAMPLING,
        "Leave special tokens out of the text; on by default. Example: --no-skip-special-tokens",
        "sampling",
    ),
    Option("n", _whole(1, 2**20), None, SAMPLING, "Samples per prompt. Example: --n 4", "sampling"),
    Option("return_logprob", BOOL, None, SAMPLING, "Write output logprobs. Example: --return-logprob", "sampling"),
    Option(
        "top_logprobs_num",
        _whole(0, 2**20),
        None,
        SAMPLING,
        "Most likely tokens to write per position. Example: --top-logprobs-num 5",
        "sampling",
    ),
    Option(
        "logprob_start_len",
        _whole(-1, 2**31),
        None,
        SAMPLING,
        "Write prompt logprobs from this position on; -1: none. Example: --return-logprob --logprob-start-len 0",
        "sampling",
    ),
    Option(
        "return_text_in_logprobs",
        BOOL,
        None,
        SAMPLING,
        "Write each token's text beside its logprob. Example: --return-logprob --return-text-in-logprobs",
        "sampling",
    ),
    Option(
        "best_of",
        _whole(1, 2**20),
        None,
        SAMPLING,
        "Samples to generate, of which the --n likeliest are kept. Example: --best-of 4",
        "sampling",
    ),
    Option(
        "frequency_penalty",
        REAL,
        None,
        SAMPLING,
        "Taken off a token's logit each time it was generated, in [-2, 2]. Example: --frequency-penalty 0.5",
        "sampling",
    ),
    Option(
        "presence_penalty",
        REAL,
        None,
        SAMPLING,
        "Taken off the logit of every token generated, in [-2, 2]. Example: --presence-penalty 0.5",
        "sampling",
    ),
    Option(
        "repetition_penalty",
        REAL,
        None,
        SAMPLING,
        "Divides the positive logits of tokens generated and multiplies negative ones, in (0, 2]. "
        "Example: --repetition-penalty 1.1",
        "sampling",
    ),
    _choice(
        "repetition_penalty_scope",
        "output|prompt+output",
        SAMPLING,
        "Tokens that the repetition penalty falls on: those generated, or the prompt's as well (the rule of Hugging "
        "Face and vLLM). Example: --repetition-penalty-scope prompt+output",
        "engine",
    ),
    Option(
        "stop_regex",
        TEXT,
        None,
        SAMPLING,
        "Pattern whose match in the output ends a row, repeatable. Example: --stop-regex '[0-9]+'",
        "sampling",
        repeat=True,
    ),
    _choice(
        "logprobs_mode",
        "raw|processed",
        SAMPLING,
        "Distribution of logprobs: the model's (raw), or the one drawn from, after penalties, masks and filters "
        "(processed). Example: --logprobs-mode processed",
        "engine",
    ),
    Option(
        "logit_processor",
        NAME_FUNCTION,
        (),
        SAMPLING,
        "Python function that rows may name as `custom_logit_processor`, repeatable. "
        "Example: --logit-processor calm=my_module:calm",
        "engine",
        repeat=True,
    ),
    Option(
        "stop_on_repeat",
        _whole(4, 2**20),
        None,
        SAMPLING,
        "End a sample whose last N tokens are one block of at most N/4 tokens over and over, with finish_reason "
        "repetition; off by default. Example: --stop-on-repeat 64",
        "engine",
    ),
    _flag(
        "lenient_schemas",
        SAMPLING,
        "Run rows whose JSON Schema has keywords that cannot be enforced, without these. Example: --lenient-schemas",
        "engine",
    ),
    # Input
    Option("prompt_column", WORD, None, INPUT, "Field that holds the prompt. Example: --prompt-column question"),
    Option("id_column", WORD, None, INPUT, "Field that holds the row's id. Example: --id-column uid"),
    Option(
        "chat",
        BOOL,
        None,
        INPUT,
        "Wrap plain text prompts as user messages (--chat), or refuse to apply the chat template (--no-chat). "
        "Example: --chat",
    ),
    Option("system", TEXT, None, INPUT, "System message of conversations without one. Example: --system 'Be brief.'"),
    _choice("truncate", "none|left|right", INPUT, "Side to cut prompts that are too long. Example: --truncate left"),
    Option(
        "media_root",
        PATH,
        None,
        INPUT,
        "The only folder in which rows may name files (input_embeds). Example: --media-root ./embeddings",
        "engine",
    ),
    Option("shard", SHARD, None, INPUT, "Run part I of N; auto reads Slurm's array variables. Example: --shard 0/16"),
    Option("limit", _whole(0), None, INPUT, "Run the first N rows after --offset. Example: --limit 100"),
    Option("offset", _whole(0), 0, INPUT, "Leave out the first N rows. Example: --offset 1000"),
    Option("sample", _whole(1), None, INPUT, "Run N rows chosen at random by the seed. Example: --sample 50"),
    _choice(
        "on_bad_row",
        "error-row|skip|fail",
        INPUT,
        "What a row that is wrong becomes: an error row, nothing, or the end of the run. Example: --on-bad-row fail",
    ),
    _choice(
        "on_duplicate_id",
        "error|suffix|allow",
        INPUT,
        "What becomes of a repeated id. Example: --on-duplicate-id suffix",
    ),
    # Job
    _choice(
        "existing",
        "resume|overwrite|resume-anyway",
        JOB,
        "Go on with unfinished work; the default. Example: --resume\n"
        "Throw unfinished work and results away and start over. Example: --overwrite\n"
        "Go on with unfinished work although the job has changed. Example: --resume-anyway",
        switches=True,
    ),
    _flag("retry_errors", JOB, "Run rows again that failed before. Example: --retry-errors"),
    Option(
        "max_errors",
        THRESHOLD,
        Threshold(),
        JOB,
        "Row errors to bear before exit code 3; by default fewer than all rows. Example: --max-errors 5%",
    ),
    Option("commit_every", _whole(1), 2000, JOB, "Most rows between commits. Example: --commit-every 500"),
    Option("commit_seconds", DURATION, 30.0, JOB, "Longest time between commits. Example: --commit-seconds 10"),
    Option(
        "max_time", DURATION, None, JOB, "Stop resumably, with exit code 75, after this long. Example: --max-time 2h"
    ),
    _choice("progress", "auto|bar|plain|json|none", JOB, "How to show progress on stderr. Example: --progress plain"),
    Option(
        "events",
        PATH,
        None,
        JOB,
        "Write token-by-token events of rows with `stream` as JSON lines; - is stdout. Example: --events events.jsonl",
    ),
    _flag("dry_run", JOB, "Check the input and the plan only, as `batchgen check` does. Example: --dry-run"),
    # Output
    Option(
        "carry",
        COLUMNS,
        "all",
        OUTPUT,
        "Unknown fields of a row to write to the output: as JSON in the column extra, or those named as columns of "
        "their own. Example: --carry source,lang",
    ),
    _flag("include_prompt", OUTPUT, "Write each prompt's text. Example: --include-prompt"),
    _flag("include_prompt_ids", OUTPUT, "Write each prompt's token ids. Example: --include-prompt-ids"),
    Option("report", PATH, None, OUTPUT, "Write the run's figures as JSON; - is stdout. Example: --report run.json"),
    Option(
        "max_output_bytes",
        SIZE,
        None,
        OUTPUT,
        "Refuse to start, or stop, where results and hidden states would exceed this. Example: --max-output-bytes 10GB",
    ),
    _choice(
        "hidden_states_dtype",
        "auto|float32",
        OUTPUT,
        "Hidden states in the model's number format, or float32, which leaves means unrounded. "
        "Example: --hidden-states-dtype float32",
        target="engine",
    ),
)

BY_NAME = {option.name: option for option in OPTIONS}


def coerce(option: Option, value: object, label: str) -> Any:
    """`value` as given by a flag, a variable, a TOML file or Python, parsed and checked.

    Raises:
        UsageError: names `label` and what it takes, or says that the value is not built yet.
    """
    try:
        result = _parse(option, value)
    except ValueError as problem:
        if not option.built:
            raise _not_built(label) from None
        raise UsageError(f"`{label}` {problem}") from None
    if not option.built and result != option.default:
        raise _not_built(label)
    return result


def _not_built(label: str) -> UsageError:
    return UsageError(f"`{label}` is not built yet; leave it out")


def _parse(option: Option, value: object) -> Any:
    if option.kind.pairs:
        return _parse_pairs(option.kind, value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        if option.repeat:
            return tuple(_parse_scalar(option.kind, item) for item in value)
        if not option.kind.joined:
            raise ValueError(f"takes one value, got a list: {list(value)!r}")
        return option.kind.parse(",".join(_text(option.kind, item) for item in value))
    parsed = _parse_scalar(option.kind, value)
    return (parsed,) if option.repeat else parsed


def _parse_pairs(kind: Kind, value: object) -> tuple[tuple[str, Any], ...]:
    if isinstance(value, Mapping):
        value = tuple(value.items())
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    pairs = tuple(_parse_pair(kind, item) for item in items)
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"names {twice!r} twice; give each a name of its own")
    return pairs


def _parse_pair(kind: Kind, item: object) -> Any:
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str):
        name, target = item
        if kind.objects and callable(target):
            return kind.parse(f"{name}=python:object")[0], target
        item = f"{name}={_text(kind, target)}"
    return _parse_scalar(kind, item)


def _parse_scalar(kind: Kind, value: object) -> Any:
    return kind.parse(_text(kind, value))


def _text(kind: Kind, value: object) -> str:
    wrong_bool = isinstance(value, bool) and bool not in kind.scalars
    if wrong_bool or not isinstance(value, kind.scalars):
        raise ValueError(f"takes {kind.metavar or 'true or false'}, got {value!r}")
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
