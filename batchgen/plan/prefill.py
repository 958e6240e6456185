"""Prefill scheduling: when each prefix tree node is computed, and which samples begin at its end.

Nodes begin in the order of `begin_order`. A *run* computes a node and continues into its first child in the same chunk,
down to a leaf while budget, pages and sample slots suffice; the other children branch off in later steps. Evicted nodes
that are needed again are recomputed by a run along the missing path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from batchgen.plan.admission import Admission, PendingSubtrees, SampleSlots
from batchgen.plan.block_manager import COMPUTING, BlockManager, Node
from batchgen.plan.builder import StepBuilder
from batchgen.plan.cache_groups import StateSpan, state_spans
from batchgen.plan.config import SchedulerConfig
from batchgen.plan.length_predictor import LengthPredictor
from batchgen.plan.order import BeginOrder
from batchgen.plan.page_forecast import Candidate
from batchgen.plan.sequences import SequenceScheduler
from batchgen.plan.spans import PromptSpans, Spans
from batchgen.plan.step_plan import SequenceStart
from batchgen.plan.unbegun import UnbegunSamples

NO_FREE_PAGES = -1
"""Result of `_blocked_until` if the pages for a missing path cannot be allocated."""

Int32s = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class _Run:
    """A path of nodes that is being computed."""

    node: Node
    path: deque[int]
    """Nodes to recompute after `node`, for a run along a missing path."""
    pending: tuple[int, int]
    """Node ids below the first node that have not begun, for a run of pending subtrees."""
    reserved: int
    """Number of sample slots reserved for samples at the end of `node`."""
    candidate: Candidate | None
    """Candidate it was admitted for; None without an admission check and after the samples have begun."""
    forced_step: int
    """Step in which it may evict all idle nodes; `COMPUTING` for none."""


class PrefillScheduler:
    """Schedules the computation of prefix tree nodes and begins the samples at their ends."""

    def __init__(
        self,
        order: BeginOrder,
        unbegun: UnbegunSamples,
        max_new: Int32s,
        block_manager: BlockManager,
        sequences: SequenceScheduler,
        predictor: LengthPredictor,
        config: SchedulerConfig,
    ) -> None:
        self.spans: Spans | None = None
        """Spans that no chunk may cut; None: there are none."""
        self._unbegun = unbegun
        self._max_new = max_new.data
        self._block_manager = block_manager
        self._sequences = sequences
        self._config = config
        self._stats = block_manager.stats
        self._pending = PendingSubtrees(block_manager.parent, block_manager.subtree_end, block_manager.refs, order.rank)
        self._deferred: list[tuple[int, int]] = []
        """Node id ranges that go back to `_pending` in the next step."""
        self._runs: list[_Run] = []
        self._slots = SampleSlots(sequences, config)
        self._backlog: dict[int, None] = {}
        """Computed nodes with samples at their ends that have yet to begin, in order."""
        self._admission = Admission(block_manager, sequences, predictor, self._max_new, config, order.interval)

    @property
    def in_progress(self) -> bool:
        """Whether prompts are being computed that were begun in earlier steps."""
        return bool(self._runs)

    def advance(self, builder: StepBuilder) -> None:
        """Continue the runs of earlier steps."""
        self._requeue_deferred()
        runs, self._runs = self._runs, []
        for run in runs:
            if run.node.alive:
                self._advance(run, builder)
            else:
                self._slots.reserved -= run.reserved
                self._pending.push(run.node.id, run.pending[1])

    def begin(self, builder: StepBuilder) -> None:
        """Begin samples at computed nodes, then new nodes, while slots, pages and budget suffice."""
        if builder.step < self._admission.blocked_until or not self._begin_backlog(builder):
            return
        while builder.budget and self._slots.free() and (taken := self._pending.pop()):
            low, high = taken
            until = self._blocked_until(low, builder)
            if until == NO_FREE_PAGES:
                self._pending.push(low, high)
                return
            if until > low:
                self._deferred.append((low, min(until, high)))
                self._pending.push(until, high)
            elif not self._exceeds(low, builder) and (candidate := self._admit(low, builder)) is not None:
                self._pending.push(self._block_manager.subtree_end[low], high)
                self._advance(self._new_run(low, builder, candidate), builder)
            else:
                self._pending.push(low, high)
                return

    def force(self, builder: StepBuilder) -> None:
        """Continue a run or begin the next node, evicting all idle nodes if needed.

        For an empty step while no sequence runs.
        """
        self._requeue_deferred()
        if self._runs:
            keep = self._runs[0].node
            self._block_manager.make_room(lambda: 0, growing=1, spare_waiting=False, keep=keep)
            self.advance(builder)
            return
        parent_id = next(iter(self._backlog), -1)
        taken = self._pending.pop() if parent_id < 0 else None
        if taken is not None:
            low, high = taken
            parent_id = self._block_manager.parent[low]
            if (parent_id < 0 or self._block_manager.usable(parent_id)) and self._make_room(low, force=True):
                self._pending.push(self._block_manager.subtree_end[low], high)
                self._advance(self._new_run(low, builder, None, force=True), builder)
                return
            self._pending.push(low, high)
        if parent_id >= 0 and (run := self._recompute_run(parent_id, builder, force=True)):
            self._advance(run, builder)

    def recompute(self, node_id: int, builder: StepBuilder, force: bool) -> None:
        """Schedule the missing path down to an evicted node, unless pages are short or its top cannot begin yet."""
        if (run := self._recompute_run(node_id, builder, force)) is not None:
            self._runs.append(run)

    def on_finished(self, sequences: Collection[int]) -> None:
        """Record that running samples have ended."""
        self._admission.end(sequences)

    def _requeue_deferred(self) -> None:
        """Put the deferred ranges back into `_pending`."""
        for low, high in self._deferred:
            self._pending.push(low, high)
        self._deferred.clear()

    def _nothing_in_flight(self) -> bool:
        """Whether no sample or run is in flight, so that waiting would free nothing."""
        return not self._sequences.by_id and not self._slots.reserved and not self._runs

    def _exceeds(self, node_id: int, builder: StepBuilder) -> bool:
        """Whether a node is a prompt that is computed as a whole, and the step has no room for it."""
        is_alone = isinstance(self.spans, PromptSpans) and self.spans.alone
        return is_alone and self._block_manager.end[node_id] > builder.budget

    def _admit(self, node_id: int, builder: StepBuilder) -> Candidate | None:
        """The candidate that begins with a node whose parent is complete, if slots and pages suffice; else None."""
        has_slots = self._slots.has_room(self._block_manager.unstarted[node_id])
        if not has_slots or not self._make_room(node_id, force=False):
            return None
        return self._admission.admit(
            self._candidate(node_id, builder), self._waiting, nothing_running=self._nothing_in_flight()
        )

    def _candidate(self, node_id: int, builder: StepBuilder) -> Candidate:
        """The path down to the first samples at or below a node, with as many of these as there are free slots."""
        block_manager, path = self._block_manager, self._unbegun.path_below(node_id)
        count = max(1, min(block_manager.unstarted[path[-1]], self._slots.free()))
        later = block_manager.end[path[-1]] - block_manager.start_of(node_id) - builder.budget
        room = self._config.max_tokens_per_step - len(self._sequences.running)
        delay = max(0, -(-later // max(1, room)))
        return Candidate(tuple(path), path[-1], self._unbegun.requests(path[-1], count), delay)

    def _waiting(self) -> list[Candidate]:
        """Candidates of the runs in progress: the samples whose prompts are being computed."""
        candidates = []
        for run in self._runs:
            if run.candidate is not None:
                path = tuple(n for n in run.candidate.path if n > run.node.id)
                candidates.append(replace(run.candidate, path=path))
            elif count := min(run.reserved, self._block_manager.unstarted[run.node.id]):
                candidates.append(Candidate((), run.node.id, self._unbegun.requests(run.node.id, count), 0))
        return candidates

    def _make_room(self, node_id: int, force: bool) -> bool:
        """Whether a node's pages can be allocated now.

        Without a forecast one more page for each begun sequence must stay free.
        """
        block_manager = self._block_manager
        if not force:
            spare = len(self._sequences.by_id) + self._slots.reserved
            if self._admission.uses_forecast:
                spare = 0
            if not block_manager.held_fit(2, spare):
                return False
            return block_manager.pages_to_admit(node_id) + spare <= block_manager.allocator.free_count
        keep = block_manager.active.get(block_manager.parent[node_id])
        return block_manager.make_room(
            lambda: block_manager.pages_to_admit(node_id), users=2, spare_waiting=False, keep=keep
        )

    def _blocked_until(self, node_id: int, builder: StepBuilder) -> int:
        """`node_id` if it can begin now; else the end of the id range that waits for the same ancestor.

        Starts the recomputation of an evicted path down to the node; NO_FREE_PAGES if its pages cannot be allocated.
        """
        path = self._block_manager.missing_path(self._block_manager.parent[node_id])
        top = path[0] if path else node_id
        if not self._parent_complete(top, builder):
            return self._block_manager.subtree_end[self._block_manager.parent[top]]
        if not path:
            return node_id
        run = self._recompute_run(path[-1], builder, force=False)
        if run is None:
            return NO_FREE_PAGES
        self._advance(run, builder)
        return self._block_manager.subtree_end[top]

    def _parent_complete(self, node_id: int, builder: StepBuilder) -> bool:
        """Whether a node's parent was completed in an earlier step or does not exist."""
        parent = self._block_manager.active.get(self._block_manager.parent[node_id])
        return parent is None or parent.completed_step not in (COMPUTING, builder.step)

    def _new_run(self, node_id: int, builder: StepBuilder, candidate: Candidate | None, force: bool = False) -> _Run:
        pending = (node_id + 1, self._block_manager.subtree_end[node_id])
        return self._run(node_id, builder, deque(), pending, candidate, force)

    def _recompute_run(self, node_id: int, builder: StepBuilder, force: bool) -> _Run | None:
        top, *missing = self._block_manager.missing_path(node_id)
        if not self._block_manager.computable(top) or not self._parent_complete(top, builder):
            return None
        if not self._make_room(top, force):
            return None
        return self._run(top, builder, deque(missing), (0, 0), None, force)

    def _run(
        self,
        node_id: int,
        builder: StepBuilder,
        missing: deque[int],
        pending: tuple[int, int],
        candidate: Candidate | None,
        force: bool,
    ) -> _Run:
        node = self._block_manager.admit(node_id, builder.plan.copies)
        forced_step = builder.step if force else COMPUTING
        return _Run(node, missing, pending, self._reserve(node_id, candidate), candidate, forced_step)

    def _reserve(self, node_id: int, candidate: Candidate | None) -> int:
        most = len(candidate.requests) if candidate is not None else self._block_manager.unstarted[node_id]
        return self._slots.reserve(min(self._block_manager.unstarted[node_id], most))

    def _advance(self, run: _Run, builder: StepBuilder) -> None:
        """Add one chunk of a run, as long as the budget allows."""
        block_manager = self._block_manager
        begin = position = run.node.next_position
        budget = builder.budget
        states: tuple[StateSpan, ...] = ()
        while True:
            node = run.node
            end = min(block_manager.reach(node), begin + budget)
            if self.spans is not None and end < node.end:
                end = self.spans.whole(block_manager.request_of(node.id), end)
            if end <= position:
                self._runs.append(run)
                break
            states += block_manager.advance(node, end)
            self._count_tokens(node, position)
            position = node.next_position
            if position == node.end:
                node.completed_step = builder.step
                self._slots.reserved -= run.reserved
                if block_manager.unstarted[node.id]:
                    self._begin_samples(node.id, builder, builder.flat + position - 1 - begin, run.reserved)
                    run.candidate = None
                if position - begin == budget or not self._extend(run, builder):
                    self._deferred.append(run.pending)
                    break
        if position > begin:
            pages = node.page_table[: -(-position // self._config.page_size)]
            builder.chunk(self._block_manager.request_of(node.id), None, begin, position, pages, states=states)

    def _extend(self, run: _Run, builder: StepBuilder) -> bool:
        """Continue into the next node of the path in the same chunk; returns whether that was possible."""
        block_manager = self._block_manager
        forced_step = run.forced_step == builder.step
        if run.path:
            if not block_manager.continues(run.path[0]) or not self._make_room(run.path[0], forced_step):
                return False
            child = run.path.popleft()
        else:
            low, high = run.pending
            while low < high and not block_manager.refs[low]:
                low = block_manager.subtree_end[low]
            run.pending = (low, high)
            if low >= high or block_manager.parent[low] != run.node.id or builder.blocked:
                return False
            if run.candidate is None and not forced_step:
                run.candidate = self._admit(low, builder)
                if run.candidate is None:
                    return False
            elif not self._slots.has_room(block_manager.unstarted[low]) or not self._make_room(low, forced_step):
                return False
            child = low
            run.pending = (low + 1, high)
        run.node = block_manager.admit(child, builder.plan.copies)
        run.reserved = self._reserve(child, run.candidate)
        return True

    def _count_tokens(self, node: Node, begin: int) -> None:
        known = self._block_manager.computed_to(node)
        again = max(0, min(node.next_position, known) - begin)
        self._stats.recomputed_tokens += again
        self._stats.prompt_tokens += node.next_position - begin - again

    def _begin_backlog(self, builder: StepBuilder) -> bool:
        """Begin samples at nodes computed earlier; the logits of the last prompt token are recomputed.

        Returns:
            Whether new nodes may begin. False while a node of the backlog waits for pages.
        """
        for node_id in list(self._backlog):
            if not builder.budget or not self._slots.has_room(self._block_manager.unstarted[node_id]):
                return True
            if not self._block_manager.unstarted[node_id]:
                del self._backlog[node_id]
                continue
            node = self._block_manager.usable(node_id)
            if node is not None and node.completed_step in (COMPUTING, builder.step):
                continue
            if node is None:
                run = self._recompute_run(node_id, builder, force=False)
                if run is None:
                    return False
                self._advance(run, builder)
                continue
            count = min(self._block_manager.unstarted[node_id], self._slots.free())
            candidate = Candidate((), node_id, self._unbegun.requests(node_id, count), 0)
            admitted = self._admission.admit(candidate, self._waiting, nothing_running=self._nothing_in_flight())
            if admitted is None:
                return False
            self._recompute_last(node, builder, len(admitted.requests))
        return True

    def _recompute_last(self, node: Node, builder: StepBuilder, count: int) -> None:
        if node.end % self._config.page_size and not node.tail_held:
            # The tail was freed: the sequence recomputes it in its own page.
            self._begin_samples(node.id, builder, None, count)
            return
        node.last_used_step = builder.step
        request, pages = self._block_manager.request_of(node.id), node.page_table[:]
        states = state_spans(node.holds, node.end, store=False)
        flat = builder.chunk(request, None, node.end - 1, node.end, pages, store=False, states=states)
        self._stats.recomputed_last_tokens += 1
        self._begin_samples(node.id, builder, flat, count)

    def _begin_samples(self, node_id: int, builder: StepBuilder, flat: int | None, count: int) -> None:
        """Begin `count` samples at the node's end, or as many as there are free slots, sampling from flat token `flat`.

        If `flat` is None only one sample begins, and computes its logits itself.
        """
        unstarted = self._block_manager.unstarted
        prompt_len = self._block_manager.end[node_id]
        count = min(unstarted[node_id], self._slots.free(), count if flat is not None else 1)
        for request, row, sample in self._unbegun.take(node_id, count):
            sequence = self._sequences.begin(
                request, row, node_id, prompt_len, self._max_new[request], sampled=flat is not None
            )
            self._admission.begin(sequence, request, node_id)
            builder.plan.starts.append(SequenceStart(sequence, request, sample))
            if flat is not None:
                builder.sample(sequence, flat)
        if unstarted[node_id]:
            self._backlog[node_id] = None
        else:
            self._backlog.pop(node_id, None)
