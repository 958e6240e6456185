"""Scheduling of sequences that have begun: which decode, which wait for pages, which are recomputed.

A sequence with C output tokens is at `position` P + C - 1, that of its last token, which is fed next. Waiting sequences
get pages strictly by age, and the youngest is preempted first. The oldest can therefore always finish.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from batchgen.plan.block_manager import COMPUTING, BlockManager, Node
from batchgen.plan.builder import StepBuilder
from batchgen.plan.cache_groups import Hold, StateSpan, state_spans
from batchgen.plan.running import Running
from batchgen.plan.spans import Spans


class Phase(Enum):
    """Scheduling state of a sequence that has begun."""

    FRESH = "its first token is sampled in this step"
    WAITING = "waits for pages"
    RESUMING = "holds pages and is recomputed"
    RUNNING = "decodes"
    AWAITING_COMMIT = "has all its tokens; its end is not reported yet"
    ENDED = "has ended"


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """A sample that has begun and not ended."""

    id: int
    request: int
    row: int
    """Index of its request in the tree's order."""
    node_id: int
    """Node at whose end its prompt ends."""
    prompt_len: int
    position: int
    """Position fed next; `prompt_len - 1` before the first token. While RUNNING, `Running.positions` is up to date
    instead."""
    limit: int
    """Position at which the sequence has all its tokens: P + max_new - 1."""
    phase: Phase
    node: Node | None = None
    """Node at whose end its prompt ends; None while it holds no pages."""
    pages: list[int] = field(default_factory=list)
    """Page table from position 0 on, including the node's pages. Only appended to while in use."""
    first_own_page: int = 0
    """Index in `pages` of the first page that the sequence itself holds."""
    capacity: int = 0
    """Number of positions that the pages hold."""
    in_place: bool = False
    """Whether its first own page is the node's tail."""
    next_position: int = 0
    """Next position to compute while RESUMING."""
    holds: list[Hold] = field(default_factory=list)
    """What it holds of each group that has its own pages."""
    recompute_last: bool = False
    """Whether it is RESUMING only for the logits of its last prompt token, whose keys and values are in its pages."""

    @property
    def state(self) -> StateSpan | None:
        """The state that its next decode row reads and writes; None: the model has none."""
        return next(iter(state_spans(self.holds, self.position + 1, store=False)), None)


def _age(sequence: ScheduledSequence) -> int:
    return sequence.id


class SequenceScheduler:
    """Scheduler of all sequences that have begun, and owner of the pages they hold in addition to their nodes'."""

    def __init__(
        self,
        block_manager: BlockManager,
        on_decode_start: Callable[[Node | None], None],
        on_decode_stop: Callable[[Node | None], None],
    ) -> None:
        self.by_id: dict[int, ScheduledSequence] = {}
        self.running: Running[ScheduledSequence] = Running()
        """Sequences that decode, in tree order."""
        self.resuming: list[ScheduledSequence] = []
        """Sequences that are recomputed, oldest first."""
        self.waiting: list[ScheduledSequence] = []
        """Sequences that wait for pages, oldest first."""
        self.awaiting_commit = 0
        """Number of sequences that have all their tokens."""
        self.spans: Spans | None = None
        """Spans that no chunk may cut; None: there are none."""
        self._entering: list[ScheduledSequence] = []
        """RUNNING sequences whose first decode row is not planned yet."""
        self._scheduled: list[ScheduledSequence] = []
        """FRESH and RESUMING sequences that sample in this step."""
        self._block_manager = block_manager
        self._allocator = block_manager.allocator
        self._page_size = block_manager.allocator.page_size
        self._stats = block_manager.stats
        self._on_decode_start = on_decode_start
        self._on_decode_stop = on_decode_stop
        self.next_id = 0
        """Id of the next sequence to begin."""
        self._kv_positions = 0
        self._places = np.arange(0)

    def begin(self, request: int, row: int, node_id: int, prompt_len: int, max_new: int, *, sampled: bool) -> int:
        """Begin a sequence and return its id; `sampled`: this step samples its first token."""
        sequence = ScheduledSequence(
            id=self.next_id,
            request=request,
            row=row,
            node_id=node_id,
            prompt_len=prompt_len,
            position=prompt_len - 1,
            limit=prompt_len + max_new - 1,
            phase=Phase.FRESH,
        )
        self.next_id += 1
        self.by_id[sequence.id] = sequence
        self._block_manager.add_waiting(node_id, 1)
        if sampled:
            self._scheduled.append(sequence)
        else:
            self._enqueue(sequence)
        return sequence.id

    def begin_step(self) -> None:
        """Begin to plan a step: sequences let go of the held pages that only the last step read."""
        for number, held in enumerate(self._block_manager.held):
            positions = self.running.positions
            for place in held.leaving(positions):
                self.running[place].holds[number].slide(int(positions[place]))
            for sequence in self.resuming:
                sequence.holds[number].slide(sequence.next_position)

    def grow(self) -> bool:
        """Allocate one more page to each decode row that needs it, oldest first.

        Returns:
            Whether sequences were preempted.
        """
        short = self.running.at_capacity()
        if not short:
            return False
        if self._block_manager.make_room(lambda: len(short), growing=len(short), spare_waiting=True):
            self._grow(short)
            return False
        before = self._stats.preemptions
        for sequence in sorted((self.running[place] for place in short), key=_age):
            while sequence.phase is Phase.RUNNING and not self._block_manager.make_room(
                lambda: 1, growing=1, spare_waiting=False
            ):
                self._preempt(max((*self.running, *self.resuming), key=_age))
            if sequence.phase is Phase.RUNNING:
                self._grow([self.running.index_of(sequence)])
        return self._stats.preemptions > before

    def _grow(self, places: list[int]) -> None:
        self.running.grow(places, self._allocator.alloc(len(places)), self._page_size)
        if self._block_manager.held:
            for sequence in (self.running[place] for place in places):
                for hold in sequence.holds:
                    hold.extend(sequence.capacity)

    def admit_waiting(self, builder: StepBuilder, recompute: Callable[[int, StepBuilder, bool], None]) -> None:
        """Allocate pages to waiting sequences while there are enough.

        Args:
            builder: the step being planned.
            recompute: schedules the missing path of a node: (node, step, whether all idle nodes may be evicted).
        """
        served = 0
        for sequence in self.waiting:
            nothing_running = not self.running and not self.resuming
            node = self._block_manager.usable(sequence.node_id)
            if node is None:
                recompute(sequence.node_id, builder, nothing_running)
                break
            if node.completed_step in (COMPUTING, builder.step) or not self._make_room_for(
                sequence, node, nothing_running
            ):
                break
            self._allocate(sequence, node, builder)
            served += 1
        del self.waiting[:served]
        builder.blocked = bool(self.waiting)

    def resume(self, builder: StepBuilder) -> None:
        """Recompute RESUMING sequences within the budget; the last position samples the next token."""
        ended = 0
        for sequence in self.resuming:
            begin, end = sequence.next_position, min(sequence.position + 1, sequence.next_position + builder.budget)
            end = min([end, *(hold.room() for hold in sequence.holds)])
            if self.spans is not None and end < sequence.prompt_len:
                end = self.spans.whole(sequence.request, end)
            if end <= begin:
                break
            for hold in sequence.holds:
                hold.extend(end)
            pages = sequence.pages[: -(-end // self._page_size)]
            store = not sequence.recompute_last
            states = state_spans(sequence.holds, end, store=store)
            flat = builder.chunk(sequence.request, sequence.id, begin, end, pages, store=store, states=states)
            sequence.next_position = end
            self._stats.recomputed_tokens += min(end, sequence.position) - begin
            if end > sequence.position:
                if sequence.position < sequence.prompt_len:
                    self._stats.recomputed_last_tokens += 1
                else:
                    self._stats.decode_tokens += 1
                builder.sample(sequence.id, flat + end - 1 - begin)
                self._scheduled.append(sequence)
                ended += 1
        del self.resuming[:ended]

    def add_decode_rows(self, builder: StepBuilder) -> int:
        """Add the decode rows and their samples to the step; returns the cached positions they attend to."""
        count = len(self.running)
        if len(self._places) != count:
            self._places = np.arange(count)
        builder.decode(self.running.decode_rows(), self._places)
        for sequence in self._entering:
            state_spans(sequence.holds, 0)
        self._entering.clear()
        self._stats.decode_tokens += count
        return self._kv_positions

    def commit(self) -> None:
        """Record that every scheduled sequence has gained a token."""
        self._kv_positions += len(self.running)
        full = self.running.advance()
        self._stop_decoding(full, Phase.AWAITING_COMMIT)
        self.awaiting_commit += len(full)
        for sequence in self._scheduled:
            sequence.position += 1
            if sequence.position == sequence.limit:
                sequence.phase = Phase.AWAITING_COMMIT
                self.awaiting_commit += 1
            elif sequence.phase is Phase.FRESH:
                self._enqueue(sequence)
            else:
                self._start_decoding(sequence)
        self._scheduled.clear()

    def finish(self, ids: Collection[int]) -> None:
        """End sequences and free everything they hold; call it between steps.

        Raises:
            KeyError: an id does not belong to a running sequence.
        """
        ended = [self.by_id.pop(i) for i in ids]
        phases = {sequence.phase for sequence in ended}
        self._stop_decoding([sequence for sequence in ended if sequence.phase is Phase.RUNNING], Phase.ENDED)
        for sequence in ended:
            self.awaiting_commit -= sequence.phase is Phase.AWAITING_COMMIT
            sequence.phase = Phase.ENDED
            if sequence.node is None:
                self._block_manager.add_waiting(sequence.node_id, -1)
            else:
                self._free_pages(sequence, sequence.node)
            self._block_manager.release(sequence.node_id)
        if Phase.RESUMING in phases:
            self.resuming = [s for s in self.resuming if s.phase is Phase.RESUMING]
        if Phase.WAITING in phases:
            self.waiting = [s for s in self.waiting if s.phase is Phase.WAITING]

    def _make_room_for(self, sequence: ScheduledSequence, node: Node, nothing_running: bool) -> bool:
        """Make room for the pages that `_allocate` needs; returns whether they are free.

        One page per other sequence stays free for their growth, so that a recomputed sequence is not preempted at once.
        """
        is_recomputed = sequence.position > sequence.prompt_len
        spare = len(self.running) + len(self.resuming) if is_recomputed and not nothing_running else 0

        def need() -> int:
            return spare + self._block_manager.pages_to_branch(node, sequence.prompt_len, sequence.position + 1)

        if self._block_manager.make_room(need, users=1, growing=spare, spare_waiting=True):
            return True
        return nothing_running and self._block_manager.make_room(need, users=1, spare_waiting=False, keep=node)

    def _allocate(self, sequence: ScheduledSequence, node: Node, builder: StepBuilder) -> None:
        prompt_len, position = sequence.prompt_len, sequence.position
        branch = self._block_manager.branch(node, prompt_len, position + 1, builder.plan.copies)
        self._block_manager.add_waiting(node.id, -1)
        sequence.node = node
        sequence.pages = branch.page_table
        sequence.holds = branch.holds
        sequence.first_own_page = node.full_pages
        sequence.capacity = len(sequence.pages) * self._page_size
        sequence.in_place = branch.in_place
        if branch.begin == prompt_len == position:
            for hold in sequence.holds:
                hold.extend(position + 1)
            self._start_decoding(sequence)
            return
        sequence.phase = Phase.RESUMING
        sequence.recompute_last = position < branch.begin
        sequence.next_position = min(position, branch.begin)
        insort(self.resuming, sequence, key=_age)

    def _start_decoding(self, sequence: ScheduledSequence) -> None:
        sequence.phase = Phase.RUNNING
        for hold in sequence.holds:
            hold.slide(sequence.position)
        if sequence.holds:
            self._entering.append(sequence)
        self.running.add(sequence)
        self._kv_positions += sequence.position + 1
        self._on_decode_start(sequence.node)

    def _stop_decoding(self, sequences: list[ScheduledSequence], phase: Phase) -> None:
        """Remove sequences from the decode rows."""
        self.running.remove(sequences)
        for sequence in sequences:
            sequence.phase = phase
            self._kv_positions -= sequence.position + 1
            self._on_decode_stop(sequence.node)

    def _enqueue(self, sequence: ScheduledSequence) -> None:
        sequence.phase = Phase.WAITING
        insort(self.waiting, sequence, key=_age)

    def _preempt(self, sequence: ScheduledSequence) -> None:
        assert sequence.node is not None
        self._stats.preemptions += 1
        if sequence.phase is Phase.RUNNING:
            self._stop_decoding([sequence], Phase.WAITING)
        else:
            self.resuming.remove(sequence)
        self._free_pages(sequence, sequence.node)
        self._block_manager.add_waiting(sequence.node_id, 1)
        self._enqueue(sequence)

    def make_progress(self) -> None:
        """Make room for the oldest sequence that is recomputed, if there is none for anyone: preempt the others."""
        oldest, *others = self.resuming
        while not self._block_manager.make_room(lambda: 0, growing=1, spare_waiting=False, keep=oldest.node) and others:
            self._preempt(others.pop())

    def _free_pages(self, sequence: ScheduledSequence, node: Node) -> None:
        for hold in sequence.holds:
            hold.release()
        self._allocator.free(sequence.pages[sequence.first_own_page :])
        self._block_manager.detach(node, sequence.in_place)
        sequence.node = None
        sequence.pages = []
