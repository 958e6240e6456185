"""Whether what comes next may begin now: when the pages that it and all before it will need are there to their ends."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from math import ceil
from typing import Final

from batchgen.plan.config import SchedulerConfig
from batchgen.plan.ends import Ends
from batchgen.plan.nodes import Nodes
from batchgen.plan.outlook import Entry, Outlook
from batchgen.plan.sequences import Sequences

__all__ = ["Admission"]

_SHARE: Final = 4
"""A prompt that lacks pages for all its samples waits for as many as this part of those under way at most: where the
pool holds a few, pages would lie idle until half of them had ended."""


class Admission:
    """Admits by the pages foreseen. Where the pool holds everything at full length nothing is simulated.

    After a refusal nothing is asked again until a sample ends or rows have grown by a page: steps in between cost
    nothing.
    """

    def __init__(
        self,
        nodes: Nodes,
        sequences: Sequences,
        ends: Ends,
        max_new: memoryview[int],
        config: SchedulerConfig,
        interval: float,
    ) -> None:
        """`interval`: that of the order of beginning."""
        self._nodes = nodes
        self._ends = ends
        self._max_new = max_new
        self._together = config.start_together
        self._size = config.page_size
        self._foresees = config.admission == "foreseen"
        self._outlook = Outlook(nodes, sequences, ends)
        self._looked = -1
        """Step that the outlook is of."""
        self.closed_until = 0
        """Step before which what was refused lately would be refused again."""
        self._interval = interval if self._foresees and ends.known else 0.0
        self._turn = 0.0
        """Step before which the next sample does not begin where samples begin at intervals."""
        self._full: dict[int, int] = {}
        """By sample under way its own pages at full length."""
        self._promised = 0
        """Their sum."""

    @property
    def foresees(self) -> bool:
        """Whether pages are looked for to the end, or only those that are needed at once."""
        return self._foresees

    def begin(self, sequence: int, request: int, node_id: int) -> None:
        """A sample has begun at the end of a node."""
        self._ends.begin(sequence, request, self._nodes.step)
        self._full[sequence] = pages = self._own_pages(request, node_id)
        self._promised += pages

    def end(self, sequences: Collection[int]) -> None:
        """Samples have ended."""
        self._ends.end(sequences, self._nodes.step)
        self._promised -= sum(self._full.pop(sequence) for sequence in sequences)
        self.closed_until = 0

    def admit(self, entry: Entry, waiting: Callable[[], list[Entry]], *, alone: bool) -> Entry | None:
        """The entry, or with fewer samples, as far as it may begin now; None if not even as many as start together.

        Args:
            entry: what would begin.
            waiting: gives the samples behind prompts that are being computed.
            alone: nothing is under way. Waiting would be for ever: one sample begins in any case.
        """
        step = self._nodes.step
        if step < self._turn and not alone:
            self.closed_until = ceil(self._turn)
            return None
        if self._foresees and not self._fits_at_full_length(entry, waiting):
            found = self._foreseen(entry, waiting, alone)
            if found is None:
                self.closed_until = step + self._size
                return None
            entry = found
        self._turn = max(self._turn, step - 1) + self._interval * len(entry.requests)
        return entry

    def _foreseen(self, entry: Entry, waiting: Callable[[], list[Entry]], alone: bool) -> Entry | None:
        if self._looked != self._nodes.step:
            self._outlook.look(waiting())
            self._looked = self._nodes.step
        least = 1 if alone else max(1, min(len(entry.requests), self._together, len(self._full) // _SHARE))
        while not self._outlook.admit(entry):
            if len(entry.requests) == least:
                if alone:
                    self._outlook.add(entry)
                    return entry
                return None
            entry = replace(entry, requests=entry.requests[: max(least, len(entry.requests) // 2)])
        return entry

    def _fits_at_full_length(self, entry: Entry, waiting: Callable[[], list[Entry]]) -> bool:
        if self._looked == self._nodes.step:
            return False
        allocator = self._nodes.allocator
        held = allocator.used_count + self._promised + self._pages(entry)
        return held <= allocator.capacity and held + sum(map(self._pages, waiting())) <= allocator.capacity

    def _pages(self, entry: Entry) -> int:
        """Most pages that an entry comes to hold."""
        pages = sum(self._own_pages(request, entry.node) for request in entry.requests)
        if entry.path:
            pages += -(-self._nodes.end[entry.node] // self._size) - self._nodes.start[entry.path[0]] // self._size
        return pages

    def _own_pages(self, request: int, node_id: int) -> int:
        length = self._nodes.end[node_id]
        return -(-(length + self._max_new[request] - 1) // self._size) - length // self._size
