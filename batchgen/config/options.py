"""Table of the `batchgen run` options. Flags, environment variables, TOML keys and the CLI reference derive from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from batchgen.config.option_types import (
    BOOL,
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
    Option,
    Target,
    choice,
    flag,
    int_range,
)
from batchgen.config.sampling_options import SAMPLING, SAMPLING_OPTIONS
from batchgen.config.units import Threshold

__all__ = ["BY_NAME", "GROUPS", "OPTIONS"]

MODEL, ENGINE, INPUT, JOB, OUTPUT = "Model", "Engine", "Input", "Job", "Output"
GROUPS = (INPUT, OUTPUT, MODEL, JOB, SAMPLING, ENGINE)


_INPUT = (
    Option("prompt_column", NAME, "Field that contains the prompt. Example: --prompt-column question"),
    Option("id_column", NAME, "Field that contains the id of the row. Example: --id-column uid"),
    Option(
        "chat",
        BOOL,
        "Apply the chat template to text prompts (--chat), or refuse rows with messages (--no-chat). Example: --chat",
    ),
    Option("system", TEXT, "System message for conversations without one. Example: --system 'Be brief.'"),
    choice(
        "truncate",
        "none|left|right",
        "Side on which prompts that are too long are truncated. Example: --truncate left",
    ),
    Option(
        "media_root",
        PATH,
        "Only folder whose files rows may name in `input_embeds`. Example: --media-root ./embeddings",
        target="engine",
    ),
    Option("shard", SHARD, "Run part I of N of the input; auto reads the Slurm array variables. Example: --shard 0/16"),
    Option("limit", int_range(0), "Run the first N rows after --offset. Example: --limit 100"),
    Option("offset", int_range(0), "Skip the first N rows. Example: --offset 1000", 0),
    Option("sample", int_range(1), "Run N rows selected at random by --seed. Example: --sample 50"),
    choice(
        "on_bad_row",
        "error-row|skip|fail",
        "Action for an invalid input row: write an error row, skip it, or stop the run. Example: --on-bad-row fail",
    ),
    choice(
        "on_duplicate_id",
        "error|suffix|allow",
        "Action for a repeated id: report an error, add a suffix, or allow it. Example: --on-duplicate-id suffix",
    ),
)

_OUTPUT = (
    Option(
        "output",
        PATH,
        "Result file; the default is INPUT with its suffix replaced by .out.parquet. Example: -o results.parquet",
        short="-o",
    ),
    Option(
        "carry",
        COLUMNS,
        "Unknown fields of a row to write to the output: all as JSON in the column `extra`, none, or the named ones as "
        "separate columns. Example: --carry source,lang",
        "all",
    ),
    flag("include_prompt", "Write the text of each prompt to the output. Example: --include-prompt"),
    flag("include_prompt_ids", "Write the token ids of each prompt to the output. Example: --include-prompt-ids"),
    Option(
        "report",
        PATH,
        "Write counts and timings of the run as JSON to this file; - is stdout. Example: --report run.json",
    ),
    Option(
        "max_output_bytes",
        SIZE,
        "Most bytes of results and hidden states together; the run does not start, or stops, if they are exceeded. "
        "Example: --max-output-bytes 10GB",
    ),
    choice(
        "hidden_states_dtype",
        "auto|float32",
        "Data type of hidden states; auto is the model's, float32 keeps means unrounded. "
        "Example: --hidden-states-dtype float32",
        target="engine",
    ),
)

_MODEL = (
    Option(
        "model",
        PATH,
        "Model folder or Hugging Face id; the default is a built-in demonstration model. Example: --model ./Qwen3-0.6B",
    ),
    Option("revision", NAME, "Branch, tag or commit of the model on the Hugging Face Hub. Example: --revision main"),
    Option(
        "tokenizer",
        PATH,
        "Tokenizer folder or Hugging Face id; the default is the model's. Example: --tokenizer ./tok",
    ),
    choice("dtype", "auto|bfloat16|float16|float32", "Data type of the weights. Example: --dtype float32"),
    choice("device", "auto|cuda|cpu", "Device to run on. Example: --device cpu"),
    choice(
        "attention",
        "auto|flash|triton|compiled|torch",
        "Attention backend: flash (vllm-flash-attn) or triton on a GPU, compiled (C++) on a CPU, torch on both; auto "
        "selects the fastest, which is measured at start on a GPU. Example: --attention torch",
    ),
    Option(
        "flash_library",
        PATH,
        "Compiled library of vllm-flash-attn or its folder; not needed if vLLM is installed. "
        "Example: --flash-library ./_vllm_fa3_C.abi3.so",
    ),
    choice(
        "quantization",
        "none|int8",
        "Quantize weights and matrix products of the native decoder to 8 bits on a CPU; the loss is measured at start "
        "and must not exceed --quantization-bound. Example: --quantization int8",
    ),
    Option(
        "quantization_bound",
        NUMBER,
        "Largest accepted loss of --quantization, as the mean KL divergence of next-token distributions in nats. "
        "Example: --quantization-bound 0.2",
        0.05,
    ),
    choice(
        "model_impl",
        "auto|native|transformers",
        "Model implementation: the native decoder, or the transformers library for any model. "
        "Example: --model-impl transformers",
    ),
    Option(
        "max_model_len",
        int_range(1),
        "Most tokens of prompt and completion together; the default is the model's. Example: --max-model-len 4096",
    ),
    Option(
        "lora",
        NAME_PATH,
        "Load a LoRA adapter that rows select by NAME; repeatable. Example: --lora fr=./french-adapter",
        (),
        repeat=True,
    ),
    Option(
        "tensor_parallel",
        int_range(1),
        "Number of GPUs per model. Example: --tensor-parallel 2",
        1,
        supported=False,
        target="run",
    ),
)

_JOB = (
    Option("config", PATH, "Read options from this TOML file. Example: --config job.toml", target="meta"),
    choice(
        "existing",
        "resume|overwrite|resume-anyway",
        "Resume unfinished work; the default. Example: --resume\n"
        "Start over; replace an earlier result when the new one is complete. Example: --overwrite\n"
        "Resume unfinished work even if the job has changed. Example: --resume-anyway",
        choice_flags=True,
    ),
    flag("retry_errors", "Run rows again that failed in an earlier run. Example: --retry-errors"),
    Option(
        "max_errors",
        THRESHOLD,
        "Most row errors before the run fails with exit code 3; by default it fails only if all rows have errors. "
        "Example: --max-errors 5%",
        Threshold(),
    ),
    Option(
        "commit_every",
        int_range(1),
        "Most finished rows between two commits to disk. Example: --commit-every 500",
        2000,
    ),
    Option(
        "commit_seconds",
        POSITIVE_DURATION,
        "Longest time between two commits to disk. Example: --commit-seconds 10",
        30.0,
    ),
    Option(
        "max_time",
        DURATION,
        "Stop after this time with exit code 75; the same command resumes the run. Example: --max-time 2h",
    ),
    choice(
        "progress",
        "auto|bar|plain|json|none",
        "Format of the progress display on stderr. Example: --progress plain",
    ),
    Option(
        "events",
        PATH,
        "Write events of rows with `stream` to this file, one JSON line per token; - is stdout. "
        "Example: --events events.jsonl",
    ),
    flag("dry_run", "Only check the input and print the plan, like `batchgen check`. Example: --dry-run"),
)

_SAMPLING = (
    choice(
        "sampling_defaults",
        "model|openai",
        "Defaults of temperature, top_p, top_k and min_p: the model's generation_config.json, or 1.0, 1.0, -1, 0.0. "
        "Example: --sampling-defaults openai",
        target="run",
    ),
    choice(
        "repetition_penalty_scope",
        "output|prompt+output",
        "Tokens that --repetition-penalty applies to: generated tokens, or prompt tokens as well (as in Hugging Face "
        "and vLLM). Example: --repetition-penalty-scope prompt+output",
    ),
    choice(
        "logprobs_mode",
        "raw|processed",
        "Distribution of logprobs: the model's (raw), or the one sampled from, after penalties, masks and filters "
        "(processed). Example: --logprobs-mode processed",
    ),
    Option(
        "logit_processor",
        NAME_FUNCTION,
        "Python function that rows select by NAME in `custom_logit_processor`; repeatable. "
        "Example: --logit-processor calm=my_module:calm",
        (),
        repeat=True,
    ),
    Option(
        "stop_on_repeat",
        int_range(4, 2**20),
        "End a sample whose last N tokens repeat a block of at most N/4 tokens, with finish_reason repetition; off by "
        "default. Example: --stop-on-repeat 64",
    ),
    flag(
        "lenient_schemas",
        "Ignore JSON Schema keywords that cannot be enforced instead of refusing the row. Example: --lenient-schemas",
    ),
)

_ENGINE = (
    Option(
        "max_num_seqs",
        int_range(1),
        "Most sequences in the running batch; the default is 256, or --max-tokens-per-step if that is less. "
        "Example: --max-num-seqs 64",
    ),
    Option(
        "max_tokens_per_step",
        int_range(1),
        "Most tokens computed in one step; the default depends on the device. Example: --max-tokens-per-step 2048",
    ),
    Option(
        "kv_memory",
        MEMORY,
        "Memory of the KV cache, as a size or a share of the device's memory. Example: --kv-memory 85%",
    ),
    Option("page_size", int_range(1, 4096), "Tokens per KV cache page. Example: --page-size 32", 16),
    Option(
        "cpu_threads",
        int_range(1, 4096),
        "Number of CPU threads; the default is the number of physical cores available. Example: --cpu-threads 8",
    ),
    Option("seed", int_range(-(2**63)), "Run seed, from which the seeds of rows are derived. Example: --seed 42", 0),
    flag(
        "dedup",
        "Compute identical prompts and identical greedy rows once; on by default. Example: --no-dedup",
        default=True,
    ),
    flag(
        "deterministic",
        "Compute bitwise identical logits for a row regardless of the batch, slightly slower. Example: --deterministic",
    ),
)


def _section(group: str, target: Target, options: Iterable[Option]) -> Iterator[Option]:
    """The options of a group, which set `target` if they name no other."""
    return (replace(option, group=group, target=option.target or target) for option in options)


OPTIONS: tuple[Option, ...] = (
    *_section(INPUT, "run", _INPUT),
    *_section(OUTPUT, "run", _OUTPUT),
    *_section(MODEL, "engine", _MODEL),
    *_section(JOB, "run", _JOB),
    *_section(SAMPLING, "engine", _SAMPLING[:1]),
    *SAMPLING_OPTIONS,
    *_section(SAMPLING, "engine", _SAMPLING[1:]),
    *_section(ENGINE, "engine", _ENGINE),
)
BY_NAME = {option.name: option for option in OPTIONS}
