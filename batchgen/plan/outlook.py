"""Page use from now on, if samples end where they are expected to: what may begin so that nothing is thrown out later.

A node's pages go at the last end below it, once all its samples have begun; until then they are held for ever as far as
anybody knows. All is computed by columns: an outlook over some hundred samples costs a fraction of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.plan.curve import Curve, Samples, pages_by_step, peak_pages, with_begun
from batchgen.plan.ends import Ends
from batchgen.plan.nodes import Nodes
from batchgen.plan.sequences import Phase, Sequences
from batchgen.plan.sequences import Sequence as Sample

__all__ = ["Entry", "Outlook"]

Int64s = npt.NDArray[np.int64]

_SEVERAL = 8
"""From so many samples on their ends are computed by columns."""
_FEW = 8
"""Up to so many nodes are looked at one by one."""
_LATE = 1
"""Steps after a sample's last draw in which its pages are still held: ends may be read late."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What would begin: samples at a node's end, behind nodes that are still to be computed."""

    path: tuple[int, ...]
    """Nodes to compute, topmost first; the samples begin at the end of the last. Empty: at `node`."""
    node: int
    requests: Sequence[int]
    """[n] the samples, in order."""
    delay: int
    """Steps until they draw."""


class _With(NamedTuple):
    """Things with an entry added."""

    curve: Curve
    pages: int
    """Of its path."""
    left: dict[int, int]
    latest: dict[int, int]
    """What becomes of its nodes."""


class Outlook:
    """The samples that have begun, seen from one step; what is admitted in it is added."""

    def __init__(self, nodes: Nodes, sequences: Sequences, ends: Ends) -> None:
        self._nodes = nodes
        self._sequences = sequences
        self._ends = ends
        self._size = nodes.allocator.page_size
        self._columns = _NodeColumns(nodes)
        self._curve: Curve = np.zeros(1)
        self._next = 0
        """Number of the sample that begins next."""
        self._unsure = 0
        """Samples whose ends are not known."""
        self._used = 0
        """Pages in use then."""
        self._more = 0
        """Pages admitted since, which are taken as prompts are computed."""
        self._left: dict[int, int] = {}
        """By node with new ends below: samples at its end and subtrees below of whose ends nothing is known."""
        self._latest: dict[int, int] = {}
        """By node with new ends below: the last end known below."""

    def look(self, waiting: Iterable[Entry]) -> None:
        """See things as they stand; `waiting` are the samples behind prompts that are being computed."""
        self._used, self._more = self._nodes.allocator.used_count, 0
        self._next = self._sequences.next_id
        self._unsure = self._ends.unsure_count
        columns, nodes = self._decoding()
        if len(self._sequences.by_id) > len(nodes):
            others = [self._other(s) for s in self._sequences.by_id.values() if s.phase is not Phase.RUNNING]
            more = np.array(others, np.int64).T
            columns, nodes = np.concatenate([columns, more[:4]], axis=1), np.concatenate([nodes, more[4]])
        end, fed, have, freed = columns
        gone, release = self._columns.look(nodes, end)
        self._left.clear()
        self._latest.clear()
        self._curve = pages_by_step(Samples(end, fed, have, freed, release, self._columns.held(gone)), self._size)
        for entry in waiting:
            self.add(entry)

    def admit(self, entry: Entry) -> bool:
        """Whether the pool holds everything to its end with `entry`; if so it is added.

        A page for every other sample that may end later than expected is left over.
        """
        found = self._with(entry)
        spare = (self._unsure + sum(map(self._ends.unsure, entry.requests))) // 2
        allocator = self._nodes.allocator
        held = max(allocator.used_count, self._used + self._more)
        if held + found.pages + peak_pages(found.curve) + spare > allocator.capacity:
            return False
        self._take(entry, found)
        return True

    def add(self, entry: Entry) -> None:
        """`entry` begins now."""
        self._take(entry, self._with(entry))

    def _take(self, entry: Entry, found: _With) -> None:
        self._next += len(entry.requests)
        self._unsure += sum(map(self._ends.unsure, entry.requests))
        self._curve = found.curve
        self._more += found.pages
        self._left.update(found.left)
        self._latest.update(found.latest)

    def _decoding(self) -> tuple[Int64s, Int64s]:
        """The decode rows' first columns of `Samples`, [4, R], and their nodes, [R]."""
        running, size = self._sequences.running, self._size
        fed, nodes = running.positions, running.nodes
        prompt = self._columns.end[nodes]
        made = fed + 1 - prompt
        left = self._ends.remaining_of(running.numbers, running.requests, made, self._nodes.step)
        have = running.capacities // size
        # A node's tail is not among what its sample gives back while that is held.
        tail = running.in_place & self._columns.tail_held[nodes]
        return np.stack([left + (_LATE - 1), fed, have, have - prompt // size - tail]), nodes

    def _other(self, sample: Sample) -> tuple[int, int, int, int, int]:
        """Columns of `Samples` of one that does not decode, and its node, -1 if that is not in the pool."""
        end = _LATE
        if sample.phase is not Phase.PARKED:
            made = sample.position + 1 - sample.prompt_len
            end += self._ends.remaining(sample.id, sample.request, made, self._nodes.step) - 1
        node = sample.node_id if sample.node_id in self._nodes.active else -1
        if sample.node is None:
            return end, sample.position, sample.prompt_len // self._size, 0, node
        fed = sample.capacity - 1 - end if sample.phase is Phase.PARKED else sample.position
        freed = len(sample.pages) - sample.own - (sample.in_place and sample.node.tail_held)
        return end, fed, len(sample.pages), freed, node

    def _with(self, entry: Entry) -> _With:
        """The curve with `entry` and without the nodes that go after it."""
        nodes, size = self._nodes, self._size
        length = nodes.end[entry.node]
        stands = nodes.active.get(entry.node)
        tail = length % size != 0 and (stands is None or (stands.tail_held and not stands.tail_taken))
        ends = self._ends_of(entry)
        curve = with_begun(self._curve, ends, length - 1, length // size, int(tail), size)
        held = {n: self._pages(n, first=n == entry.path[0]) for n in entry.path}
        left = {n: nodes.refs[n] for n in entry.path}
        latest = dict.fromkeys(entry.path, 0)
        node, end, gone = entry.node, int(ends.max()), len(entry.requests)
        while node >= 0:
            if node not in left:
                left[node], latest[node] = self._known(node)
            left[node] -= gone
            latest[node] = max(end, latest[node])
            if left[node]:
                break
            curve[latest[node] + 1 :] -= held[node] if node in held else self._columns.held(np.array([node]))
            node, end, gone = nodes.parent[node], latest[node], 1
        return _With(curve, sum(held.values()), left, latest)

    def _known(self, node: int) -> tuple[int, int]:
        """Samples and subtrees below a node of whose ends nothing is known, and the last end known."""
        if node in self._left:
            return self._left[node], self._latest[node]
        return self._columns.of(node)

    def _ends_of(self, entry: Entry) -> Int64s:
        """[n] last steps of the samples of an entry."""
        step, count = self._nodes.step, len(entry.requests)
        if count < _SEVERAL:
            left = np.array([self._ends.remaining(self._next + i, r, 0, step) for i, r in enumerate(entry.requests)])
        else:
            numbers = np.arange(self._next, self._next + count)
            left = self._ends.remaining_of(numbers, np.array(entry.requests), np.zeros(count, np.int64), step)
        return left + (_LATE - 1 + entry.delay)

    def _pages(self, node: int, *, first: bool) -> int:
        """Pages that a node of a path takes: one that follows its parent in the same run writes on in its tail."""
        if first:
            return self._nodes.pages_to_admit(node)
        start, end = self._nodes.start[node], self._nodes.end[node]
        return -(-end // self._size) - -(-start // self._size)


class _NodeColumns:
    """The nodes in the pool, by columns, and what is known of their ends."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._size = nodes.allocator.page_size
        self._parent, self._start, self.end = (np.asarray(x) for x in (nodes.parent, nodes.start, nodes.end))
        self._refs = np.frombuffer(nodes.refs, np.int32)
        self.tail_held, self._in_place = (np.frombuffer(x, np.uint8) for x in (nodes.tail_held, nodes.in_place))
        self._ids = np.zeros(0, np.int64)
        """[N] nodes that were in the pool at the last look, rising."""
        self._left = self._latest = self._ids
        """[N] samples at a node's end and subtrees below of whose ends nothing is known; the last end known below."""

    def look(self, at: Int64s, ends: Int64s) -> tuple[Int64s, Int64s]:
        """See which nodes go, and when.

        Args:
            at: [R] nodes of samples, -1 where one is not in the pool.
            ends: [R] the samples' last steps.

        Returns:
            [G] nodes of which the end is known, and [G] the last steps in which their pages are held.
        """
        active = self._nodes.active
        self._ids = np.fromiter(active, np.int64, len(active))
        self._ids.sort()
        self._left, self._latest = self._refs[self._ids].astype(np.int64), np.zeros(len(self._ids), np.int64)
        self._note(at, ends)
        found = []
        done = np.flatnonzero(self._left == 0)
        while len(done) > _FEW:
            found.append(done)
            self._note(self._parent[self._ids[done]], self._latest[done])
            self._left[done] = -1
            done = np.flatnonzero(self._left == 0)
        found.append(np.array(self._up(done.tolist()), np.int64))
        gone = np.concatenate(found)
        return self._ids[gone], self._latest[gone]

    def _note(self, nodes: Int64s, ends: Int64s) -> None:
        """Below nodes, -1 for none, there is one end each of which nothing was known."""
        inside = nodes >= 0
        places = np.searchsorted(self._ids, nodes[inside])
        np.subtract.at(self._left, places, 1)
        np.maximum.at(self._latest, places, ends[inside])

    def _up(self, places: list[int]) -> list[int]:
        """`_note` above a few nodes of which the end is known; all of which it is known then."""
        for place in places:
            parent = int(self._parent[self._ids[place]])
            if parent >= 0:
                above = int(self._ids.searchsorted(parent))
                self._left[above] -= 1
                self._latest[above] = max(self._latest[above], self._latest[place])
                if not self._left[above]:
                    places.append(above)
        return places

    def of(self, node: int) -> tuple[int, int]:
        """What is left to know below a node in the pool, and the last end known."""
        place = int(self._ids.searchsorted(node))
        if place == len(self._ids) or self._ids[place] != node:
            return 0, 0
        return int(self._left[place]), int(self._latest[place])

    def held(self, nodes: Int64s) -> Int64s:
        """[N] pages that nodes in the pool give back when they go, their parents' tails not among them while held."""
        end, parent = self.end[nodes], self._parent[nodes]
        tail = (end % self._size != 0) & (self.tail_held[nodes] == 0)
        parents = self.tail_held[parent] & self._in_place[nodes] & (parent >= 0)
        return np.asarray(-(-end // self._size) - self._start[nodes] // self._size - tail - parents, np.int64)
