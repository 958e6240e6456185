"""Prefix groups that begin and end at multiples of more positions than a page has.

Where a group would end within a block of positions, each of its rows, or each group behind it, takes the whole block
for itself: so which positions are attended to together does not depend on where prompts part.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from batchgen.kernels.types import AttentionBatch, GroupPages, Ints

__all__ = ["aligned"]


def aligned(batch: AttentionBatch, page_size: int, align: int) -> AttentionBatch:
    """The same attention, by groups and own pages that begin at multiples of `align`.

    Args:
        batch: whose groups cover every position before a row's own pages, but those that no window reaches.
        page_size: S.
        align: positions, a multiple of S.
    """
    if not batch.groups:
        return batch
    assert batch.decode_pages is not None
    assert batch.decode_lens is not None
    assert batch.decode_own_start is not None
    step, own = align // page_size, batch.decode_own_start // page_size  # pages
    before = np.zeros((len(own), int(own.max())), np.int64)  # [R, pages] those of each row's groups
    groups = []
    for group in batch.groups:
        start = group.start // page_size
        before[group.rows, start : start + len(group.pages)] = group.pages
    for group in batch.groups:
        start, end = (x // page_size // step * step for x in (group.start, group.start + len(group.pages) * page_size))
        if end > start:
            groups.append(GroupPages(group.rows, before[group.rows[0], start:end], start * page_size))
    first = own // step * step
    lens = batch.decode_lens + (own - first) * page_size
    return replace(
        batch,
        groups=groups,
        decode_pages=_from(
            first, np.concatenate((before, batch.decode_pages), 1), own, before.shape[1], lens, page_size
        ),
        decode_lens=lens,
        decode_own_start=first * page_size,
        max_decode_len=int(lens.max()),
    )


def _from(first: Ints, tables: Ints, own: Ints, width: int, lens: Ints, page_size: int) -> Ints:
    """[R, W] each row's pages from page `first` on: of `tables` up to page `own`, then from column `width` on."""
    page = first[:, None] + np.arange(-(-int(lens.max()) // page_size))
    column = np.where(page < own[:, None], page, page - own[:, None] + width)
    return np.take_along_axis(tables, np.minimum(column, tables.shape[1] - 1), 1)
