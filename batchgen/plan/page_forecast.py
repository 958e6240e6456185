"""Pages in use at each future step, if samples end where they are expected to.

Admission uses the forecast to begin only samples that need not be preempted later. A sample frees its own pages after
its end, a node after the last end below it; a node of which samples have not begun yet counts as held forever.
Everything is computed on numpy columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.plan.block_manager import BlockManager
from batchgen.plan.length_predictor import LengthPredictor
from batchgen.plan.sequences import Phase, SequenceScheduler
from batchgen.plan.sequences import ScheduledSequence as Sample

Int64s = npt.NDArray[np.int64]

PagesByStep = npt.NDArray[np.float64]
"""[T] pages in use in each future step, relative to now; the last value holds for all later steps. Whole numbers stored
as floats, because `bincount` weights are floats."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Columns of running samples [R] and of the nodes [N] whose pages they free; steps are counted from now."""

    end: Int64s
    """[R] last step in which each sample holds its pages."""
    position: Int64s
    """[R] position fed to the model now; grows by one per step."""
    allocated: Int64s
    """[R] pages already allocated for positions from 0 on, including the nodes'."""
    freed: Int64s
    """[R] pages in use now that each sample frees at its end, in addition to those it allocates until then."""
    release: Int64s
    """[N] last step in which each node holds its pages."""
    pages: Int64s
    """[N] pages that each node frees then."""
    most: Int64s | None = None
    """[R] most pages that each sample holds in addition; None: a page for each position."""


def pages_by_step(samples: Samples, page_size: int) -> PagesByStep:
    """Pages that samples allocate and free, up to the step after the last one ends."""
    if not len(samples.end):
        return np.zeros(1)
    into = samples.position % page_size
    taken = (into + samples.end) // page_size  # pages allocated after now
    now = samples.position // page_size + 1 - samples.allocated
    if samples.most is not None:
        now = np.minimum(now, samples.most)
        taken = np.minimum(taken, samples.most - now)
    steps = int(max(samples.end.max(), samples.release.max(initial=0))) + 1
    # A sample at offset `into` of its page allocates the k-th further page in step k * page_size - into. `taking`
    # counts by that step less one, as [k, offset], the samples that allocate their last page; its reversed cumulative
    # sum counts those that allocate any.
    rounds = -(-steps // page_size)
    last = (taken - 1) * page_size + (page_size - 1 - into)
    taking = np.bincount(last[taken > 0], minlength=rounds * page_size).reshape(rounds, page_size)
    change = np.zeros(steps + 1)
    change[1:] = taking[::-1].cumsum(axis=0)[::-1].reshape(-1)[:steps]
    change[0] = now.sum()
    change -= np.bincount(samples.end + 1, now + taken + samples.freed, steps + 1)
    if len(samples.release):
        change -= np.bincount(samples.release + 1, samples.pages, steps + 1)
    return change.cumsum()


def with_new_samples(
    usage: PagesByStep,
    ends: Int64s,
    position: int,
    allocated: int,
    reused: int,
    page_size: int,
    most: int | None = None,
) -> PagesByStep:
    """Page use with further samples that begin together.

    Args:
        usage: page use of all other samples.
        ends: [n] last steps of the new samples.
        position: position that each of them feeds now; grows by one per step.
        allocated: pages of positions from 0 on that they share and need not allocate.
        reused: further pages that the first of them need not allocate.
        page_size: S.
        most: most pages that each sample holds; None: a page for each position.
    """
    active = np.bincount(ends)[::-1].cumsum()[::-1]  # [T] running samples in each step
    own = np.arange(position, position + len(active))
    own //= page_size
    own += 1 - allocated
    if most is not None:
        np.minimum(own, most, out=own)
    own *= active
    both = _extended(usage, len(own) + 1)
    both[: len(own)] += own
    both[: ends[0] + 1] -= reused
    return both


def _extended(usage: PagesByStep, steps: int) -> PagesByStep:
    """Copy of the page use, extended to at least `steps` steps."""
    if len(usage) >= steps:
        return usage.copy()
    longer = np.empty(steps)
    longer[: len(usage)] = usage
    longer[len(usage) :] = usage[-1]
    return longer


def peak_pages(usage: PagesByStep) -> int:
    """Highest page use of all future steps, at least 0."""
    return max(0, int(usage.max()))


_VECTORIZE_FROM = 8
"""Number of samples from which on their ends are computed on columns."""
_MAX_SCALAR = 8
"""Maximum number of nodes that are processed one by one."""
_RELEASE_DELAY = 1
"""Steps after a sample's last token in which its pages are still held, because ends may be read late."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Samples that could begin at a node's end, and the nodes to compute before."""

    path: tuple[int, ...]
    """Nodes to compute, topmost first; the last one is `node`. Empty if `node` is computed."""
    node: int
    """Node at whose end the samples begin."""
    requests: Sequence[int]
    """[n] request of each sample, in order."""
    delay: int
    """Steps until the samples get their first token."""


class WithCandidate(NamedTuple):
    """Forecast with a candidate added."""

    usage: PagesByStep
    pages: int
    """Pages of the candidate's path."""
    unresolved: dict[int, int]
    last_end: dict[int, int]
    """New values of `_unresolved` and `_last_end` for the affected nodes."""


class PageForecast:
    """Forecast of page use as of one step; candidates admitted in that step are added to it."""

    def __init__(self, nodes: BlockManager, sequences: SequenceScheduler, ends: LengthPredictor) -> None:
        self._block_manager = nodes
        self._sequences = sequences
        self._predictor = ends
        self._allocator = nodes.allocator
        self._capacity = nodes.allocator.capacity
        self._page_size = nodes.allocator.page_size
        self._columns = _NodeColumns(nodes)
        self._curve: PagesByStep = np.zeros(1)
        self._next_id = 0
        """Id of the next sample to begin."""
        self._uncertain = 0
        """Number of samples whose ends are not known."""
        self._used_pages = 0
        """Pages in use at the last update."""
        self._admitted_pages = 0
        """Pages of the nodes admitted since, which are allocated as prompts are computed."""
        self._unresolved: dict[int, int] = {}
        """Node with admitted samples below -> number of samples at its end and child subtrees whose ends are
        unknown."""
        self._last_end: dict[int, int] = {}
        """Node with admitted samples below -> last known end below."""

    def update(self, waiting: Iterable[Candidate]) -> None:
        """Recompute the forecast for the current step; `waiting` are the samples whose prompts are being computed."""
        self._used_pages, self._admitted_pages = self._allocator.used_count, 0
        self._next_id = self._sequences.next_id
        self._uncertain = self._predictor.uncertain_count
        columns, nodes = self._running_columns()
        if len(self._sequences.by_id) > len(nodes):
            others = [self._other_columns(s) for s in self._sequences.by_id.values() if s.phase is not Phase.RUNNING]
            more = np.array(others, np.int64).T
            columns, nodes = np.concatenate([columns, more[:4]], axis=1), np.concatenate([nodes, more[4]])
        self._unresolved.clear()
        self._last_end.clear()
        self._curve = pages_by_step(self._samples(columns, nodes), self._page_size)
        for candidate in waiting:
            self.add(candidate)

    def admit(self, candidate: Candidate) -> bool:
        """Add the candidate and return True if it fits, else return False."""
        added = self._with_candidate(candidate)
        if not self._holds(candidate, added):
            return False
        self._apply(candidate, added)
        return True

    def fits(self, candidate: Candidate) -> bool:
        """Whether the pool holds all samples until their ends if the candidate begins."""
        return self._holds(candidate, self._with_candidate(candidate))

    def _holds(self, candidate: Candidate, added: WithCandidate) -> bool:
        """Whether all pages fit, with one in reserve for every second sample that may end later than expected."""
        spare = (self._uncertain + sum(map(self._predictor.is_uncertain, candidate.requests))) // 2
        held = max(self._allocator.used_count, self._used_pages + self._admitted_pages)
        return held + added.pages + peak_pages(added.usage) + spare <= self._capacity

    def add(self, candidate: Candidate) -> None:
        """Add a candidate that begins now."""
        self._apply(candidate, self._with_candidate(candidate))

    def _apply(self, candidate: Candidate, added: WithCandidate) -> None:
        self._next_id += len(candidate.requests)
        self._uncertain += sum(map(self._predictor.is_uncertain, candidate.requests))
        self._curve = added.usage
        self._admitted_pages += added.pages
        self._unresolved.update(added.unresolved)
        self._last_end.update(added.last_end)

    def _samples(self, columns: Int64s, nodes: Int64s) -> Samples:
        """The samples, given their first columns [4, R] and nodes [R], and the nodes that are freed after them."""
        end, position, allocated, freed = columns
        gone, release = self._columns.update(nodes, end)
        return Samples(end, position, allocated, freed, release, self._columns.held(gone))

    def _running_columns(self) -> tuple[Int64s, Int64s]:
        """[4, R] the first columns of `Samples` for the decode rows, and [R] their nodes."""
        running, size = self._sequences.running, self._page_size
        position, nodes = running.positions, running.nodes
        prompt = self._columns.end[nodes]
        generated = position + 1 - prompt
        unresolved = self._predictor.remaining_of(
            running.sequence_ids, running.requests, generated, self._block_manager.step
        )
        allocated = running.capacities // size
        # A sample that continues in its node's tail does not free that page while the node holds it.
        tail = running.in_place & self._columns.tail_held[nodes]
        return np.stack(
            [unresolved + (_RELEASE_DELAY - 1), position, allocated, allocated - prompt // size - tail]
        ), nodes

    def _other_columns(self, sample: Sample) -> tuple[int, int, int, int, int]:
        """First columns of `Samples` for a sample that does not decode, and its node, -1 if that is not in the pool."""
        end = _RELEASE_DELAY
        if sample.phase is not Phase.AWAITING_COMMIT:
            generated = sample.position + 1 - sample.prompt_len
            end += self._predictor.remaining(sample.id, sample.request, generated, self._block_manager.step) - 1
        node = sample.node_id if sample.node_id in self._block_manager.active else -1
        if sample.node is None:
            return end, sample.position, sample.prompt_len // self._page_size, 0, node
        position = sample.capacity - 1 - end if sample.phase is Phase.AWAITING_COMMIT else sample.position
        freed = len(sample.pages) - sample.first_own_page - (sample.in_place and sample.node.tail_held)
        return end, position, len(sample.pages), freed, node

    def _with_candidate(self, candidate: Candidate) -> WithCandidate:
        """The forecast with a candidate, and with the nodes that are freed once it has ended."""
        nodes, size = self._block_manager, self._page_size
        length = nodes.end[candidate.node]
        existing = nodes.active.get(candidate.node)
        tail = length % size != 0 and (existing is None or (existing.tail_held and not existing.tail_taken))
        ends = self._ends_of(candidate)
        usage = with_new_samples(self._curve, ends, length - 1, length // size, int(tail), size)
        held = {n: self._path_pages(n, first=n == candidate.path[0]) for n in candidate.path}
        unresolved = {n: nodes.refs[n] for n in candidate.path}
        last_end = dict.fromkeys(candidate.path, 0)
        node, end, gone = candidate.node, int(ends.max()), len(candidate.requests)
        while node >= 0:
            if node not in unresolved:
                unresolved[node], last_end[node] = self._unresolved_below(node)
            unresolved[node] -= gone
            last_end[node] = max(end, last_end[node])
            if unresolved[node]:
                break
            usage[last_end[node] + 1 :] -= held[node] if node in held else self._columns.held(np.array([node]))
            node, end, gone = nodes.parent[node], last_end[node], 1
        return WithCandidate(usage, sum(held.values()), unresolved, last_end)

    def _unresolved_below(self, node: int) -> tuple[int, int]:
        """Number of samples and child subtrees of a node whose ends are unknown, and the last known end below it."""
        if node in self._unresolved:
            return self._unresolved[node], self._last_end[node]
        return self._columns.of(node)

    def _ends_of(self, candidate: Candidate) -> Int64s:
        """[n] last step of each sample of a candidate."""
        step, count = self._block_manager.step, len(candidate.requests)
        if count < _VECTORIZE_FROM:
            unresolved = np.array(
                [self._predictor.remaining(self._next_id + i, r, 0, step) for i, r in enumerate(candidate.requests)]
            )
        else:
            numbers = np.arange(self._next_id, self._next_id + count)
            unresolved = self._predictor.remaining_of(
                numbers, np.array(candidate.requests), np.zeros(count, np.int64), step
            )
        return unresolved + (_RELEASE_DELAY - 1 + candidate.delay)

    def _path_pages(self, node: int, *, first: bool) -> int:
        """Pages that a node of a path allocates; all but the first continue in their parents' tails."""
        if first:
            return self._block_manager.pages_to_admit(node)
        start, end = self._block_manager.start_of(node), self._block_manager.end[node]
        return -(-end // self._page_size) - -(-start // self._page_size)


class _NodeColumns:
    """Columns over the nodes in the pool, with their expected ends."""

    def __init__(self, nodes: BlockManager) -> None:
        self._block_manager = nodes
        self._page_size = nodes.allocator.page_size
        self._parent, self.end = np.asarray(nodes.parent), np.asarray(nodes.end)
        self._refs = np.frombuffer(nodes.refs, np.int32)
        self.tail_held, self._in_place = (np.frombuffer(x, np.uint8) for x in (nodes.tail_held, nodes.in_place))
        self._ids = np.zeros(0, np.int64)
        """[N] nodes in the pool at the last update, ascending."""
        self._unresolved = self._last_end = self._ids
        """[N] number of samples and child subtrees of each node whose ends are unknown; [N] last known end below."""

    def update(self, at: Int64s, ends: Int64s) -> tuple[Int64s, Int64s]:
        """Compute which nodes are freed, and when.

        Args:
            at: [R] node of each sample, -1 if it is not in the pool.
            ends: [R] last step of each sample.

        Returns:
            [G] nodes whose end is known, and [G] the last step in which each holds its pages.
        """
        active = self._block_manager.active
        self._ids = np.fromiter(active, np.int64, len(active))
        self._ids.sort()
        self._unresolved, self._last_end = self._refs[self._ids].astype(np.int64), np.zeros(len(self._ids), np.int64)
        self._resolve(at, ends)
        resolved = []
        done = np.flatnonzero(self._unresolved == 0)
        while len(done) > _MAX_SCALAR:
            resolved.append(done)
            self._resolve(self._parent[self._ids[done]], self._last_end[done])
            self._unresolved[done] = -1
            done = np.flatnonzero(self._unresolved == 0)
        resolved.append(np.array(self._resolve_parents(done.tolist()), np.int64))
        gone = np.concatenate(resolved)
        return self._ids[gone], self._last_end[gone]

    def _resolve(self, nodes: Int64s, ends: Int64s) -> None:
        """Record one more known end below each of the nodes; -1 is ignored."""
        inside = nodes >= 0
        places = np.searchsorted(self._ids, nodes[inside])
        np.subtract.at(self._unresolved, places, 1)
        np.maximum.at(self._last_end, places, ends[inside])

    def _resolve_parents(self, places: list[int]) -> list[int]:
        """Apply `_resolve` to the parents of a few nodes whose ends are known; returns all nodes resolved by that."""
        for place in places:
            parent = int(self._parent[self._ids[place]])
            if parent >= 0:
                above = int(self._ids.searchsorted(parent))
                self._unresolved[above] -= 1
                self._last_end[above] = max(self._last_end[above], self._last_end[place])
                if not self._unresolved[above]:
                    places.append(above)
        return places

    def of(self, node: int) -> tuple[int, int]:
        """Number of unknown ends below a node in the pool, and the last known one."""
        place = int(self._ids.searchsorted(node))
        if place == len(self._ids) or self._ids[place] != node:
            return 0, 0
        return int(self._unresolved[place]), int(self._last_end[place])

    def held(self, nodes: Int64s) -> Int64s:
        """[N] pages that each node frees, without its parent's tail while the parent holds that."""
        end, parent = self.end[nodes], self._parent[nodes]
        tail = (end % self._page_size != 0) & (self.tail_held[nodes] == 0)
        parents = self.tail_held[parent] & self._in_place[nodes] & (parent >= 0)
        start = np.where(parent >= 0, self.end[parent], 0)
        return np.asarray(-(-end // self._page_size) - start // self._page_size - tail - parents, np.int64)
