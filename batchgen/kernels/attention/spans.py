"""Attention in which runs of tokens see one another: the features of an image in Gemma 3 and its like.

A backend attends causally; the rows of the runs are computed again, in plain PyTorch and float32, over what each of
them sees: the positions that a causal token sees, within its window, and the later tokens of its run, which are in
the pool by then. A run is computed alone, so that its results do not depend on what else is in the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from batchgen.kernels.attention.torch_attention import TorchAttention
from batchgen.kernels.pooled import AttentionCounts, PooledAttention
from batchgen.kernels.types import AttentionArgs, AttentionBatch, Ints, KVPool, PagedAttention

_ROWS: Final = 64
"""Tokens of a run that are computed at once, whose scores are all in memory."""


class SpanAttention(PooledAttention):
    """One step's attention (the `PagedAttention` protocol) with runs of tokens that see one another."""

    def __init__(
        self,
        causal: PagedAttention,
        pool: KVPool,
        batch: AttentionBatch,
        spans: Sequence[tuple[int, int]],
        start: int = 0,
    ) -> None:
        """Wrap a backend's attention of a step, or of a tile of it.

        Args:
            causal: the backend's attention over `pool` and `batch`.
            pool: keys and values of the layers.
            batch: the step.
            spans: flat tokens [start, end) of each run in the step; each lies in one chunk.
            start: flat token of the step that is the first of the queries.
        """
        self._causal = causal
        self._pool = pool
        self._batch = batch
        self._spans = spans
        self._start = start

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
        return SpanAttention(self._causal.tile(start, end, height), self._pool, self._batch, inside, start)

    def attend_stored(self, layer: int, query: Tensor, args: AttentionArgs) -> Tensor:
        """See `PagedAttention.attend_stored`."""
        out = self._causal.attend_stored(layer, query, args)
        for start, end in self._spans if args.runs else ():
            chunk = next(c for c in self._batch.chunks if c.q_start <= start < c.q_start + c.q_len)
            assert end <= chunk.q_start + chunk.q_len, "a run lies in one chunk"
            ahead = chunk.kv_len - chunk.q_len - chunk.q_start  # position of a flat token, less its number
            run = range(start + ahead, end + ahead)
            for at in range(start, end, _ROWS):
                rows = slice(at - self._start, min(at + _ROWS, end) - self._start)
                out[rows] = self._rows(layer, query[rows], args, (run, at + ahead, chunk.pages)).to(out.dtype)
        return out

    def _rows(self, layer: int, query: Tensor, args: AttentionArgs, place: tuple[range, int, Ints]) -> Tensor:
        """[n, N, D] -> [n, N, Dv] float32: results of tokens of a run.

        `place`: the positions of the run, the position of the first of the tokens, the pages of their sequence.
        """
        run, first, table = place
        end, size = run.stop, self._pool.page_size
        low = 0 if args.window is None else max(0, first - args.window + 1)
        pages = torch.from_numpy(table[low // size : -(-end // size)]).to(query.device)
        seen = slice(low % size, low % size + end - low)
        keys, values = (x[layer][pages].flatten(0, 1)[seen].float() for x in (self._pool.keys, self._pool.values))
        at = torch.arange(first, first + len(query), device=query.device)[:, None]  # [n, 1]
        places = torch.arange(low, end, device=query.device)  # [S]
        hidden = (places > at) & (places < run.start)  # [n, S]: what comes later in the run is seen
        if args.window is not None:
            hidden |= places <= at - args.window
        kv_heads, group = keys.shape[1], query.shape[1] // keys.shape[1]
        rows = query.float().view(len(query), kv_heads, group, -1)  # [n, K, G, D]
        scores = torch.einsum("nkgd,skd->nkgs", rows, keys) * args.scale
        if args.softcap is not None:
            scores = torch.tanh(scores / args.softcap) * args.softcap
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        if args.sinks is not None:
            sinks = args.sinks.float().view(1, kv_heads, group, 1).expand(len(query), -1, -1, -1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : len(places)]  # [n, K, G, S]
        return torch.einsum("nkgs,skd->nkgd", weights, values).flatten(1, 2)
