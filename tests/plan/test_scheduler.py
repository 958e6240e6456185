"""Step plans executed against a simulated pool that knows what every slot must hold."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.plan import groups
from batchgen.plan.builder import StepBuilder
from batchgen.plan.config import SchedulerStats
from batchgen.plan.nodes import Nodes
from batchgen.plan.pages import PageAllocator
from batchgen.plan.scheduler import Scheduler, SchedulerConfig
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
    """Branching prompts and a pool that holds the largest request alone, or hardly more."""
    base = draw(st.lists(st.integers(0, 1), min_size=6, max_size=24))
    tails = st.lists(st.integers(0, 2), max_size=9)
    prompts = st.tuples(st.integers(1, len(base)), tails).map(lambda x: base[: x[0]] + x[1])
    scale = draw(st.sampled_from([1, 1, 5]))
    lengths = st.lists(st.integers(1, draw(st.sampled_from([2, 8]))).map(lambda n: n * scale), max_size=4)
    job = draw(st.lists(st.tuples(prompts, lengths, st.integers(0, 1), st.just(0)), min_size=1, max_size=14))
    size = draw(st.sampled_from([1, 1, 2, 3, 4, 8]))
    need = max([pages_alone(r, size) for r in job if r[1]], default=1)
    return job, draw(configs(1 + need + draw(st.sampled_from([0, 0, 1, 2, 5])), size))


def simulator(rows: list[tuple], config: SchedulerConfig, lag: int = 0, kinds: list[int] | None = None) -> Simulator:
    return Simulator(
        prompts=[r[0] for r in rows],
        targets=[r[1] for r in rows],
        max_new=[max(r[1], default=1) + r[2] for r in rows],
        config=config,
        keys=[r[3] for r in rows],
        lag=lag,
        kinds=kinds,
    )


def live_distinct(sim: Simulator) -> int:
    live = [r for r in range(len(sim.prompts)) if sim.targets[r] and r not in sim.too_large]
    return len({(sim.keys[r], *sim.prompts[r][: i + 1]) for r in live for i in range(len(sim.prompts[r]))})


@settings(max_examples=200, deadline=None)
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
        assert stats.relogit_tokens == 0


@settings(max_examples=250, deadline=None)
@given(rows, configs())
def test_small_pool(rows: list[tuple], config: SchedulerConfig) -> None:
    sim = simulator(rows, config)
    sim.run()
    assert sim.scheduler.stats.prompt_tokens == live_distinct(sim)
    assert sim.scheduler.stats.peak_pages <= config.num_pages - 1


@settings(max_examples=400, deadline=None)
@given(tight_jobs())
def test_whatever_fits_alone_ends(job: tuple[list[tuple], SchedulerConfig]) -> None:
    sim = simulator(*job)
    assert not [r for r in sim.too_large if sim.targets[r]]
    sim.run()
    stats = sim.scheduler.stats
    assert stats.prompt_tokens == live_distinct(sim)
    assert stats.sampled_tokens == sum(map(sum, sim.targets))
    assert stats.decode_tokens == stats.sampled_tokens - sum(map(len, sim.targets))


@settings(max_examples=120, deadline=None)
@given(tight_jobs(), st.integers(1, 3))
def test_ends_reported_late(job: tuple[list[tuple], SchedulerConfig], lag: int) -> None:
    rows, config = job
    rows = [(r[0], [max(r[1])] * len(r[1]) if r[1] else [], 0, 0) for r in rows]
    simulator(rows, config, lag).run()


@settings(max_examples=150, deadline=None)
@given(tight_jobs(), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 13)), max_size=4))
def test_cancelled_requests(job: tuple[list[tuple], SchedulerConfig], cancels: list[tuple[int, int]]) -> None:
    rows, config = job
    sim = simulator(rows, config)

    def between(step: int) -> None:
        for when, request in cancels:
            if when == step and request < len(rows):
                sim.cancel(request)

    sim.run(between)


def test_preemption_computes_again_exactly_what_was_lost() -> None:
    # Two rows of 4 + 8 positions in 5 usable pages of 4: both cannot stand at full length.
    config = SchedulerConfig(num_pages=6, page_size=4, max_num_seqs=2, max_tokens_per_step=16, admission="free")
    sim = simulator([([1, 2, 3, 4], [9], 0, 0), ([5, 6, 7, 8], [9], 0, 0)], config)
    sim.run()
    stats = sim.scheduler.stats
    assert stats.preemptions == 1
    # The younger one stood at position 8 with 5 tokens out; its prompt's page could stay.
    assert stats.evicted_nodes == 0
    assert stats.recomputed_tokens == 4


def test_eviction_before_preemption() -> None:
    # The root [1, 1] waits for its second child while the first one's row grows into the last page.
    config = SchedulerConfig(num_pages=6, page_size=2, max_num_seqs=1, max_tokens_per_step=8)
    sim = simulator([([1, 1, 2, 2], [4], 0, 0), ([1, 1, 3, 3], [4], 0, 0), ([4, 4], [5], 0, 0)], config)
    sim.run()
    assert sim.scheduler.stats.preemptions == 0


REGRESSIONS = [
    # Nested nodes hold the same tail page: both must let go of it before the pool is full for good.
    (
        SchedulerConfig(3, 8, 20, 20, 16, 1),
        [[1, 0, 2, 1, 2, 1, 1, 2, 2, 2, 1], [1, 0, 0, 1], [1, 0, 1, 1, 0], [1, 1, 1, 1, 0], [1, 0, 2]],
        [[2, 2], [2, 7, 1], [6, 4], [1, 6, 1, 4], [4, 1, 8, 7]],
    ),
    # Resident nodes that nobody uses yet leave no room for the first node to come.
    (
        SchedulerConfig(7, 2, 3, 4, 16, 8),
        [[0, 0, 1, 1, 0, 1, 0, 1, 0, 0, 0, 1], [0], [1, 0], [1, 0, 0, 0, 1], [1, 2], [0, 0, 0, 1]],
        [[1], [2, 2, 2, 2], [2], [2, 2, 2], [2, 2, 1], []],
    ),
    # The only thing left is a sample whose node gave its tail up.
    (
        SchedulerConfig(9, 2, 2, 2, 4, 8),
        [[0, 0, 1, 1, 0, 0, 2, 2], [0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 0]],
        [[3, 2, 6, 1], [2, 6, 3, 1]],
    ),
]


@pytest.mark.parametrize(("config", "prompts", "targets"), REGRESSIONS)
def test_pools_that_once_got_stuck(config: SchedulerConfig, prompts: list, targets: list) -> None:
    simulator([(p, t, 0, 0) for p, t in zip(prompts, targets, strict=True)], config).run()


def test_logits_alone_are_computed_without_storing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that was to compute its prompt's tail itself, and finds it standing again, stores nothing anew."""
    config = SchedulerConfig(num_pages=20, page_size=4, max_num_seqs=1, max_tokens_per_step=8)
    sim = simulator([([1] * 7, [2, 2], 0, 0)], config)
    prompts = sim.scheduler._prompts
    monkeypatch.setattr(
        prompts, "_relogit", lambda node, builder, count: prompts._begin_samples(node.id, builder, None, count)
    )
    chunks = []
    execute = sim.execute
    monkeypatch.setattr(sim, "execute", lambda plan: (chunks.extend(plan.prefills), execute(plan)))
    sim.run()
    assert [(c.start, c.end, c.sequence, c.store) for c in chunks] == [(0, 7, None, True), (6, 7, 1, False)]
    assert sim.scheduler.stats.relogit_tokens == 1


def test_nodes_at_work_are_not_evicted() -> None:
    allocator = PageAllocator(9, 4)
    nodes = Nodes(tree_of([[1] * 6, [2] * 8]), np.array([1, 1], np.int32), allocator, SchedulerStats())
    nodes.step = 3
    busy, idle = nodes.admit(0, []), nodes.admit(1, [])
    busy.touched = busy.ready = 3
    idle.touched = idle.ready = 2
    assert not nodes.make_room(lambda: 7, spare_waiting=False)
    assert (busy.alive, busy.tail_held, idle.alive) == (True, True, False)
    nodes.step = 4
    assert nodes.make_room(lambda: 7, spare_waiting=False)
    assert not busy.alive
    assert allocator.used_count == 0


def test_nothing_branches_off_in_the_step_that_completes_its_parent() -> None:
    config = SchedulerConfig(num_pages=20, page_size=4, max_num_seqs=4, max_tokens_per_step=16)
    scheduler = Scheduler(tree_of([[1, 1, 1, 2], [1, 1, 1, 3]]), np.array([1, 1]), np.array([3, 3]), config)
    scheduler.step()
    prompts, nodes = scheduler._prompts, scheduler._nodes
    assert sorted(nodes.active) == [0, 1]
    prompts.recompute(2, StepBuilder(1, SchedulerStats()), force=False)
    assert sorted(nodes.active) == [0, 1]
    prompts.recompute(2, StepBuilder(2, SchedulerStats()), force=False)
    assert sorted(nodes.active) == [0, 1, 2]


def test_the_youngest_is_preempted() -> None:
    config = SchedulerConfig(num_pages=8, page_size=4, max_num_seqs=3, max_tokens_per_step=16, admission="free")
    sim = simulator([([r] * 4, [9], 0, 0) for r in (1, 2, 3)], config)
    done: list[int] = []
    sim.run(lambda step: done.extend(sorted(sim.ended - set(done))))
    assert sim.scheduler.stats.preemptions > 0
    assert done == [0, 1, 2]


def test_one_row_copies_nothing() -> None:
    config = SchedulerConfig(num_pages=50, page_size=4, max_num_seqs=8, max_tokens_per_step=64)
    sim = simulator([([i] * 7, [5], 0, 0) for i in range(6)], config)
    sim.run()
    assert sim.scheduler.stats.page_copies == 0
    assert sim.scheduler.stats.peak_pages == 6 * 3


def test_samples_fork_and_the_first_writes_in_place() -> None:
    config = SchedulerConfig(num_pages=50, page_size=4, max_num_seqs=8, max_tokens_per_step=64)
    sim = simulator([([1] * 7, [3, 3, 3, 3], 0, 0)], config)
    plan = sim.scheduler.step()
    assert plan is not None
    assert len(plan.starts) == len(plan.samples) == 4
    assert {s.token for s in plan.samples} == {6}
    sim.execute(plan)
    sim.scheduler.commit(sim.count(plan))
    sim.run()
    assert sim.scheduler.stats.page_copies == 3
    assert sim.scheduler.stats.prompt_tokens == 7


def test_more_samples_than_slots_need_one_relogit_each_time() -> None:
    config = SchedulerConfig(num_pages=50, page_size=4, max_num_seqs=4, max_tokens_per_step=64)
    sim = simulator([([1] * 8, [3] * 10, 0, 0)], config)
    sim.run()
    assert sim.scheduler.stats.prompt_tokens == 8
    assert sim.scheduler.stats.relogit_tokens == 2


def test_shared_prefix_work_is_counted() -> None:
    """256 rows behind 128 shared tokens: computed once, read once per step."""
    shared = [9] * 128
    rows = [([*shared, i // 16, i % 16, 1, 2], [8], 0, 0) for i in range(256)]
    config = SchedulerConfig(num_pages=1000, page_size=16, max_num_seqs=256, max_tokens_per_step=2048)
    sim = simulator(rows, config)
    sim.run()
    stats = sim.scheduler.stats
    assert stats.prompt_tokens == 128 + 16 + 256 * 3
    # The path to the first leaf in one chunk, the others as soon as their parents stand.
    assert stats.prefill_chunks == 256
    assert stats.steps <= 3 + 7
    assert stats.relogit_tokens == 0
    assert stats.peak_pages == 8 + 256
    # The first row decodes alone once; in each of the other 8 steps all rows read the prefix once.
    assert stats.group_passes == 8
    assert stats.decode_kv_reads == stats.decode_kv_positions - (256 * 7 - 1 - 8) * 128


def test_tree_work_is_counted() -> None:
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
    # In a step with all rows: the root once, each task once, each question once, and what the rows hold alone.
    assert sim.most_groups == 1 + 4 + 32
    saving = 127 * 32 + 4 * 31 * 64 + 32 * 3 * 16
    assert stats.decode_kv_reads <= stats.decode_kv_positions - 9 * saving


@settings(max_examples=100, deadline=None)
@given(rows, configs(num_pages=1000), st.integers(1, 60))
def test_nodes_that_are_not_looked_at_get_no_pass(rows: list[tuple], config: SchedulerConfig, saving: int) -> None:
    """The same groups as where all nodes are looked at that several rows share."""
    config = replace(config, group_min_saving=saving)
    some, all_nodes = simulator(rows, config), simulator(rows, config)
    all_nodes.scheduler._groups._fewest = 2
    some.run()
    all_nodes.run()
    assert asdict(some.scheduler.stats) == asdict(all_nodes.scheduler.stats)


def test_groups_too_small_for_a_pass_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen rows of one root, and pairs below it: a pair saves the 12 positions of its prompt at most."""
    looked: list[int] = []
    monkeypatch.setattr(groups, "choose_levels", lambda nodes, *given: looked.append(len(nodes)) or [-1] * len(nodes))
    prompts = [([1] * 8 + [2 + i // 2] * 4, [4], 0, 0) for i in range(16)]
    for saving, most in ((13, 1), (12, 9)):
        looked.clear()
        config = SchedulerConfig(
            num_pages=99, page_size=4, max_num_seqs=16, max_tokens_per_step=99, group_min_saving=saving
        )
        simulator(prompts, config).run()
        assert max(looked) == most


def test_groups_are_the_same_list_while_rows_stay() -> None:
    config = SchedulerConfig(num_pages=99, page_size=2, max_num_seqs=4, max_tokens_per_step=64, group_min_saving=1)
    scheduler = Scheduler(tree_of([[1, 1, 1], [1, 1, 2]]), np.array([1, 1]), np.array([9, 9]), config)
    seen = []
    for _ in range(6):
        plan = scheduler.step()
        assert plan is not None
        seen.append(plan.groups)
        scheduler.commit(())
    assert len(seen[-1]) == 1
    assert seen[-1] is seen[-2] is seen[-3]


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_who_has_all_tokens_keeps_nobody_waiting(lag: int) -> None:
    """However late its end is reported: as many rows draw in every step, and only the last end takes steps more."""
    rows = [([i, 7], [1 + i % 6], 0, 0) for i in range(90)]
    config = SchedulerConfig(page_size=4, num_pages=1000, max_num_seqs=8, max_tokens_per_step=64)
    sim = simulator(rows, config, lag)
    begun: list[int] = []
    sim.run(lambda step: begun.append(len(sim.who)))
    tokens = sum(sum(row[1]) for row in rows)
    assert len(begun) - lag <= tokens // 8 + 6, "no slot is empty but at the end"
    assert begun[0] == 8
    slow = simulator(rows, config)
    slow.run()
    assert sim.scheduler.stats.steps == slow.scheduler.stats.steps + lag


def test_too_large_is_exact() -> None:
    config = SchedulerConfig(num_pages=4, page_size=4, max_num_seqs=2, max_tokens_per_step=8)
    tree = tree_of([[1] * 8, [2] * 8, [3] * 13])
    scheduler = Scheduler(tree, np.array([1, 1, 1]), np.array([5, 6, 1]), config)
    assert [scheduler.too_large(r) for r in range(3)] == [None, 4, 4]
    sim = simulator([([1] * 8, [5], 0, 0)], config)
    sim.run()
    assert sim.scheduler.stats.peak_pages == 3


def test_too_large_request_left_in_is_named() -> None:
    config = SchedulerConfig(num_pages=4, page_size=4, max_num_seqs=2, max_tokens_per_step=8)
    scheduler = Scheduler(tree_of([[1] * 13]), np.array([1]), np.array([1]), config)
    with pytest.raises(ValueError, match="request 0 needs 4 pages"):
        scheduler.step()


def test_unknown_sequence_cannot_end() -> None:
    config = SchedulerConfig(num_pages=9, page_size=4, max_num_seqs=2, max_tokens_per_step=8)
    scheduler = Scheduler(tree_of([[1]]), np.array([1]), np.array([1]), config)
    scheduler.step()
    with pytest.raises(KeyError):
        scheduler.commit([7])


@pytest.mark.parametrize(
    ("samples", "max_new", "message"),
    [
        ([1], [1, 1], r"samples has shape \(1,\)"),
        ([1, -1], [1, 1], "samples of request 1 is negative"),
        ([1, 1], [1, 0], "max_new of request 1 is 0"),
    ],
)
def test_bad_columns_are_refused(samples: list[int], max_new: list[int], message: str) -> None:
    config = SchedulerConfig(num_pages=9, page_size=4, max_num_seqs=2, max_tokens_per_step=8)
    with pytest.raises(ValueError, match=message):
        Scheduler(tree_of([[1], [2]]), np.array(samples), np.array(max_new), config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"num_pages": 1}, "num_pages must be at least 2"),
        ({"max_tokens_per_step": 3}, "max_tokens_per_step"),
        ({"group_min_saving": -1}, "group_min_saving"),
        ({"group_rows": 0}, "group_rows"),
        ({"start_together": 0}, "start_together"),
    ],
)
def test_bad_limits_are_refused(change: dict[str, int], message: str) -> None:
    good = {"num_pages": 8, "page_size": 4, "max_num_seqs": 4, "max_tokens_per_step": 8}
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**{**good, **change})
