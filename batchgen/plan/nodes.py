"""Nodes of the prefix tree in the pool: who uses them, which pages they hold, when those go.

A node holds the pages of its own segment: the full ones, and while somebody still has to branch off inside it the last,
partly filled one, its *tail*. A user (child node or sequence) needs the tail's positions at the head of its own first
page. The first user writes on in the tail itself behind the node's positions (*in place*), others copy; if the tail was
given up under memory pressure they compute its positions anew. Ancestors' full pages are shared by all below.

How many positions are copied makes no difference to whether they are. Copying one reads and writes its keys and values
once, computing it multiplies by every weight: over a thousand operations for each byte moved even in a model of five
million parameters, where a processor makes some hundreds at most meanwhile. What a copy costs besides, handing it over,
a step's copies pay together and once. So a segment that two prompts share is computed once, however short it is.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchgen.plan.config import SchedulerStats
from batchgen.plan.pages import PageAllocator
from batchgen.plan.tree import PrefixTree
from batchgen.plan.types import PageCopy

__all__ = ["Branch", "Node", "Nodes"]

COMPUTING = -1
"""`Node.ready` of a node that is not complete."""


@dataclass(slots=True, eq=False)
class Node:
    """A node in the pool, complete or being computed."""

    id: int
    parent: Node | None
    start: int
    end: int
    table: list[int]
    """Pages of positions 0..end-1, ancestors' included; the tail last, while held."""
    own: int
    """Place in `table` of the first page the node holds itself."""
    full: int
    """Full pages up to `end`."""
    done: int
    """Next position to compute."""
    in_place: bool
    """The first own page is the parent's tail."""
    tail_held: bool
    tail_taken: bool = False
    """A user writes on in the tail."""
    ready: int = COMPUTING
    """Step that completed the node."""
    touched: int = COMPUTING
    """Last step in which a chunk wrote or read its pages; it is not evicted in that step."""
    users: int = 0
    """Children in the pool and sequences that hold pages."""
    rows: int = 0
    """Decode rows below."""
    shared: dict[int, Node] = field(default_factory=dict)
    """Children with two or more decode rows below."""
    alive: bool = True


@dataclass(frozen=True, slots=True)
class Branch:
    """Pages of a new user of a node, and where it must begin to compute."""

    pages: list[int]
    begin: int
    in_place: bool


class Nodes:
    """State of all nodes: lasting columns for every one, `Node` objects for those in the pool."""

    def __init__(
        self,
        tree: PrefixTree,
        samples: npt.NDArray[np.int32],
        allocator: PageAllocator,
        stats: SchedulerStats,
    ) -> None:
        self.parent = tree.parent.data
        self.start = tree.start.data
        self.end = tree.end.data
        self.request = tree.request.data
        self.first_row = tree.first_row.data
        self.subtree_end = tree.subtree_end.data
        self.refs, self.unstarted = _counts(tree, samples)
        """By node: unended samples at its end plus children with any below; samples at its end not yet begun."""
        self.step = 0
        """Step being planned."""
        self.active: dict[int, Node] = {}
        self.tail_held = bytearray(len(tree))
        """By node in the pool, as `Node.tail_held` ..."""
        self.in_place = bytearray(len(tree))
        """... and `Node.in_place`."""
        self.waiting: dict[int, int] = {}
        """By node: sequences begun at its end that hold no pages."""
        self.allocator = allocator
        self._page_size = allocator.page_size
        self._stats = stats
        self._computed: dict[int, int] = {}
        """By evicted node: the position it had been computed to."""

    def missing(self, node_id: int) -> list[int]:
        """The node and its ancestors that are not in the pool, topmost first."""
        path: list[int] = []
        while node_id >= 0 and node_id not in self.active:
            path.append(node_id)
            node_id = self.parent[node_id]
        path.reverse()
        return path

    def computed_to(self, node: Node) -> int:
        """Positions below this have been computed before."""
        return self._computed.get(node.id, node.start)

    def pages_to_admit(self, node_id: int) -> int:
        """Free pages that `admit` takes now."""
        return self.pages_to_branch(self._parent_of(node_id), self.start[node_id], self.end[node_id])

    def pages_to_branch(self, node: Node | None, begin: int, end: int) -> int:
        """Free pages that `branch` takes now."""
        count = -(-end // self._page_size) - begin // self._page_size
        if begin % self._page_size and node is not None and node.tail_held and not node.tail_taken:
            return count - 1
        return count

    def branch(self, node: Node | None, begin: int, end: int, copies: list[PageCopy]) -> Branch:
        """Give pages for positions [begin, end) to a new user of `node`, whose end is `begin`."""
        size = self._page_size
        count = -(-end // size) - begin // size
        if node is None:
            return Branch(self.allocator.alloc(count), begin, False)
        node.users += 1
        filled = begin % size
        if not filled:
            return Branch(self.allocator.alloc(count), begin, False)
        if not node.tail_held:
            return Branch(self.allocator.alloc(count), begin - filled, False)
        tail = node.table[node.full]
        in_place = not node.tail_taken
        if in_place:
            self.allocator.share(tail)
            pages = [tail, *self.allocator.alloc(count - 1)]
            node.tail_taken = True
        else:
            pages = self.allocator.alloc(count)
            copies.append(PageCopy(tail, pages[0], filled))
            self._stats.page_copies += 1
        self.settle(node)
        return Branch(pages, begin, in_place)

    def leave(self, node: Node, in_place: bool) -> None:
        """A user of `node` gave its pages up."""
        node.users -= 1
        if in_place:
            node.tail_taken = False

    def admit(self, node_id: int, copies: list[PageCopy]) -> Node:
        """Bring a node into the pool, to be computed; its parent is complete or it has none."""
        parent = self._parent_of(node_id)
        start, end = self.start[node_id], self.end[node_id]
        branch = self.branch(parent, start, end, copies)
        own = start // self._page_size
        node = Node(
            id=node_id,
            parent=parent,
            start=start,
            end=end,
            table=branch.pages if parent is None else parent.table[:own] + branch.pages,
            own=own,
            full=end // self._page_size,
            done=branch.begin,
            in_place=branch.in_place,
            tail_held=end % self._page_size != 0,
        )
        self.active[node_id] = node
        self.tail_held[node_id], self.in_place[node_id] = node.tail_held, node.in_place
        return node

    def settle(self, node: Node) -> None:
        """Give the tail up once nobody has to branch off any more."""
        if node.tail_held and node.users == self.refs[node.id]:
            self._drop_tail(node)

    def release(self, node_id: int, count: int = 1) -> None:
        """`count` samples at the node's end are over; nodes with nobody left below go, up to the root."""
        while node_id >= 0:
            self.refs[node_id] -= count
            assert self.refs[node_id] >= 0
            count = 1
            node = self.active.get(node_id)
            if self.refs[node_id]:
                if node is not None:
                    self.settle(node)
                return
            if node is not None:
                self._remove(node)
            self._computed.pop(node_id, None)
            node_id = self.parent[node_id]

    def wait(self, node_id: int, change: int) -> None:
        """Sequences begun at the node's end that hold no pages have become more or fewer."""
        count = self.waiting.get(node_id, 0) + change
        if count:
            self.waiting[node_id] = count
        else:
            del self.waiting[node_id]

    def make_room(self, need: Callable[[], int], *, spare_waiting: bool, keep: Node | None = None) -> bool:
        """Evict nodes without users, the deepest first, until `need()` pages are free.

        Args:
            need: pages wanted; evictions may lower it.
            spare_waiting: leave nodes for which begun sequences wait. Otherwise tails go too.
            keep: a node that stays, tail and all.

        Returns:
            Whether so many are free now.
        """
        if need() <= self.allocator.free_count:
            return True

        def idle(node: Node) -> bool:
            if node.users or node is keep or node.touched == self.step:
                return False
            return not (spare_waiting and node.id in self.waiting)

        heap = [(-node.end, node.id) for node in self.active.values() if idle(node)]
        heapq.heapify(heap)
        while heap and need() > self.allocator.free_count:
            node = self.active[heapq.heappop(heap)[1]]
            self._evict(node)
            if node.parent is not None and idle(node.parent):
                heapq.heappush(heap, (-node.parent.end, node.parent.id))
        if not spare_waiting:
            self._drop_tails(need, keep)
        return need() <= self.allocator.free_count

    def _parent_of(self, node_id: int) -> Node | None:
        parent = self.parent[node_id]
        return None if parent < 0 else self.active[parent]

    def _drop_tails(self, need: Callable[[], int], keep: Node | None) -> None:
        """Give tails up that nobody writes on in; nested nodes may hold the same page as theirs."""
        held: dict[int, list[Node]] = {}
        for node in self.active.values():
            idle = node is not keep and node.ready != COMPUTING and node.touched != self.step
            if idle and node.tail_held:
                held.setdefault(node.table[node.full], []).append(node)
        for page, nodes in held.items():
            if need() <= self.allocator.free_count:
                return
            if self.allocator.holders(page) == len(nodes):
                for node in nodes:
                    self._drop_tail(node)

    def _drop_tail(self, node: Node) -> None:
        node.tail_held = False
        self.tail_held[node.id] = False
        self.allocator.free([node.table.pop()])

    def _evict(self, node: Node) -> None:
        assert not node.users
        self._computed[node.id] = max(node.done, self.computed_to(node))
        self._stats.evicted_nodes += 1
        self._remove(node)

    def _remove(self, node: Node) -> None:
        self.allocator.free(node.table[node.own :])
        node.alive = False
        del self.active[node.id]
        if node.parent is not None:
            self.leave(node.parent, node.in_place)


def _counts(tree: PrefixTree, samples: npt.NDArray[np.int32]) -> tuple[array[int], array[int]]:
    """Per node: samples at its end plus children with samples below, and samples at its end."""
    rows = samples[tree.order]
    before = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
    live = before[tree.last_row + 1] > before[tree.first_row]
    ends = np.bincount(tree.node_of_request, weights=samples, minlength=len(tree)).astype(np.int32)
    children = np.bincount(tree.parent[live & (tree.parent >= 0)], minlength=len(tree)).astype(np.int32)
    return array("i", (ends + children).tobytes()), array("i", ends.tobytes())
