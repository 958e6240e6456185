"""The one table of `batchgen run` options: flags, environment, TOML, checks and the CLI reference derive from it."""

from __future__ import annotations

from batchgen.option_kinds import (
    BOOL,
    COLUMNS,
    DURATION,
    MEMORY,
    NAME_PATH,
    PATH,
    REAL,
    SHARD,
    SIZE,
    SOME_TIME,
    TEXT,
    THRESHOLD,
    WORD,
    Option,
    choice,
    flag,
    whole,
)
from batchgen.sampling_options import SAMPLING, SAMPLING_OPTIONS
from batchgen.units import Threshold

__all__ = ["BY_NAME", "GROUPS", "OPTIONS"]

MODEL, ENGINE, INPUT, JOB, OUTPUT = "Model", "Engine", "Input", "Job", "Output"
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
    choice(
        "dtype", "auto|bfloat16|float16|float32", MODEL, "Number format of weights. Example: --dtype float32", "engine"
    ),
    choice("device", "auto|cuda|cpu", MODEL, "Where to compute. Example: --device cpu", "engine"),
    choice(
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
    choice(
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
    choice(
        "model_impl",
        "auto|native|transformers",
        MODEL,
        "Our decoder, or any model of the transformers library. Example: --model-impl transformers",
        "engine",
    ),
    Option(
        "max_model_len",
        whole(1),
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
    Option("tensor_parallel", whole(1), 1, MODEL, "GPUs per model. Example: --tensor-parallel 2", built=False),
    # Engine
    Option(
        "max_num_seqs",
        whole(1),
        None,
        ENGINE,
        "Most samples generated at once. Default: 256, or a step's tokens if fewer. Example: --max-num-seqs 64",
        "engine",
    ),
    Option(
        "max_tokens_per_step",
        whole(1),
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
    Option("page_size", whole(1, 4096), 16, ENGINE, "Tokens in a KV page. Example: --page-size 32", "engine"),
    Option(
        "cpu_threads",
        whole(1, 4096),
        None,
        ENGINE,
        "Threads for computing on the CPU; by default its physical cores, as many as a container may use. Example: "
        "--cpu-threads 8",
        "engine",
    ),
    Option(
        "seed",
        whole(-(2**63)),
        0,
        ENGINE,
        "Run seed, from which rows derive theirs. Example: --seed 42",
        "engine",
    ),
    flag(
        "dedup",
        ENGINE,
        "Compute identical prompts, and identical greedy rows, once. Example: --no-dedup",
        "engine",
        default=True,
    ),
    flag(
        "deterministic",
        ENGINE,
        "Logits that are the same bits whatever else runs with a row; a little slower. Example: --deterministic",
        "engine",
    ),
    *SAMPLING_OPTIONS,
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
    choice("truncate", "none|left|right", INPUT, "Side to cut prompts that are too long. Example: --truncate left"),
    Option(
        "media_root",
        PATH,
        None,
        INPUT,
        "The only folder in which rows may name files (input_embeds). Example: --media-root ./embeddings",
        "engine",
    ),
    Option("shard", SHARD, None, INPUT, "Run part I of N; auto reads Slurm's array variables. Example: --shard 0/16"),
    Option("limit", whole(0), None, INPUT, "Run the first N rows after --offset. Example: --limit 100"),
    Option("offset", whole(0), 0, INPUT, "Leave out the first N rows. Example: --offset 1000"),
    Option("sample", whole(1), None, INPUT, "Run N rows chosen at random by the seed. Example: --sample 50"),
    choice(
        "on_bad_row",
        "error-row|skip|fail",
        INPUT,
        "What a row that is wrong becomes: an error row, nothing, or the end of the run. Example: --on-bad-row fail",
    ),
    choice(
        "on_duplicate_id",
        "error|suffix|allow",
        INPUT,
        "What becomes of a repeated id. Example: --on-duplicate-id suffix",
    ),
    # Job
    choice(
        "existing",
        "resume|overwrite|resume-anyway",
        JOB,
        "Go on with unfinished work; the default. Example: --resume\n"
        "Throw unfinished work and results away and start over. Example: --overwrite\n"
        "Go on with unfinished work although the job has changed. Example: --resume-anyway",
        switches=True,
    ),
    flag("retry_errors", JOB, "Run rows again that failed before. Example: --retry-errors"),
    Option(
        "max_errors",
        THRESHOLD,
        Threshold(),
        JOB,
        "Row errors to bear before exit code 3; by default fewer than all rows. Example: --max-errors 5%",
    ),
    Option("commit_every", whole(1), 2000, JOB, "Most rows between commits. Example: --commit-every 500"),
    Option("commit_seconds", SOME_TIME, 30.0, JOB, "Longest time between commits. Example: --commit-seconds 10"),
    Option(
        "max_time", DURATION, None, JOB, "Stop resumably, with exit code 75, after this long. Example: --max-time 2h"
    ),
    choice("progress", "auto|bar|plain|json|none", JOB, "How to show progress on stderr. Example: --progress plain"),
    Option(
        "events",
        PATH,
        None,
        JOB,
        "Write token-by-token events of rows with `stream` as JSON lines; - is stdout. Example: --events events.jsonl",
    ),
    flag("dry_run", JOB, "Check the input and the plan only, as `batchgen check` does. Example: --dry-run"),
    # Output
    Option(
        "carry",
        COLUMNS,
        "all",
        OUTPUT,
        "Unknown fields of a row to write to the output: as JSON in the column extra, or those named as columns of "
        "their own. Example: --carry source,lang",
    ),
    flag("include_prompt", OUTPUT, "Write each prompt's text. Example: --include-prompt"),
    flag("include_prompt_ids", OUTPUT, "Write each prompt's token ids. Example: --include-prompt-ids"),
    Option("report", PATH, None, OUTPUT, "Write the run's figures as JSON; - is stdout. Example: --report run.json"),
    Option(
        "max_output_bytes",
        SIZE,
        None,
        OUTPUT,
        "Refuse to start, or stop, where results and hidden states would exceed this. Example: --max-output-bytes 10GB",
    ),
    choice(
        "hidden_states_dtype",
        "auto|float32",
        OUTPUT,
        "Hidden states in the model's number format, or float32, which leaves means unrounded. "
        "Example: --hidden-states-dtype float32",
        target="engine",
    ),
)

BY_NAME = {option.name: option for option in OPTIONS}
