"""The outlook, sample by sample and node by node: the oracle of `batchgen.plan.outlook`.

Pages only grow between two ends, so the most that is ever in use stands right before one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from batchgen.plan.ends import Ends
from batchgen.plan.nodes import Node, Nodes
from batchgen.plan.outlook import Entry
from batchgen.plan.sequences import Phase, Sequences
from batchgen.plan.sequences import Sequence as Sample

__all__ = ["SlowOutlook"]

_LATE = 1
"""Steps after a sample's last draw in which its pages are still held: ends may be read late."""


@dataclass(slots=True)
class Rows:
    """Samples under way, by column; steps are counted from now."""

    end: list[int] = field(default_factory=list)
    """Last step in which each holds its pages."""
    fed: list[int] = field(default_factory=list)
    """Position fed now; one more with each step."""
    have: list[int] = field(default_factory=list)
    """Pages of positions 0.. that it need not take any more, its nodes' included."""
    freed: list[int] = field(default_factory=list)
    """Of the pages in use those that it gives back at its end; what it takes until then goes, too."""
    release: list[int] = field(default_factory=list)
    """By node of which the end is known: the last step in which its pages are held ..."""
    pages: list[int] = field(default_factory=list)
    """... and how many these are."""

    def add(self, end: int, fed: int, have: int, freed: int) -> None:
        """Add a sample."""
        self.end.append(end)
        self.fed.append(fed)
        self.have.append(have)
        self.freed.append(freed)

    def plus(self, other: Rows) -> Rows:
        """Both together."""
        return Rows(
            self.end + other.end,
            self.fed + other.fed,
            self.have + other.have,
            self.freed + other.freed,
            self.release + other.release,
            self.pages + other.pages,
        )


def peak_pages(rows: Rows, page_size: int) -> int:
    """Most pages in use at once from now on, beyond those in use now; 0 at least."""
    most = 0
    for step in set(rows.end):
        use = -sum(pages for release, pages in zip(rows.release, rows.pages, strict=True) if release < step)
        for end, fed, have, freed in zip(rows.end, rows.fed, rows.have, rows.freed, strict=True):
            use += (fed + step) // page_size + 1 - have if end >= step else -freed
        most = max(most, use)
    return most


class SlowOutlook:
    """The samples that have begun, seen from one step; what is admitted in it is added."""

    def __init__(self, nodes: Nodes, sequences: Sequences, ends: Ends) -> None:
        self._nodes = nodes
        self._sequences = sequences
        self._ends = ends
        self._size = nodes.allocator.page_size
        self._rows = Rows()
        self._next = 0
        """Number of the sample that begins next."""
        self._unsure = 0
        """Samples whose ends are not known."""
        self._used = 0
        """Pages in use then."""
        self._more = 0
        """Pages admitted since, which are taken as prompts are computed."""
        self._left: dict[int, int] = {}
        """By node in the pool: samples at its end and subtrees below of whose ends nothing is known."""
        self._latest: dict[int, int] = {}
        """By node in the pool: the last end known below."""

    def look(self, waiting: Iterable[Entry]) -> None:
        """See things as they stand; `waiting` are the samples behind prompts that are being computed."""
        nodes, size, step = self._nodes, self._size, self._nodes.step
        self._rows = rows = Rows()
        self._used, self._more = nodes.allocator.used_count, 0
        self._next = self._sequences.next_id
        self._unsure = sum(self._ends.unsure(s.request) for s in self._sequences.by_id.values())
        self._left = {n: nodes.refs[n] for n in nodes.active}
        self._latest = dict.fromkeys(nodes.active, 0)
        running = self._sequences.running
        for s, position in zip(running, running.positions.tolist(), strict=True):
            assert s.node is not None
            end = _LATE - 1 + self._ends.remaining(s.id, s.request, position + 1 - s.prompt_len, step)
            rows.add(end, position, len(s.pages), self._own(s, s.node))
            self._note(s.node_id, 1, end)
        for s in self._sequences.by_id.values():
            if s.phase is Phase.RUNNING:
                continue
            end = _LATE
            if s.phase is not Phase.PARKED:
                end += self._ends.remaining(s.id, s.request, s.position + 1 - s.prompt_len, step) - 1
            if s.node is None:
                rows.add(end, s.position, s.prompt_len // size, 0)
            else:
                fed = s.capacity - 1 - end if s.phase is Phase.PARKED else s.position
                rows.add(end, fed, len(s.pages), self._own(s, s.node))
            if s.node_id in self._left:
                self._note(s.node_id, 1, end)
        for n in sorted(nodes.active, reverse=True):
            if not self._left[n]:
                rows.release.append(self._latest[n])
                rows.pages.append(_held(nodes.active[n]))
                if nodes.parent[n] >= 0:
                    self._note(nodes.parent[n], 1, self._latest[n])
        for entry in waiting:
            self.add(entry)

    def peak_with(self, entry: Entry) -> tuple[int, int]:
        """Most pages in use with `entry` beyond those in use now, and the pages of its path."""
        added, pages, _, _ = self._with(entry)
        return peak_pages(self._rows.plus(added), self._size), pages

    def admit(self, entry: Entry) -> bool:
        """Whether the pool holds everything to its end with `entry`; if so it is added.

        A page for every other sample that may end later than expected is left over.
        """
        spare = (self._unsure + sum(map(self._ends.unsure, entry.requests))) // 2
        allocator = self._nodes.allocator
        peak, pages = self.peak_with(entry)
        held = max(allocator.used_count, self._used + self._more)
        if held + pages + peak + spare > allocator.capacity:
            return False
        self.add(entry)
        return True

    @staticmethod
    def _own(sequence: Sample, node: Node) -> int:
        """Pages that a sample gives back at its end, its node's tail not among them while that is held."""
        return len(sequence.pages) - sequence.own - (sequence.in_place and node.tail_held)

    def _note(self, node: int, count: int, end: int) -> None:
        self._left[node] -= count
        self._latest[node] = max(self._latest[node], end)

    def add(self, entry: Entry) -> None:
        """`entry` begins now."""
        added, pages, left, latest = self._with(entry)
        self._next += len(entry.requests)
        self._unsure += sum(map(self._ends.unsure, entry.requests))
        self._rows = self._rows.plus(added)
        self._more += pages
        self._left.update(left)
        self._latest.update(latest)

    def _with(self, entry: Entry) -> tuple[Rows, int, dict[int, int], dict[int, int]]:
        """The rows and node releases that `entry` adds, the pages of its path, and what becomes of its nodes."""
        nodes, size = self._nodes, self._size
        rows, length = Rows(), nodes.end[entry.node]
        stands = nodes.active.get(entry.node)
        tail = length % size != 0 and (stands is None or (stands.tail_held and not stands.tail_taken))
        for number, request in enumerate(entry.requests):
            end = _LATE - 1 + entry.delay + self._ends.remaining(self._next + number, request, 0, nodes.step)
            rows.add(end, length - 1, length // size + (tail and not number), 0)
        held = {n: self._pages(n, first=n == entry.path[0]) for n in entry.path}
        left = {n: nodes.refs[n] for n in entry.path}
        latest = dict.fromkeys(entry.path, 0)
        node, end, gone = entry.node, max(rows.end, default=0), len(entry.requests)
        while node >= 0:
            left[node] = left.get(node, self._left.get(node, 0)) - gone
            latest[node] = max(end, latest.get(node, self._latest.get(node, 0)))
            if left[node]:
                break
            rows.release.append(latest[node])
            rows.pages.append(held[node] if node in held else _held(nodes.active[node]))
            node, end, gone = nodes.parent[node], latest[node], 1
        return rows, sum(held.values()), left, latest

    def _pages(self, node: int, *, first: bool) -> int:
        """Pages that a node of a path takes: one that follows its parent in the same run writes on in its tail."""
        if first:
            return self._nodes.pages_to_admit(node)
        start, end = self._nodes.start[node], self._nodes.end[node]
        return -(-end // self._size) - -(-start // self._size)


def _held(node: Node) -> int:
    """Pages that a node gives back when it goes, its parent's tail not among them while that is held."""
    parent = node.parent
    return len(node.table) - node.own - (node.in_place and parent is not None and parent.tail_held)
