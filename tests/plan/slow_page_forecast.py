"""Page forecast computed sample by sample and node by node: the oracle of `batchgen.plan.page_forecast`.

Page use only grows between two ends, so its maximum is reached right before one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from batchgen.plan.block_manager import BlockManager, Node
from batchgen.plan.length_predictor import LengthPredictor
from batchgen.plan.page_forecast import Candidate
from batchgen.plan.sequences import Phase, SequenceScheduler
from batchgen.plan.sequences import ScheduledSequence as Sample

_RELEASE_DELAY = 1
"""Steps after a sample's last token in which its pages are still held, because ends may be read late."""


@dataclass(slots=True)
class Rows:
    """Columns of running samples and of freed nodes, as in `page_forecast.Samples`; steps are counted from now."""

    end: list[int] = field(default_factory=list)
    """Last step in which each sample holds its pages."""
    position: list[int] = field(default_factory=list)
    """Position fed to the model now; grows by one per step."""
    allocated: list[int] = field(default_factory=list)
    """Pages already allocated for positions from 0 on, including the nodes'."""
    freed: list[int] = field(default_factory=list)
    """Pages in use now that each sample frees at its end, in addition to those it allocates until then."""
    release: list[int] = field(default_factory=list)
    """Last step in which each node holds its pages."""
    pages: list[int] = field(default_factory=list)
    """Pages that each node frees then."""

    def add(self, end: int, position: int, allocated: int, freed: int) -> None:
        """Add a sample."""
        self.end.append(end)
        self.position.append(position)
        self.allocated.append(allocated)
        self.freed.append(freed)

    def plus(self, other: Rows) -> Rows:
        """Concatenation of two sets of columns."""
        return Rows(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


def peak_pages(rows: Rows, page_size: int) -> int:
    """Most pages in use at once from now on, relative to now; at least 0."""
    most = 0
    for step in set(rows.end):
        use = -sum(pages for release, pages in zip(rows.release, rows.pages, strict=True) if release < step)
        for end, position, allocated, freed in zip(rows.end, rows.position, rows.allocated, rows.freed, strict=True):
            use += (position + step) // page_size + 1 - allocated if end >= step else -freed
        most = max(most, use)
    return most


class SlowPageForecast:
    """Forecast of page use as of one step; candidates admitted in that step are added to it."""

    def __init__(self, block_manager: BlockManager, sequences: SequenceScheduler, predictor: LengthPredictor) -> None:
        self._block_manager = block_manager
        self._sequences = sequences
        self._predictor = predictor
        self._page_size = block_manager.allocator.page_size
        self._rows = Rows()
        self._next_id = 0
        """Id of the next sample to begin."""
        self._uncertain = 0
        """Number of samples whose ends are not known."""
        self._used_pages = 0
        """Pages in use at the last update."""
        self._admitted_pages = 0
        """Pages of the nodes admitted since, which are allocated as prompts are computed."""
        self._unresolved: dict[int, int] = {}
        """Node in the pool -> number of samples at its end and child subtrees whose ends are unknown."""
        self._last_end: dict[int, int] = {}
        """Node in the pool -> last known end below."""

    def update(self, waiting: Iterable[Candidate]) -> None:
        """Recompute the forecast for the current step; `waiting` are the samples whose prompts are being computed."""
        block_manager, size, step = self._block_manager, self._page_size, self._block_manager.step
        self._rows = rows = Rows()
        self._used_pages, self._admitted_pages = block_manager.allocator.used_count, 0
        self._next_id = self._sequences.next_id
        self._uncertain = sum(self._predictor.is_uncertain(s.request) for s in self._sequences.by_id.values())
        self._unresolved = {n: block_manager.refs[n] for n in block_manager.active}
        self._last_end = dict.fromkeys(block_manager.active, 0)
        running = self._sequences.running
        for s, position in zip(running, running.positions.tolist(), strict=True):
            assert s.node is not None
            end = _RELEASE_DELAY - 1 + self._predictor.remaining(s.id, s.request, position + 1 - s.prompt_len, step)
            rows.add(end, position, len(s.pages), self._freed(s, s.node))
            self._resolve(s.node_id, 1, end)
        for s in self._sequences.by_id.values():
            if s.phase is Phase.RUNNING:
                continue
            end = _RELEASE_DELAY
            if s.phase is not Phase.AWAITING_COMMIT:
                end += self._predictor.remaining(s.id, s.request, s.position + 1 - s.prompt_len, step) - 1
            if s.node is None:
                rows.add(end, s.position, s.prompt_len // size, 0)
            else:
                position = s.capacity - 1 - end if s.phase is Phase.AWAITING_COMMIT else s.position
                rows.add(end, position, len(s.pages), self._freed(s, s.node))
            if s.node_id in self._unresolved:
                self._resolve(s.node_id, 1, end)
        for n in sorted(block_manager.active, reverse=True):
            if not self._unresolved[n]:
                rows.release.append(self._last_end[n])
                rows.pages.append(_held(block_manager.active[n]))
                if block_manager.parent[n] >= 0:
                    self._resolve(block_manager.parent[n], 1, self._last_end[n])
        for candidate in waiting:
            self.add(candidate)

    def peak_with(self, candidate: Candidate) -> tuple[int, int]:
        """Most pages in use with the candidate, relative to now, and the pages of its path."""
        added, pages, _, _ = self._with_candidate(candidate)
        return peak_pages(self._rows.plus(added), self._page_size), pages

    def admit(self, candidate: Candidate) -> bool:
        """Add the candidate and return True if the pool then holds all samples until their ends, else return False.

        One page is kept in reserve for every second sample that may end later than expected.
        """
        spare = (self._uncertain + sum(map(self._predictor.is_uncertain, candidate.requests))) // 2
        allocator = self._block_manager.allocator
        peak, pages = self.peak_with(candidate)
        held = max(allocator.used_count, self._used_pages + self._admitted_pages)
        if held + pages + peak + spare > allocator.capacity:
            return False
        self.add(candidate)
        return True

    @staticmethod
    def _freed(sequence: Sample, node: Node) -> int:
        """Pages that a sample frees at its end, without its node's tail while the node holds that."""
        return len(sequence.pages) - sequence.first_own_page - (sequence.in_place and node.tail_held)

    def _resolve(self, node: int, count: int, end: int) -> None:
        self._unresolved[node] -= count
        self._last_end[node] = max(self._last_end[node], end)

    def add(self, candidate: Candidate) -> None:
        """Add a candidate that begins now."""
        added, pages, unresolved, last_end = self._with_candidate(candidate)
        self._next_id += len(candidate.requests)
        self._uncertain += sum(map(self._predictor.is_uncertain, candidate.requests))
        self._rows = self._rows.plus(added)
        self._admitted_pages += pages
        self._unresolved.update(unresolved)
        self._last_end.update(last_end)

    def _with_candidate(self, candidate: Candidate) -> tuple[Rows, int, dict[int, int], dict[int, int]]:
        """Rows and node releases that a candidate adds, pages of its path, and its nodes' unknown and last ends."""
        block_manager, size = self._block_manager, self._page_size
        rows, length = Rows(), block_manager.end[candidate.node]
        existing = block_manager.active.get(candidate.node)
        tail = length % size != 0 and (existing is None or (existing.tail_held and not existing.tail_taken))
        for number, request in enumerate(candidate.requests):
            left = self._predictor.remaining(self._next_id + number, request, 0, block_manager.step)
            end = _RELEASE_DELAY - 1 + candidate.delay + left
            rows.add(end, length - 1, length // size + (tail and not number), 0)
        held = {n: self._path_pages(n, first=n == candidate.path[0]) for n in candidate.path}
        unresolved = {n: block_manager.refs[n] for n in candidate.path}
        last_end = dict.fromkeys(candidate.path, 0)
        node, end, ended = candidate.node, max(rows.end, default=0), len(candidate.requests)
        while node >= 0:
            unresolved[node] = unresolved.get(node, self._unresolved.get(node, 0)) - ended
            last_end[node] = max(end, last_end.get(node, self._last_end.get(node, 0)))
            if unresolved[node]:
                break
            rows.release.append(last_end[node])
            rows.pages.append(held[node] if node in held else _held(block_manager.active[node]))
            node, end, ended = block_manager.parent[node], last_end[node], 1
        return rows, sum(held.values()), unresolved, last_end

    def _path_pages(self, node: int, *, first: bool) -> int:
        """Pages that a node of a path allocates; all but the first continue in their parents' tails."""
        if first:
            return self._block_manager.pages_to_admit(node)
        start, end = self._block_manager.start_of(node), self._block_manager.end[node]
        return -(-end // self._page_size) - -(-start // self._page_size)


def _held(node: Node) -> int:
    """Pages that a node frees, without its parent's tail while the parent holds that."""
    parent = node.parent
    return len(node.page_table) - node.first_own_page - (node.in_place and parent is not None and parent.tail_held)
