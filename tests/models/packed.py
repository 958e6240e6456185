"""Helpers that run sequences through a model in packed steps: a seeded mix of prompt chunks and decoded tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.attention.torch_attention import TorchAttention
from batchgen.kernels.cpu.attention import CompiledAttention
from batchgen.kernels.device import HOST
from batchgen.kernels.grouped import attention_of
from batchgen.kernels.lora import lora_step
from batchgen.kernels.mixers.states import PooledStates, Run, StatePool, chunk_batches
from batchgen.kernels.types import Attention, AttentionBatch, ChunkPages, KVPool, PagedAttention
from batchgen.models.base import Model, ModelInput, ModelSpec

LENGTHS = (3, 19, 11, 1, 26)
"""Sequence lengths, shorter and longer than the tiny models' window."""

Step = list[tuple[int, int, int]]
"""(sequence, start, end), prompt chunks first, then decoded tokens."""


def random_sequences(vocab: int, seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    """Random token ids of each sequence, without special ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=generator) for n in lengths]


def schedule(lengths: list[int], seed: int) -> list[Step]:
    """Steps that feed every position once: prompts in chunks, the last four tokens of each sequence one by one."""
    rng = random.Random(seed)
    done = [0] * len(lengths)
    steps: list[Step] = []
    while done != lengths:
        chunks: Step = []
        decodes: Step = []
        for i, length in enumerate(lengths):
            if done[i] == length or rng.random() < 0.2:
                continue
            prompt = max(1, length - 4)
            end = done[i] + 1 if done[i] >= prompt else rng.randint(done[i] + 1, prompt)
            (decodes if done[i] >= prompt else chunks).append((i, done[i], end))
            done[i] = end
        if chunks or decodes:
            steps.append(chunks + decodes)
    return steps


def packed_logits(
    model: Model,
    sequences: list[Tensor],
    attention: Callable[[list[tuple[int, int]]], Attention],
    seed: int = 0,
    adapters: list[int] | None = None,
) -> list[Tensor]:
    """Logits [n, V] at every position of every sequence, of the model's part of the vocabulary.

    `attention` creates a step's attention from its (sequence, tokens) parts; `adapters` is each sequence's adapter or
    -1.
    """
    pool = StatePool.allocate(model.spec.states, len(sequences) + 1, model.spec.dtype, model.spec.device)
    got: list[list[Tensor]] = [[] for _ in sequences]
    for step in schedule([len(s) for s in sequences], seed):
        ids = torch.cat([sequences[i][start:end] for i, start, end in step])
        positions = torch.cat([torch.arange(start, end) for _, start, end in step])
        of_token = None if adapters is None else np.concatenate([np.full(end - at, adapters[i]) for i, at, end in step])
        lora = None if of_token is None else lora_step(of_token, HOST)
        parts = [(i, end - start) for i, start, end in step]
        inputs = ModelInput(ids, positions, attention(parts), lora=lora, states=pooled_states(pool, parts))
        hidden = model.hidden(inputs)
        assert hidden.shape == (len(ids), model.spec.hidden_size)
        assert hidden.dtype == model.spec.dtype
        head = model.spec.adapts_head and of_token is not None
        logits = model.logits(hidden, torch.from_numpy(of_token) if head else None).float()
        tokens = model.spec.vocab
        assert logits.shape == (len(ids), tokens.stop - tokens.start)
        assert logits.dtype == torch.float32
        for (i, start, end), rows in zip(step, logits.split([e - s for _, s, e in step]), strict=True):
            assert sum(len(r) for r in got[i]) == start
            got[i].append(rows)
            assert end <= len(sequences[i])
    return [torch.cat(rows) for rows in got]


def pooled_states(pool: StatePool, parts: list[tuple[int, int]]) -> PooledStates:
    """The recurrent states of a step with these (sequence, tokens) parts; slot i + 1 has those of sequence i."""
    ends = [*accumulate(count for _, count in parts)]
    runs = [
        [Run(end - count, end, sequence + 1, sequence + 1)] for (sequence, count), end in zip(parts, ends, strict=True)
    ]
    return PooledStates(pool, chunk_batches(runs, HOST))


class PagedCache:
    """Paged attention with pages in shuffled order."""

    def __init__(self, spec: ModelSpec, sequences: int, page_size: int = 4, pages_each: int = 8) -> None:
        total = sequences * pages_each
        self.pool = KVPool.allocate(list(spec.kv_layers), total + 1, page_size, spec.dtype, spec.device)
        for cache in self.pool.caches:
            cache.fill_(torch.nan)  # reading a position before it is written gives NaN
        order = torch.randperm(total, generator=torch.Generator().manual_seed(1)) + 1
        self.pages = order.view(sequences, pages_each)
        self.lengths = [0] * sequences

    def step(self, parts: list[tuple[int, int]]) -> TorchAttention:
        return TorchAttention(self.pool, self.batch(parts))

    def spanned_step(
        self, parts: list[tuple[int, int]], spans: list[tuple[int, int]], *, exceed: bool = False
    ) -> PagedAttention:
        """A step some of whose tokens see one another; `exceed`: also behind their windows."""
        batch = self.batch(parts)
        batch.spans, batch.spans_exceed_window = spans, exceed
        return attention_of(TorchAttention, self.pool, batch)

    def compiled_step(self, parts: list[tuple[int, int]]) -> CompiledAttention:
        return CompiledAttention(self.pool, self.batch(parts))

    def batch(self, parts: list[tuple[int, int]]) -> AttentionBatch:
        size = self.pool.page_size
        slots: list[Tensor] = []
        chunks: list[ChunkPages] = []
        rows: list[int] = []
        start = 0
        for sequence, count in parts:
            begin = self.lengths[sequence]
            end = self.lengths[sequence] = begin + count
            at = torch.arange(begin, end)
            slots.append(self.pages[sequence][at // size] * size + at % size)
            if count > 1 or (not rows and begin == 0):
                assert not rows, "chunks come first"
                chunks.append(ChunkPages(start, count, end, self.pages[sequence][: -(-end // size)].numpy()))
            else:
                rows.append(sequence)
            start += count
        lens = np.array([self.lengths[i] for i in rows])
        return AttentionBatch(
            slot_mapping=torch.cat(slots),
            chunks=chunks,
            decode_start=start - len(rows),
            decode_pages=self.pages[rows].numpy() if rows else None,
            decode_lens=lens if rows else None,
            decode_own_start=np.zeros(len(rows), np.int64) if rows else None,
            max_decode_len=int(lens.max()) if rows else 0,
        )
