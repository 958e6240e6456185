"""Configuration of the engine: the options that `run`, `check` and `Engine` share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from batchgen.config.option_types import (
    CLOCK,
    JSON,
    MEMORY,
    NAME,
    NAME_FUNCTION,
    NAME_PATH,
    NUMBER,
    PATH,
    POSITIVE_DURATION,
    SIZE,
    TOTAL_SHARE,
    URL_PREFIX,
    Group,
    coerce,
    declared_options,
    int_range,
)
from batchgen.config.sampling_options import SAMPLING
from batchgen.errors import UsageError
from batchgen.request.processors import LogitProcessor

INPUT, OUTPUT, MODEL, JOB, ENGINE = map(Group, ("Input", "Output", "Model", "Job", "Engine"))
"""Groups of options in the help."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configuration of the engine. None means that the value is derived from the model and the device.

    Text is parsed as on the command line (`kv_memory="4GiB"`).

    Raises:
        UsageError: a value is out of range or not supported.
    """

    model: str | None = MODEL.option(
        None,
        "Model folder or Hugging Face id, or demo, the built-in demonstration model, which is the default. "
        "Example: --model ./Qwen3-0.6B",
        PATH,
    )
    revision: str | None = MODEL.option(
        None,
        "Branch, tag or commit of the model on the Hugging Face Hub. Example: --revision main",
        NAME,
        reach="files",
    )
    allow_pickle_weights: bool = MODEL.option(
        False,
        "Read weights from pytorch_model*.bin where a folder has no safetensors, by PyTorch's restricted reader. "
        "Example: --allow-pickle-weights",
        reach="code",
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
        reach="code",
    )
    kv_dtype: Literal["auto", "fp8"] = MODEL.option(
        "auto",
        "Number format of stored keys and values: auto is that of the run; fp8 (E4M3) halves their memory on a GPU, "
        "and rounds them. Example: --kv-dtype fp8",
    )
    quantization: Literal["auto", "none", "int8"] = MODEL.option(
        "auto",
        "How weights are computed: none dequantizes a quantized checkpoint as it is read; auto keeps its numbers "
        "where that is as fast here (on a CPU int8 with int8 inputs, on a GPU eight and four bits); int8 takes "
        "a checkpoint's integers, or quantizes the "
        "weights and matrix products of the native decoder to 8 bits on a CPU; its loss is measured at start and must "
        "not exceed --quantization-bound. Example: --quantization int8",
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
    rope_scaling: str | None = MODEL.option(
        None,
        "Rope scaling of the model in place of that of its config.json, with or without `rope_theta`; it may make the "
        'context longer. Example: --rope-scaling \'{"rope_type": "yarn", "factor": 4.0, '
        '"original_max_position_embeddings": 32768}\'',
        JSON,
    )
    """JSON text; a mapping is accepted, too."""
    hf_overrides: str | None = MODEL.option(
        None,
        "Values that replace those of the model's config.json; nested configurations are merged. "
        'Example: --hf-overrides \'{"text_config": {"rope_theta": 1000000}}\'',
        JSON,
    )
    """JSON text; a mapping is accepted, too."""
    reasoning: str = MODEL.option(
        "auto",
        "Format in which the model writes its thoughts, which conversations return apart from their answers: auto "
        "finds it by the tokenizer and the chat template, off leaves thoughts in the text, or the name of a family. "
        "Example: --reasoning qwen3",
        NAME,
    )
    tool_parser: str = MODEL.option(
        "auto",
        "Format in which the model calls tools, whose calls conversations return apart from their answers: auto finds "
        "it by the tokenizer and the chat template, off leaves calls in the text, or the name of a format. "
        "Example: --tool-parser hermes",
        NAME,
    )
    lora: tuple[tuple[str, str], ...] = MODEL.option(
        (), "Load a LoRA adapter that rows select by NAME; repeatable. Example: --lora fr=./french-adapter", NAME_PATH
    )
    """(name, folder) of the LoRA adapters that rows may select; a mapping is accepted, too."""
    served_model_name: tuple[str, ...] = MODEL.option(
        (), "Further name by which rows may name the model; repeatable. Example: --served-model-name gpt-4o-mini", NAME
    )
    any_model: bool = MODEL.option(False, "Accept every name in the `model` of rows. Example: --any-model")
    chat_template_name: str | None = INPUT.option(
        None,
        "Chat template for conversations, of a model that has several; the default is `tool_use` for rows with tools "
        "if there is one, else `default`. Example: --chat-template-name rag",
        NAME,
    )
    ignore_template_options: bool = INPUT.option(
        False,
        "Ignore `chat_template_kwargs`, `reasoning_effort` and `verbosity` where the chat template does not read them, "
        "instead of refusing the row. Example: --ignore-template-options",
    )
    media_root: str | None = INPUT.option(
        None, "Only folder whose files rows may name, such as images. Example: --media-root ./pictures", PATH
    )
    allow_media_url: tuple[str, ...] = INPUT.option(
        (),
        "Beginning of URLs from which rows may fetch images and sounds; repeatable. "
        "Example: --allow-media-url https://example.com/pictures/",
        URL_PREFIX,
    )
    max_image_pixels: int = INPUT.option(
        50_000_000, "Most pixels of an image. Example: --max-image-pixels 100000000", int_range(1, 178_956_970)
    )
    max_audio_seconds: float = INPUT.option(
        3600.0, "Longest sound. Example: --max-audio-seconds 10m", POSITIVE_DURATION
    )
    max_media_items: int = INPUT.option(
        256, "Most images and sounds of a prompt. Example: --max-media-items 16", int_range(1)
    )
    clock: str | None = INPUT.option(
        None,
        "Time that chat templates see; the default is the creation time of the job. Example: --clock 2026-01-31T12:00",
        CLOCK,
    )
    """ISO 8601; a `datetime` is accepted, too."""
    pooling: Literal["auto", "last", "mean", "cls"] = OUTPUT.option(
        "auto",
        "How the states of tokens become an embedding: the last one, their mean or the first one; auto is as the "
        "checkpoint's files of sentence-transformers say, else mean for encoders and last for others. "
        "Example: --pooling mean",
    )
    normalize: bool | None = OUTPUT.option(
        None, "Divide embeddings by their norm; the default is as the checkpoint's files say. Example: --normalize"
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
        "Most sequences in the running batch; the default is 256, and on a GPU what its memory holds at expected "
        "lengths, up to 1024 (2048 for models of at most 1.3 billion parameters). --max-tokens-per-step limits both. "
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
    gpu_memory_utilization: float | None = ENGINE.option(
        None,
        "Share of the device's memory that may be in use in all, weights included, as in vLLM; in place of "
        "--kv-memory. Example: --gpu-memory-utilization 0.9",
        TOTAL_SHARE,
    )
    tensor_parallel: int = MODEL.option(
        1,
        "Number of processes that compute the model together, each with a part of every layer, on one GPU each or on a "
        "share of the processors; for models that one GPU does not hold. Example: --tensor-parallel 4",
        int_range(1, 64),
    )
    offload: Literal["none", "auto", "weights", "kv"] = ENGINE.option(
        "none",
        "Run what is larger than the device's memory: with weights the host's memory holds the blocks of the model "
        "that do not fit, which are copied to the device in every step; kv does so with keys and values of rows, and "
        "auto with what pays of both. Example: --offload auto",
    )
    device_memory: int | None = ENGINE.option(
        None,
        "Most memory of the device that weights, keys and values, and steps take; the default is all of it. On a CPU, "
        "with --offload, the size of a device, whose place the CPU takes. Example: --device-memory 24GiB",
        SIZE,
    )
    """Most bytes of the device's memory."""
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
                object.__setattr__(self, item.name, coerce(_BY_NAME[item.name], value, item.name))
        if self.gpu_memory_utilization is not None and self.kv_memory is not None:
            raise UsageError("`--gpu-memory-utilization` and `--kv-memory` cannot be combined; keep one of them")
        seqs, tokens = self.max_num_seqs, self.max_tokens_per_step
        if seqs is not None and tokens is not None and tokens < seqs:
            raise UsageError(
                f"`--max-tokens-per-step` ({tokens}) must be at least `--max-num-seqs` ({seqs}): every "
                "sequence computes a token in every step"
            )

    @property
    def kv_budget(self) -> int | float | None:
        """Memory of the KV cache, as `DeviceMemory.budget` takes it."""
        return self.kv_memory if self.gpu_memory_utilization is None else self.gpu_memory_utilization


ENGINE_OPTIONS = declared_options(EngineConfig, "engine")
_BY_NAME = {option.name: option for option in ENGINE_OPTIONS}
