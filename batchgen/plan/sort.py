"""Sort of prompts by token ids, with the lengths of the prefixes that neighbours share. Fully vectorized.

Quicksort on whole prompts: each group of tied rows is compared with one of its rows, the pivot, up to where each
differs. Three values then determine a row's position: whether it comes before or after the pivot, how many tokens it
shares with it, and the two tokens that follow. Rows equal in all three form the groups of the next round, which starts
after those tokens. Only the pivots' tokens are compared more than once, and tokens after a row's divergence are not
read. Pivots are random, so the number of rounds grows with the logarithm of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FIRST_WINDOW = 64
"""Number of tokens compared at first."""
LAST_WINDOW = 256
"""Maximum number of tokens compared at once; windows grow fourfold from `FIRST_WINDOW`."""
BLOCK = 1 << 16
"""Number of tokens gathered at once: they fit into a core's cache and bound the temporary memory."""

PART = 1 << 18
"""Number of tied rows sorted at once, unless more of them form one group."""

Int32s = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]


def sort_prompts(tokens: Int32s, offsets: Offsets, keys: Int64s | None = None) -> tuple[Int32s, Int32s]:
    """Sort the prompts by (key, ids), a prefix before its extensions, equal prompts by index.

    Needs about 50 bytes of memory per prompt, regardless of its length.

    Args:
        tokens: [total] int32, ids >= 0.
        offsets: [N + 1] int32 or int64; prompt i is `tokens[offsets[i]:offsets[i + 1]]`.
        keys: [N] int64; prompts of different keys share nothing.

    Returns:
        order [N] int32, prompt indices; shared [N] int32, tokens that `order[i]` shares with `order[i - 1]`.
    """
    rows = len(offsets) - 1
    assert rows < 1 << 31, "an index of a prompt has 32 bits"
    slots = np.arange(rows, dtype=np.int32)
    order = slots.copy() if keys is None else np.argsort(keys, kind="stable").astype(np.int32)
    shared = np.zeros(rows, np.int32)
    if rows == 0:
        return order, shared
    first = np.zeros(rows, np.bool_)
    first[0] = True
    if keys is not None:
        first[1:] = np.diff(keys[order]) != 0
    reader = _Reader(tokens, offsets[:-1], np.diff(offsets).astype(np.int32))
    tied = _Tied(slots, first, np.zeros(int(first.sum()), np.int32)).without_singles()
    del slots, first
    turn = 0
    while len(tied.slots):
        tied = _Tied.joined([_split(reader, order, shared, part, turn) for part in tied.parts()])
        turn += 1
    return order, shared


@dataclass(frozen=True, slots=True)
class _Tied:
    """Groups of tied rows: adjacent slots of the order that agree on their first `depth` tokens."""

    slots: Int32s
    """[slots] indices into the order."""
    first: Bools
    """[slots] whether a group begins here."""
    depth: Int32s
    """[groups] number of tokens known to be equal."""

    def without_singles(self) -> _Tied:
        """The groups of more than one row."""
        last = np.append(self.first[1:], True)
        single = self.first & last
        if not single.any():
            return self
        return _Tied(self.slots[~single], self.first[~single], self.depth[~single[self.first]])

    def parts(self) -> Iterator[_Tied]:
        """The groups, some at a time: they have at most `PART` slots together, or it is a single one."""
        if len(self.slots) <= PART:
            yield self
            return
        starts = np.flatnonzero(self.first)
        ends = np.append(starts[1:], len(self.slots))
        group = 0
        while group < len(starts):
            begin = int(starts[group])
            after = max(group + 1, int(np.searchsorted(ends, begin + PART, side="right")))
            slots = slice(begin, int(ends[after - 1]))
            yield _Tied(self.slots[slots], self.first[slots], self.depth[group:after])
            group = after

    @staticmethod
    def joined(parts: Sequence[_Tied]) -> _Tied:
        """The groups of several values."""
        if len(parts) == 1:
            return parts[0]
        slots, first, depth = ([getattr(part, name) for part in parts] for name in ("slots", "first", "depth"))
        return _Tied(np.concatenate(slots), np.concatenate(first), np.concatenate(depth))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reader of token windows of many rows at once."""

    tokens: Int32s
    starts: Offsets
    lengths: Int32s

    def windows(self, begin: Offsets, width: int) -> Int32s:
        """[rows, width] tokens from the indices `begin` on; values past the last token are arbitrary."""
        last = len(self.tokens) - width
        if last < 0 or int(begin.max()) > last:
            return np.take(self.tokens, begin[:, None] + np.arange(width), mode="clip")
        strides = (self.tokens.itemsize, self.tokens.itemsize)
        view = np.ndarray((last + 1, width), np.int32, self.tokens, strides=strides)
        out: Int32s = view[begin]
        return out

    def pairs(self, rows: Int32s, depth: Int32s) -> Uint64s:
        """[rows] the two tokens at `depth`, each plus one and 0 past the end, packed into one sortable number."""
        two = self.windows(self.starts[rows] + depth, 2).astype(np.uint64) + np.uint64(1)
        left = self.lengths[rows] - depth
        high = np.where(left > 0, two[:, 0], np.uint64(0))
        low = np.where(left > 1, two[:, 1], np.uint64(0))
        packed: Uint64s = (high << np.uint64(32)) | low
        return packed

    def agree(self, rows: Int32s, others: Int32s, depth: Int32s) -> Int32s:
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


def _pivots(order: Int32s, tied: _Tied, turn: int) -> Int32s:
    """[groups] a random row of each group, so that no input makes every choice bad."""
    starts = np.flatnonzero(tied.first)
    sizes = np.diff(np.append(starts, len(tied.slots)))
    hashed = (tied.slots[starts].astype(np.uint64) + np.uint64(turn << 40)) * np.uint64(0x9E3779B97F4A7C15)
    places = ((hashed >> np.uint64(33)) % sizes.astype(np.uint64)).astype(np.int64)
    pivots: Int32s = order[tied.slots[starts + places]]
    return pivots


def _split(reader: _Reader, order: Int32s, shared: Int32s, tied: _Tied, turn: int) -> _Tied:
    """Sort each group around its pivot, store the shared lengths, and return the groups that are still tied."""
    keys, depth = _compare(reader, order, tied, turn)
    places = keys.sorting()
    keys = keys.take(places)
    depth = depth[places]
    rows = order[tied.slots][places]
    order[tied.slots] = rows
    del places
    same, one, on = keys.compared()
    del keys
    # Both share with the pivot what the nearer one does, and one token more if it is the same one in both.
    value = depth + one
    np.minimum(depth[:-1] + one[1:], value[1:], out=value[1:])
    value[same] = reader.lengths[rows[same]]
    inside = ~tied.first
    # A later round overwrites the pairs that are tied and have not ended.
    shared[tied.slots[inside]] = value[inside]
    return _Tied(tied.slots[on], ~same[on], (depth + 2)[on & ~same].astype(np.int32)).without_singles()


@dataclass(frozen=True, slots=True)
class _Keys:
    """Sort keys of rows: the side of the pivot, then the two tokens at which a row leaves it, in one number or two."""

    pairs: Uint64s
    """[rows] the tokens, of `bits` bits each; above them the side, if that fits."""
    bits: int
    side: Int64s | None
    """[rows] the side, if it does not."""

    @staticmethod
    def of(pairs: Uint64s, side: _Sides) -> _Keys:
        """The keys, in place of `pairs`, which have 32 bits each."""
        low = np.uint64(0xFFFFFFFF)
        blocks = [slice(begin, begin + BLOCK) for begin in range(0, len(pairs), BLOCK)]
        most = max(max(int(pairs[at].max() >> np.uint64(32)), int((pairs[at] & low).max())) for at in blocks)
        bits = most.bit_length()
        if side.most.bit_length() + 2 * bits > 64:
            return _Keys(pairs, 32, np.concatenate([side.of(at) for at in blocks]))
        for at in blocks:
            high = (pairs[at] >> np.uint64(32)) << np.uint64(bits)
            pairs[at] = side.of(at).astype(np.uint64) << np.uint64(2 * bits) | high | (pairs[at] & low)
        return _Keys(pairs, bits, None)

    def sorting(self) -> Int64s:
        """[rows] places that sort the rows; equal ones keep their order."""
        columns = (self.pairs,) if self.side is None else (self.pairs, self.side)
        places: Int64s = np.lexsort(columns)
        return places

    def take(self, places: Int64s) -> _Keys:
        """The keys at `places`."""
        return _Keys(self.pairs[places], self.bits, None if self.side is None else self.side[places])

    def compared(self) -> tuple[Bools, Bools, Bools]:
        """[rows] of sorted rows: same key as the one before; only the first token is the same; goes on after both."""
        bits, pairs = np.uint64(self.bits), self.pairs
        same, one = np.zeros(len(pairs), np.bool_), np.zeros(len(pairs), np.bool_)
        same[1:] = pairs[1:] == pairs[:-1]
        heads = pairs >> bits
        one[1:] = heads[1:] == heads[:-1]
        if self.side is not None:
            together = self.side[1:] == self.side[:-1]
            same[1:] &= together
            one[1:] &= together
        return same, one & ~same, (pairs & np.uint64((1 << self.bits) - 1)) != 0


def _compare(reader: _Reader, order: Int32s, tied: _Tied, turn: int) -> tuple[_Keys, Int32s]:
    """The sort keys of the rows in the slots, and [slots] the tokens that each is known to share with its group.

    Two tokens separate most rows of a job without sharing: the first round has no pivots, and takes the next tokens.
    """
    count = len(tied.slots)
    group = np.cumsum(tied.first, dtype=np.int32) - np.int32(1)
    depth = tied.depth[group]
    pairs = np.empty(count, np.uint64)
    after = np.zeros(count, np.int8)
    """-1, 0 or 1 for rows before, at or after the pivot"""
    pivots = _pivots(order, tied, turn) if turn else None
    most = 0
    for begin in range(0, count, BLOCK):
        part = slice(begin, begin + BLOCK)
        rows, known = order[tied.slots[part]], depth[part]
        if pivots is None:
            pairs[part] = reader.pairs(rows, known)
            continue
        others = pivots[group[part]]
        agreed = reader.agree(rows, others, known)
        most = max(most, int((agreed - known).max()))
        pairs[part] = mine = reader.pairs(rows, agreed)
        theirs, mine = (values >> np.uint64(32) for values in (reader.pairs(others, agreed), mine))
        after[part] = (mine > theirs).astype(np.int8) - (mine < theirs)
        depth[part] = agreed
    return _Keys.of(pairs, _Sides(group, depth, tied.depth, after, most + 1)), depth


@dataclass(frozen=True, slots=True)
class _Sides:
    """Sort keys by group, then by position relative to the group's pivot.

    Among the rows before the pivot those that share least come first, among the rows after it last.
    """

    group: Int32s
    """[rows] number of each row's group."""
    agreed: Int32s
    """[rows] tokens that it shares with the pivot."""
    depth: Int32s
    """[groups] tokens that all of a group share."""
    after: npt.NDArray[np.int8]
    """[rows] -1, 0 or 1: before, at or after the pivot."""
    span: int
    """More than the rows of a group share with their pivot, in addition to `depth`."""

    @property
    def most(self) -> int:
        """No key is larger."""
        return len(self.depth) * (2 * self.span + 1) - 1

    def of(self, rows: slice) -> Int64s:
        """The keys of some rows."""
        group, after = self.group[rows].astype(np.int64), self.after[rows]
        more = self.agreed[rows] - self.depth[group]
        group *= 2 * self.span + 1
        group += np.where(after < 0, more, np.where(after == 0, self.span, 2 * self.span - more))
        return group
