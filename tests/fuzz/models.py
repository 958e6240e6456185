"""Fuzzer of model folders: the first line of an input names a file, the rest is what the file holds.

The folder is loaded, or refused by a `ModelError` of one line.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from batchgen.errors import ModelError, UsageError
from batchgen.models.check import check_model
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.jobs import model_folder, scratch
from tests.fuzz.mutations import dump, mutate_bytes, mutate_value
from tests.fuzz.parsing import require
from tests.models.loading import load_model

_JSON = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
)
_WEIGHTS = "model.safetensors"
_FILES = (*_JSON, _WEIGHTS, "chat_template.jinja", "added_tokens.json", "special_tokens_map.json")
_READ_BY_TOKENIZER = frozenset(_FILES) - {_WEIGHTS, "model.safetensors.index.json"}
_WORDS = (
    "model_type", "architectures", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size",
    "vocab_size",
    "head_dim", "rope_scaling", "rope_theta", "rope_parameters", "rope_type", "type", "factor",
    "max_position_embeddings", "sliding_window",
    "layer_types", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config", "quant_method", "text_config",
    "auto_map",
    "eos_token_id", "bos_token_id", "pad_token_id", "temperature", "top_k", "top_p", "llama", "qwen2", "gpt2",
    "mixtral", "gemma2",
    "LlamaForCausalLM", "yarn", "linear", "llama3", "bfloat16", "float32", "int8", "weight_map", "metadata",
    "total_size", "data_offsets",
    "shape", "F32", "BF16", "model.norm.weight", "lm_head.weight", "__metadata__", "tokenizer_class", "chat_template",
    "added_tokens_decoder",
    "model_max_length", "add_bos_token", "PreTrainedTokenizerFast", "vocab", "merges", "pre_tokenizer", "decoder",
    "normalizer", "post_processor",
    "ByteLevel", "BPE", "special", "content", "id", "hidden_act", "silu", "rms_norm_eps", "attention_bias",
    "attention_dropout",
)  # fmt: skip


@cache
def _folder() -> Path:
    """The folder whose files are replaced, one an input."""
    return Path(shutil.copytree(model_folder(), scratch() / "replaced"))


def _original(name: str) -> bytes | None:
    path = model_folder() / name
    return path.read_bytes() if path.exists() else None


def _head(name: str) -> bytes:
    """What an input holds of the intact file."""
    content = _original(name)
    if content is None:
        return (
            b'{"metadata": {}, "weight_map": {"model.norm.weight": "model.safetensors"}}' if "index" in name else b"{}"
        )
    if name != _WEIGHTS:
        return content
    return content[: 8 + int.from_bytes(content[:8], "little")]


def _tail(name: str) -> bytes:
    content = _original(name)
    return content[len(_head(name)) :] if name == _WEIGHTS and content is not None else b""


def _attempt(load: Callable[[Path], object]) -> str | None:
    """Load the folder; the error, if it is refused."""
    try:
        load(_folder())
    except (ModelError, UsageError) as error:
        text = str(error)
        text.encode()
        require("\n" not in text and len(text) < 3000, "a refusal is one line:", text)
        return text
    return None


def _with_file(data: bytes, check: Callable[[str], Hashable]) -> Hashable:
    name_of, _, content = data.partition(b"\n")
    name = name_of.decode("ascii", "replace")
    if name not in _FILES:
        return None
    path = _folder() / name
    path.write_bytes(content + _tail(name))
    os.utime(path, ns=(hash(content) & 0xFFFFFFFF,) * 2)  # a cache by time sees another file
    try:
        return name, check(name)
    finally:
        original = _original(name)
        path.unlink() if original is None else path.write_bytes(original)


def _check(data: bytes) -> Hashable:
    def check(name: str) -> Hashable:
        problem = _attempt(check_model)
        return None if problem is None else problem.rpartition("/")[2][-40:]

    return _with_file(data, check)


def _check_loaded(data: bytes) -> Hashable:
    def check(name: str) -> Hashable:
        loads: list[Callable[[Path], object]] = [load_model]
        if name in _READ_BY_TOKENIZER:
            loads.append(lambda folder: Tokenizer.load(folder).generation.sampling_defaults(1 << 20))
        return tuple(_attempt(load) is None for load in loads)

    return _with_file(data, check)


def _make(rng: Random) -> bytes:
    name = rng.choice(_FILES)
    return name.encode() + b"\n" + _head(name)


def _mutate(data: bytes, rng: Random) -> bytes:
    name, _, content = data.partition(b"\n")
    if rng.random() < 0.25:
        return name + b"\n" + mutate_bytes(content, rng)
    start = 8 if name.decode("ascii", "replace") == _WEIGHTS else 0
    try:
        value: Any = json.loads(content[start:])
    except (ValueError, RecursionError):
        return _make(rng)
    for _ in range(rng.choice((1, 1, 2))):
        value = mutate_value(value, rng, _WORDS)
    text = dump(value)
    size = len(text) if rng.random() < 0.9 else rng.choice((0, 2**63, 2**64 - 1, len(text) + 1))
    return name + b"\n" + (size.to_bytes(8, "little") if start else b"") + text


FUZZERS = (Fuzzer("models", _check, _make, _mutate, ((5, _check_loaded),)),)
