"""Steps of layers that attend in chunks (Llama 4): a token sees no position before the last multiple of their size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from batchgen.kernels.types import AttentionBatch, ChunkPages, GroupPages, Ints


def restarted(batch: AttentionBatch, size: int, page_size: int) -> AttentionBatch:
    """A step in which each sequence begins at the last multiple of `size`, so that any causal backend computes it.

    Prefill chunks are cut at the multiples. Positions count from where a token's sequence begins, and page tables begin
    there, so `size` must be a multiple of `page_size`.
    """
    chunks = [piece for chunk in batch.chunks for piece in _pieces(chunk, size, page_size)]
    if batch.decode_pages is None:
        return replace(batch, chunks=chunks)
    assert batch.decode_lens is not None
    assert batch.decode_own_start is not None
    begin = (batch.decode_own_start + batch.decode_lens - 1) // size * size  # [R]
    if not begin.any():
        return replace(batch, chunks=chunks)
    before = np.maximum(begin - batch.decode_own_start, 0) // page_size  # [R] own pages that are not seen
    lens = batch.decode_lens - before * page_size
    places = before[:, None] + np.arange(-(-int(lens.max()) // page_size))
    most = batch.decode_pages.shape[1]
    pages = np.take_along_axis(batch.decode_pages, np.minimum(places, most - 1), 1)
    return replace(
        batch,
        chunks=chunks,
        groups=[part for group in batch.groups for part in _parts(group, begin[group.rows], page_size)],
        decode_pages=np.where(places < most, pages, 0),
        decode_lens=lens,
        decode_own_start=np.maximum(batch.decode_own_start - begin, 0),
        max_decode_len=int(lens.max()),
    )


def _pieces(chunk: ChunkPages, size: int, page_size: int) -> Iterator[ChunkPages]:
    """A prefill chunk, cut at the multiples of `size`."""
    first = chunk.kv_len - chunk.q_len
    for begin in range(first // size * size, chunk.kv_len, size):
        low, high = max(first, begin), min(begin + size, chunk.kv_len)
        pages = chunk.pages[begin // page_size : -(-high // page_size)]
        yield ChunkPages(chunk.q_start + low - first, high - low, high - begin, pages)


def _parts(group: GroupPages, begin: Ints, page_size: int) -> Iterator[GroupPages]:
    """A prefix group without what its rows do not see, for the rows of each `begin` [g]."""
    end = group.start + len(group.pages) * page_size
    for at in np.unique(begin[begin < end]).tolist():
        low = max(group.start, at)
        yield GroupPages(group.rows[begin == at], group.pages[(low - group.start) // page_size :], low - at)
