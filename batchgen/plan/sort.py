"""Sort of prompts by token ids, with the lengths of the prefixes that neighbours share. Fully vectorized.

Quicksort on whole prompts: each group of tied rows is compared with one of its rows, the pivot, up to where each
differs. Three values then determine a row's position: whether it comes before or after the pivot, how many tokens it
shares with it, and the two tokens that follow. Rows equal in all three form the groups of the next round, which starts
after those tokens. Only the pivots' tokens are compared more than once, and tokens after a row's divergence are not
read. Pivots are random, so the number of rounds grows with the logarithm of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FIRST_WINDOW = 64
"""Number of tokens compared at first."""
LAST_WINDOW = 256
"""Maximum number of tokens compared at once; windows grow fourfold from `FIRST_WINDOW`."""
BLOCK = 1 << 16
"""Number of tokens gathered at once: they fit into a core's cache and bound the temporary memory."""

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]


def sort_prompts(tokens: Int32s, offsets: Int64s, keys: Int64s | None = None) -> tuple[Int64s, Int32s]:
    """Sort the prompts by (key, ids), a prefix before its extensions, equal prompts by index.

    Needs about 150 bytes of memory per prompt, regardless of its length.

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
    turn = 0
    while len(tied.slots):
        # Two tokens separate most rows of a job without sharing: the first round needs no pivot.
        pivots = _pivots(order, tied, turn) if turn else None
        tied = _split(reader, order, shared, tied, pivots)
        turn += 1
    return order, shared


@dataclass(frozen=True, slots=True)
class _Tied:
    """Groups of tied rows: adjacent slots of the order that agree on their first `depth` tokens."""

    slots: Int64s
    """[slots] indices into the order."""
    first: Bools
    """[slots] whether a group begins here."""
    depth: Int64s
    """[groups] number of tokens known to be equal."""

    def without_singles(self) -> _Tied:
        """The groups of more than one row."""
        last = np.append(self.first[1:], True)
        single = self.first & last
        if not single.any():
            return self
        return _Tied(self.slots[~single], self.first[~single], self.depth[~single[self.first]])


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reader of token windows of many rows at once."""

    tokens: Int32s
    starts: Int64s
    lengths: Int64s

    def windows(self, begin: Int64s, width: int) -> Int32s:
        """[rows, width] tokens from the indices `begin` on; values past the last token are arbitrary."""
        last = len(self.tokens) - width
        if last < 0 or int(begin.max()) > last:
            return np.take(self.tokens, begin[:, None] + np.arange(width), mode="clip")
        strides = (self.tokens.itemsize, self.tokens.itemsize)
        view = np.ndarray((last + 1, width), np.int32, self.tokens, strides=strides)
        out: Int32s = view[begin]
        return out

    def pairs(self, rows: Int64s, depth: Int64s) -> Uint64s:
        """[rows] the two tokens at `depth`, each plus one and 0 past the end, packed into one sortable number."""
        two = self.windows(self.starts[rows] + depth, 2).astype(np.uint64) + np.uint64(1)
        left = self.lengths[rows] - depth
        high = np.where(left > 0, two[:, 0], np.uint64(0))
        low = np.where(left > 1, two[:, 1], np.uint64(0))
        packed: Uint64s = (high << np.uint64(32)) | low
        return packed

    def agree(self, rows: Int64s, others: Int64s, depth: Int64s) -> Int64s:
        """[rows] number of tokens that `rows[i]` and `others[i]` share; the first `depth[i]` are known to be equal."""
        until = np.minimum(self.lengths[rows], self.lengths[others])
        result = depth.copy()
        mine, theirs = self.starts[rows], self.starts[others]
        on = np.flatnonzero(result < until)
        width = FIRST_WINDOW
        while len(on):
            step = max(1, BLOCK // width)
            alike = np.empty(len(on), np.bool_)
            for begin in range(0, len(on), step):
                part = on[begin : begin + step]
                at = result[part]
                differ = self.windows(mine[part] + at, width) != self.windows(theirs[part] + at, width)
                equal = differ.argmax(axis=1)
                whole = ~differ[np.arange(len(part)), equal]
                equal[whole] = width
                result[part] = np.minimum(at + equal, until[part])
                alike[begin : begin + step] = whole
            on = on[alike & (result[on] < until[on])]
            width = min(width * 4, LAST_WINDOW)
        return result


def _pivots(order: Int64s, tied: _Tied, turn: int) -> Int64s:
    """[groups] a random row of each group, so that no input makes every choice bad."""
    starts = np.flatnonzero(tied.first)
    sizes = np.diff(np.append(starts, len(tied.slots)))
    hashed = (tied.slots[starts].astype(np.uint64) + np.uint64(turn << 40)) * np.uint64(0x9E3779B97F4A7C15)
    places = ((hashed >> np.uint64(33)) % sizes.astype(np.uint64)).astype(np.int64)
    pivots: Int64s = order[tied.slots[starts + places]]
    return pivots


def _split(reader: _Reader, order: Int64s, shared: Int32s, tied: _Tied, pivots: Int64s | None) -> _Tied:
    """Sort each group around its pivot, store the shared lengths, and return the groups that are still tied.

    If `pivots` is None, sort by the next two tokens only.
    """
    group = np.cumsum(tied.first) - 1
    rows = order[tied.slots]
    depth = tied.depth[group]
    if pivots is None:
        pairs, side = reader.pairs(rows, depth), group
    else:
        others = pivots[group]
        agreed = reader.agree(rows, others, depth)
        pairs = reader.pairs(rows, agreed)
        side = _sides(group, agreed - depth, pairs, reader.pairs(others, agreed))
        depth = agreed
    places = np.argsort(pairs, kind="stable") if len(tied.depth) == 1 and pivots is None else np.lexsort((pairs, side))
    rows, pairs, side, depth = rows[places], pairs[places], side[places], depth[places]
    order[tied.slots] = rows
    together = side[1:] == side[:-1]
    same = np.zeros(len(rows), np.bool_)
    same[1:] = (pairs[1:] == pairs[:-1]) & together
    one = np.zeros(len(rows), np.bool_)
    one[1:] = (pairs[1:] >> np.uint64(32) == pairs[:-1] >> np.uint64(32)) & together & ~same[1:]
    ended = (pairs & np.uint64(0xFFFFFFFF)) == 0
    least = depth.copy()
    np.minimum(depth[1:], depth[:-1], out=least[1:])
    value = np.where(same, reader.lengths[rows], least + one)
    inside = ~tied.first
    # A later round overwrites the pairs that are tied and have not ended.
    shared[tied.slots[inside]] = value[inside]
    on = ~ended
    return _Tied(tied.slots[on], ~same[on], (depth + 2)[on & ~same]).without_singles()


def _sides(group: Int64s, agreed: Int64s, mine: Uint64s, pivots: Uint64s) -> Int64s:
    """[rows] sort key by group, then by position relative to the pivot.

    Among the rows before the pivot those that share least come first, among the rows after it last.
    """
    shift = np.uint64(32)
    mine, pivots = mine >> shift, pivots >> shift
    span = int(agreed.max()) + 1
    place = np.where(mine < pivots, agreed, np.where(mine == pivots, span, 2 * span - agreed))
    sides: Int64s = group * np.int64(2 * span + 1) + place
    return sides
