"""Scheduler: plans steps until every sample has ended. Independent of tensors and stop conditions."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from batchgen.plan.block_manager import BlockManager
from batchgen.plan.builder import StepBuilder
from batchgen.plan.cache_groups import HeldGroup
from batchgen.plan.config import SchedulerConfig, SchedulerStats
from batchgen.plan.length_predictor import LengthPredictor, Lengths
from batchgen.plan.order import begin_order
from batchgen.plan.page_allocator import PageAllocator
from batchgen.plan.prefill import PrefillScheduler
from batchgen.plan.prefix_group_selection import PrefixGroups
from batchgen.plan.sequences import Phase, SequenceScheduler
from batchgen.plan.spans import Spans
from batchgen.plan.step_plan import StepPlan
from batchgen.plan.tree import PrefixTree
from batchgen.plan.unbegun import UnbegunSamples
from batchgen.plan.work import Work, WorkForecast, WorkLeft, work_done

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerStats"]


class Scheduler:
    """Turns a prefix tree into steps: call `step`, run the plan, call `commit`, until `step` returns None.

    Every tree node with unfinished samples below is computed once, unless it is evicted; samples begin with the logits
    of their prompt's last token. The cost of planning a step depends on the step's work, not on the size of the job.

    `DecodeRow.pages` and `StepPlan.groups` are lists owned by the scheduler: read-only. Pages are only appended to a
    row while it decodes, so an earlier plan may see more pages than its position needs. The group list is the same
    object until a row is added or removed.

    Args:
        tree: prefix tree of all requests.
        samples: [N] samples to generate per request; 0 leaves a request out.
        max_new: [N] maximum tokens per sample, at least 1 for requests with samples.
        config: limits.
        kinds: [N] kind of each request for the `LengthPredictor`; None: all are of one kind.
        spans: spans that no chunk may cut; `max_tokens_per_step` holds the longest.
        seen: samples of another job that ended, from which lengths are expected.

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
        spans: Spans | None = None,
        seen: Lengths | None = None,
    ) -> None:
        _check_columns(len(tree.order), samples, max_new)
        self.config = config
        self.stats = SchedulerStats(tokens_per_step=config.max_tokens_per_step)
        self._max_new = np.ascontiguousarray(max_new, dtype=np.int32)
        self._predictor = predictor = LengthPredictor(self._max_new, kinds, seen)
        order = begin_order(tree, samples, predictor.expected, config)
        self.tree = tree = order.tree
        """The prefix tree in the order in which prompts begin."""
        self._samples = np.ascontiguousarray(samples, dtype=np.int32)
        self._allocator = PageAllocator(config.num_pages, config.page_size)
        self._pages = [
            group.planned(config.page_size) if isinstance(group, HeldGroup) else None for group in config.cache_groups
        ]
        self._block_manager = BlockManager(tree, self._samples, self._allocator, self.stats, self._pages)
        self._groups = PrefixGroups(
            self._block_manager.first_row, config.page_size, config.group_costs, int(tree.end.max(initial=0))
        )
        self._sequences = SequenceScheduler(self._block_manager, self._groups.add_row, self._groups.remove_row)
        self._unbegun_samples = UnbegunSamples(order, self._samples, self._block_manager)
        self._prefill = PrefillScheduler(
            order, self._unbegun_samples, self._max_new, self._block_manager, self._sequences, predictor, config
        )
        self._spans = self._sequences.spans = self._prefill.spans = spans
        self._forecast = WorkForecast(order, self._samples, self._block_manager, self._sequences, predictor)
        self._rows: npt.NDArray[np.int32] | None = None
        self.unended = int(self._samples.sum(dtype=np.int64))
        """Number of samples that have not ended, whether they have begun or not."""
        self.unbegun = self.unended
        """Number of samples that have not begun."""
        self.stats.slots = min(config.max_num_seqs, self.unended)
        self._open = False

    @property
    def group_pages_in_use(self) -> list[int]:
        """Number of pages of each cache group in use now."""
        return [allocator.used_count for allocator in self._allocators()]

    @property
    def group_peaks(self) -> list[int]:
        """Most pages of each cache group in use at once."""
        return [allocator.peak for allocator in self._allocators()]

    @property
    def lengths(self) -> Lengths:
        """The samples that have ended, and of another job."""
        return self._predictor.seen

    @property
    def work_done(self) -> Work:
        """The work of the steps planned so far."""
        return work_done(self.stats)

    def work_left(self) -> WorkLeft:
        """The work that is left after these; call it between `commit` and `step`.

        It simulates the steps to come: a second for some millions of samples.
        """
        assert not self._open, "commit the last step first"
        return self._forecast.left(self.config)

    def work_left_since(self) -> WorkLeft:
        """The work that is left after the last `work_left`, which takes no simulation."""
        assert not self._open, "commit the last step first"
        return self._forecast.since(self.config)

    def work_of(self, samples: npt.NDArray[np.integer]) -> Work:
        """The work of requests of the tree alone, with the lengths that were expected before any sample had ended.

        Args:
            samples: [N] samples per request.
        """
        return self._forecast.of(samples, self.config)

    def limit_tokens(self, tokens: int) -> None:
        """Lower the maximum tokens per step to `tokens`, but not below `max_num_seqs`: every running sample decodes.

        Nor below the longest span.
        """
        least = max(tokens, self.config.max_num_seqs, 0 if self._spans is None else self._spans.longest)
        if least < self.config.max_tokens_per_step:
            self.config = replace(self.config, max_tokens_per_step=least)
            self.stats.tokens_per_step = least

    def step(self) -> StepPlan | None:
        """Plan the next step; None when every sample has ended.

        A plan without tokens means that every running sample has all its tokens and waits for `commit` to report its
        end.

        Raises:
            ValueError: at the first step, a request is too large for the pool and was not cancelled.
        """
        assert not self._open, "commit the last step first"
        if not self.unended:
            return None
        if not self.stats.steps:
            self._check_sizes()
        self.stats.steps += 1
        self._block_manager.begin_step(self.stats.steps)
        self._sequences.begin_step()
        builder = StepBuilder(self.stats.steps, self.stats)
        self._fill(builder)
        self._finish_plan(builder)
        self._open = True
        return builder.plan

    def commit(self, finished: Collection[int], dropped: int = 0) -> None:
        """Record that the step has run: every sequence with a `SampleRow` gained a token.

        Ends may be reported several steps late; a sequence with all its `max_new` tokens is not scheduled again.

        Args:
            finished: ids of the sequences that have ended.
            dropped: number of sampled tokens of the step that were discarded and are not counted.

        Raises:
            KeyError: an id in `finished` does not belong to a running sequence.
        """
        assert self._open, "no step to commit"
        self._open = False
        self.stats.sampled_tokens -= dropped
        self._sequences.commit()
        for pages in self._block_manager.held:
            pages.end_step()
        if finished:
            self.unended -= len(finished)
            self._sequences.finish(finished)
            self._prefill.on_finished(finished)

    def dry_run(self, most_tokens: int, lag: int = 0) -> None:
        """Plan steps without a model, in which every sample runs to its limit.

        Args:
            most_tokens: sampled tokens after which it stops, since they take its time.
            lag: steps that are planned before the end of a sample is known.
        """
        left: dict[int, int] = {}
        ended: list[list[int]] = [[] for _ in range(lag)]
        while self.stats.sampled_tokens < most_tokens and (plan := self.step()) is not None:
            left.update((start.sequence, int(self._max_new[start.request])) for start in plan.starts)
            for row in plan.samples:
                left[row.sequence] -= 1
            ended.append([row.sequence for row in plan.samples if not left[row.sequence]])
            self.commit(ended.pop(0))

    def cancel(self, request: int) -> list[int]:
        """Cancel all samples of `request`; call it between `commit` and `step`.

        Returns:
            The ids of its sequences that were running; they have ended now.
        """
        assert not self._open, "commit the last step first"
        if self._rows is None:
            self._rows = np.empty(len(self.tree.order), np.int32)
            self._rows[self.tree.order] = np.arange(len(self.tree.order), dtype=np.int32)
        begun = [s.id for s in self._sequences.by_id.values() if s.request == request]
        node_id = int(self.tree.node_of_request[request])
        never = self._unbegun_samples.cancel(request, int(self._rows[request]), node_id)
        self.unbegun -= never
        self.unended -= len(begun) + never
        self._sequences.finish(begun)
        self._prefill.on_finished(begun)
        return begun

    def withdraw(self, share: float, together: npt.NDArray[np.bool_]) -> list[int]:
        """Cancel requests of which no sample has begun, the last ones to begin; call it between `commit` and `step`.

        Args:
            share: of the samples that have not begun, how many to cancel.
            together: [N] requests that stay, since others that may have begun belong to them.

        Returns:
            The requests that were cancelled.
        """
        withdrawn, left = list[int](), int(self.unbegun * share)
        for request, samples in self._unbegun_samples.untouched():
            if left < samples:
                break
            if not together[request]:
                withdrawn.append(request)
                left -= samples
        for request in withdrawn:
            self.cancel(request)
        return withdrawn

    def _allocators(self) -> Iterator[PageAllocator]:
        """The allocator of each cache group's pages."""
        return (self._allocator if pages is None else pages.allocator for pages in self._pages)

    def _check_sizes(self) -> None:
        lengths = self.tree.end[self.tree.node_of_request].astype(np.int64)
        needed = -(-(lengths + self._max_new - 1) // self.config.page_size)
        live = (self._samples > 0) & (needed > self._allocator.capacity)
        for request in np.flatnonzero(live).tolist():
            if not self._unbegun_samples.is_cancelled(request):
                have = self._allocator.capacity
                raise ValueError(f"request {request} needs {needed[request]} pages, the pool has {have}; cancel it")

    def _fill(self, builder: StepBuilder) -> None:
        sequences, prefill = self._sequences, self._prefill
        preempted = sequences.grow()
        if preempted and sequences.running:
            builder.blocked = True
        else:
            sequences.admit_waiting(builder, prefill.recompute)
        builder.budget = self.config.max_tokens_per_step - len(sequences.running)
        sequences.resume(builder)
        prefill.advance(builder)
        if not builder.blocked:
            prefill.begin(builder)
        if builder.flat or sequences.running:
            return
        if sequences.resuming:
            # All pages of a group are in use.
            sequences.make_progress()
            sequences.resume(builder)
        elif not sequences.by_id or prefill.in_progress:
            prefill.force(builder)
        elif sequences.waiting:
            # A sequence that computes its own logits has only just begun.
            sequences.admit_waiting(builder, prefill.recompute)
            sequences.resume(builder)

    def _finish_plan(self, builder: StepBuilder) -> None:
        stats, plan = self.stats, builder.plan
        positions = self._sequences.add_decode_rows(builder)
        plan.groups = self._groups.groups_of(self._sequences.running)
        stats.decode_kv_positions += positions
        stats.decode_kv_reads += positions - self._groups.saving
        stats.group_passes += len(plan.groups)
        sampled = len(plan.samples)
        stats.sampled_tokens += sampled
        stats.max_decode_rows = max(stats.max_decode_rows, len(plan.decodes))
        stats.peak_pages = self._allocator.peak
        stats.peak_window_pages, stats.peak_states = (
            sum(pages.allocator.peak for pages in self._block_manager.held if pages.exact is exact)
            for exact in (False, True)
        )
        plan.group_pages = [
            None if pages is None else pages.by_page for pages in self._pages if pages is None or not pages.exact
        ]
        if not self.unbegun:
            stats.tail_steps += 1
            stats.tail_tokens += sampled
        self.unbegun -= len(plan.starts)
        if not plan.prefills and not plan.decodes:
            awaiting = any(s.phase is Phase.AWAITING_COMMIT for s in self._sequences.by_id.values())
            assert awaiting, "nothing could be scheduled"


def _check_columns(requests: int, samples: npt.NDArray[np.integer], max_new: npt.NDArray[np.integer]) -> None:
    for name, column in (("samples", samples), ("max_new", max_new)):
        if column.shape != (requests,):
            raise ValueError(f"{name} has shape {column.shape}, expected ({requests},)")
    if (samples < 0).any():
        raise ValueError(f"samples of request {int((samples < 0).argmax())} is negative")
    short = (samples > 0) & (max_new < 1)
    if short.any():
        raise ValueError(
            f"max_new of request {int(short.argmax())} is {int(max_new[short.argmax()])}; it must be at least 1"
        )
