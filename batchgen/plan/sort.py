"""Sort prompts by their token ids and measure what neighbours share. No Python per token or per row.

Most-significant-token-first refinement: groups of rows that agree so far first skip their whole common prefix (compared
a window of tokens at a time with the group's first row), then split by the two tokens at which they begin to differ.
Every token of a shared prefix is read once per row; tokens past a row's divergence are not read at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["sort_prompts"]

WINDOW = 32
"""Tokens compared at once."""
BLOCK = 1 << 16
"""Rows compared at once: bounds the temporary memory."""

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def sort_prompts(tokens: Int32s, offsets: Int64s, keys: Int64s | None = None) -> tuple[Int64s, Int32s]:
    """Order of the prompts by (key, ids), a prefix before its extensions, equal prompts by index.

    Args:
        tokens: [total] int32, ids >= 0.
        offsets: [N + 1] int64; prompt i is `tokens[offsets[i]:offsets[i + 1]]`.
        keys: [N] int64; prompts of different keys share nothing.

    Returns:
        order [N] int64, prompt indices; shared [N] int32, tokens that `order[i]` shares with `order[i - 1]`.
    """
    rows = len(offsets) - 1
    order = np.arange(rows) if keys is None else np.argsort(keys, kind="stable")
    shared = np.zeros(rows, np.int32)
    if rows == 0:
        return order, shared
    first = np.zeros(rows, np.bool_)
    first[0] = True
    if keys is not None:
        first[1:] = np.diff(keys[order]) != 0
    reader = _Reader(tokens, offsets[:-1], np.diff(offsets))
    tied = _Tied(np.arange(rows), first, np.zeros(int(first.sum()), np.int64)).without_singles()
    while len(tied.slots):
        tied = _refine(reader, order, shared, tied)
    return order, shared


@dataclass(frozen=True, slots=True)
class _Tied:
    """Groups of rows not yet told apart: adjacent slots of the order that agree on their first `depth` tokens."""

    slots: Int64s
    first: Bools
    """[slots] whether a group begins here."""
    depth: Int64s
    """[groups]"""

    def without_singles(self) -> _Tied:
        last = np.append(self.first[1:], True)
        single = self.first & last
        if not single.any():
            return self
        return _Tied(self.slots[~single], self.first[~single], self.depth[~single[self.first]])


@dataclass(frozen=True, slots=True)
class _Reader:
    """Windows of tokens at given places of given rows."""

    tokens: Int32s
    starts: Int64s
    lengths: Int64s

    def windows(self, rows: Int64s, depth: Int64s, width: int) -> Int32s:
        """[rows, width] tokens from `depth` on; what lies past a row's end is arbitrary."""
        total = len(self.tokens)
        begin = self.starts[rows] + depth
        if total < width:
            return np.take(self.tokens, np.minimum(begin[:, None] + np.arange(width), total - 1))
        view = np.lib.stride_tricks.sliding_window_view(self.tokens, width)
        out: Int32s = view[np.minimum(begin, total - width)]
        late = np.flatnonzero(begin > total - width)
        if len(late):
            out[late] = np.take(self.tokens, np.minimum(begin[late, None] + np.arange(width), total - 1))
        return out

    def common(self, rows: Int64s, others: Int64s, group: Int64s, depth: Int64s) -> Int64s:
        """Tokens, at most WINDOW, that `rows[i]` and `others[group[i]]` share from `depth[group[i]]` on."""
        result = np.empty(len(rows), np.int64)
        for begin in range(0, len(rows), BLOCK):
            part = slice(begin, begin + BLOCK)
            ids = group[part]
            low, high = int(ids[0]), int(ids[-1]) + 1
            theirs = self.windows(others[low:high], depth[low:high], WINDOW)[ids - low]
            mine = self.windows(rows[part], depth[ids], WINDOW)
            differ = mine != theirs
            equal = np.where(differ.any(axis=1), differ.argmax(axis=1), WINDOW)
            left = np.minimum(self.lengths[rows[part]], self.lengths[others[ids]]) - depth[ids]
            result[part] = np.minimum(equal, left)
        return result

    def pairs(self, rows: Int64s, depth: Int64s) -> npt.NDArray[np.uint64]:
        """[rows] the two tokens at `depth`, plus one each, as one sortable number; 0 past the end."""
        two = self.windows(rows, depth, 2).astype(np.uint64) + np.uint64(1)
        left = self.lengths[rows] - depth
        high = np.where(left > 0, two[:, 0], np.uint64(0))
        low = np.where(left > 1, two[:, 1], np.uint64(0))
        packed: npt.NDArray[np.uint64] = (high << np.uint64(32)) | low
        return packed


def _refine(reader: _Reader, order: Int64s, shared: Int32s, tied: _Tied) -> _Tied:
    """Advance every group: past a whole window that all its rows share, else split it where they differ."""
    starts = np.flatnonzero(tied.first)
    group = np.cumsum(tied.first) - 1
    rows = order[tied.slots]
    common = np.minimum.reduceat(reader.common(rows, rows[starts], group, tied.depth), starts)
    depth = tied.depth + common
    split = common < WINDOW
    if not split.any():
        return _Tied(tied.slots, tied.first, depth)
    moving = split[group]
    again = _split(reader, order, shared, _Tied(tied.slots[moving], tied.first[moving], depth[split]))
    if split.all():
        return again
    kept = _Tied(tied.slots[~moving], tied.first[~moving], depth[~split])
    return _merge(kept, again)


def _split(reader: _Reader, order: Int64s, shared: Int32s, tied: _Tied) -> _Tied:
    """Sort each group by its next two tokens, note what neighbours share, return the groups still tied."""
    group = np.cumsum(tied.first) - 1
    rows = order[tied.slots]
    pairs = reader.pairs(rows, tied.depth[group])
    places = np.argsort(pairs, kind="stable") if len(tied.depth) == 1 else np.lexsort((pairs, group))
    rows, pairs = rows[places], pairs[places]
    order[tied.slots] = rows
    depth = tied.depth[group]
    high = pairs >> np.uint64(32)
    same = np.zeros(len(rows), np.bool_)
    same[1:] = (pairs[1:] == pairs[:-1]) & ~tied.first[1:]
    one = np.zeros(len(rows), np.bool_)
    one[1:] = (high[1:] == high[:-1]) & ~same[1:]
    ended = (pairs & np.uint64(0xFFFFFFFF)) == 0
    value = np.where(same, reader.lengths[rows], depth + one)
    inside = ~tied.first
    # A pair that ties and has not ended is overwritten by a later round.
    shared[tied.slots[inside]] = value[inside]
    on = ~ended
    return _Tied(tied.slots[on], ~same[on], (depth + 2)[on & ~same]).without_singles()


def _merge(a: _Tied, b: _Tied) -> _Tied:
    """Both sets of groups in the order of their slots."""
    slots = np.concatenate([a.slots, b.slots])
    places = np.argsort(slots, kind="stable")
    heads = np.concatenate([a.slots[a.first], b.slots[b.first]])
    depth = np.concatenate([a.depth, b.depth])[np.argsort(heads, kind="stable")]
    return _Tied(slots[places], np.concatenate([a.first, b.first])[places], depth)
