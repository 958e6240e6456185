"""Attention with vllm-flash-attn over the paged pool (see `flash.library`).

One call for all prefill chunks, and one for all decode rows over their own pages. Chunks attend to their whole past,
shared pages included. Decode rows that share a prefix attend to it in a separate pass (`PrefixPass`), whose partial
results are merged with the library's by log-sum-exp, in float32 (see `merge`). A sink joins the denominator at the
end: out * sigmoid(lse - sink).

The library loads whole tiles. Where layers free the pages behind their window, which may hold anything then, its tables
begin with the first page that is seen.

A row's own pages may begin after position 0. The library treats them as the whole sequence: its causal mask and its
window count back from the last key, which is at the query's position, so the distances are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.kernels.flash.library import FlashLibrary, Runs
from batchgen.kernels.merge import merge_parts
from batchgen.kernels.pooled import PooledAttention
from batchgen.kernels.types import AttentionArgs, AttentionBatch, ChunkPages, KVPool

Ints = npt.NDArray[np.int32]


class PrefixPass(Protocol):
    """Attention of a step's decode rows to the pages of their prefix groups only."""

    def prefix_parts(self, layer: int, query: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        """Partial results of all groups, merged for rows that are in several.

        Args:
            layer: index of the layer.
            query: [T, N, D] of the whole step.
            args: as in `Attention.attend`, windows by absolute positions; sinks are left out.

        Returns:
            [R, N, Dv] float32 and the log-sum-exp [R, N] float32; 0 and -inf for rows that see no shared page.
        """


PrefixFactory = Callable[[KVPool, AttentionBatch], PrefixPass]
"""Makes one step's pass over shared prefixes."""


class MergeParts(Protocol):
    """The signature of `merge.merge_parts`, which PyTorch and Triton implement."""

    def __call__(
        self,
        out_a: Tensor,
        lse_a: Tensor,
        out_b: Tensor,
        lse_b: Tensor,
        *,
        dtype: torch.dtype | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `merge.merge_parts`."""


def flash_factory(
    library: FlashLibrary, prefix: PrefixFactory, merge: MergeParts
) -> Callable[[KVPool, AttentionBatch], FlashAttention]:
    """A factory of each step's attention with `library`, which uses `prefix` and `merge` for shared prefixes."""
    return lambda pool, batch: FlashAttention(library, pool, batch, prefix, merge)


class FlashAttention(PooledAttention):
    """One step's attention with a flash library (the `PagedAttention` protocol). Made for each step."""

    def __init__(
        self,
        library: FlashLibrary,
        pool: KVPool,
        batch: AttentionBatch,
        prefix: PrefixFactory,
        merge: MergeParts = merge_parts,
    ) -> None:
        self._library = library
        self._pool = pool
        self._batch = batch
        self._prefix = prefix(pool, batch) if batch.groups else None
        self._merge = merge
        self._parts: dict[int | None, list[tuple[slice, Runs]]] = {}
        self._schedules: dict[tuple[int, int, tuple[int, ...], int | None, bool], Tensor | None] = {}

    def attend_stored(self, layer: int, query: Tensor, args: AttentionArgs) -> Tensor:
        """Attend over the stored keys and values. See `PagedAttention.attend_stored`."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        queries = query.to(keys.dtype)
        out = torch.empty(*query.shape[:2], values.shape[3], dtype=keys.dtype, device=query.device)
        window = args.window if self._batch.windowed else None
        if window not in self._parts:
            self._parts[window] = _parts(self._batch, self._pool.page_size, window)
        parts = self._parts[window]
        for number, (tokens, runs) in enumerate(parts):
            part = out[tokens]
            lse = self._attend_part(number, queries[tokens], part, (keys, values), runs, args)
            if self._prefix is not None and number == len(parts) - 1:
                shared = self._prefix.prefix_parts(layer, queries, args)
                part, _ = self._merge(part, lse, *shared, sinks=args.sinks)
            elif args.sinks is not None:
                part = part * torch.sigmoid(lse - args.sinks.float()).unsqueeze(-1)
            if len(part) == len(out):
                out = part
            elif part.data_ptr() != out[tokens].data_ptr():
                out[tokens] = part
        return out.to(query.dtype)

    def _attend_part(
        self, number: int, query: Tensor, out: Tensor, cache: tuple[Tensor, Tensor], runs: Runs, args: AttentionArgs
    ) -> Tensor:
        """Call the library once; it writes to `out`. Returns lse [t, N] float32."""
        keys, values = cache
        kind = (number, query.shape[1], (*keys.shape[2:], values.shape[3]), args.window, bool(args.softcap))
        if kind not in self._schedules:
            self._schedules[kind] = self._library.schedule(query.shape[1], keys, values, runs, args)
        written, lse = self._library.attend(query, keys, values, runs, args, self._schedules[kind], out)
        if written.data_ptr() != out.data_ptr():
            out.copy_(written)
        return lse.transpose(0, 1)


def _parts(batch: AttentionBatch, page_size: int, window: int | None) -> list[tuple[slice, Runs]]:
    """The step's calls, chunks first: flat tokens, and the runs that they form; all tables in one upload.

    `window`: tables have no pages behind it; None: as they are.
    """
    parts: list[tuple[slice, list[Ints], int, int]] = []
    chunks = [c for c in batch.chunks if c.q_len]
    if chunks:
        # The queries of chunks are adjacent; chunks without queries are left out.

        starts = np.cumsum([0, *(c.q_len for c in chunks)])
        lens, queries = np.array([c.kv_len for c in chunks]), np.array([c.q_len for c in chunks])
        tables, lens = _seen(_padded(chunks), lens, lens - queries, page_size, window)
        parts.append((slice(0, int(starts[-1])), [starts, lens, tables], int(queries.max()), int(lens.max())))
    if batch.decode_pages is not None and batch.decode_lens is not None and len(batch.decode_lens):
        rows = len(batch.decode_lens)
        tables, lens = _seen(batch.decode_pages, batch.decode_lens, batch.decode_lens - 1, page_size, window)
        tokens = slice(batch.decode_start, batch.decode_start + rows)
        longest = batch.max_decode_len if window is None else int(lens.max())
        parts.append((tokens, [np.arange(rows + 1), lens, tables], 1, longest))
    on_device = iter(batch.device.upload(*(t.astype(np.int32) for _, tables, _, _ in parts for t in tables)))
    return [
        (tokens, Runs(next(on_device), next(on_device), next(on_device), queries, keys))
        for tokens, _, queries, keys in parts
    ]


def _seen(
    tables: npt.NDArray[Any], lens: npt.NDArray[Any], first: npt.NDArray[Any], page_size: int, window: int | None
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Page tables [n, p] and lengths [n] without the pages that no token at positions `first` [n] or later sees."""
    if window is None:
        return tables, lens
    lead = np.maximum(first - window + 1, 0) // page_size
    lens = lens - lead * page_size
    inside = np.arange(-(-int(lens.max()) // page_size))
    return np.take_along_axis(tables, np.minimum(lead[:, None] + inside, tables.shape[1] - 1), 1), lens


def _padded(chunks: list[ChunkPages]) -> Ints:
    table = np.zeros((len(chunks), max(len(c.pages) for c in chunks)), np.int32)
    for row, chunk in zip(table, chunks, strict=True):
        row[: len(chunk.pages)] = chunk.pages
    return table
