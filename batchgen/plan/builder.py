"""Builder of one `StepPlan` under the token budget."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batchgen.plan.cache_groups import StateSpan
from batchgen.plan.config import SchedulerStats
from batchgen.plan.step_plan import DecodeRows, PrefillChunk, SampleRow, SampleRows, StepPlan


class StepBuilder:
    """A step being planned: its number, its plan so far and the tokens left for prefill chunks."""

    def __init__(self, step: int, stats: SchedulerStats) -> None:
        self.step = step
        self.budget = 0
        """Number of prefill tokens that still fit into the step."""
        self.plan = StepPlan()
        self.flat = 0
        """Number of flat tokens of the chunks added so far."""
        self.blocked = False
        """Whether begun sequences wait for pages, so that nothing new may begin."""
        self._stats = stats
        self._samples: list[SampleRow] = []

    def chunk(
        self,
        request: int,
        sequence: int | None,
        start: int,
        end: int,
        pages: list[int],
        *,
        store: bool = True,
        states: tuple[StateSpan, ...] = (),
    ) -> int:
        """Add a chunk and return the flat token of position `start`."""
        self.plan.prefills.append(PrefillChunk(request, sequence, start, end, pages, store, states))
        self._stats.prefill_chunks += 1
        self._stats.chunk_kv_positions += end
        self._stats.chunk_reads += (end * (end + 1) - start * (start + 1)) // 2
        flat = self.flat
        self.flat += end - start
        self.budget -= end - start
        assert self.budget >= 0
        return flat

    def sample(self, sequence: int, flat: int) -> None:
        """Sample the next token of `sequence` from the logits of flat token `flat`."""
        self._samples.append(SampleRow(sequence, flat))

    def decode(self, rows: DecodeRows, places: npt.NDArray[np.int64]) -> None:
        """Add the decode rows [R], which all sample, after all chunks; `places` is 0..R-1."""
        plan = self.plan
        plan.decodes = rows
        tokens = places + self.flat if self.flat else places
        if not self._samples:
            plan.samples = SampleRows(rows.sequence_ids, tokens)
            return
        chunks = SampleRows.of(self._samples)
        plan.samples = SampleRows(
            np.concatenate([chunks.sequence_ids, rows.sequence_ids]), np.concatenate([chunks.tokens, tokens])
        )
