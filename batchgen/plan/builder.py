"""Fills one `StepPlan` under the token budget."""

from __future__ import annotations

from batchgen.plan.config import SchedulerStats
from batchgen.plan.types import PrefillChunk, SampleRow, StepPlan

__all__ = ["StepBuilder"]


class StepBuilder:
    """A step being planned: its number, its plan so far and the tokens left for prefill chunks."""

    def __init__(self, step: int, stats: SchedulerStats) -> None:
        self.step = step
        self.budget = 0
        """Prefill tokens the step still has room for."""
        self.plan = StepPlan()
        self.flat = 0
        """Flat tokens of the chunks so far."""
        self.blocked = False
        """Begun sequences wait for pages: nothing new may begin."""
        self._stats = stats

    def chunk(
        self, request: int, sequence: int | None, start: int, end: int, pages: list[int], *, store: bool = True
    ) -> int:
        """Add a chunk and return the flat token of position `start`."""
        self.plan.prefills.append(PrefillChunk(request, sequence, start, end, pages, store))
        self._stats.prefill_chunks += 1
        self._stats.chunk_kv_positions += end
        flat = self.flat
        self.flat += end - start
        self.budget -= end - start
        assert self.budget >= 0
        return flat

    def sample(self, sequence: int, flat: int) -> None:
        """Have the next token of `sequence` drawn from the logits of flat token `flat`."""
        self.plan.samples.append(SampleRow(sequence, flat))
