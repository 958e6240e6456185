"""llama.cpp on a CPU through its C API: many sequences in one context, decoded together, token ids in and out.

The model is converted once by the package `gguf`: a Llama, Qwen 3 or LFM2, without a tokenizer.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from gguf.utility import SafetensorsLocal

from batchgen.bench.engines.peer_tools import (
    Outputs,
    PeerEngine,
    Row,
    Setting,
    cached_conversion,
    common_length,
    prefix_waves,
)

_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Dtype -> ggml type of weights and KV cache."""
_FAMILIES = ("llama", "qwen3", "lfm2")
"""Values of `model_type`, which GGUF files call by the same names."""
_LAYOUT = 1
"""Version of the written GGUF file; part of the cache key."""
_STEP_TOKENS = 2048
_MIN_SHARED = 32
_UNIT = 256
"""Number of cells to a multiple of which a sequence's part of the KV cache is rounded up."""


class Engine(PeerEngine):
    """One model in memory. Settings are sequences per batch, without and with shared prefixes.

    llama.cpp allows at most 256 sequences, older versions 64; a setting that fails is skipped.
    """

    version = llama_cpp.__version__
    settings = tuple({"batch": n, "shared": shared, "ubatch": 512} for shared in (0, 1) for n in (64, 16, 128, 256))

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request, "cpu")
        model, kind = request["model"], f"llama.cpp {_LAYOUT} {self.dtype}"
        path = cached_conversion(request["cache"], model, kind, lambda folder: _convert(model, folder, self.dtype))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path / "model.gguf").encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def run(self, samples: list[Row], setting: Setting) -> Outputs:
        """See `PeerEngine`.

        `batch` sequences run together; each leaves the batch when it is finished. With `shared`, a prefix is computed
        in one sequence and its cache cells are shared with the others.
        """
        for row in samples:
            row["output"] = []
        if setting["shared"]:
            ordered = sorted(samples, key=lambda row: row["ids"])
        else:
            ordered = sorted(samples, key=lambda row: (-row["max_new"], -len(row["ids"])))
        batches = [ordered[i : i + setting["batch"]] for i in range(0, len(ordered), setting["batch"])]
        context = _Context(self, batches, setting)
        try:
            for batch in batches:
                context.generate(batch)
        finally:
            context.close()
        return [row["output"] for row in samples], context.counted


class _Context:
    """A llama.cpp context that generates batches of sequences one after another."""

    def __init__(self, engine: Engine, batches: Sequence[Sequence[Row]], setting: Setting) -> None:
        self.counted = {"prompt_tokens_computed": 0, "decode_rows": 0}
        self._random = np.random.default_rng(0)
        self._vocab, self._shared = engine.vocab, bool(setting["shared"])
        sequences = max(map(len, batches))
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = sequences
        params.n_batch, params.n_ubatch = _STEP_TOKENS, setting["ubatch"]
        params.n_threads = params.n_threads_batch = engine.threads
        params.type_k = params.type_v = int(gguf.GGMLQuantizationType[_TYPES[engine.dtype]])
        # Only a unified cache lets sequences share cells; otherwise each sequence attends to a separate buffer.
        params.kv_unified = self._shared
        cells = max(sum(map(_cells, batch)) for batch in batches)
        params.n_ctx = cells if self._shared else sequences * max(_cells(row) for batch in batches for row in batch)
        self._context = llama_cpp.llama_init_from_model(engine.model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot create a context of {params.n_ctx} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(_STEP_TOKENS, 0, 1)

    def close(self) -> None:
        """Free the context."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def generate(self, rows: Sequence[Row]) -> None:
        """Generate a batch; the index of a row is its sequence number."""
        llama_cpp.llama_memory_clear(self._memory, False)
        for wave in self._waves(rows):
            self._prefill(rows, wave)
        length = [len(row["ids"]) for row in rows]
        while live := [i for i, row in enumerate(rows) if len(row["output"]) < row["max_new"]]:
            for part in range(0, len(live), _STEP_TOKENS):
                members = live[part : part + _STEP_TOKENS]
                fed = [(rows[i]["output"][-1], length[i] + len(rows[i]["output"]) - 1, i, True) for i in members]
                for i, token in zip(members, self._decode(rows, fed), strict=True):
                    rows[i]["output"].append(token)
            self.counted["decode_rows"] += len(live)

    def _waves(self, rows: Sequence[Row]) -> Iterator[list[tuple[int, int]]]:
        """Groups of sequences whose prompts are computed together: (sequence, number of tokens shared with another)."""
        if not self._shared:
            yield [(i, 0) for i in range(len(rows))]
            return
        first = prefix_waves([row["ids"] for row in rows], _MIN_SHARED)
        led = {i for wave in first for i in wave}
        done: list[int] = []
        for wave in (*first, [i for i in range(len(rows)) if i not in led]):
            begun = []
            for i in wave:
                prompt = rows[i]["ids"]
                common, source = max(((common_length(prompt, rows[j]["ids"]), j) for j in done), default=(0, i))
                common = min(common, len(prompt) - 1)  # the last token's logits are needed
                if common:
                    llama_cpp.llama_memory_seq_cp(self._memory, source, i, 0, common)
                begun.append((i, common))
            yield begun
            done += wave

    def _prefill(self, rows: Sequence[Row], wave: Sequence[tuple[int, int]]) -> None:
        fed = [
            (token, at, i, at == len(rows[i]["ids"]) - 1)
            for i, begin in wave
            for at, token in enumerate(rows[i]["ids"][begin:], begin)
        ]
        self.counted["prompt_tokens_computed"] += len(fed)
        for begin in range(0, len(fed), _STEP_TOKENS):
            part = fed[begin : begin + _STEP_TOKENS]
            ended = [i for _, _, i, last in part if last]
            for i, token in zip(ended, self._decode(rows, part), strict=True):
                rows[i]["output"].append(token)

    def _decode(self, rows: Sequence[Row], fed: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Run one step of (token, position, sequence, whether logits are needed) and return the next tokens."""
        batch = self._batch
        batch.n_tokens = len(fed)
        for at, (token, position, sequence, output) in enumerate(fed):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, output
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for {len(fed)} tokens")
        sampled = [rows[sequence]["sampled"] for _, _, sequence, output in fed if output]
        if not sampled:
            return []
        pointer = ctypes.cast(llama_cpp.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        logits = np.ctypeslib.as_array(pointer, (len(sampled), self._vocab))
        if any(sampled):  # Gumbel noise: the argmax is a sample at temperature 1
            logits = logits + self._random.gumbel(size=logits.shape) * np.array(sampled)[:, None]
        ids: list[int] = logits.argmax(axis=1).tolist()
        return ids


def _cells(row: Row) -> int:
    return -(-(len(row["ids"]) + int(row["max_new"])) // _UNIT) * _UNIT


def _convert(model: str, folder: Path, dtype: str) -> None:
    """Write `model.gguf` with matrices in `dtype` and vectors in float32.

    Raises:
        ValueError: the architecture or a tensor is not supported.
    """
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    family, kind = config["model_type"], gguf.GGMLQuantizationType[_TYPES[dtype]]
    if family not in _FAMILIES:
        raise ValueError(f"cannot convert model type {family}; supported: {', '.join(_FAMILIES)}")
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), family)
    for name, value in _metadata(config).items():
        getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for path in sorted(Path(model).glob("*.safetensors")):
        for name, stored in SafetensorsLocal(path).tensors.items():
            target = names.get_name(name, try_suffixes=(".weight",))
            if target is None:
                raise ValueError(f"cannot convert the tensor {name}")
            values = gguf.quants.dequantize(stored.mmap_bytes(), gguf.GGMLQuantizationType[stored.dtype])
            values, part = values.reshape(stored.shape), target.split(".")[-2]
            if family == "llama" and part in heads:
                values = interleaved(values, heads[part])
            if part == "conv":
                values = values.squeeze(1)
            if values.ndim == 1 or part == "conv" or dtype == "float32":
                writer.add_tensor(target, values)
            else:
                writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    """Key of a GGUF file, as a method of its writer names it -> value."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    if (config.get("rope_scaling") or rope.get("rope_type", "default")) not in (None, "default"):
        raise ValueError("cannot convert a model with scaled rotary embeddings")
    made = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "head_count": config["num_attention_heads"],
        "head_count_kv": config["num_key_value_heads"],
        **dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), head_dim),
        "rope_freq_base": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        "layer_norm_rms_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "tokenizer_model": "no_vocab",
    }
    if config["model_type"] == "lfm2":  # layers without attention have no heads
        heads = [made["head_count_kv"] if kind == "full_attention" else 0 for kind in config["layer_types"]]
        made |= {"head_count_kv": heads, "shortconv_l_cache": config.get("conv_L_cache", 3)}
    return made


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection [N * D, H], reordered from rotary embeddings of half heads to those of adjacent pairs."""
    rows, width = values.shape
    return values.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)
