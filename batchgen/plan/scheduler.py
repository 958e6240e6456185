"""Plans one step after the other until every sample has ended. Knows nothing of tensors or stop conditions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from batchgen.plan.builder import StepBuilder
from batchgen.plan.config import SchedulerConfig, SchedulerStats
from batchgen.plan.ends import Ends
from batchgen.plan.groups import PrefixGroups
from batchgen.plan.nodes import Nodes
from batchgen.plan.order import begin_order
from batchgen.plan.pages import PageAllocator
from batchgen.plan.prefill import Prompts
from batchgen.plan.sequences import Phase, Sequences
from batchgen.plan.tree import PrefixTree
from batchgen.plan.types import StepPlan

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerStats"]


class Scheduler:
    """Turns a prefix tree into steps: `step`, run it, `commit`, until `step` returns None.

    Every tree node with unended samples below is computed once, unless memory forces it out; samples begin at the
    logits of their prompt's last token. Cost per step is of the order of the step's own work, whatever the job's size.

    `DecodeRow.pages` and `StepPlan.groups` are the scheduler's own lists: not to be changed. A row's pages are only
    appended to while it decodes, so an earlier plan may see more pages than its position needs; the group list is
    the same object while no row joins or leaves.

    Args:
        tree: the prefix tree of all requests.
        samples: [N] samples to generate per request; 0 leaves a request out.
        max_new: [N] most tokens per sample, at least 1 where `samples` is.
        config: limits.
        kinds: [N] requests of one kind are expected to end alike, `EXACT` ones at their limit; None: all are of one.

    Raises:
        ValueError: a column has the wrong length or a value out of range.
    """

    def __init__(
        self,
        tree: PrefixTree,
        samples: npt.NDArray[np.integer],
        max_new: npt.NDArray[np.integer],
        config: SchedulerConfig,
        kinds: npt.NDArray[np.int32] | None = None,
    ) -> None:
        _check_columns(len(tree.order), samples, max_new)
        self.config = config
        self.stats = SchedulerStats(tokens_per_step=config.max_tokens_per_step)
        self._max_new = np.ascontiguousarray(max_new, dtype=np.int32)
        ends = Ends(self._max_new, kinds)
        order = begin_order(tree, samples, ends.expected, config)
        tree = order.tree
        self._tree = tree
        self._samples = np.ascontiguousarray(samples, dtype=np.int32)
        self._allocator = PageAllocator(config.num_pages, config.page_size)
        self._nodes = Nodes(tree, self._samples, self._allocator, self.stats)
        self._groups = PrefixGroups(
            self._nodes.first_row, config.page_size, config.group_costs, int(tree.end.max(initial=0))
        )
        self._sequences = Sequences(self._nodes, self.stats, self._groups.join, self._groups.leave)
        self._prompts = Prompts(
            order, self._samples, self._max_new, self._nodes, self._sequences, ends, config, self.stats
        )
        self._rows: npt.NDArray[np.int32] | None = None
        self._unended = self._unbegun = int(self._samples.sum(dtype=np.int64))
        self.stats.slots = min(config.max_num_seqs, self._unended)
        self._open = False

    @property
    def unended(self) -> int:
        """Samples that have not ended, begun or not."""
        return self._unended

    @property
    def pages_in_use(self) -> int:
        """Pages held now."""
        return self._allocator.used_count

    def pages_needed(self, request: int) -> int:
        """Pages one sample of `request` fills at its full length."""
        prompt_len = int(self._tree.end[self._tree.node_of_request[request]])
        return -(-(prompt_len + int(self._max_new[request]) - 1) // self.config.page_size)

    def too_large(self, request: int) -> int | None:
        """Pages a sample of `request` needs if that is more than the whole pool, else None.

        Such a request must be cancelled before the first step; every other one can finish.
        """
        needed = self.pages_needed(request)
        return needed if needed > self._allocator.capacity else None

    def limit_tokens(self, tokens: int) -> None:
        """Plan steps of at most so many tokens from now on, or of `max_num_seqs`: whatever has begun decodes."""
        least = max(tokens, self.config.max_num_seqs)
        if least < self.config.max_tokens_per_step:
            self.config = replace(self.config, max_tokens_per_step=least)
            self.stats.tokens_per_step = least

    def step(self) -> StepPlan | None:
        """Plan the next step; None when every sample has ended.

        A plan without tokens means that every begun sample has all its tokens and `commit` has yet to hear of ends.

        Raises:
            ValueError: at the first step, a request is too large for the pool and was not cancelled.
        """
        assert not self._open, "commit the last step first"
        if not self._unended:
            return None
        if not self.stats.steps:
            self._check_sizes()
        self.stats.steps += 1
        self._nodes.step = self.stats.steps
        builder = StepBuilder(self.stats.steps, self.stats)
        self._fill(builder)
        self._finish_plan(builder)
        self._open = True
        return builder.plan

    def commit(self, finished: Collection[int], dropped: int = 0) -> None:
        """The step has run: every sequence with a `SampleRow` gained a token; those in `finished` have ended.

        Ends may be reported steps later: a sequence with all its `max_new` tokens is scheduled no more. `dropped` draws
        of the step gave no token that anybody wanted, and are not counted.

        Raises:
            KeyError: an id in `finished` names no begun, unended sequence.
        """
        assert self._open, "no step to commit"
        self._open = False
        self.stats.sampled_tokens -= dropped
        self._sequences.commit()
        if finished:
            self._unended -= len(finished)
            self._sequences.finish(finished)
            self._prompts.ended(finished)

    def cancel(self, request: int) -> list[int]:
        """End all samples of `request`, between `commit` and `step`.

        Returns:
            The sequences of it that had begun and not ended; they have ended now.
        """
        assert not self._open, "commit the last step first"
        if self._rows is None:
            self._rows = np.empty(len(self._tree.order), np.int32)
            self._rows[self._tree.order] = np.arange(len(self._tree.order), dtype=np.int32)
        begun = [s.id for s in self._sequences.by_id.values() if s.request == request]
        node_id = int(self._tree.node_of_request[request])
        never = self._prompts.cancel(request, int(self._rows[request]), node_id)
        self._unbegun -= never
        self._unended -= len(begun) + never
        self._sequences.finish(begun)
        self._prompts.ended(begun)
        return begun

    def _check_sizes(self) -> None:
        lengths = self._tree.end[self._tree.node_of_request].astype(np.int64)
        needed = -(-(lengths + self._max_new - 1) // self.config.page_size)
        live = (self._samples > 0) & (needed > self._allocator.capacity)
        for request in np.flatnonzero(live).tolist():
            if not self._prompts.is_cancelled(request):
                have = self._allocator.capacity
                raise ValueError(f"request {request} needs {needed[request]} pages, the pool has {have}; cancel it")

    def _fill(self, builder: StepBuilder) -> None:
        sequences, prompts = self._sequences, self._prompts
        preempted = sequences.grow()
        if preempted and sequences.running:
            builder.blocked = True
        else:
            sequences.join(builder, prompts.recompute)
        builder.budget = self.config.max_tokens_per_step - len(sequences.running)
        sequences.resume(builder)
        prompts.advance(builder)
        if not builder.blocked:
            prompts.begin(builder)
        if builder.flat or sequences.running:
            return
        if not sequences.by_id:
            prompts.force(builder)
        elif sequences.line:
            # One that has to compute its own logits has only now begun.
            sequences.join(builder, prompts.recompute)
            sequences.resume(builder)

    def _finish_plan(self, builder: StepBuilder) -> None:
        stats, plan = self.stats, builder.plan
        positions = self._sequences.emit(builder)
        plan.groups = self._groups.of(self._sequences.running)
        stats.decode_kv_positions += positions
        stats.decode_kv_reads += positions - self._groups.saving
        stats.group_passes += len(plan.groups)
        drawn = len(plan.samples)
        stats.sampled_tokens += drawn
        stats.max_decode_rows = max(stats.max_decode_rows, len(plan.decodes))
        stats.peak_pages = self._allocator.peak
        if not self._unbegun:
            stats.tail_steps += 1
            stats.tail_tokens += drawn
        self._unbegun -= len(plan.starts)
        if not plan.prefills and not plan.decodes:
            parked = any(s.phase is Phase.PARKED for s in self._sequences.by_id.values())
            assert parked, "nothing could be scheduled"


def _check_columns(requests: int, samples: npt.NDArray[np.integer], max_new: npt.NDArray[np.integer]) -> None:
    for name, column in (("samples", samples), ("max_new", max_new)):
        if column.shape != (requests,):
            raise ValueError(f"{name} has shape {column.shape}, expected ({requests},)")
    if (samples < 0).any():
        raise ValueError(f"samples of request {int((samples < 0).argmax())} is negative")
    short = (samples > 0) & (max_new < 1)
    if short.any():
        raise ValueError(
            f"max_new of request {int(short.argmax())} is {int(max_new[short.argmax()])}; it has samples and needs 1"
        )
