"""Which prefill chunks of a step begin with the same pages, so that their tokens may share tiles over those.

A chunk of few tokens fills a tile badly: with 16 tokens of two heads each, three quarters of a tile of 128 rows are
padding, over the whole of a long prompt prefix. Where many such chunks stand behind one prefix, their tokens together
fill tiles over its pages, and each chunk goes on alone from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchgen.kernels.types import ChunkPages, Ints

__all__ = ["SharedPages", "shared_pages"]

LEAST_KEYS = 256
"""Positions below which a pass of its own costs more, by the parts it leaves, than it saves."""


@dataclass(frozen=True, slots=True)
class SharedPages:
    """Chunks, by index, that have pages [begin, end) of their tables in common, all of them past their queries."""

    chunks: Ints
    begin: int
    end: int


def shared_pages(
    chunks: Sequence[ChunkPages], page_size: int, tile_tokens: int, align: int = 1
) -> tuple[list[SharedPages], Ints]:
    """Prefixes that are worth a pass of their own, and how many pages of each chunk they cover.

    Args:
        chunks: a step's.
        page_size: S.
        tile_tokens: most tokens of a tile; chunks of more than half as many fill tiles well enough alone.
        align: pages that those of a prefix are a multiple of.

    Returns:
        shared: each of at least two chunks; those of one chunk are adjacent runs from page 0 on.
        covered: [C] int64 pages.
    """
    covered = np.zeros(len(chunks), np.int64)
    pasts = [(chunk.kv_len - chunk.q_len) // page_size for chunk in chunks]
    may = [2 * c.q_len <= tile_tokens and p * page_size >= LEAST_KEYS for c, p in zip(chunks, pasts, strict=True)]
    if sum(may) < 2:
        return [], covered
    tokens = np.array([chunk.q_len for chunk in chunks], np.int64)
    past = np.array(pasts, np.int64)
    chosen = np.flatnonzero(may)
    tables = np.full((len(chunks), int(past[chosen].max())), -1, np.int64)
    for index in chosen.tolist():
        tables[index, : past[index]] = chunks[index].pages[: past[index]]
    shared: list[SharedPages] = []
    # (chunks, pages that they have in common, pages dealt with), depth first through the tree of the tables.
    stack = [(chosen, 0, 0)]
    while stack:
        members, page, done = stack.pop()
        for run in _by_page(members, tables[members, page]):
            least = int(past[run].min())
            differing = np.flatnonzero((tables[run, page:least] != tables[run[0], page:least]).any(0))
            common = page + int(differing[0]) if len(differing) else least
            reached, end = done, common // align * align
            if _worth(tokens[run], (end - done) * page_size, tile_tokens):
                shared.append(SharedPages(run, done, end))
                covered[run] = reached = end
            longer = run[past[run] > common]
            if len(longer) > 1:
                stack.append((longer, common, reached))
    return shared, covered


def _by_page(members: Ints, pages: Ints) -> list[Ints]:
    """Runs of at least two members with the same page."""
    order = np.argsort(pages, kind="stable")
    edges = np.flatnonzero(np.diff(pages[order])) + 1
    return [run for run in np.split(members[order], edges) if len(run) > 1]


def _worth(tokens: Ints, keys: int, tile_tokens: int) -> bool:
    """Whether tiles of all tokens together are at most half as many as tiles of each chunk."""
    return keys >= LEAST_KEYS and 2 * -(-int(tokens.sum()) // tile_tokens) <= len(tokens)
