"""llama.cpp on a CPU through its C API: many sequences in one context, decoded together, token ids in and out."""

from __future__ import annotations

import ctypes
import runpy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from batchgen.bench.engines.peer_tools import (
    PeerEngine,
    cached_conversion,
    common_length,
    expand_samples,
    join_samples,
    prefix_waves,
    require_cpu,
)

_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}
"""Dtype -> ggml type number of the KV cache."""
_FILE = "model.gguf"
_LAYOUT = 1
"""Version of the written GGUF file; part of the cache key."""
_STEP_TOKENS = 2048
_MIN_SHARED = 32
_UNIT = 256
"""Number of cells to a multiple of which a sequence's part of the KV cache is rounded up."""
_SETTINGS = tuple(
    {"batch": batch, "shared": shared, "ubatch": 512} for shared in (0, 1) for batch in (64, 16, 128, 256)
)
"""llama.cpp allows at most 256 sequences, older versions 64; a setting that fails is skipped."""


@dataclass(slots=True)
class _Row:
    """A sequence of a batch."""

    prompt: list[int]
    new: int
    sampled: bool = False
    """Whether tokens are sampled at temperature 1 instead of greedily."""
    output: list[int] = field(default_factory=list)


class Engine(PeerEngine):
    """One model in memory. Settings are sequences per batch, without and with shared prefixes."""

    version = llama_cpp.__version__
    device = "cpu"
    settings = _SETTINGS

    def __init__(self, request: dict[str, Any]) -> None:
        require_cpu(request)
        model, self.dtype, self.threads = request["model"], request["dtype"], request["threads"]
        kind = f"llama.cpp {_LAYOUT} {self.dtype}"
        folder = cached_conversion(request["cache"], model, kind, lambda folder: _convert(model, folder, self.dtype))
        llama_cpp.llama_backend_init()
        path = folder / _FILE
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def generate(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
        """Generate with fixed lengths: greedily, or at temperature 1 for rows of several samples.

        `batch` sequences run together; each leaves the batch when it is finished. With `shared`, a prefix is computed
        in one sequence and its cache cells are shared with the others.
        """
        samples = [_Row(row["ids"], row["max_new"], row.get("samples", 1) > 1) for row in expand_samples(rows)]
        key = (lambda row: row.prompt) if setting["shared"] else (lambda row: (-row.new, -len(row.prompt)))
        ordered = sorted(samples, key=key)
        batches = [ordered[i : i + setting["batch"]] for i in range(0, len(ordered), setting["batch"])]
        context = _Context(self._model, self._vocab, batches, setting, _TYPES[self.dtype], self.threads)
        try:
            for batch in batches:
                context.run(batch)
        finally:
            context.close()
        return join_samples(rows, [row.output for row in samples]), context.counted


class _Context:
    """A llama.cpp context that generates batches of sequences one after another."""

    def __init__(
        self,
        model: Any,
        vocab: int,
        batches: Sequence[Sequence[_Row]],
        setting: dict[str, int],
        kind: int,
        threads: int,
    ) -> None:
        self.counted = {"prompt_tokens_computed": 0, "decode_rows": 0}
        self._random = np.random.default_rng(0)
        self._vocab, self._shared = vocab, bool(setting["shared"])
        sequences = max(map(len, batches))
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = sequences
        params.n_batch, params.n_ubatch = _STEP_TOKENS, setting["ubatch"]
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = kind
        # Only a unified cache lets sequences share cells; otherwise each sequence attends to a separate buffer.
        params.kv_unified = self._shared
        cells = max(sum(map(_cells, batch)) for batch in batches)
        params.n_ctx = cells if self._shared else sequences * max(_cells(row) for batch in batches for row in batch)
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot create a context of {params.n_ctx} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(_STEP_TOKENS, 0, 1)

    def close(self) -> None:
        """Free the context."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def run(self, rows: Sequence[_Row]) -> None:
        """Generate a batch; the index of a row is its sequence number."""
        llama_cpp.llama_memory_clear(self._memory, False)
        for wave in self._waves(rows):
            self._prefill(rows, wave)
        length = [len(row.prompt) for row in rows]
        while live := [i for i, row in enumerate(rows) if len(row.output) < row.new]:
            for part in range(0, len(live), _STEP_TOKENS):
                members = live[part : part + _STEP_TOKENS]
                fed = [(rows[i].output[-1], length[i] + len(rows[i].output) - 1, i, True) for i in members]
                for i, token in zip(members, self._decode(rows, fed), strict=True):
                    rows[i].output.append(token)
            self.counted["decode_rows"] += len(live)

    def _waves(self, rows: Sequence[_Row]) -> Iterator[list[tuple[int, int]]]:
        """Groups of sequences whose prompts are computed together: (sequence, number of tokens shared with another)."""
        if not self._shared:
            yield [(i, 0) for i in range(len(rows))]
            return
        first = prefix_waves([row.prompt for row in rows], _MIN_SHARED)
        led = {i for wave in first for i in wave}
        done: list[int] = []
        for wave in (*first, [i for i in range(len(rows)) if i not in led]):
            begun = []
            for i in wave:
                prompt = rows[i].prompt
                common, source = max(((common_length(prompt, rows[j].prompt), j) for j in done), default=(0, i))
                common = min(common, len(prompt) - 1)  # the last token's logits are needed
                if common:
                    llama_cpp.llama_memory_seq_cp(self._memory, source, i, 0, common)
                begun.append((i, common))
            yield begun
            done += wave

    def _prefill(self, rows: Sequence[_Row], wave: Sequence[tuple[int, int]]) -> None:
        fed = [
            (token, at, i, at == len(rows[i].prompt) - 1)
            for i, begin in wave
            for at, token in enumerate(rows[i].prompt[begin:], begin)
        ]
        self.counted["prompt_tokens_computed"] += len(fed)
        for begin in range(0, len(fed), _STEP_TOKENS):
            part = fed[begin : begin + _STEP_TOKENS]
            ended = [i for _, _, i, last in part if last]
            for i, token in zip(ended, self._decode(rows, part), strict=True):
                rows[i].output.append(token)

    def _decode(self, rows: Sequence[_Row], fed: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Run one step of (token, position, sequence, whether logits are needed) and return the next tokens."""
        batch = self._batch
        batch.n_tokens = len(fed)
        for at, (token, position, sequence, output) in enumerate(fed):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, output
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for {len(fed)} tokens")
        sampled = [rows[sequence].sampled for _, _, sequence, output in fed if output]
        if not sampled:
            return []
        pointer = ctypes.cast(llama_cpp.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        logits = np.ctypeslib.as_array(pointer, (len(sampled), self._vocab))
        if any(sampled):  # Gumbel noise: the argmax is a sample at temperature 1
            logits = logits + self._random.gumbel(size=logits.shape) * np.array(sampled)[:, None]
        ids: list[int] = logits.argmax(axis=1).tolist()
        return ids


def _cells(row: _Row) -> int:
    return -(-(len(row.prompt) + row.new) // _UNIT) * _UNIT


def _convert(model: str, folder: Path, dtype: str) -> None:
    write_gguf = runpy.run_path(str(Path(__file__).with_name("llama_gguf.py")))["write_gguf"]
    write_gguf(Path(model), folder / _FILE, dtype)
