"""Attention in which runs of tokens see one another: the features of an image in Gemma 3 and its like.

A backend attends causally; the rows of the runs are computed again, in plain PyTorch and float32, over what each of
them sees: the positions that a causal token sees, within its window, and the later tokens of its run, or all of them,
which are in the pool by then. A run is computed alone, so that its results do not depend on what else is in the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.attention.torch_attention import TorchAttention
from batchgen.kernels.pooled import AttentionCounts, PooledAttention
from batchgen.kernels.types import AttentionArgs, AttentionBatch, KVPool, PagedAttention

_ROWS: Final = 64
"""Tokens of a run that are computed at once, whose scores are all in memory."""


class _Part(NamedTuple):
    """Tokens of a run that are computed at once."""

    rows: slice
    """Their rows among the queries"""
    slots: Tensor
    """[S] int64: slots of the pool that they see"""
    hidden: Tensor
    """[n, S] bool: which of these a token does not see"""


class SpanAttention(PooledAttention):
    """One step's attention (the `PagedAttention` protocol) with runs of tokens that see one another."""

    def __init__(
        self,
        causal: PagedAttention,
        pool: KVPool,
        batch: AttentionBatch,
        spans: Sequence[tuple[int, int]],
        start: int = 0,
        *,
        exceed: bool = False,
    ) -> None:
        """Wrap a backend's attention of a step, or of a tile of it.

        Args:
            causal: the backend's attention over `pool` and `batch`.
            pool: keys and values of the layers.
            batch: the step.
            spans: flat tokens [start, end) of each run in the step; each lies in one chunk.
            start: flat token of the step that is the first of the queries.
            exceed: whether a token sees those of its run that are behind its window.
        """
        self._causal = causal
        self._pool = pool
        self._batch = batch
        self._spans = spans
        self._start = start
        self._exceed = exceed
        self._plans: dict[int | None, list[_Part]] = {}
        """By window, planned at the first layer that needs it."""

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """See `PooledAttention.spans`."""
        return self._spans

    @property
    def counts(self) -> AttentionCounts:
        """Counters of the causal attention."""
        return self._causal.counts if isinstance(self._causal, PooledAttention) else AttentionCounts()

    def cache(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `PagedAttention.cache`."""
        return self._causal.cache(layer)

    def tile(self, start: int, end: int, height: int) -> SpanAttention:
        """See `TorchAttention.tile`, which the causal part must be; a run is in one tile."""
        assert isinstance(self._causal, TorchAttention)
        inside = [span for span in self._spans if start <= span[0] and span[1] <= end]
        causal = self._causal.tile(start, end, height)
        return SpanAttention(causal, self._pool, self._batch, inside, start, exceed=self._exceed)

    def attend_stored(self, layer: int, query: Tensor, args: AttentionArgs) -> Tensor:
        """See `PagedAttention.attend_stored`."""
        out = self._causal.attend_stored(layer, query, args)
        if args.runs:
            if args.window not in self._plans:
                self._plans[args.window] = [part for span in self._spans for part in self._plan(span, args.window)]
            for part in self._plans[args.window]:
                out[part.rows] = self._attend(layer, query[part.rows], args, part).to(out.dtype)
        return out

    def _plan(self, span: tuple[int, int], window: int | None) -> Iterator[_Part]:
        """The parts of a run."""
        start, end = span
        chunk = next(c for c in self._batch.chunks if c.q_start <= start < c.q_start + c.q_len)
        assert end <= chunk.q_start + chunk.q_len, "a run lies in one chunk"
        size, ahead = self._pool.page_size, chunk.kv_len - chunk.q_len - chunk.q_start
        for token in range(start, end, _ROWS):
            first, last = token + ahead, min(token + _ROWS, end) + ahead  # positions
            low = 0 if window is None else max(0, first - window + 1)
            low = min(low, start + ahead) if self._exceed else low
            at, places = np.arange(first, last)[:, None], np.arange(low, end + ahead)
            hidden = (places > at) & (places < start + ahead)  # [n, S]: what comes later in the run is seen
            if window is not None:
                hidden |= (places <= at - window) & ((places < start + ahead) | (not self._exceed))
            slots = chunk.pages[places // size] * size + places % size
            rows = slice(token - self._start, last - ahead - self._start)
            yield _Part(rows, *self._batch.device.upload(slots, hidden))

    def _attend(self, layer: int, query: Tensor, args: AttentionArgs, part: _Part) -> Tensor:
        """[n, N, D] -> [n, N, Dv] float32: results of a part's tokens."""
        keys, values = (x[layer].flatten(0, 1)[part.slots].float() for x in (self._pool.keys, self._pool.values))
        kv_heads, group = keys.shape[1], query.shape[1] // keys.shape[1]
        rows = query.float().view(len(query), kv_heads, group, -1)  # [n, K, G, D]
        scores = torch.einsum("nkgd,skd->nkgs", rows, keys) * args.scale
        if args.softcap is not None:
            scores = torch.tanh(scores / args.softcap) * args.softcap
        scores = scores.masked_fill(part.hidden[:, None, None], -torch.inf)
        if args.sinks is not None:
            sinks = args.sinks.float().view(1, kv_heads, group, 1).expand(len(query), -1, -1, -1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : len(keys)]  # [n, K, G, S]
        return torch.einsum("nkgs,skd->nkgd", weights, values).flatten(1, 2)
