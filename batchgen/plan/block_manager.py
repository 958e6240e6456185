"""KV pages of the prefix tree: the nodes in the pool, their users and the pages they hold.

A node holds the pages of its segment: the full ones and, while a user still has to branch off, the last, partly
filled one, its *tail*. A user (child node or sequence) needs the tail's positions at the head of its first page.
The first user continues in the tail itself, after the node's positions (*in place*); the others copy it. If the tail
was dropped under memory pressure, they recompute its positions. All descendants share the full pages of their
ancestors.

In cache groups that keep a window, a user also needs the positions of the last window before the node's end. A node
holds these pages until no further user can branch off. A user that comes back after that, because it was preempted or
evicted, needs them again: the node has *lost its window*, and its positions are recomputed in its pages.

Positions are always copied rather than recomputed, however few they are: copying one moves its keys and values once,
computing it multiplies by every weight. A segment that two prompts share is therefore computed once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchgen.plan.cache_groups import HeldPages, Hold, StateSpan, state_spans
from batchgen.plan.config import SchedulerStats
from batchgen.plan.page_allocator import PageAllocator
from batchgen.plan.step_plan import PageCopy
from batchgen.plan.tree import PrefixTree, user_counts

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
    holds: list[Hold] = field(default_factory=list)
    """What it holds of each group that has its own pages."""
    window_lost: bool = False
    """Whether its last window is not held, so that no user can branch off."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Pages of a new user of a node, and the position from which it must compute."""

    page_table: list[int]
    """Pages from position 0 on, the node's included."""
    begin: int
    in_place: bool
    holds: list[Hold]
    """What it holds of each group that has its own pages: those of the positions before `begin`."""


class BlockManager:
    """State of all prefix tree nodes: columns over every node, `Node` objects for those in the pool."""

    def __init__(
        self,
        tree: PrefixTree,
        samples: npt.NDArray[np.int32],
        allocator: PageAllocator,
        stats: SchedulerStats,
        groups: Sequence[HeldPages | None] = (None,),
    ) -> None:
        """`groups`: pages of each cache group; None: those of page tables."""
        self.parent = tree.parent.data
        self.end = tree.end.data
        self.first_row = tree.first_row.data
        self.subtree_end = tree.subtree_end.data
        self._order = tree.order.data
        self.refs, self.unstarted = user_counts(tree, samples)
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
        self._groups = groups
        self.held = [pages for pages in groups if pages is not None]
        """The groups that have their own pages."""
        self._exact = any(pages.exact for pages in self.held)
        self._advanced: list[Node] = []
        """Nodes that have been computed further in the last step, and hold pages for that."""
        self._computed_to: dict[int, int] = {}
        """Evicted node -> the position it had been computed to."""

    def begin_step(self, step: int) -> None:
        """Begin to plan a step: nodes let go of the held pages that only the last step read."""
        self.step = step
        for node in self._advanced:
            # Users of the node may recompute its last page.
            restart = max(0, node.next_position - 1) // self._page_size * self._page_size
            for hold in node.holds:
                hold.slide(restart)
        self._advanced.clear()

    def advance(self, node: Node, end: int) -> tuple[StateSpan, ...]:
        """Record that this step computes a node up to `end`, for which held pages are allocated."""
        node.next_position = end
        node.last_used_step = self.step
        for hold in node.holds:
            hold.extend(end)
        if node.holds:
            self._advanced.append(node)
        return state_spans(node.holds, end)

    def reach(self, node: Node) -> int:
        """Position up to which a node can be computed in this step, as far as pages are concerned."""
        return min([node.end, *(hold.room() for hold in node.holds)])

    def start_of(self, node_id: int) -> int:
        """First position of a node's segment: its parent's end."""
        parent = self.parent[node_id]
        return 0 if parent < 0 else self.end[parent]

    def request_of(self, node_id: int) -> int:
        """A request below a node, whose ids give the segment's tokens."""
        return self._order[self.first_row[node_id]]

    def missing_path(self, node_id: int) -> list[int]:
        """Of a node and its ancestors, those from which no user can branch off, topmost first."""
        path: list[int] = []
        while node_id >= 0 and self.usable(node_id) is None:
            path.append(node_id)
            node_id = self.parent[node_id]
        path.reverse()
        return path

    def usable(self, node_id: int) -> Node | None:
        """A node if it is in the pool, complete or being computed, and has not lost its window."""
        node = self.active.get(node_id)
        return None if node is None or node.window_lost else node

    def computed_to(self, node: Node) -> int:
        """Position up to which the node has been computed before."""
        return self._computed_to.get(node.id, node.start)

    def pages_to_compute(self, node_id: int) -> int:
        """Number of pages that a node's positions are in."""
        return -(-self.end[node_id] // self._page_size) - self.start_of(node_id) // self._page_size

    def pages_to_admit(self, node_id: int) -> int:
        """Number of free pages that `admit` would allocate now."""
        if node_id in self.active:
            return int(self.end[node_id] % self._page_size != 0 and not self.tail_held[node_id])
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
        count, filled = -(-end // size) - begin // size, begin % size
        if node is None:
            return self._branch(self.allocator.alloc(count), begin, False, None)
        node.users += 1
        above = node.page_table[: node.full_pages]
        if not filled or not node.tail_held:
            branch = self._branch(above + self.allocator.alloc(count), begin - filled, False, node)
        elif node.tail_taken:
            branch = self._branch(above + self.allocator.alloc(count), begin, False, node)
            copies.append(self._copy(node.page_table[node.full_pages], branch.page_table[node.full_pages], filled))
            self.stats.page_copies += 1
        else:
            tail = node.page_table[node.full_pages]
            self.allocator.share(tail)
            branch = self._branch([*above, tail, *self.allocator.alloc(count - 1)], begin, True, node)
            node.tail_taken = True
        self.drop_unused(node)
        return branch

    def _branch(self, page_table: list[int], begin: int, in_place: bool, node: Node | None) -> Branch:
        """A branch of `node`, holding the pages that its user needs of the node."""
        if node is None:
            return Branch(page_table, begin, in_place, [pages.hold(page_table, None, begin) for pages in self.held])
        assert not node.window_lost, f"node {node.id} has lost its window"
        holds = [pages.hold(page_table, above, begin) for pages, above in zip(self.held, node.holds, strict=True)]
        return Branch(page_table, begin, in_place, holds)

    def _copy(self, source: int, target: int, tokens: int) -> PageCopy:
        pages = [
            (source, target) if own is None else own.copied(source, target)
            for own in self._groups
            if own is None or not own.exact
        ]
        return PageCopy(source, target, tokens, pages)

    def detach(self, node: Node, in_place: bool) -> None:
        """Remove a user of `node`, which has freed its pages."""
        node.users -= 1
        if in_place:
            node.tail_taken = False

    def admit(self, node_id: int, copies: list[PageCopy]) -> Node:
        """Allocate the pages of a node that will be computed; its parent is complete, or it is a root."""
        if (lost := self.active.get(node_id)) is not None:
            return self._reopen(lost, copies)
        parent = self._parent_of(node_id)
        start, end = self.start_of(node_id), self.end[node_id]
        branch = self.branch(parent, start, end, copies)
        node = Node(
            id=node_id,
            parent=parent,
            start=start,
            end=end,
            page_table=branch.page_table,
            first_own_page=start // self._page_size,
            full_pages=end // self._page_size,
            next_position=branch.begin,
            in_place=branch.in_place,
            tail_held=end % self._page_size != 0,
            holds=branch.holds,
        )
        self.active[node_id] = node
        self.tail_held[node_id], self.in_place[node_id] = node.tail_held, node.in_place
        return node

    def _reopen(self, node: Node, copies: list[PageCopy]) -> Node:
        """Compute a node that has lost its window once more, in its own pages."""
        parent, size = node.parent, self._page_size
        self._computed_to[node.id] = node.end
        node.completed_step, node.window_lost = COMPUTING, False
        node.next_position = begin = node.start if self._exact else node.start // size * size
        if node.end % size and not node.tail_held:
            node.page_table += self.allocator.alloc(1)
            node.tail_held = self.tail_held[node.id] = True
        above = (None,) * len(self.held) if parent is None else parent.holds
        now = parent is not None and parent.last_used_step == self.step
        node.holds = [
            pages.reopen(node.page_table, hold if now or pages.exact else None, begin)
            for pages, hold in zip(self.held, above, strict=True)
        ]
        if parent is not None:
            if begin % size and (tail := parent.page_table[-1]) != (first := node.page_table[node.first_own_page]):
                copies.append(self._copy(tail, first, begin % size))
            self.drop_unused(parent)
        return node

    def computable(self, node_id: int) -> bool:
        """Whether this step may compute a node that has lost its window: not a second time."""
        node = self.active.get(node_id)
        return node is None or node.last_used_step != self.step

    def continues(self, node_id: int) -> bool:
        """Whether a chunk may go on from a node's parent into the node, which may have its own copy of a tail."""
        return node_id not in self.active or (
            self.start_of(node_id) % self._page_size == 0 and self.computable(node_id)
        )

    def drop_unused(self, node: Node) -> None:
        """Free the tail and the window once no further user can branch off."""
        if node.completed_step == COMPUTING or node.users != self.refs[node.id]:
            return
        if node.tail_held:
            self._drop_tail(node)
        self._lose_window(node)

    def release(self, node_id: int, count: int = 1) -> None:
        """Record that `count` samples at the node's end have ended; free finished nodes, up to the root."""
        while node_id >= 0:
            self.refs[node_id] -= count
            assert self.refs[node_id] >= 0
            count = 1
            node = self.active.get(node_id)
            if self.refs[node_id]:
                if node is not None:
                    self.drop_unused(node)
                return
            if node is not None:
                self._remove(node)
            self._computed_to.pop(node_id, None)
            node_id = self.parent[node_id]

    def add_waiting(self, node_id: int, change: int) -> None:
        """Change the number of sequences begun at the node's end that hold no pages."""
        if count := self.waiting.get(node_id, 0) + change:
            self.waiting[node_id] = count
        else:
            del self.waiting[node_id]

    def held_fit(self, users: int, growing: int = 0) -> bool:
        """Whether the held groups have pages for further holders; as in `HeldPages.needs`."""
        return all(pages.needs(users, growing) <= pages.free_count for pages in self.held)

    def make_room(
        self,
        need: Callable[[], int],
        *,
        users: int = 0,
        growing: int = 0,
        spare_waiting: bool,
        keep: Node | None = None,
    ) -> bool:
        """Evict nodes without users, the deepest first, until `need()` pages are free.

        `need`: number of pages needed, which evictions may lower; `users`, `growing`: as in `HeldPages.needs`;
        `spare_waiting`: keep nodes that begun sequences wait for, else tails and windows are freed, too; `keep`: a node
        that stays, with its tail and its window. Returns whether so many pages are free now.
        """

        def enough() -> bool:
            return need() <= self.allocator.free_count and self.held_fit(users, growing)

        def idle(node: Node) -> bool:
            if node.users or node is keep or node.last_used_step == self.step:
                return False
            return not (spare_waiting and node.id in self.waiting)

        if enough():
            return True
        heap = [(-node.end, node.id) for node in self.active.values() if idle(node)]
        heapq.heapify(heap)
        while heap and not enough():
            node = self.active[heapq.heappop(heap)[1]]
            self._evict(node)
            if node.parent is not None and idle(node.parent):
                heapq.heappush(heap, (-node.parent.end, node.parent.id))
        if not spare_waiting:
            self._drop_tails(enough, keep)
            if self.held:
                self._drop_windows(enough, keep)
        return enough()

    def _parent_of(self, node_id: int) -> Node | None:
        parent = self.parent[node_id]
        return None if parent < 0 else self.active[parent]

    def _resting(self, node: Node, keep: Node | None) -> bool:
        """Whether a node is complete and no part of this step."""
        return node is not keep and node.completed_step != COMPUTING and node.last_used_step != self.step

    def _drop_tails(self, enough: Callable[[], bool], keep: Node | None) -> None:
        """Free tails that no user continues in; nested nodes may hold the same page as their tail."""
        held: dict[int, list[Node]] = {}
        for node in self.active.values():
            if node.tail_held and self._resting(node, keep):
                held.setdefault(node.page_table[node.full_pages], []).append(node)
        for page, nodes in held.items():
            if enough():
                return
            if self.allocator.ref_count(page) == len(nodes):
                for node in nodes:
                    self._drop_tail(node)

    def _drop_windows(self, enough: Callable[[], bool], keep: Node | None) -> None:
        """Free windows for users that are still to come."""
        for node in self.active.values():
            if enough():
                return
            if not node.window_lost and self._resting(node, keep):
                self._lose_window(node)

    def _drop_tail(self, node: Node) -> None:
        for hold in node.holds:
            hold.shrink(node.full_pages)
        node.tail_held = False
        self.tail_held[node.id] = False
        self.allocator.free([node.page_table.pop()])
        if self._exact:  # users would have to recompute its positions
            self._lose_window(node)

    def _lose_window(self, node: Node) -> None:
        for hold in node.holds:
            hold.release()
        node.window_lost = bool(node.holds)

    def _evict(self, node: Node) -> None:
        assert not node.users
        self._computed_to[node.id] = max(node.next_position, self.computed_to(node))
        self.stats.evicted_nodes += 1
        self._remove(node)

    def _remove(self, node: Node) -> None:
        for hold in node.holds:
            hold.release()
        self.allocator.free(node.page_table[node.first_own_page :])
        node.alive = False
        del self.active[node.id]
        if node.parent is not None:
            self.detach(node.parent, node.in_place)
