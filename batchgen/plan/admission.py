"""Admission control: which pending subtree is next, and whether the KV pool has pages for it until its samples end."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from math import ceil
from typing import Final

import numpy as np
import numpy.typing as npt

from batchgen.plan.block_manager import BlockManager
from batchgen.plan.cache_groups import HeldPages
from batchgen.plan.config import SchedulerConfig
from batchgen.plan.length_predictor import LengthPredictor
from batchgen.plan.page_forecast import Candidate, Int64s, PageForecast, Samples, WithCandidate, with_new_samples
from batchgen.plan.sequences import ScheduledSequence, SequenceScheduler
from batchgen.plan.window_pages import WindowHold, WindowPages


class PendingSubtrees:
    """Priority queue of node id ranges that have not begun.

    The ranges are disjoint; each holds the subtrees of siblings. The range whose first node has the lowest rank is
    next.

    Args:
        parent: [M] parent of each node, -1 for a root.
        subtree_end: [M] one past the last node of each subtree.
        refs: [M] reference count of each node; 0 if its subtree has no unfinished sample.
        rank: [M] position of each node in the begin order; None for depth first.
    """

    def __init__(
        self,
        parent: memoryview[int],
        subtree_end: memoryview[int],
        refs: array[int],
        rank: npt.NDArray[np.int32] | None = None,
    ) -> None:
        self._parent = parent
        self._subtree_end = subtree_end
        self._refs = refs
        self._rank = range(len(parent)) if rank is None else rank.data
        self._heap: list[tuple[int, int, int]] = []
        self.push(0, len(parent))

    def __bool__(self) -> bool:
        """Whether a range is queued; its subtrees may all be finished."""
        return bool(self._heap)

    def pop(self) -> tuple[int, int] | None:
        """Remove and return the next range whose first node has unfinished samples below; None if there is none."""
        while self._heap:
            _, low, high = heapq.heappop(self._heap)
            if self._refs[low]:
                return low, high
            while low < high and not self._refs[low]:
                low = self._subtree_end[low]
            if low < high:
                heapq.heappush(self._heap, (self._rank[low], low, high))
        return None

    def push(self, low: int, high: int) -> None:
        """Queue the consecutive node ids `[low, high)`, which may be of different depths."""
        while low < high:
            parent = self._parent[low]
            end = high if parent < 0 else min(high, self._subtree_end[parent])
            heapq.heappush(self._heap, (self._rank[low], low, end))
            low = end


_WAIT_FRACTION: Final = 4
"""A prompt that lacks pages for all its samples waits for at most 1/4 as many as are running. In a pool that holds only
a few samples, waiting for more would leave pages unused."""


class SampleSlots:
    """The slots for samples: taken by begun samples, or reserved for those whose prompts are being computed."""

    def __init__(self, sequences: SequenceScheduler, config: SchedulerConfig) -> None:
        self._sequences = sequences
        self._config = config
        self.reserved = 0
        """Number of reserved slots."""

    def free(self) -> int:
        """Number of free slots."""
        begun = len(self._sequences.by_id) - self._sequences.awaiting_commit  # a finished sequence needs no slot
        return self._config.max_num_seqs - begun - self.reserved

    def has_room(self, samples: int) -> bool:
        """Whether samples of one node can begin, all of them or as many as begin together at least."""
        config = self._config
        return self.free() >= min(max(1, samples), config.start_together, config.max_num_seqs)

    def reserve(self, most: int) -> int:
        """Reserve up to `most` slots, as many as are free; returns their number."""
        count = max(0, min(most, self.free()))
        self.reserved += count
        return count


def held_forecasts(
    nodes: BlockManager, sequences: SequenceScheduler, ends: LengthPredictor, tokens: int
) -> list[HeldForecast]:
    """The forecast of each group in `nodes.held`; `tokens`: most of a step."""
    return [
        WindowForecast(pages, number, nodes, sequences, ends, tokens)
        if isinstance(pages, WindowPages)
        else SlotForecast(pages, nodes)
        for number, pages in enumerate(nodes.held)
    ]


class HeldForecast(ABC):
    """Whether a group has pages for samples until their ends."""

    @abstractmethod
    def begin(self, pages: int) -> None:
        """Record that a sample has begun, which has so many `pages` of page tables at its full length."""

    @abstractmethod
    def end(self, pages: Iterable[int]) -> None:
        """Record that samples have ended."""

    @abstractmethod
    def fits_at_most(self, pages: Iterable[int]) -> bool:
        """Whether further holders, with so many `pages` of page tables each, fit next to all that has begun."""

    @abstractmethod
    def update(self, waiting: Iterable[Candidate]) -> None:
        """Recompute the forecast for this step; `waiting` are the samples whose prompts are being computed."""

    @abstractmethod
    def fits(self, candidate: Candidate) -> bool:
        """Whether the pool holds all samples until their ends if the candidate begins."""

    @abstractmethod
    def add(self, candidate: Candidate) -> None:
        """Add a candidate that begins now."""


_NO_NODES: Final = np.zeros(0, np.int64)


class WindowForecast(PageForecast, HeldForecast):
    """Forecast of the pages of a group that keeps a window: a sample holds those of its window at most.

    What nodes hold counts as held forever. They hold a window only for samples that have not begun.
    """

    def __init__(
        self,
        pages: WindowPages,
        number: int,
        nodes: BlockManager,
        sequences: SequenceScheduler,
        ends: LengthPredictor,
        tokens: int,
    ) -> None:
        """`number`: of the group in `nodes.held`; pages of `tokens` are kept free for the chunks in progress."""
        super().__init__(nodes, sequences, ends)
        self._number, self._allocator = number, pages.allocator
        self._most = pages.group.most_pages(self._page_size)
        """Most pages that a sample holds."""
        self._begun = 0
        """Most pages that the begun samples hold."""
        self._capacity = self._allocator.capacity - min(self._allocator.capacity // 4, tokens // self._page_size)

    def begin(self, pages: int) -> None:
        """See `HeldForecast.begin`."""
        self._begun += self._most_of([pages])

    def end(self, pages: Iterable[int]) -> None:
        """See `HeldForecast.end`."""
        self._begun -= self._most_of(pages)

    def fits_at_most(self, pages: Iterable[int]) -> bool:
        """See `HeldForecast.fits_at_most`."""
        return self._allocator.used_count + self._begun + self._most_of(pages) <= self._capacity

    def _most_of(self, pages: Iterable[int]) -> int:
        return sum(min(count, self._most) for count in pages)

    def _samples(self, columns: Int64s, nodes: Int64s) -> Samples:
        end, position, allocated, own = columns
        held = np.minimum(own, self._most)
        return Samples(end, position, allocated, held, _NO_NODES, _NO_NODES, self._most - held)

    def _other_columns(self, sample: ScheduledSequence) -> tuple[int, int, int, int, int]:
        end, position, allocated, freed, node = super()._other_columns(sample)
        if sample.node is not None:
            hold = sample.holds[self._number]
            assert isinstance(hold, WindowHold)
            allocated = hold.high  # pages are allocated as its positions are recomputed
            freed = max(0, allocated - sample.first_own_page - (sample.in_place and sample.node.tail_held))
        return end, position, allocated, freed, node

    def _with_candidate(self, candidate: Candidate) -> WithCandidate:
        length, size, most = self._block_manager.end[candidate.node], self._page_size, self._most
        usage = with_new_samples(self._curve, self._ends_of(candidate), length - 1, length // size, 0, size, most)
        path = (min(most, self._path_pages(n, first=n == candidate.path[0])) for n in candidate.path)
        return WithCandidate(usage, sum(path), {}, {})


class SlotForecast(HeldForecast):
    """Forecast of slots: a node and a sample hold one each, for which nothing else of the slots matters than how many
    are free now.
    """

    def __init__(self, slots: HeldPages, nodes: BlockManager) -> None:
        self._allocator, self._nodes = slots.allocator, nodes
        self._left = 0
        """Slots that no row needs."""

    def begin(self, pages: int) -> None:
        """See `HeldForecast.begin`."""

    def end(self, pages: Iterable[int]) -> None:
        """See `HeldForecast.end`."""

    def fits_at_most(self, pages: Iterable[int]) -> bool:
        """See `HeldForecast.fits_at_most`."""
        return sum(1 for _ in pages) <= self._free()

    def update(self, waiting: Iterable[Candidate]) -> None:
        """See `HeldForecast.update`."""
        self._left = self._free()
        for candidate in waiting:
            self.add(candidate)

    def fits(self, candidate: Candidate) -> bool:
        """See `HeldForecast.fits`."""
        return len(candidate.path) + len(candidate.requests) <= self._left

    def add(self, candidate: Candidate) -> None:
        """See `HeldForecast.add`."""
        self._left -= len(candidate.path) + len(candidate.requests)

    def _free(self) -> int:
        """Free slots, less those of the samples that have begun and hold none yet."""
        return self._allocator.free_count - sum(self._nodes.waiting.values())


class Admission:
    """Admission by forecast page use.

    No forecast is computed while the pool holds every admitted sample at full length. After a refusal the next check
    waits until a sample ends or the rows have grown by a page.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        sequences: SequenceScheduler,
        predictor: LengthPredictor,
        max_new: memoryview[int],
        config: SchedulerConfig,
        interval: float,
    ) -> None:
        """`interval`: `BeginOrder.interval`."""
        self._block_manager = block_manager
        self._predictor = predictor
        self._max_new = max_new
        self._start_together = config.start_together
        self._page_size = config.page_size
        self.uses_forecast = config.admission == "foreseen"
        """Whether admission uses the page forecast, or only counts the pages needed now."""
        self._forecast = PageForecast(block_manager, sequences, predictor)
        self._held = held_forecasts(block_manager, sequences, predictor, config.max_tokens_per_step)
        self._forecast_step = -1
        """Step of the current forecast."""
        self.blocked_until = 0
        """Step before which the last refused candidate would be refused again."""
        self._interval = interval if self.uses_forecast and predictor.all_exact else 0.0
        self._next_begin = 0.0
        """Earliest step of the next sample if samples begin at intervals."""
        self._max_pages: dict[int, int] = {}
        """Running sample -> number of pages it holds itself at full length."""
        self._total_max_pages = 0
        """Sum of `_max_pages`."""

    def begin(self, sequence: int, request: int, node_id: int) -> None:
        """Record that a sample has begun at the end of a node."""
        self._predictor.begin(sequence, request, self._block_manager.step)
        self._max_pages[sequence] = pages = self._own_pages(request, node_id)
        self._total_max_pages += pages
        for forecast in self._held:
            forecast.begin(pages)

    def end(self, sequences: Collection[int]) -> None:
        """Record that samples have ended."""
        self._predictor.end(sequences, self._block_manager.step)
        ended = [self._max_pages.pop(sequence) for sequence in sequences]
        self._total_max_pages -= sum(ended)
        for forecast in self._held:
            forecast.end(ended)
        self.blocked_until = 0

    def admit(
        self, candidate: Candidate, waiting: Callable[[], list[Candidate]], *, nothing_running: bool
    ) -> Candidate | None:
        """The candidate, with as many of its samples as may begin now; None if fewer than must start together.

        Args:
            candidate: samples that could begin.
            waiting: returns the samples whose prompts are being computed.
            nothing_running: no sample is running, so that waiting would never end: one sample begins in any case.
        """
        step = self._block_manager.step
        if step < self._next_begin and not nothing_running:
            self.blocked_until = ceil(self._next_begin)
            return None
        if self.uses_forecast and not self._fits_at_full_length(candidate, waiting):
            admitted = self._admit_by_forecast(candidate, waiting, nothing_running)
            if admitted is None:
                self.blocked_until = step + self._page_size
                return None
            candidate = admitted
        self._next_begin = max(self._next_begin, step - 1) + self._interval * len(candidate.requests)
        return candidate

    def _admit_by_forecast(
        self, candidate: Candidate, waiting: Callable[[], list[Candidate]], nothing_running: bool
    ) -> Candidate | None:
        if self._forecast_step != self._block_manager.step:
            candidates = waiting()
            self._forecast.update(candidates)
            for forecast in self._held:
                forecast.update(candidates)
            self._forecast_step = self._block_manager.step
        fewest = max(1, min(len(candidate.requests), self._start_together, len(self._max_pages) // _WAIT_FRACTION))
        if nothing_running:
            fewest = 1
        while not all(forecast.fits(candidate) for forecast in self._held) or not self._forecast.admit(candidate):
            if len(candidate.requests) == fewest:
                if not nothing_running:
                    return None
                self._forecast.add(candidate)
                break
            candidate = replace(candidate, requests=candidate.requests[: max(fewest, len(candidate.requests) // 2)])
        for forecast in self._held:
            forecast.add(candidate)
        return candidate

    def _fits_at_full_length(self, candidate: Candidate, waiting: Callable[[], list[Candidate]]) -> bool:
        if self._forecast_step == self._block_manager.step:
            return False
        manager = self._block_manager
        for forecast in self._held:
            counts = (count for each in (candidate, *waiting()) for count in self._page_counts(each))
            if not forecast.fits_at_most(counts):
                return False
        held = manager.allocator.used_count + self._total_max_pages + self._pages(candidate)
        capacity = manager.allocator.capacity
        return held <= capacity and held + sum(map(self._pages, waiting())) <= capacity

    def _pages(self, candidate: Candidate) -> int:
        """Most pages that a candidate can hold."""
        pages = sum(self._own_pages(request, candidate.node) for request in candidate.requests)
        if candidate.path:
            start, end = self._block_manager.start_of(candidate.path[0]), self._block_manager.end[candidate.node]
            pages += -(-end // self._page_size) - start // self._page_size
        return pages

    def _page_counts(self, candidate: Candidate) -> Iterator[int]:
        """Most pages that each sample and each node of a candidate can hold."""
        yield from (self._own_pages(request, candidate.node) for request in candidate.requests)
        yield from map(self._block_manager.pages_to_compute, candidate.path)

    def _own_pages(self, request: int, node_id: int) -> int:
        length = self._block_manager.end[node_id]
        return -(-(length + self._max_new[request] - 1) // self._page_size) - length // self._page_size
