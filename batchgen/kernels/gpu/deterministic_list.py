"""Work lists of `deterministic_attention_kernel`, planned on the host in numpy.

A token's keys are scanned in steps of a fixed number of positions, which begin at multiples of that number, from the
first to the last. The scan does not depend on the batch: chunks and decode rows use one tile shape, and no scan is
split over programs. Decode rows of a prefix group still share work: the group's scan stops after the last whole step
within the group and saves its float32 state, from which every row continues alone. A row in a group thus makes the same
steps with the same values as it would alone.

Launches, in order: prefix groups, by the number of groups before them on their rows' scans, then chunks and decode
rows. Within a launch the longest items come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from batchgen.kernels.attention.work_items import token_positions
from batchgen.kernels.gpu.work_list import FIELDS, WorkList, pack
from batchgen.kernels.types import AttentionBatch, Ints

_NAMES = (
    "rows_at",  # the item's tokens are rows[rows_at : rows_at + count]
    "count",
    "page_at",  # index in pages of the item's page table
    "base",  # position of the table's first slot
    "first",  # keys before it are visible to none of the tokens, and not loaded
    "begin",  # first step, a multiple of the tile's keys
    "end",  # end of the last step, which may be shorter
    "resumed",  # whether the tokens continue from a saved state
    "saves_state",  # whether the tokens save their state instead of a result
)
_NONE = slice(0, 0)


@dataclass(frozen=True, slots=True)
class DeterministicListShape:
    """Sizes that a list is made for; they do not depend on the step."""

    page_size: int
    window: int | None
    queries: int
    """Most tokens of a tile."""
    keys: int
    """Positions per step."""

    def plan(self, batch: AttentionBatch, tokens: int | None = None) -> WorkList:
        """The work list of a step. See `plan_deterministic`."""
        return plan_deterministic(batch, self, tokens)


def plan_deterministic(batch: AttentionBatch, shape: DeterministicListShape, tokens: int | None = None) -> WorkList:
    """The work list of a step, of `tokens` flat tokens if given; tokens past the batch's are in no item.

    Groups must form a tree: a row's groups are adjacent from position 0 to its own pages, and rows that share a group
    share everything before it.
    """
    planner = _Planner(batch, shape, batch.slot_mapping.shape[0] if tokens is None else tokens)
    levels = planner.groups()
    return planner.pack([*levels, [*planner.chunks(), *planner.decodes()]])


class _Planner:
    def __init__(self, batch: AttentionBatch, shape: DeterministicListShape, tokens: int) -> None:
        self._batch = batch
        self._shape = shape
        self._positions = token_positions(batch, tokens)
        rows = 0 if batch.decode_lens is None else len(batch.decode_lens)
        self._rows: list[Ints] = [np.arange(tokens)]
        self._rows_end = tokens
        self._pages: list[Ints] = []
        self._pages_end = 0
        # Of each decode row, after the groups so far: the end position, the number of groups, and the last pages.
        self._ends = np.zeros(rows, np.int64)
        self._depths = np.zeros(rows, np.int64)
        self._tails = np.zeros((rows, -(-shape.keys // shape.page_size) if batch.groups else 0), np.int64)

    def groups(self) -> list[list[Ints]]:
        """Items [n, 9] of the groups, by launch."""
        levels: list[list[Ints]] = []
        for group in sorted(self._batch.groups, key=lambda g: g.start):
            rows = group.rows
            assert (self._ends[rows] == group.start).all(), "a row's groups are adjacent"
            assert (self._tails[rows] == self._tails[rows[0]]).all(), "rows of a group share what is before it"
            end = group.start + len(group.pages) * self._shape.page_size
            begin, stop = self._whole_steps(group.start), self._whole_steps(end)
            if stop > begin:
                depth = int(self._depths[rows[0]])
                levels += [[]] if depth == len(levels) else []
                levels[depth].append(self._group(group.rows, group.pages, group.start, begin, stop))
                self._depths[rows] = depth + 1
            both = np.concatenate((self._tails[rows[0]], group.pages))
            self._tails[rows] = both[len(both) - self._tails.shape[1] :]
            self._ends[rows] = end
        return levels

    def _group(self, rows: Ints, pages: Ints, start: int, begin: Ints, stop: Ints) -> Ints:
        """Items of a group's rows over keys [begin, stop), one per tile of rows."""
        size = self._shape.page_size
        base = begin // size * size
        before = self._tails[rows[0]][self._tails.shape[1] - (start - base) // size :]
        page_at = self._add_pages(np.concatenate((before, pages)))
        tokens = rows + self._batch.decode_start
        at = np.arange(0, len(tokens), self._shape.queries)
        count = np.minimum(self._shape.queries, len(tokens) - at)
        low = np.minimum.reduceat(self._positions[tokens], at)
        first = self._first(low)
        begin = np.clip(self._whole_steps(first), begin, stop)  # skip steps that no row sees; they change nothing
        resumed = int(self._depths[rows[0]] > 0)
        items = self._items(self._rows_end + at, count, page_at, base, first, begin, stop, resumed, 1)
        self._rows.append(tokens)
        self._rows_end += len(tokens)
        return items

    def chunks(self) -> Iterator[Ints]:
        """Items of the prefill chunks, whose scans begin at the first key that any token of a tile sees."""
        queries = self._shape.queries
        for chunk in self._batch.chunks:
            at = np.arange(0, chunk.q_len, queries)
            count = np.minimum(queries, chunk.q_len - at)
            low = chunk.kv_len - chunk.q_len + at
            first = self._first(low)
            page_at = self._add_pages(chunk.pages)
            begin = self._whole_steps(first)
            yield self._items(chunk.q_start + at, count, page_at, 0, first, begin, low + count, 0, 0)

    def decodes(self) -> Iterator[Ints]:
        """An item per decode row, from the end of its groups' scans to its last key."""
        batch, size = self._batch, self._shape.page_size
        if batch.decode_pages is None or batch.decode_own_start is None:
            return
        assert (self._ends == batch.decode_own_start).all(), "own pages follow the groups'"
        rows, kept = batch.decode_pages.shape[0], self._tails.shape[1]
        tables = np.concatenate((self._tails, batch.decode_pages), axis=1)
        page_at = self._add_pages(tables.reshape(-1)) + np.arange(rows) * tables.shape[1]
        left = self._whole_steps(self._ends)  # position of the saved state
        table_from = left // size * size
        skipped = kept - (batch.decode_own_start - table_from) // size
        last = self._positions[batch.decode_start : batch.decode_start + rows]
        first = self._first(last)
        begin = np.maximum(self._whole_steps(first), left)
        at = batch.decode_start + np.arange(rows)
        one, state = np.ones(rows, np.int64), (self._depths > 0).astype(np.int64)
        yield self._items(at, one, page_at + skipped, table_from, first, begin, last + 1, state, 0)

    def _whole_steps(self, position: Ints | int) -> Ints:
        starts: Ints = np.asarray(position) // self._shape.keys * self._shape.keys
        return starts

    def _first(self, low: Ints) -> Ints:
        """First key that any token of a tile sees, if the tile's first token is at position `low`."""
        if self._shape.window is None:
            return np.zeros_like(low)
        return np.maximum(low - self._shape.window + 1, 0)

    def _add_pages(self, pages: Ints) -> int:
        at = self._pages_end
        self._pages.append(pages)
        self._pages_end += len(pages)
        return at

    def _items(self, *columns: Ints | int) -> Ints:
        """Stack columns to items [n, 9], in the order of `_NAMES`."""
        assert len(columns) == len(_NAMES)
        table: Ints = np.stack(np.broadcast_arrays(*columns), axis=1)
        return table

    def pack(self, launches: list[list[Ints]]) -> WorkList:
        """Sort each launch's items by length and pack all sections."""
        tables = []
        for items in launches:
            joined = np.concatenate(items) if items else np.empty((0, len(_NAMES)), np.int64)
            joined = joined[np.argsort(joined[:, 5] - joined[:, 6], kind="stable")]
            table = np.zeros((len(joined), FIELDS), np.int64)
            table[:, : len(_NAMES)] = joined
            tables.append(table)
        pages = np.concatenate(self._pages) if self._pages else np.empty(0, np.int64)
        packed, places = pack(
            [*(table.reshape(-1) for table in tables), np.concatenate(self._rows), self._positions, pages]
        )
        *items_at, rows, positions, page_table = places
        whole = np.concatenate(tables)
        return WorkList(
            packed=packed,
            items=tuple(items_at),
            rows=rows,
            positions=positions,
            pages=page_table,
            parts=_NONE,
            merges=(_NONE, _NONE, _NONE),
            num_parts=0,
            keys_read=int(np.maximum(whole[:, 6] - np.maximum(whole[:, 4], whole[:, 5]), 0).sum()),
            padded_rows=int((self._shape.queries - whole[:, 1]).sum()),
            direct=0,
        )
