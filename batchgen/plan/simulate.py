"""Simulation of a job's steps, before it runs or from a state in between.

Samples occupy slots in begin order until their expected ends, and hold pages of their prompts and more as they grow.
Steps in which nothing begins or ends are skipped.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from batchgen.plan.config import SchedulerConfig, SchedulerStats
from batchgen.plan.order import BeginOrder
from batchgen.plan.tree import blocks

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_EXACT: Final = 2048
"""Number of samples that begin one by one in the simulation: the last ones, which leave slots empty at the end."""
_GROUPS: Final = 2048
"""Number of groups in which the samples before them begin, if that leaves `_GROUPS_AT_ONCE` groups running at once."""
_GROUPS_AT_ONCE: Final = 8
_GOLDEN: Final = 0.6180339887498949
"""Its multiples fall evenly between whole numbers, in no order."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Samples and prompts that have begun when a simulation starts."""

    remaining: Int64s
    """[R] tokens that each running sample has yet to generate, at least 1."""
    prompt_tokens: int
    """Tokens to compute of prompts that have begun, and of sequences that are recomputed."""
    pages: int
    """Pages in use."""
    complete: npt.NDArray[np.bool_]
    """[M] whether a node takes no computation apart from these tokens."""


def simulate(
    order: BeginOrder,
    samples: npt.NDArray[np.integer[Any]],
    lengths: npt.NDArray[np.integer[Any]],
    config: SchedulerConfig,
    begun: Begun | None = None,
) -> SchedulerStats:
    """Simulate the steps of a job: samples occupy slots in begin order until their ends.

    In a job of many samples neighbours in begin order begin in groups, so that the simulation stays short.

    `samples`: [N] that have not begun; 0 leaves a request out; `lengths`: [N] tokens that each sample generates, at
    least 1 for requests with samples; `begun`: what runs at the start. Counts steps, slots and sampled tokens only.
    """
    queue = _in_order(order, samples, lengths, None if begun is None else begun.complete)
    if begun is None:
        begun = Begun(np.zeros(0, np.int64), 0, 0, np.zeros(0, np.bool_))
    slots = min(config.max_num_seqs, len(queue.outputs) + len(begun.remaining))
    pool = _Slots(slots, config.max_tokens_per_step, begun.prompt_tokens, order.interval)
    # Pages are followed only if they can run out.
    most = begun.pages + int(begun.remaining.sum() + queue.prompts.sum() + queue.outputs.sum()) // config.page_size
    if most + len(queue.outputs) > config.num_pages - 1:
        pool.pages = _Pages(config.num_pages - 1, config.page_size)
    for left in begun.remaining.tolist():
        pool.add(left, 1, begun.pages / len(begun.remaining))
    for batch in _batches(queue, slots, config):
        pool.begin(*batch)
    pool.compute()
    tail = [(end - pool.step - 1) * count for end, count in pool.ends]
    last = max((end for end, _ in pool.ends), default=0)
    return SchedulerStats(
        steps=max(last, pool.step),
        sampled_tokens=int(queue.outputs.sum() + begun.remaining.sum()),
        slots=slots,
        tail_steps=max(0, last - pool.step - 1),
        tail_tokens=sum(t for t in tail if t > 0),
    )


class _Pages:
    """Forecast of the pages that samples hold until their ends."""

    def __init__(self, capacity: int, page_size: int) -> None:
        self._capacity = capacity
        self._page_size = page_size
        self._ends = np.zeros(0, np.int64)
        """[R] steps in which samples have ended, ascending."""
        self._growth = np.zeros((2, 0))
        """[2, R] pages that they would have held in step 0; pages by which they grow in a step."""

    def fit(self, step: int, output: int, count: int, pages: float) -> bool:
        """Whether the pages last if `count` samples that hold `pages` begin and generate `output` tokens."""
        end, rate = step + output, count / self._page_size
        base, rates = np.cumsum(self._growth[:, ::-1], axis=1)[:, ::-1]
        held = base + rates * self._ends
        before = self._ends <= end
        if (held[before] + pages + rate * (self._ends[before] - step) > self._capacity).any():
            return False
        later = int(before.sum())
        at_end = base[later] + rates[later] * end if later < len(self._ends) else 0.0
        return bool(at_end + pages + rate * output <= self._capacity)

    def add(self, step: int, output: int, count: int, pages: float) -> None:
        """Begin samples."""
        at, rate = int(np.searchsorted(self._ends, step + output)), count / self._page_size
        self._ends = np.insert(self._ends, at, step + output)
        self._growth = np.insert(self._growth, at, (pages - rate * step, rate), axis=1)

    def release(self, step: int) -> None:
        """Free the pages of samples that have ended."""
        gone = int(np.searchsorted(self._ends, step, side="right"))
        self._ends, self._growth = self._ends[gone:], self._growth[:, gone:]


class _Slots:
    """The slots of a run: what occupies them, and until which step."""

    def __init__(self, slots: int, budget: int, backlog: int, interval: float) -> None:
        self.slots = slots
        self.budget = budget
        self.backlog = backlog
        """Prompt tokens that are to be computed."""
        self.step = 0
        self.ends: list[tuple[int, int]] = []
        """Heap of (step in which it has ended, samples) of what runs."""
        self.pages: _Pages | None = None
        self._interval = interval
        self._next_begin = 0.0
        self._running = 0
        self._room = 0

    def begin(self, prompt: int, output: int, count: int, pages: float, together: tuple[int, int]) -> None:
        """Begin `count` samples of `output` tokens once slots and pages are free and their prompts are computed.

        `prompt`: tokens of their prompts that are to be computed; `output`: tokens that each of `count` samples
        generates; `pages`: that they hold at first; `together`: free slots that they need to begin at once, and free
        slots for which they wait otherwise.
        """
        self.backlog += prompt
        self._go_to(max(self.step, ceil(self._next_begin) if self.ends else 0))
        if self._lacks(together[0], output, count, pages):
            while self._lacks(together[1], output, count, pages):
                self._go_to(self.ends[0][0])
        self._next_begin = max(self._next_begin, self.step - 1) + self._interval * count
        self.compute()
        self.add(output, count, pages)

    def compute(self) -> None:
        """Compute the backlog: what does not fit into this step is computed in the next ones with their decode rows."""
        if not self._room:
            self._room = self.budget - self._running
        while self.backlog > self._room:
            self.backlog -= self._room
            self._go_to(self.step + 1)
            self._room = self.budget - self._running
        self._room -= self.backlog
        self.backlog = 0

    def add(self, output: int, count: int, pages: float) -> None:
        """Let `count` samples run for `output` steps from this one on."""
        heapq.heappush(self.ends, (self.step + output, count))
        self._running += count
        if self.pages is not None:
            self.pages.add(self.step, output, count, pages)

    def _lacks(self, slots: int, output: int, count: int, pages: float) -> bool:
        if not self.ends:
            return False
        if self._running + slots > self.slots:
            return True
        return self.pages is not None and not self.pages.fit(self.step, output, count, pages)

    def _go_to(self, step: int) -> None:
        """Go on to a step, in which what has ended by then frees its slots."""
        if step > self.step:
            self.step, self._room = step, 0
        while self.ends and self.ends[0][0] <= self.step:
            self._running -= heapq.heappop(self.ends)[1]
            if self.pages is not None:
                self.pages.release(self.step)


@dataclass(frozen=True, slots=True)
class _Queue:
    """Samples in begin order."""

    prompts: Int32s
    """[samples] prompt tokens that each computes."""
    outputs: Int32s
    """[samples] tokens that each generates."""
    unbegun: Int32s
    """[samples] samples of its request that have not begun when it does, itself included."""


def _batches(
    queue: _Queue, slots: int, config: SchedulerConfig
) -> Iterator[tuple[int, int, int, float, tuple[int, int]]]:
    """Arguments of `_Slots.begin` for all samples: in groups of neighbours, but the last ones one by one."""
    total = len(queue.outputs)
    head = max(0, total - _EXACT)
    most = max(1, min(head // _GROUPS, slots // _GROUPS_AT_ONCE))
    size = next(size for size in range(most, 0, -1) if slots % size == 0)  # groups fill all slots
    starts = np.concatenate([np.arange(0, head, size), np.arange(head, total)])
    if not len(starts):
        return
    counts = np.diff(starts, append=total)
    tokens, outputs = (np.add.reduceat(each, starts, dtype=np.int64) for each in (queue.prompts, queue.outputs))
    pages = tokens / config.page_size + counts / 2
    means = np.maximum(1, np.rint(outputs / counts)).astype(np.int64)
    # A request begins with several of its samples, and with as many as possible.
    wait = np.maximum(counts, np.minimum(queue.unbegun[starts], min(config.start_together, slots)))
    first = (queue.unbegun[starts] != queue.unbegun[starts - 1] - 1) | (starts == 0)
    begin = np.where(first, wait, counts)
    for i in range(len(starts)):
        yield int(tokens[i]), int(means[i]), int(counts[i]), float(pages[i]), (int(begin[i]), int(wait[i]))


def _in_order(
    order: BeginOrder,
    samples: npt.NDArray[np.integer[Any]],
    lengths: npt.NDArray[np.integer[Any]],
    complete: npt.NDArray[np.bool_] | None,
) -> _Queue:
    tree = order.tree
    count = samples[tree.order]
    live = count > 0
    before = np.zeros(len(count) + 1, np.int32)
    np.cumsum(live, dtype=np.int32, out=before[1:])
    if not before[-1]:
        return _Queue(*np.zeros((3, 0), np.int32))
    # The first sample below a node computes it.
    computed = np.zeros(int(before[-1]), np.int32)
    for part in blocks(len(tree)):
        first = before[tree.first_row[part]]
        needed = first < before[tree.row_after(part)]
        reached = np.flatnonzero(needed if complete is None else needed & ~complete[part])
        parent = tree.parent[part][reached]
        start = np.where(parent >= 0, tree.end[parent], np.int32(0))
        np.add.at(computed, first[reached], tree.end[part][reached] - start)
    del before
    requests = tree.order[live]
    each: Int32s = count[live].astype(np.int32, copy=False)
    del live
    if order.rank is not None:
        turn = np.argsort(order.rank[tree.node_of_request[requests]], kind="stable").astype(np.int32)
        requests, computed, each = requests[turn], computed[turn], each[turn]
        del turn
    outputs = lengths[requests].astype(np.int32, copy=False)
    del requests, count
    ends = np.cumsum(each, dtype=np.int32)
    if int(ends[-1]) == len(ends):
        return _Queue(computed, outputs, each)
    prompts = np.zeros(int(ends[-1]), np.int32)
    prompts[ends - each] = computed
    unbegun = np.repeat(ends, each) - np.arange(len(prompts), dtype=np.int32)
    return _Queue(prompts, np.repeat(outputs, each), unbegun)


def steps_by_rows(
    samples: npt.NDArray[np.integer[Any]],
    expected: npt.NDArray[np.integer[Any]],
    exact: npt.NDArray[np.bool_],
    slots: int,
) -> npt.NDArray[np.float64]:
    """[slots + 1] about how many steps run each number of samples, of which at most `slots` run at once.

    `samples`: [N] of each request; `expected`: [N] tokens of one; `exact`: [N] whether it ends there, else anywhere up
    to twice as far. Slots are full until the last samples, which represent all, end one by one.
    """
    total, ends = int(samples.sum(dtype=np.int64)), samples.cumsum(dtype=np.int64)
    count, steps = min(slots, total), np.zeros(slots + 1)
    if not count:
        return steps
    chosen = np.searchsorted(ends, (np.arange(count) + 0.5) * total / count, side="right")
    spread = 2 * ((np.arange(count) * _GOLDEN) % 1.0)
    lengths = np.sort(expected[chosen] * np.where(exact[chosen], 1.0, spread))[::-1]
    steps[1 : count + 1] = lengths - np.append(lengths[1:], 0.0)
    before = float(np.dot(samples, expected)) / count - float(expected[chosen].mean())
    steps[count] += max(0.0, before)
    return steps
