"""Sequences that have begun: which decode, which wait for pages, which are computed again.

A sequence with C output tokens stands at `position` P + C - 1, that of its last token, which is fed next. The line of
those that wait is served strictly by age; the youngest is preempted first. The oldest can therefore always finish.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from batchgen.plan.builder import StepBuilder
from batchgen.plan.config import SchedulerStats
from batchgen.plan.nodes import COMPUTING, Node, Nodes
from batchgen.plan.running import Running

__all__ = ["Phase", "Sequence", "Sequences"]


class Phase(Enum):
    """Where a begun sequence stands."""

    FRESH = "its first token is drawn in this step"
    WAITING = "in line for pages"
    RESUMING = "holds pages and is computed again"
    RUNNING = "decodes"
    PARKED = "has all its tokens; its end is not reported yet"
    ENDED = "gone"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample that has begun and not ended."""

    id: int
    request: int
    row: int
    """Place of its request in the tree's order."""
    node_id: int
    """Node at whose end its prompt ends."""
    prompt_len: int
    position: int
    """Position fed next; `prompt_len - 1` before the first token is drawn. As it was at the last join while RUNNING."""
    limit: int
    """Position at which no further token is asked for: P + max_new - 1."""
    phase: Phase
    node: Node | None = None
    """Set while it holds pages."""
    pages: list[int] = field(default_factory=list)
    """Pages of positions 0.., the node's included. Only ever appended to while in use."""
    own: int = 0
    """Place in `pages` of its first own page."""
    capacity: int = 0
    """Positions the pages hold."""
    in_place: bool = False
    """Its first own page is the node's tail."""
    done: int = 0
    """Next position to compute, while resuming."""
    relogit: bool = False
    """Resuming only for the logits of its last prompt token, whose keys and values stand in its pages."""


def _age(sequence: Sequence) -> int:
    return sequence.id


class Sequences:
    """All begun sequences and the pages they hold beside their nodes'."""

    def __init__(
        self,
        nodes: Nodes,
        stats: SchedulerStats,
        joined: Callable[[Node | None], None],
        left: Callable[[Node | None], None],
    ) -> None:
        self.by_id: dict[int, Sequence] = {}
        self.running: Running[Sequence] = Running()
        """Decode rows, in tree order."""
        self.resuming: list[Sequence] = []
        """Oldest first."""
        self.line: list[Sequence] = []
        """Those waiting for pages, oldest first."""
        self.parked = 0
        """Those that have all their tokens."""
        self._scheduled: list[Sequence] = []
        """Fresh and resumed ones that draw in this step."""
        self._nodes = nodes
        self._allocator = nodes.allocator
        self._page_size = nodes.allocator.page_size
        self._stats = stats
        self._joined = joined
        self._left = left
        self.next_id = 0
        """Number of the sequence that begins next."""
        self._kv_positions = 0
        self._places = np.arange(0)

    def begin(self, request: int, row: int, node_id: int, prompt_len: int, max_new: int, *, drawn: bool) -> int:
        """A new sequence; `drawn` if this step draws its first token, else it has to compute its logits itself."""
        sequence = Sequence(
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
        self._nodes.wait(node_id, 1)
        if drawn:
            self._scheduled.append(sequence)
        else:
            self._queue(sequence)
        return sequence.id

    def grow(self) -> bool:
        """Get the decode rows at the end of their pages one more each, the oldest first.

        Returns:
            Whether sequences were preempted for it.
        """
        short = self.running.full()
        if not short:
            return False
        if len(short) <= self._allocator.free_count or self._nodes.make_room(lambda: len(short), spare_waiting=True):
            self.running.grow(short, self._allocator.alloc(len(short)), self._page_size)
            return False
        before = self._stats.preemptions
        for sequence in sorted((self.running[place] for place in short), key=_age):
            while sequence.phase is Phase.RUNNING and not self._nodes.make_room(lambda: 1, spare_waiting=False):
                self._preempt(max((*self.running, *self.resuming), key=_age))
            if sequence.phase is Phase.RUNNING:
                self.running.grow([self.running.place(sequence)], self._allocator.alloc(1), self._page_size)
        return self._stats.preemptions > before

    def join(self, builder: StepBuilder, recompute: Callable[[int, StepBuilder, bool], None]) -> None:
        """Give pages to the sequences in line, as far as they go.

        Args:
            builder: the step.
            recompute: has a node's missing path computed: (node, step, whether everything idle may be evicted).
        """
        served = 0
        for sequence in self.line:
            alone = not self.running and not self.resuming
            node = self._nodes.active.get(sequence.node_id)
            if node is None:
                recompute(sequence.node_id, builder, alone)
                break
            if node.ready in (COMPUTING, builder.step) or not self._fits(sequence, node, alone):
                break
            self._take(sequence, node, builder)
            served += 1
        del self.line[:served]
        builder.blocked = bool(self.line)

    def resume(self, builder: StepBuilder) -> None:
        """Compute resuming sequences anew within the budget; the last position draws the next token."""
        ended = 0
        for sequence in self.resuming:
            if not builder.budget:
                break
            begin, end = sequence.done, min(sequence.position + 1, sequence.done + builder.budget)
            pages = sequence.pages[: -(-end // self._page_size)]
            flat = builder.chunk(sequence.request, sequence.id, begin, end, pages, store=not sequence.relogit)
            sequence.done = end
            self._stats.recomputed_tokens += min(end, sequence.position) - begin
            if end > sequence.position:
                if sequence.position < sequence.prompt_len:
                    self._stats.relogit_tokens += 1
                else:
                    self._stats.decode_tokens += 1
                builder.sample(sequence.id, flat + end - 1 - begin)
                self._scheduled.append(sequence)
                ended += 1
        del self.resuming[:ended]

    def emit(self, builder: StepBuilder) -> int:
        """Add the decode rows and what they draw; returns the cached positions they attend to."""
        count = len(self.running)
        if len(self._places) != count:
            self._places = np.arange(count)
        builder.decode(self.running.decode_rows(), self._places)
        self._stats.decode_tokens += count
        return self._kv_positions

    def commit(self) -> None:
        """Every scheduled sequence has gained its token."""
        self._kv_positions += len(self.running)
        full = self.running.advance()
        self._stop(full, Phase.PARKED)
        self.parked += len(full)
        for sequence in self._scheduled:
            sequence.position += 1
            if sequence.position == sequence.limit:
                sequence.phase = Phase.PARKED
                self.parked += 1
            elif sequence.phase is Phase.FRESH:
                self._queue(sequence)
            else:
                self._run(sequence)
        self._scheduled.clear()

    def finish(self, ids: Collection[int]) -> None:
        """Sequences that have ended give everything back. Called between steps.

        Raises:
            KeyError: an id that names no begun, unended sequence.
        """
        ended = [self.by_id.pop(i) for i in ids]
        phases = {sequence.phase for sequence in ended}
        self._stop([sequence for sequence in ended if sequence.phase is Phase.RUNNING], Phase.ENDED)
        for sequence in ended:
            self.parked -= sequence.phase is Phase.PARKED
            sequence.phase = Phase.ENDED
            if sequence.node is None:
                self._nodes.wait(sequence.node_id, -1)
            else:
                self._give_back(sequence, sequence.node)
            self._nodes.release(sequence.node_id)
        if Phase.RESUMING in phases:
            self.resuming = [s for s in self.resuming if s.phase is Phase.RESUMING]
        if Phase.WAITING in phases:
            self.line = [s for s in self.line if s.phase is Phase.WAITING]

    def _fits(self, sequence: Sequence, node: Node, alone: bool) -> bool:
        """Make room for what `_take` takes. One that is computed again must not be preempted at once: a page each
        for the others' growth stays free.
        """
        spare = 0 if alone or sequence.position <= sequence.prompt_len else len(self.running) + len(self.resuming)

        def need() -> int:
            return spare + self._nodes.pages_to_branch(node, sequence.prompt_len, sequence.position + 1)

        if self._nodes.make_room(need, spare_waiting=True):
            return True
        return alone and self._nodes.make_room(need, spare_waiting=False, keep=node)

    def _take(self, sequence: Sequence, node: Node, builder: StepBuilder) -> None:
        prompt_len, position = sequence.prompt_len, sequence.position
        branch = self._nodes.branch(node, prompt_len, position + 1, builder.plan.copies)
        self._nodes.wait(node.id, -1)
        sequence.node = node
        sequence.pages = node.table[: node.full] + branch.pages
        sequence.own = node.full
        sequence.capacity = len(sequence.pages) * self._page_size
        sequence.in_place = branch.in_place
        if branch.begin == prompt_len == position:
            self._run(sequence)
            return
        sequence.phase = Phase.RESUMING
        sequence.relogit = position < branch.begin
        sequence.done = min(position, branch.begin)
        insort(self.resuming, sequence, key=_age)

    def _run(self, sequence: Sequence) -> None:
        sequence.phase = Phase.RUNNING
        self.running.add(sequence)
        self._kv_positions += sequence.position + 1
        self._joined(sequence.node)

    def _stop(self, sequences: list[Sequence], phase: Phase) -> None:
        """They decode no more."""
        self.running.remove(sequences)
        for sequence in sequences:
            sequence.phase = phase
            self._kv_positions -= sequence.position + 1
            self._left(sequence.node)

    def _queue(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        insort(self.line, sequence, key=_age)

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.node is not None
        self._stats.preemptions += 1
        if sequence.phase is Phase.RUNNING:
            self._stop([sequence], Phase.WAITING)
        else:
            self.resuming.remove(sequence)
        self._give_back(sequence, sequence.node)
        self._nodes.wait(sequence.node_id, 1)
        self._queue(sequence)

    def _give_back(self, sequence: Sequence, node: Node) -> None:
        self._allocator.free(sequence.pages[sequence.own :])
        self._nodes.leave(node, sequence.in_place)
        sequence.node = None
        sequence.pages = []
