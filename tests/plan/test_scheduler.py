"""Scheduler tests: step plans run on a simulated pool that checks the contents of every slot."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.plan.block_manager import BlockManager
from batchgen.plan.config import SchedulerStats
from batchgen.plan.page_allocator import PageAllocator
from batchgen.plan.scheduler import Scheduler, SchedulerConfig
from tests.cases import each, examples
from tests.plan.simulator import Simulator
from tests.plan.test_tree import tree_of

prompt = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=9),
    st.integers(1, 20).map(lambda n: [7] * n),
    st.integers(5, 15).flatmap(lambda n: st.lists(st.integers(0, 2), max_size=4).map(lambda x: [5] * n + x)),
    st.just([1, 2, 3, 4, 5]),
)
row = st.tuples(prompt, st.lists(st.integers(1, 8), max_size=4), st.integers(0, 3), st.integers(0, 1))
rows = st.lists(row, min_size=1, max_size=14)


def pages_alone(row: tuple, size: int) -> int:
    return -(-(len(row[0]) + max(row[1], default=1) + row[2] - 1) // size)


@st.composite
def configs(draw: st.DrawFn, num_pages: int | None = None, size: int | None = None) -> SchedulerConfig:
    seqs = draw(st.sampled_from([1, 2, 3, 8, 20]))
    return SchedulerConfig(
        num_pages=num_pages or draw(st.integers(5, 24)),
        page_size=size or draw(st.sampled_from([1, 2, 3, 4, 8])),
        max_num_seqs=seqs,
        max_tokens_per_step=seqs + draw(st.sampled_from([0, 1, 3, 30])),
        group_min_saving=draw(st.sampled_from([0, 4, 16])),
        group_rows=draw(st.sampled_from([None, None, 1, 2, 8])),
        start_together=draw(st.sampled_from([1, 8])),
        order=draw(st.sampled_from(["longest", "longest", "tree", "first-come"])),
        admission=draw(st.sampled_from(["foreseen", "foreseen", "free"])),
    )


@st.composite
def tight_jobs(draw: st.DrawFn) -> tuple[list[tuple], SchedulerConfig]:
    """Branching prompts, and a pool that holds little more than the largest request alone."""
    base = draw(st.lists(st.integers(0, 1), min_size=6, max_size=24))
    tails = st.lists(st.integers(0, 2), max_size=9)
    prompts = st.tuples(st.integers(1, len(base)), tails).map(lambda x: base[: x[0]] + x[1])
    scale = draw(st.sampled_from([1, 1, 5]))
    lengths = st.lists(st.integers(1, draw(st.sampled_from([2, 8]))).map(lambda n: n * scale), max_size=4)
    job = draw(st.lists(st.tuples(prompts, lengths, st.integers(0, 1), st.just(0)), min_size=1, max_size=14))
    size = draw(st.sampled_from([1, 1, 2, 3, 4, 8]))
    need = max([pages_alone(r, size) for r in job if r[1]], default=1)
    return job, draw(configs(1 + need + draw(st.sampled_from([0, 0, 1, 2, 5])), size))


EITHER = st.one_of(tight_jobs(), st.tuples(rows, configs(num_pages=1000)))


def columns(rows: list[tuple]) -> tuple[list[list[int]], list[list[int]], list[int], list[int]]:
    """Prompts, lengths of samples, limits and keys of rows."""
    limits = [max(row[1], default=1) + row[2] for row in rows]
    return [row[0] for row in rows], [row[1] for row in rows], limits, [row[3] for row in rows]


def simulator(rows: list[tuple], config: SchedulerConfig, lag: int = 0, kinds: list[int] | None = None) -> Simulator:
    prompts, targets, limits, keys = columns(rows)
    return Simulator(prompts, targets, limits, config, keys, lag, kinds)


def live_distinct(sim: Simulator) -> int:
    live = [r for r in range(len(sim.prompts)) if sim.targets[r] and r not in sim.too_large]
    return len({(sim.keys[r], *sim.prompts[r][: i + 1]) for r in live for i in range(len(sim.prompts[r]))})


@examples(200)
@given(rows, configs(num_pages=1000))
def test_every_shared_token_is_computed_once(rows: list[tuple], config: SchedulerConfig) -> None:
    sim = simulator(rows, config)
    sim.run()
    stats = sim.scheduler.stats
    samples = sum(map(len, sim.targets))
    assert stats.prompt_tokens == live_distinct(sim)
    assert stats.recomputed_tokens == stats.preemptions == stats.evicted_nodes == 0
    assert stats.sampled_tokens == sum(map(sum, sim.targets))
    assert stats.decode_tokens == stats.sampled_tokens - samples
    assert stats.decode_kv_positions == sim.decode_positions
    assert stats.decode_kv_reads == sim.decode_positions - sim.saved
    if samples <= config.max_num_seqs:
        assert stats.recomputed_last_tokens == 0


@examples(400)
@given(tight_jobs())
def test_every_request_that_fits_alone_finishes(job: tuple[list[tuple], SchedulerConfig]) -> None:
    sim = simulator(*job)
    assert not [r for r in sim.too_large if sim.targets[r]]
    sim.run()
    stats = sim.scheduler.stats
    assert stats.prompt_tokens == live_distinct(sim)
    assert stats.sampled_tokens == sum(map(sum, sim.targets))
    assert stats.decode_tokens == stats.sampled_tokens - sum(map(len, sim.targets))
    assert stats.peak_pages <= sim.config.num_pages - 1


@examples(120)
@given(tight_jobs(), st.integers(1, 3))
def test_ends_may_be_reported_late(job: tuple[list[tuple], SchedulerConfig], lag: int) -> None:
    rows, config = job
    rows = [(r[0], [max(r[1])] * len(r[1]) if r[1] else [], 0, 0) for r in rows]
    simulator(rows, config, lag).run()


@examples(150)
@given(tight_jobs(), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 13)), max_size=4))
def test_cancelled_requests_free_everything(
    job: tuple[list[tuple], SchedulerConfig], cancels: list[tuple[int, int]]
) -> None:
    simulator(*job).run_cancelling(cancels)


@examples(150)
@given(
    tight_jobs(),
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from([0.3, 0.5, 1.0])), max_size=4),
    st.sets(st.integers(0, 12), max_size=4),
)
def test_withdrawn_requests_never_begin(
    job: tuple[list[tuple], SchedulerConfig], shares: list[tuple[int, float]], together: set[int]
) -> None:
    simulator(*job).run_withdrawing(shares, together)


def test_half_of_what_has_not_begun_is_withdrawn() -> None:
    config = SchedulerConfig(num_pages=64, page_size=4, max_num_seqs=2, max_tokens_per_step=16)
    sim = simulator([([1, 2, request], [9], 0, 0) for request in range(20)], config)
    assert sim.run_withdrawing([(0, 0.5)], set()) == 9


def test_preemption_recomputes_exactly_the_lost_positions() -> None:
    # Two rows of 4 + 8 positions in 5 usable pages of 4: they do not fit together at full length.
    config = SchedulerConfig(num_pages=6, page_size=4, max_num_seqs=2, max_tokens_per_step=16, admission="free")
    sim = simulator([([1, 2, 3, 4], [9], 0, 0), ([5, 6, 7, 8], [9], 0, 0)], config)
    sim.run()
    stats = sim.scheduler.stats
    assert stats.preemptions == 1
    # The younger one was at position 8 with 5 output tokens; its prompt's page was kept.
    assert stats.evicted_nodes == 0
    assert stats.recomputed_tokens == 4


def test_idle_nodes_are_evicted_before_a_sequence_is_preempted() -> None:
    # The root [1, 1] waits for its second child while the first one's row grows into the last page.
    config = SchedulerConfig(num_pages=6, page_size=2, max_num_seqs=1, max_tokens_per_step=8)
    sim = simulator([([1, 1, 2, 2], [4], 0, 0), ([1, 1, 3, 3], [4], 0, 0), ([4, 4], [5], 0, 0)], config)
    sim.run()
    assert sim.scheduler.stats.preemptions == 0


REGRESSIONS = [
    # Nested nodes hold the same tail page: both must free it.
    ((3, 8, 20, 20, 16, 1), "10212112221 1001 10110 11110 102", "22 271 64 1614 4187"),
    # Unused nodes in the pool leave no room for the next node.
    ((7, 2, 3, 4, 16, 8), "001101010001 0 10 10001 12 0001", "1 2222 2 222 221 -"),
    # The only remaining sample belongs to a node whose tail was freed.
    ((9, 2, 2, 2, 4, 8), "00110022 00110100000", "3261 2631"),
]
"""(configuration, prompts, lengths of their samples), both as digits"""


@each("limits, prompts, targets", REGRESSIONS)
def test_tight_pools_do_not_deadlock(limits: tuple[int, ...], prompts: str, targets: str) -> None:
    columns = ([[int(digit) for digit in row if digit != "-"] for row in text.split()] for text in (prompts, targets))
    simulator([(p, t, 0, 0) for p, t in zip(*columns, strict=True)], SchedulerConfig(*limits)).run()


def test_nodes_in_use_are_not_evicted() -> None:
    allocator = PageAllocator(9, 4)
    nodes = BlockManager(tree_of([[1] * 6, [2] * 8]), np.array([1, 1], np.int32), allocator, SchedulerStats())
    nodes.step = 3
    busy, idle = nodes.admit(0, []), nodes.admit(1, [])
    busy.last_used_step = busy.completed_step = 3
    idle.last_used_step = idle.completed_step = 2
    assert not nodes.make_room(lambda: 7, spare_waiting=False)
    assert (busy.alive, busy.tail_held, idle.alive) == (True, True, False)
    nodes.step = 4
    assert nodes.make_room(lambda: 7, spare_waiting=False)
    assert not busy.alive
    assert allocator.used_count == 0


def test_youngest_sequence_is_preempted() -> None:
    config = SchedulerConfig(num_pages=8, page_size=4, max_num_seqs=3, max_tokens_per_step=16, admission="free")
    sim = simulator([([r] * 4, [9], 0, 0) for r in (1, 2, 3)], config)
    done: list[int] = []
    sim.run(lambda step: done.extend(sorted(sim.ended - set(done))))
    assert sim.scheduler.stats.preemptions > 0
    assert done == [0, 1, 2]


def test_first_sample_writes_in_place_and_the_others_copy_a_page() -> None:
    config = SchedulerConfig(num_pages=50, page_size=4, max_num_seqs=8, max_tokens_per_step=64)
    sim = simulator([([1] * 7, [3, 3, 3, 3], 0, 0)], config)
    plan = sim.scheduler.step()
    assert len(plan.starts) == len(plan.samples) == 4
    assert {s.token for s in plan.samples} == {6}
    sim.execute(plan)
    sim.scheduler.commit(sim.count(plan))
    sim.run()
    assert sim.scheduler.stats.page_copies == 3
    assert sim.scheduler.stats.prompt_tokens == 7


def test_more_samples_than_slots_recompute_the_last_token_once_per_round() -> None:
    config = SchedulerConfig(num_pages=50, page_size=4, max_num_seqs=4, max_tokens_per_step=64)
    sim = simulator([([1] * 8, [3] * 10, 0, 0)], config)
    sim.run()
    assert sim.scheduler.stats.prompt_tokens == 8
    assert sim.scheduler.stats.recomputed_last_tokens == 2


def test_counts_of_a_shared_prefix() -> None:
    """128 tokens shared by 256 rows are computed once and read once per step."""
    shared = [9] * 128
    rows = [([*shared, i // 16, i % 16, 1, 2], [8], 0, 0) for i in range(256)]
    config = SchedulerConfig(num_pages=1000, page_size=16, max_num_seqs=256, max_tokens_per_step=2048)
    sim = simulator(rows, config)
    sim.run()
    stats = sim.scheduler.stats
    assert stats.prompt_tokens == 128 + 16 + 256 * 3
    # The path to the first leaf is one chunk, the others follow when their parents are complete.
    assert stats.prefill_chunks == 256
    assert stats.steps <= 3 + 7
    assert stats.recomputed_last_tokens == 0
    assert stats.peak_pages == 8 + 256
    # The first row decodes alone once; in each of the other 8 steps all rows read the prefix once.
    assert stats.group_passes == 8
    assert stats.decode_kv_reads == stats.decode_kv_positions - (256 * 7 - 1 - 8) * 128


def test_counts_of_a_tree() -> None:
    """Root 32 -> 4 tasks of 64 -> 8 questions of 16 each, 4 samples of 12: three levels of groups."""
    rows = [([1] * 32 + [2 + t] * 64 + [10 + q] * 16, [12] * 4, 0, 0) for t in range(4) for q in range(8)]
    config = SchedulerConfig(
        num_pages=2000, page_size=16, max_num_seqs=128, max_tokens_per_step=4096, group_min_saving=48
    )
    sim = simulator(rows, config)
    sim.run()
    stats = sim.scheduler.stats
    assert stats.prompt_tokens == 32 + 4 * 64 + 32 * 16
    assert stats.page_copies == 0
    assert stats.steps <= 3 + 11
    # A step with all rows reads the root, each task and each question once, and the rows' own pages.
    assert sim.most_groups == 1 + 4 + 32
    saving = 127 * 32 + 4 * 31 * 64 + 32 * 3 * 16
    assert stats.decode_kv_reads <= stats.decode_kv_positions - 9 * saving


@examples(100)
@given(rows, configs(num_pages=1000), st.integers(1, 60))
def test_skipping_small_nodes_does_not_change_the_groups(
    rows: list[tuple], config: SchedulerConfig, saving: int
) -> None:
    """The groups equal those selected among all nodes that several rows share, as together with a long prompt."""
    config = replace(config, group_min_saving=saving)
    some, all_nodes = simulator(rows, config), simulator([*rows, ([99] * 80, [], 0, 0)], config)
    some.run()
    all_nodes.run()
    assert asdict(some.scheduler.stats) == asdict(all_nodes.scheduler.stats)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_finished_sequences_do_not_occupy_slots(lag: int) -> None:
    """However late ends are reported, all slots sample in every step; only the last end adds steps."""
    rows = [([i, 7], [1 + i % 6], 0, 0) for i in range(90)]
    config = SchedulerConfig(page_size=4, num_pages=1000, max_num_seqs=8, max_tokens_per_step=64)
    sim = simulator(rows, config, lag)
    begun: list[int] = []
    sim.run(lambda step: begun.append(len(sim.owners)))
    tokens = sum(sum(row[1]) for row in rows)
    assert len(begun) - lag <= tokens // 8 + 6, "every slot is used until the end"
    assert begun[0] == 8
    slow = simulator(rows, config)
    slow.run()
    assert sim.scheduler.stats.steps == slow.scheduler.stats.steps + lag


@pytest.mark.parametrize(("prompt", "limit", "fits"), [(8, 5, True), (8, 6, False), (13, 1, False)])
def test_error_names_a_request_that_is_too_large(prompt: int, limit: int, fits: bool) -> None:
    config = SchedulerConfig(num_pages=4, page_size=4, max_num_seqs=2, max_tokens_per_step=8)
    scheduler = Scheduler(tree_of([[1] * prompt]), np.array([1]), np.array([limit]), config)
    if fits:
        simulator([([1] * prompt, [limit], 0, 0)], config).run()
    else:
        with pytest.raises(ValueError, match="request 0 needs 4 pages"):
            scheduler.step()


def test_commit_of_an_unknown_sequence_fails() -> None:
    config = SchedulerConfig(num_pages=9, page_size=4, max_num_seqs=2, max_tokens_per_step=8)
    scheduler = Scheduler(tree_of([[1]]), np.array([1]), np.array([1]), config)
    scheduler.step()
    with pytest.raises(KeyError):
        scheduler.commit([7])


WRONG_COLUMNS = [
    ([1], [1, 1], r"samples has shape \(1,\)"),
    ([1, -1], [1, 1], "samples of request 1 is negative"),
    ([1, 1], [1, 0], "max_new of request 1 is 0"),
]
WRONG_LIMITS = [("page_size", 0, " must be at least 1"), ("max_num_seqs", 0, " must be at least 1")]
WRONG_LIMITS += [("num_pages", 1, " must be at least 2"), ("max_tokens_per_step", 3, ""), ("group_min_saving", -1, "")]
WRONG_LIMITS += [("group_rows", 0, ""), ("start_together", 0, "")]


@each("samples, max_new, message", WRONG_COLUMNS)
def test_invalid_columns_are_rejected(samples: list[int], max_new: list[int], message: str) -> None:
    config = SchedulerConfig(num_pages=9, page_size=4, max_num_seqs=2, max_tokens_per_step=8)
    with pytest.raises(ValueError, match=message):
        Scheduler(tree_of([[1], [2]]), np.array(samples), np.array(max_new), config)


@each("name, value, message", WRONG_LIMITS)
def test_invalid_limits_are_rejected(name: str, value: int, message: str) -> None:
    good = {"num_pages": 8, "page_size": 4, "max_num_seqs": 4, "max_tokens_per_step": 8}
    with pytest.raises(ValueError, match=name + message):
        SchedulerConfig(**{**good, name: value})
