"""Prompts: which tree nodes are computed when, and which samples begin at their ends.

Nodes begin in the order of `begin_order`. A *run* computes a node and goes on into its first child in the same chunk,
down to a leaf while budget, pages and sample slots last; the other children branch off in later steps. Nodes that were
evicted and are needed again are recomputed by a run along the missing path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from batchgen.plan.admission import Admission
from batchgen.plan.builder import StepBuilder
from batchgen.plan.config import SchedulerConfig, SchedulerStats
from batchgen.plan.ends import Ends
from batchgen.plan.frontier import Frontier
from batchgen.plan.nodes import COMPUTING, Node, Nodes
from batchgen.plan.order import BeginOrder
from batchgen.plan.outlook import Entry
from batchgen.plan.sequences import Sequences
from batchgen.plan.types import SequenceStart

__all__ = ["Prompts"]

NO_ROOM = -1

Int32s = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class _Run:
    """A path being computed."""

    node: Node
    chain: deque[int]
    """Nodes to recompute after it, for a run along a missing path."""
    rest: tuple[int, int]
    """Ids below the first node that nobody has begun, for a run from the frontier."""
    reserved: int
    """Sample slots kept for the ends of `node`."""
    entry: Entry | None
    """What it was admitted for, where that was looked at; None after the samples have begun."""
    forced: int
    """Step in which it may evict everything idle."""


class Prompts:
    """Computes nodes and begins the samples at their ends."""

    def __init__(
        self,
        order: BeginOrder,
        samples: Int32s,
        max_new: Int32s,
        nodes: Nodes,
        sequences: Sequences,
        ends: Ends,
        config: SchedulerConfig,
        stats: SchedulerStats,
    ) -> None:
        self._order = order.tree.order.data
        self._samples = samples.data
        self._max_new = max_new.data
        self._nodes = nodes
        self._sequences = sequences
        self._config = config
        self._stats = stats
        self._frontier = Frontier(nodes.parent, nodes.subtree_end, nodes.refs, order.rank)
        self._deferred: list[tuple[int, int]] = []
        """Ranges of the frontier that wait for the next step."""
        self._runs: list[_Run] = []
        self._reserved = 0
        self._next: dict[int, tuple[int, int]] = {}
        """By node with some samples begun: the place in the order and the sample that begins next."""
        self._backlog: dict[int, None] = {}
        """Computed nodes at whose ends samples have still to begin, in order."""
        self._cancelled: set[int] = set()
        self._admission = Admission(nodes, sequences, ends, self._max_new, config, order.interval)

    def advance(self, builder: StepBuilder) -> None:
        """Go on with the runs of earlier steps."""
        self._resort()
        runs, self._runs = self._runs, []
        for run in runs:
            if run.node.alive:
                self._advance(run, builder)
            else:
                self._reserved -= run.reserved
                self._frontier.give_back(run.node.id, run.rest[1])

    def begin(self, builder: StepBuilder) -> None:
        """Begin samples at computed nodes, then new nodes, as far as slots, pages and budget go."""
        if builder.step < self._admission.closed_until or not self._serve_backlog(builder):
            return
        while builder.budget and self._slots() and (taken := self._frontier.take()):
            low, high = taken
            until = self._blocked_until(low, builder)
            if until == NO_ROOM:
                self._frontier.give_back(low, high)
                return
            if until > low:
                self._deferred.append((low, min(until, high)))
                self._frontier.give_back(until, high)
            elif (entry := self._admit(low, builder)) is not None:
                self._frontier.give_back(self._nodes.subtree_end[low], high)
                self._advance(self._fresh_run(low, builder, entry), builder)
            else:
                self._frontier.give_back(low, high)
                return

    def force(self, builder: StepBuilder) -> None:
        """Begin the first thing there is, evicting everything idle. For an empty step while no sequence runs."""
        self._resort()
        parent_id = next(iter(self._backlog), -1)
        taken = self._frontier.take() if parent_id < 0 else None
        if taken is not None:
            low, high = taken
            parent_id = self._nodes.parent[low]
            if (parent_id < 0 or parent_id in self._nodes.active) and self._make_room(low, force=True):
                self._frontier.give_back(self._nodes.subtree_end[low], high)
                self._advance(self._fresh_run(low, builder, None, force=True), builder)
                return
            self._frontier.give_back(low, high)
        if parent_id >= 0 and (run := self._path_run(parent_id, builder, force=True)):
            self._advance(run, builder)

    def recompute(self, node_id: int, builder: StepBuilder, force: bool) -> None:
        """Have the missing path down to an evicted node computed, unless pages lack or its top cannot begin yet."""
        run = self._path_run(node_id, builder, force)
        if run is not None:
            self._runs.append(run)

    def cancel(self, request: int, row: int, node_id: int) -> int:
        """Samples of `request`, at place `row` of the order, that have not begun never do; returns how many."""
        if request in self._cancelled or not self._nodes.unstarted[node_id]:
            return 0
        self._cancelled.add(request)
        next_row, next_sample = self._next.get(node_id, (self._nodes.first_row[node_id], 0))
        begun = 0 if row > next_row else next_sample if row == next_row else self._samples[request]
        count = self._samples[request] - begun
        if count:
            self._nodes.unstarted[node_id] -= count
            self._nodes.release(node_id, count)
        return count

    def ended(self, sequences: Collection[int]) -> None:
        """Samples that had begun have ended."""
        self._admission.end(sequences)

    def is_cancelled(self, request: int) -> bool:
        """Whether samples of `request` have been kept from beginning."""
        return request in self._cancelled

    def _resort(self) -> None:
        """What had to wait for this step goes back to the frontier."""
        for low, high in self._deferred:
            self._frontier.give_back(low, high)
        self._deferred.clear()

    def _slots(self) -> int:
        begun = len(self._sequences.by_id) - self._sequences.parked  # whoever has all tokens is in no step any more
        return self._config.max_num_seqs - begun - self._reserved

    def _enough_slots(self, node_id: int) -> bool:
        config = self._config
        wanted = max(1, self._nodes.unstarted[node_id])
        return self._slots() >= min(wanted, config.start_together, config.max_num_seqs)

    def _alone(self) -> bool:
        """Whether nothing has begun that could end: then waiting helps nobody."""
        return not self._sequences.by_id and not self._reserved and not self._runs

    def _admit(self, node_id: int, builder: StepBuilder) -> Entry | None:
        """What begins with a node, its parent complete, if slots and pages last for it now and later on."""
        if not self._enough_slots(node_id) or not self._make_room(node_id, force=False):
            return None
        return self._admission.admit(self._entry(node_id, builder), self._waiting, alone=self._alone())

    def _entry(self, node_id: int, builder: StepBuilder) -> Entry:
        """The way down to the first samples at or below a node, and as many of these as there are slots."""
        nodes, path = self._nodes, [node_id]
        while not nodes.unstarted[path[-1]]:
            child = path[-1] + 1
            while not nodes.refs[child]:
                child = nodes.subtree_end[child]
            path.append(child)
        count = max(1, min(nodes.unstarted[path[-1]], self._slots()))
        later = nodes.end[path[-1]] - nodes.start[node_id] - builder.budget
        room = self._config.max_tokens_per_step - len(self._sequences.running)
        delay = max(0, -(-later // max(1, room)))
        return Entry(tuple(path), path[-1], self._upcoming(path[-1], count), delay)

    def _waiting(self) -> list[Entry]:
        """The samples behind prompts that are being computed."""
        entries = []
        for run in self._runs:
            if run.entry is not None:
                path = tuple(n for n in run.entry.path if n > run.node.id)
                entries.append(replace(run.entry, path=path))
            elif count := min(run.reserved, self._nodes.unstarted[run.node.id]):
                entries.append(Entry((), run.node.id, self._upcoming(run.node.id, count), 0))
        return entries

    def _make_room(self, node_id: int, force: bool) -> bool:
        """Whether a node can be admitted now; with a page to spare for each begun sequence's growth, unless that is
        foreseen.
        """
        nodes = self._nodes
        if not force:
            spare = len(self._sequences.by_id) + self._reserved
            if self._admission.foresees:
                spare = 0
            return nodes.pages_to_admit(node_id) + spare <= nodes.allocator.free_count
        keep = nodes.active.get(nodes.parent[node_id])
        return nodes.make_room(lambda: nodes.pages_to_admit(node_id), spare_waiting=False, keep=keep)

    def _blocked_until(self, node_id: int, builder: StepBuilder) -> int:
        """`node_id` if it can begin now; else the id up to which everything waits for the same node.

        An evicted path down to it is begun here; NO_ROOM if there are no pages for that.
        """
        path = self._nodes.missing(self._nodes.parent[node_id])
        top = path[0] if path else node_id
        if not self._parent_complete(top, builder):
            return self._nodes.subtree_end[self._nodes.parent[top]]
        if not path:
            return node_id
        run = self._path_run(path[-1], builder, force=False)
        if run is None:
            return NO_ROOM
        self._advance(run, builder)
        return self._nodes.subtree_end[top]

    def _parent_complete(self, node_id: int, builder: StepBuilder) -> bool:
        """Whether a node whose parent is in the pool, or that has none, can branch off in this step."""
        parent = self._nodes.active.get(self._nodes.parent[node_id])
        return parent is None or parent.ready not in (COMPUTING, builder.step)

    def _fresh_run(self, node_id: int, builder: StepBuilder, entry: Entry | None, force: bool = False) -> _Run:
        rest = (node_id + 1, self._nodes.subtree_end[node_id])
        return self._run(node_id, builder, deque(), rest, entry, force)

    def _path_run(self, node_id: int, builder: StepBuilder, force: bool) -> _Run | None:
        top, *chain = self._nodes.missing(node_id)
        if not self._parent_complete(top, builder) or not self._make_room(top, force):
            return None
        return self._run(top, builder, deque(chain), (0, 0), None, force)

    def _run(
        self,
        node_id: int,
        builder: StepBuilder,
        chain: deque[int],
        rest: tuple[int, int],
        entry: Entry | None,
        force: bool,
    ) -> _Run:
        node = self._nodes.admit(node_id, builder.plan.copies)
        forced = builder.step if force else COMPUTING
        return _Run(node, chain, rest, self._reserve(node_id, entry), entry, forced)

    def _reserve(self, node_id: int, entry: Entry | None) -> int:
        most = len(entry.requests) if entry is not None else self._nodes.unstarted[node_id]
        count = max(0, min(self._nodes.unstarted[node_id], self._slots(), most))
        self._reserved += count
        return count

    def _advance(self, run: _Run, builder: StepBuilder) -> None:
        """One chunk of a run: as far along its path as the budget goes."""
        nodes = self._nodes
        begin = position = run.node.done
        budget = builder.budget
        while True:
            node = run.node
            if position - begin == budget:
                self._runs.append(run)
                break
            node.done = min(node.end, begin + budget)
            node.touched = builder.step
            self._count(node, position)
            position = node.done
            if position == node.end:
                node.ready = builder.step
                self._reserved -= run.reserved
                if nodes.unstarted[node.id]:
                    self._begin_samples(node.id, builder, builder.flat + position - 1 - begin, run.reserved)
                    run.entry = None
                if position - begin == budget or not self._extend(run, builder):
                    self._deferred.append(run.rest)
                    break
        if position > begin:
            pages = node.table[: -(-position // self._config.page_size)]
            builder.chunk(self._nodes.request[node.id], None, begin, position, pages)

    def _extend(self, run: _Run, builder: StepBuilder) -> bool:
        """Go on into the next node of the path in the same chunk."""
        nodes = self._nodes
        forced = run.forced == builder.step
        if run.chain:
            if not self._make_room(run.chain[0], forced):
                return False
            child = run.chain.popleft()
        else:
            low, high = run.rest
            while low < high and not nodes.refs[low]:
                low = nodes.subtree_end[low]
            run.rest = (low, high)
            if low >= high or nodes.parent[low] != run.node.id or builder.blocked:
                return False
            if run.entry is None and not forced:
                run.entry = self._admit(low, builder)
                if run.entry is None:
                    return False
            elif not self._enough_slots(low) or not self._make_room(low, forced):
                return False
            child = low
            run.rest = (low + 1, high)
        run.node = nodes.admit(child, builder.plan.copies)
        run.reserved = self._reserve(child, run.entry)
        return True

    def _count(self, node: Node, begin: int) -> None:
        known = self._nodes.computed_to(node)
        again = max(0, min(node.done, known) - begin)
        self._stats.recomputed_tokens += again
        self._stats.prompt_tokens += node.done - begin - again

    def _serve_backlog(self, builder: StepBuilder) -> bool:
        """Begin samples at nodes computed earlier, by their last token's logits computed anew.

        Returns:
            Whether new nodes may begin: not while a node of the backlog waits for pages.
        """
        for node_id in list(self._backlog):
            if not builder.budget or not self._enough_slots(node_id):
                return True
            if not self._nodes.unstarted[node_id]:
                del self._backlog[node_id]
                continue
            node = self._nodes.active.get(node_id)
            if node is not None and node.ready in (COMPUTING, builder.step):
                continue
            if node is None:
                run = self._path_run(node_id, builder, force=False)
                if run is None:
                    return False
                self._advance(run, builder)
                continue
            entry = Entry((), node_id, self._upcoming(node_id, min(self._nodes.unstarted[node_id], self._slots())), 0)
            admitted = self._admission.admit(entry, self._waiting, alone=self._alone())
            if admitted is None:
                return False
            self._relogit(node, builder, len(admitted.requests))
        return True

    def _relogit(self, node: Node, builder: StepBuilder, count: int) -> None:
        if node.end % self._config.page_size and not node.tail_held:
            # The tail was given up: a sequence has to compute it in a page of its own.
            self._begin_samples(node.id, builder, None, count)
            return
        node.touched = builder.step
        flat = builder.chunk(self._nodes.request[node.id], None, node.end - 1, node.end, node.table[:], store=False)
        self._stats.relogit_tokens += 1
        self._begin_samples(node.id, builder, flat, count)

    def _upcoming(self, node_id: int, count: int) -> list[int]:
        """The requests of the next `count` samples at a node's end, of which at least so many have not begun."""
        row, sample = self._next.get(node_id, (self._nodes.first_row[node_id], 0))
        requests: list[int] = []
        while len(requests) < count:
            request = self._order[row]
            if request not in self._cancelled:
                requests += [request] * min(self._samples[request] - sample, count - len(requests))
            row, sample = row + 1, 0
        return requests

    def _begin_samples(self, node_id: int, builder: StepBuilder, flat: int | None, count: int) -> None:
        """Begin `count` samples at the node's end, or as many as there are slots, drawing from flat token `flat`.

        Without one the first only, which computes its logits itself.
        """
        nodes = self._nodes
        left = nodes.unstarted[node_id]
        prompt_len = nodes.end[node_id]
        row, sample = self._next.get(node_id, (nodes.first_row[node_id], 0))
        for _ in range(min(left, self._slots(), count if flat is not None else 1)):
            request = self._order[row]
            while sample == self._samples[request] or request in self._cancelled:
                row, sample = row + 1, 0
                request = self._order[row]
            sequence = self._sequences.begin(
                request, row, node_id, prompt_len, self._max_new[request], drawn=flat is not None
            )
            self._admission.begin(sequence, request, node_id)
            builder.plan.starts.append(SequenceStart(sequence, request, sample))
            if flat is not None:
                builder.sample(sequence, flat)
            sample += 1
            left -= 1
        nodes.unstarted[node_id] = left
        if left:
            self._next[node_id] = (row, sample)
            self._backlog[node_id] = None
        else:
            self._next.pop(node_id, None)
            self._backlog.pop(node_id, None)
