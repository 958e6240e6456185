"""llama.cpp on a CPU through its C interface: many sequences in one context, decoded together, ids in and out."""

from __future__ import annotations

import ctypes
import runpy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from peer_tools import apart, common_length, converted, shared_waves, together

_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}
"""Numbers of its types, for the cache."""
_FILE = "model.gguf"
_LAYOUT = 1
"""Counts changes of what the file holds."""
_STEP_TOKENS = 2048
_LEAST_SHARED = 32
_UNIT = 256
"""A sequence's share of the cache is a multiple of this."""
_SETTINGS = tuple(
    {"batch": batch, "shared": shared, "ubatch": 512} for shared in (0, 1) for batch in (64, 16, 128, 256)
)
"""Of sequences it takes 256 at most, older ones 64: a setting that it refuses is not the best."""


@dataclass(slots=True)
class _Row:
    """A sequence of a batch."""

    prompt: list[int]
    new: int
    drawn: bool = False
    """At temperature 1, not greedy."""
    output: list[int] = field(default_factory=list)


class Engine:
    """One model in memory."""

    version = llama_cpp.__version__

    def __init__(self, path: Path, dtype: str, threads: int) -> None:
        self._dtype, self._threads = dtype, threads
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def describe(self) -> dict[str, Any]:
        """What is in force, and settings to try: sequences at once, without and with a cache of shared prefixes."""
        return {"dtype": self._dtype, "device": "cpu", "threads": self._threads, "settings": list(_SETTINGS)}

    def generate(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
        """Greedy but for rows of several samples, lengths fixed; `batch` at once, each of which leaves when it is done.

        With `shared` a prefix is computed in one sequence, whose cache the others then refer to.
        """
        alone = [_Row(row["ids"], row["max_new"], row.get("samples", 1) > 1) for row in apart(rows)]
        key = (lambda row: row.prompt) if setting["shared"] else (lambda row: (-row.new, -len(row.prompt)))
        ordered = sorted(alone, key=key)
        batches = [ordered[i : i + setting["batch"]] for i in range(0, len(ordered), setting["batch"])]
        context = _Context(self._model, self._vocab, batches, setting, _TYPES[self._dtype], self._threads)
        try:
            for batch in batches:
                context.run(batch)
        finally:
            context.close()
        return together(rows, [row.output for row in alone]), context.counted


class _Context:
    """A cache and what fills it, for batches of sequences one after another."""

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
        # Only in one buffer for all can sequences refer to one another's cells; else each attends to its own alone.
        params.kv_unified = self._shared
        cells = max(sum(map(_cells, batch)) for batch in batches)
        params.n_ctx = cells if self._shared else sequences * max(_cells(row) for batch in batches for row in batch)
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {params.n_ctx} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(_STEP_TOKENS, 0, 1)

    def close(self) -> None:
        """Give the memory back."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def run(self, rows: Sequence[_Row]) -> None:
        """Generate a batch; the place of a row in it is its sequence."""
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
        """Sequences whose prompts are computed together, each with its count of tokens that another one has."""
        if not self._shared:
            yield [(i, 0) for i in range(len(rows))]
            return
        first = shared_waves([row.prompt for row in rows], _LEAST_SHARED)
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
        """Compute (token, position, sequence, whether it has an output) and choose the token of each output."""
        batch = self._batch
        batch.n_tokens = len(fed)
        for at, (token, position, sequence, output) in enumerate(fed):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, output
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode says {status} of {len(fed)} tokens")
        drawn = [rows[sequence].drawn for _, _, sequence, output in fed if output]
        if not drawn:
            return []
        pointer = ctypes.cast(llama_cpp.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        logits = np.ctypeslib.as_array(pointer, (len(drawn), self._vocab))
        if any(drawn):  # the largest of logits with such noise is a token drawn at temperature 1
            logits = logits + self._random.gumbel(size=logits.shape) * np.array(drawn)[:, None]
        ids: list[int] = logits.argmax(axis=1).tolist()
        return ids


def _cells(row: _Row) -> int:
    return -(-(len(row.prompt) + row.new) // _UNIT) * _UNIT


def load(request: dict[str, Any]) -> Engine:
    """An engine for the driver's request."""
    model, dtype = request["model"], request["dtype"]
    if request["device"] != "cpu":
        raise RuntimeError("it is measured on a CPU only")
    kind = f"llama.cpp {_LAYOUT} {dtype}"
    folder = converted(request["cache"], model, kind, lambda aside: _convert(model, aside, dtype))
    return Engine(folder / _FILE, dtype, request["threads"])


def _convert(model: str, folder: Path, dtype: str) -> None:
    write_gguf = runpy.run_path(str(Path(__file__).with_name("llama_gguf.py")))["write_gguf"]
    write_gguf(Path(model), folder / _FILE, dtype)
