"""Work of a job: what its steps have computed, and what is left of it.

Tokens and positions that are left are counted; steps are simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.plan.block_manager import BlockManager
from batchgen.plan.config import SchedulerConfig, SchedulerStats
from batchgen.plan.length_predictor import LengthPredictor
from batchgen.plan.order import BeginOrder
from batchgen.plan.sequences import Phase, SequenceScheduler
from batchgen.plan.simulate import Begun, simulate
from batchgen.plan.tree import PrefixTree, blocks

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]


class Work(NamedTuple):
    """Quantities on which the time of steps depends."""

    steps: float = 0.0
    prompt_tokens: float = 0.0
    """Positions computed by prefill chunks."""
    prompt_reads: float = 0.0
    """Positions that these attend to."""
    decode_tokens: float = 0.0
    """Positions computed by decode rows."""
    decode_positions: float = 0.0
    """Positions that these attend to."""
    decode_reads: float = 0.0
    """The same, but what a prefix group reads once counts once."""


class WorkLeft(NamedTuple):
    """Work that is left: expected, and if samples end as early or as late as may reasonably be."""

    expected: Work
    least: Work
    most: Work


def work_done(stats: SchedulerStats) -> Work:
    """The work of all steps planned so far."""
    return Work(
        stats.steps,
        stats.prompt_tokens + stats.recomputed_tokens + stats.recomputed_last_tokens,
        stats.chunk_reads,
        stats.decode_tokens,
        stats.decode_kv_positions,
        stats.decode_kv_reads,
    )


class WorkForecast:
    """Forecast of a job's work from the state of its scheduler."""

    def __init__(
        self,
        order: BeginOrder,
        samples: npt.NDArray[np.integer[Any]],
        block_manager: BlockManager,
        sequences: SequenceScheduler,
        predictor: LengthPredictor,
    ) -> None:
        self._order = order
        self._samples = samples
        self._block_manager = block_manager
        self._sequences = sequences
        self._predictor = predictor
        self._stats = block_manager.stats
        self._shared: Int32s | None = None
        """[N] positions of each request that other samples share; None before they are needed."""
        self._decoded_shared = 0.0
        """The same, summed over the tokens decoded so far."""
        self._planned: _Planned | None = None
        self._seen = (0, 0.0)
        """Tokens decoded until the last simulation, and the mean of `_shared` over the samples that ran then."""

    def of(self, samples: npt.NDArray[np.integer[Any]], config: SchedulerConfig) -> Work:
        """The work of requests alone, with the lengths expected before any sample ended and all slots in use.

        `samples`: [N] per request; 0 leaves a request out.
        """
        tree, lengths = self._order.tree, self._predictor.expected
        tokens, reads = _prompt_work(tree, samples, None)
        decoded, attended = _decode_work(tree, samples, lengths)
        slots = min(config.max_num_seqs, max(1, int(samples.sum())))
        return Work(
            max(decoded / slots, tokens / config.max_tokens_per_step), tokens, reads, decoded, attended, attended
        )

    def left(self, config: SchedulerConfig) -> WorkLeft:
        """The work that is left, between two steps, by a simulation of all steps to come."""
        tree, manager, predictor = self._order.tree, self._block_manager, self._predictor
        pending = _pending(tree, self._samples, np.frombuffer(manager.unstarted, np.int32))
        running = _Running.of(tree, self._sequences, predictor, manager.step)
        lengths = np.ones(len(pending), np.int32)
        waiting = np.zeros((3, predictor.begun.shape[1]))
        for part in blocks(len(pending)):
            some = part.start + np.flatnonzero(pending[part])
            # Each sample to come has its own quantile, too.
            ids, none = self._sequences.next_id + some, np.zeros(len(some), np.int64)
            lengths[some] = predictor.remaining_of(ids, some, none, manager.step)
            count = pending[part].astype(np.int64)
            waiting += predictor.by_kind(part, count * predictor.limits[part], count, count * lengths[part])
        complete = np.frombuffer(manager.refs, np.int32) == 0
        complete[list(manager.active)] = True
        prompt_tokens, reads = _prompt_work(tree, pending, complete)
        partial, partial_reads = _partial_work(manager)
        backlog = running.backlog + partial
        begun = Begun(running.remaining, backlog, manager.allocator.used_count, complete)
        decoded, attended = _decode_work(tree, pending, lengths)
        expected = Work(
            simulate(self._order, pending, lengths, config, begun).steps,
            prompt_tokens + backlog,
            reads + partial_reads,
            decoded + int(running.remaining.sum()),
            attended + running.reads,
            attended + running.reads - self._saved(pending, lengths, running),
        )
        total = float(waiting[2].sum() + running.remaining.sum())
        done, sampled, shares = work_done(self._stats), self._stats.sampled_tokens, predictor.shares(manager.step)
        self._planned = _Planned(done, sampled, expected, total, waiting, predictor.begun, shares)
        return self.since(config)

    def since(self, config: SchedulerConfig) -> WorkLeft:
        """The work that is left after the steps since `left`, without another simulation.

        What the samples that have ended since then were expected to generate is not left, and those that have not are
        expected to end as those that have.
        """
        plan, predictor, step = self._planned, self._predictor, self._block_manager.step
        assert plan is not None
        running = _Running.of(self._order.tree, self._sequences, predictor, step)
        limits, counts = np.maximum(0.0, plan.waiting[:2] - (predictor.begun - plan.begun))
        waiting = plan.waiting[2] * limits / np.maximum(1.0, plan.waiting[0]) * predictor.shares(step) / plan.shares
        tokens = float(waiting.sum() + running.remaining.sum())
        more = tokens - (plan.total - (self._stats.sampled_tokens - plan.sampled))
        steps, prompts, prompt_reads, decoded, positions, reads = (
            before - (now - then)
            for before, now, then in zip(plan.work, work_done(self._stats), plan.done, strict=True)
        )
        steps = max(steps + more * plan.work.steps / max(1.0, plan.total), prompts / config.max_tokens_per_step)
        positions, reads = (
            before + more * each / max(1.0, plan.work.decode_tokens)
            for before, each in ((positions, plan.work.decode_positions), (reads, plan.work.decode_reads))
        )
        left = (steps, prompts, prompt_reads, decoded + more, positions, reads)
        expected = Work(*(max(0.0, quantity) for quantity in left))
        # How far the lengths of those whose limit does not end them may be off.
        uncertain = predictor.uncertain(running.requests)
        unsure = float(waiting[:-1].sum() + running.remaining[uncertain].sum())
        count = int(counts[:-1].sum() + uncertain.sum())
        if not count or not unsure:
            return WorkLeft(expected, expected, expected)
        most = float(limits[:-1].sum() + running.limits[uncertain].sum())
        low, high = predictor.error_factors(count)
        share = unsure / tokens
        factors = 1.0 - share + share * low, 1.0 - share + share * min(high, max(1.0, most / unsure))
        return WorkLeft(expected, *(_scaled(expected, factor) for factor in factors))

    def _saved(self, pending: Int32s, lengths: Int32s, running: _Running) -> float:
        """Reads that prefix groups will save, if they go on saving the same fraction of what is shared.

        `pending`: [N] samples of each request that have not begun; `lengths`: [N] tokens that each will generate.
        """
        if self._shared is None:
            self._shared = _shared_positions(self._order.tree, self._samples)
        shared, stats = self._shared, self._stats
        tokens, before = self._seen
        mean = float(shared[running.requests].mean()) if len(running.requests) else before
        self._decoded_shared += (stats.decode_tokens - tokens) * (mean + before if before else 2 * mean) / 2
        self._seen = (stats.decode_tokens, mean)
        saved = stats.decode_kv_positions - stats.decode_kv_reads
        fraction = min(1.0, saved / self._decoded_shared) if self._decoded_shared else 1.0
        total = int((running.remaining * shared[running.requests]).sum())
        for part in blocks(len(pending)):
            total += int((pending[part].astype(np.int64) * (lengths[part] - 1) * shared[part]).sum())
        return fraction * float(total)


@dataclass(frozen=True, slots=True)
class _Planned:
    """Work that was left when the steps to come were simulated. Columns are by kind, as in `LengthPredictor`."""

    done: Work
    """Work that was done before."""
    sampled: int
    """Tokens that were sampled before."""
    work: Work
    """Expected work that was left."""
    total: float
    """Expected tokens that were to be sampled."""
    waiting: Float64s
    """[3, K + 1] limits of the samples that had not begun, their number, and their expected tokens."""
    begun: Float64s
    """[2, K + 1] limits of those that had, and their number."""
    shares: Float64s
    """[K + 1] expected share of its limit that a sample generates."""


@dataclass(frozen=True, slots=True)
class _Running:
    """The samples that have begun."""

    requests: Int64s
    """[R] request of each."""
    remaining: Int64s
    """[R] expected tokens to come."""
    limits: Int64s
    """[R] most tokens to come."""
    reads: int
    """Positions that these attend to."""
    backlog: int
    """Positions to recompute of preempted samples."""

    @staticmethod
    def of(tree: PrefixTree, sequences: SequenceScheduler, predictor: LengthPredictor, step: int) -> _Running:
        decoding = sequences.running
        others = [s for s in sequences.by_id.values() if s.phase in (Phase.WAITING, Phase.RESUMING)]
        ids = np.concatenate([decoding.sequence_ids, np.array([s.id for s in others], np.int64)])
        requests = np.concatenate([decoding.requests, np.array([s.request for s in others], np.int64)])
        positions = np.concatenate([decoding.positions, np.array([s.position for s in others], np.int64)])
        generated = positions - tree.end[tree.node_of_request[requests]] + 1
        remaining = predictor.remaining_of(ids, requests, generated, step)
        return _Running(
            requests,
            remaining,
            predictor.limits[requests] - generated,
            int((remaining * (2 * positions + remaining + 1)).sum()) // 2,
            sum(s.position - (s.next_position if s.phase is Phase.RESUMING else s.prompt_len) for s in others),
        )


def _pending(tree: PrefixTree, samples: npt.NDArray[np.integer[Any]], unstarted: npt.NDArray[np.int32]) -> Int32s:
    """[N] samples of each request that have not begun, given [M] those of each node: its last ones."""
    pending = np.empty(len(samples), np.int32)
    bounds = np.append(tree.first_row, np.int32(len(samples)))  # the rows of a node come before those of the next one
    for part in blocks(len(tree)):
        first, after = bounds[part], bounds[part.start + 1 : part.stop + 1]
        requests = tree.order[first[0] : after[-1]]
        by_row = samples[requests].astype(np.int64)
        sums = np.concatenate([[0], np.cumsum(by_row)])
        opening = sums[first - first[0]]
        begun = opening + (sums[after - first[0]] - opening - unstarted[part])
        pending[requests] = np.minimum(by_row, np.maximum(0, sums[1:] - np.repeat(begun, after - first)))
    return pending


def _shared_positions(tree: PrefixTree, samples: npt.NDArray[np.integer[Any]]) -> Int32s:
    """[N] prompt positions that each request shares with another one that has samples, its neighbour in the tree's
    order; all, if it has more samples than one.
    """
    live = np.flatnonzero(samples[tree.order] > 0).astype(np.int32)
    shared = np.zeros(len(samples), np.int32)
    if len(live):
        # Two requests share what all between them share.
        lengths = tree.shared_len[tree.order[: live[-1] + 1]]
        before = np.minimum.reduceat(lengths, np.append(np.int32(0), live[:-1] + np.int32(1)))
        del lengths
        before[0] = 0
        shared[tree.order[live]] = np.maximum(before, np.append(before[1:], np.int32(0)))
    return np.where(samples > 1, tree.end[tree.node_of_request], shared)


def _partial_work(block_manager: BlockManager) -> tuple[int, int]:
    """Tokens that begun nodes have yet to compute, and the positions that they attend to."""
    ends = [(node.next_position, node.end) for node in block_manager.active.values() if node.next_position < node.end]
    return sum(end - at for at, end in ends), sum(end * (end + 1) - at * (at + 1) for at, end in ends) // 2


def _prompt_work(
    tree: PrefixTree, samples: npt.NDArray[np.integer[Any]], complete: npt.NDArray[np.bool_] | None
) -> tuple[int, int]:
    """Tokens of the nodes above requests with samples, and the positions that they attend to."""
    before = np.zeros(len(samples) + 1, np.int32)
    np.cumsum(samples[tree.order] > 0, dtype=np.int32, out=before[1:])
    tokens = reads = 0
    for part in blocks(len(tree)):
        needed = before[tree.row_after(part)] > before[tree.first_row[part]]
        if complete is not None:
            needed &= ~complete[part]
        end, parent = tree.end[part][needed].astype(np.int64), tree.parent[part][needed]
        start = np.where(parent >= 0, tree.end[parent], 0).astype(np.int64)
        tokens += int((end - start).sum())
        reads += int((end * (end + 1) - start * (start + 1)).sum())
    return tokens, reads // 2


def _decode_work(
    tree: PrefixTree, samples: npt.NDArray[np.integer[Any]], lengths: npt.NDArray[np.integer[Any]]
) -> tuple[int, int]:
    """Tokens that samples feed back, and the positions that these attend to without prefix groups."""
    tokens = reads = 0
    for part in blocks(len(samples)):
        some = part.start + np.flatnonzero(samples[part])
        count, fed = samples[some].astype(np.int64), lengths[some].astype(np.int64) - 1
        prompt = tree.end[tree.node_of_request[some]].astype(np.int64)
        tokens += int((count * fed).sum())
        reads += int((count * fed * (2 * prompt + fed + 1)).sum())
    return tokens, reads // 2


def _scaled(work: Work, factor: float) -> Work:
    """The work if samples generate `factor` times as many tokens."""
    decoded = {name: getattr(work, name) * factor for name in ("decode_tokens", "decode_positions", "decode_reads")}
    return work._replace(steps=work.steps * factor, **decoded)
