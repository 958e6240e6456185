"""KV pages of the prefix tree: the page allocator, the nodes in the pool, their users and the pages they hold.

A node holds the pages of its segment: the full ones and, while a user still has to branch off, the last, partly
filled one, its *tail*. A user (child node or sequence) needs the tail's positions at the head of its first page.
The first user continues in the tail itself, after the node's positions (*in place*); the others copy it. If the tail
was dropped under memory pressure, they recompute its positions. All descendants share the full pages of their
ancestors.

Positions are always copied rather than recomputed, however few they are: copying one moves its keys and values once,
computing it multiplies by every weight. A segment that two prompts share is therefore computed once.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchgen.plan.cache_groups import ONE_BYTE_PAGES, CacheGroup, cache_bytes
from batchgen.plan.config import SchedulerStats
from batchgen.plan.step_plan import PageCopy
from batchgen.plan.tree import PrefixTree, blocks


class PageAllocator:
    """Allocator of pages 1..num_pages-1 with exact reference counts; page 0 is scratch and never allocated.

    Of the free pages the first are allocated first: pages in use stay close together, and pages that are allocated in
    one step, and so read one after the other in the next ones, are neighbours however long the run is.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"a pool needs at least two pages of one position, got {num_pages} pages of {page_size}")
        self.page_size = page_size
        self.capacity = num_pages - 1
        """Number of pages that can be in use at once."""
        self.used_count = 0
        """Number of pages in use."""
        self.peak = 0
        """Peak number of pages in use at once."""
        self._freed: list[int] = []
        """Heap of the pages that were in use and are free."""
        self._ref_counts = [0]
        """By page, up to the last one that was ever in use."""

    @property
    def free_count(self) -> int:
        """Number of free pages."""
        return self.capacity - self.used_count

    def ref_count(self, page: int) -> int:
        """Reference count of `page`."""
        return self._ref_counts[page] if page < len(self._ref_counts) else 0

    def alloc(self, count: int) -> list[int]:
        """Allocate `count` pages with one reference each. The caller has checked `free_count`."""
        assert 0 <= count <= self.free_count, f"{count} pages requested, {self.free_count} free"
        again = min(count, len(self._freed))
        pages = [heapq.heappop(self._freed) for _ in range(again)]
        for page in pages:
            self._ref_counts[page] = 1
        if again < count:
            first = len(self._ref_counts)
            self._ref_counts += [1] * (count - again)
            pages += range(first, len(self._ref_counts))
        self.used_count += count
        if self.used_count > self.peak:
            self.peak = self.used_count
        return pages

    def share(self, page: int) -> None:
        """Add a reference to a page in use."""
        assert self.ref_count(page) > 0, f"page {page} is not in use"
        self._ref_counts[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Drop one reference from each page; a page without references is free."""
        ref_count = self._ref_counts
        for page in pages:
            left = ref_count[page] - 1 if page < len(ref_count) else -1
            assert left >= 0, f"page {page} freed twice"
            ref_count[page] = left
            if left == 0:
                heapq.heappush(self._freed, page)
                self.used_count -= 1


COMPUTING = -1
"""`Node.completed_step` of a node that is not complete."""


@dataclass(slots=True, eq=False)
class Node:
    """A prefix tree node that holds pages, complete or being computed."""

    id: int
    parent: Node | None
    start: int
    end: int
    page_table: list[int]
    """Pages of positions 0..end-1, including the ancestors'; the tail comes last while it is held."""
    first_own_page: int
    """Index in `page_table` of the first page that the node itself holds."""
    full_pages: int
    """Number of full pages up to `end`."""
    next_position: int
    """Next position to compute."""
    in_place: bool
    """Whether its first own page is the parent's tail."""
    tail_held: bool
    """Whether the node still holds its partly filled last page."""
    tail_taken: bool = False
    """Whether a user continues in the tail."""
    completed_step: int = COMPUTING
    """Step that computed the node's last position; `COMPUTING` until then."""
    last_used_step: int = COMPUTING
    """Last step in which a chunk read or wrote its pages; the node is not evicted in that step."""
    users: int = 0
    """Number of child nodes in the pool and of sequences that hold pages."""
    rows: int = 0
    """Number of decode rows below."""
    shared_children: dict[int, Node] = field(default_factory=dict)
    """Children with two or more decode rows below, by id."""
    alive: bool = True
    """Whether the node is still in the pool."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Pages of a new user of a node, and the position from which it must compute."""

    pages: list[int]
    begin: int
    in_place: bool


class BlockManager:
    """State of all prefix tree nodes: columns over every node, `Node` objects for those in the pool."""

    def __init__(
        self,
        tree: PrefixTree,
        samples: npt.NDArray[np.int32],
        allocator: PageAllocator,
        stats: SchedulerStats,
        cache_groups: Sequence[CacheGroup] = ONE_BYTE_PAGES,
    ) -> None:
        self.parent = tree.parent.data
        self.end = tree.end.data
        self.first_row = tree.first_row.data
        self.subtree_end = tree.subtree_end.data
        self._order = tree.order.data
        self.refs, self.unstarted = _counts(tree, samples)
        """[M] unfinished samples at each node's end plus children with any below; samples at its end not yet begun."""
        self.step = 0
        """Number of the step being planned."""
        self.active: dict[int, Node] = {}
        """Nodes in the pool, by id."""
        self.tail_held = bytearray(len(tree))
        """[M] `Node.tail_held` of the nodes in the pool."""
        self.in_place = bytearray(len(tree))
        """[M] `Node.in_place` of the nodes in the pool."""
        self.waiting: dict[int, int] = {}
        """Node id -> number of sequences begun at its end that hold no pages."""
        self.allocator = allocator
        self._page_size = allocator.page_size
        self.stats = stats
        self._page_bytes = cache_bytes(cache_groups, 1)
        self._capacity_bytes = cache_bytes(cache_groups, allocator.capacity)
        self._computed_to: dict[int, int] = {}
        """Evicted node -> the position it had been computed to."""

    def fits(self, pages: int) -> bool:
        """Whether `pages` pages in use at once fit into the pool."""
        return pages * self._page_bytes <= self._capacity_bytes

    def start_of(self, node_id: int) -> int:
        """First position of a node's segment: its parent's end."""
        parent = self.parent[node_id]
        return 0 if parent < 0 else self.end[parent]

    def request_of(self, node_id: int) -> int:
        """A request below a node, whose ids give the segment's tokens."""
        return self._order[self.first_row[node_id]]

    def missing_path(self, node_id: int) -> list[int]:
        """Of a node and its ancestors, those that are not in the pool, topmost first."""
        path: list[int] = []
        while node_id >= 0 and node_id not in self.active:
            path.append(node_id)
            node_id = self.parent[node_id]
        path.reverse()
        return path

    def computed_to(self, node: Node) -> int:
        """Position up to which the node has been computed before."""
        return self._computed_to.get(node.id, node.start)

    def pages_to_admit(self, node_id: int) -> int:
        """Number of free pages that `admit` would allocate now."""
        return self.pages_to_branch(self._parent_of(node_id), self.start_of(node_id), self.end[node_id])

    def pages_to_branch(self, node: Node | None, begin: int, end: int) -> int:
        """Number of free pages that `branch` would allocate now."""
        count = -(-end // self._page_size) - begin // self._page_size
        if begin % self._page_size and node is not None and node.tail_held and not node.tail_taken:
            return count - 1
        return count

    def branch(self, node: Node | None, begin: int, end: int, copies: list[PageCopy]) -> Branch:
        """Allocate pages for positions [begin, end) of a new user of `node`, whose end is `begin`."""
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
        tail = node.page_table[node.full_pages]
        in_place = not node.tail_taken
        if in_place:
            self.allocator.share(tail)
            pages = [tail, *self.allocator.alloc(count - 1)]
            node.tail_taken = True
        else:
            pages = self.allocator.alloc(count)
            copies.append(PageCopy(tail, pages[0], filled))
            self.stats.page_copies += 1
        self.drop_unused_tail(node)
        return Branch(pages, begin, in_place)

    def detach(self, node: Node, in_place: bool) -> None:
        """Remove a user of `node`, which has freed its pages."""
        node.users -= 1
        if in_place:
            node.tail_taken = False

    def admit(self, node_id: int, copies: list[PageCopy]) -> Node:
        """Allocate the pages of a node that will be computed; its parent is complete, or it is a root."""
        parent = self._parent_of(node_id)
        start, end = self.start_of(node_id), self.end[node_id]
        branch = self.branch(parent, start, end, copies)
        first_own_page = start // self._page_size
        node = Node(
            id=node_id,
            parent=parent,
            start=start,
            end=end,
            page_table=branch.pages if parent is None else parent.page_table[:first_own_page] + branch.pages,
            first_own_page=first_own_page,
            full_pages=end // self._page_size,
            next_position=branch.begin,
            in_place=branch.in_place,
            tail_held=end % self._page_size != 0,
        )
        self.active[node_id] = node
        self.tail_held[node_id], self.in_place[node_id] = node.tail_held, node.in_place
        return node

    def drop_unused_tail(self, node: Node) -> None:
        """Free the tail once no further user can branch off."""
        if node.tail_held and node.users == self.refs[node.id]:
            self._drop_tail(node)

    def release(self, node_id: int, count: int = 1) -> None:
        """Record that `count` samples at the node's end have ended; free finished nodes, up to the root."""
        while node_id >= 0:
            self.refs[node_id] -= count
            assert self.refs[node_id] >= 0
            count = 1
            node = self.active.get(node_id)
            if self.refs[node_id]:
                if node is not None:
                    self.drop_unused_tail(node)
                return
            if node is not None:
                self._remove(node)
            self._computed_to.pop(node_id, None)
            node_id = self.parent[node_id]

    def add_waiting(self, node_id: int, change: int) -> None:
        """Change the number of sequences begun at the node's end that hold no pages."""
        count = self.waiting.get(node_id, 0) + change
        if count:
            self.waiting[node_id] = count
        else:
            del self.waiting[node_id]

    def make_room(self, need: Callable[[], int], *, spare_waiting: bool, keep: Node | None = None) -> bool:
        """Evict nodes without users, the deepest first, until `need()` pages are free.

        Args:
            need: number of pages needed; evictions may lower it.
            spare_waiting: keep nodes that begun sequences wait for. Otherwise tails are freed, too.
            keep: a node that stays, with its tail.

        Returns:
            Whether `need()` pages are free now.
        """
        if need() <= self.allocator.free_count:
            return True

        def idle(node: Node) -> bool:
            if node.users or node is keep or node.last_used_step == self.step:
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
        """Free tails that no user continues in; nested nodes may hold the same page as their tail."""
        held: dict[int, list[Node]] = {}
        for node in self.active.values():
            idle = node is not keep and node.completed_step != COMPUTING and node.last_used_step != self.step
            if idle and node.tail_held:
                held.setdefault(node.page_table[node.full_pages], []).append(node)
        for page, nodes in held.items():
            if need() <= self.allocator.free_count:
                return
            if self.allocator.ref_count(page) == len(nodes):
                for node in nodes:
                    self._drop_tail(node)

    def _drop_tail(self, node: Node) -> None:
        node.tail_held = False
        self.tail_held[node.id] = False
        self.allocator.free([node.page_table.pop()])

    def _evict(self, node: Node) -> None:
        assert not node.users
        self._computed_to[node.id] = max(node.next_position, self.computed_to(node))
        self.stats.evicted_nodes += 1
        self._remove(node)

    def _remove(self, node: Node) -> None:
        self.allocator.free(node.page_table[node.first_own_page :])
        node.alive = False
        del self.active[node.id]
        if node.parent is not None:
            self.detach(node.parent, node.in_place)


def _counts(tree: PrefixTree, samples: npt.NDArray[np.int32]) -> tuple[array[int], array[int]]:
    """[M] samples at each node's end plus children with samples below; [M] samples at each node's end."""
    before = np.zeros(len(samples) + 1, np.int32)
    np.cumsum(samples[tree.order] > 0, dtype=np.int32, out=before[1:])
    ends, refs = (array("i", bytes(4)) * len(tree) for _ in range(2))
    samples_at, users = np.frombuffer(ends, np.int32), np.frombuffer(refs, np.int32)
    np.add.at(samples_at, tree.node_of_request, samples)
    users[:] = samples_at
    for part in blocks(len(tree)):
        live = before[tree.row_after(part)] > before[tree.first_row[part]]
        parent = tree.parent[part][live]
        np.add.at(users, parent[parent >= 0], 1)
    return refs, ends
