"""Sliding windows: steps run on simulated pools of both kinds of layers, and pages are counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.plan.cache_groups import CacheGroup, bytes_by_kind
from batchgen.plan.scheduler import SchedulerConfig
from batchgen.plan.window_pages import WindowGroup
from tests.cases import examples
from tests.plan.counted import counted
from tests.plan.simulator import Simulator
from tests.plan.test_scheduler import configs, live_distinct, rows, simulator, tight_jobs


def windowed(config: SchedulerConfig, window: int, more: int = 1000, page_bytes: int = 1) -> SchedulerConfig:
    """The limits for a model with layers without and with a window, and `more` pages of these than needed."""
    group = WindowGroup((1,), page_bytes, window)
    group = replace(group, num_pages=group.least_pages(config.page_size) + more)
    return replace(config, cache_groups=(CacheGroup((0,), 1), group))


windows = st.sampled_from([1, 2, 3, 4, 7, 12, 40])


@examples(50)
@given(rows, configs(num_pages=1000), windows)
def test_windows_cost_nothing_where_memory_is_plenty(rows: list[tuple], config: SchedulerConfig, window: int) -> None:
    """No token is computed twice, and the steps are those of a model without windows."""
    plain, sim = simulator(rows, config), simulator(rows, windowed(config, window))
    plain.run()
    sim.run()
    assert sim.scheduler.stats.prompt_tokens == live_distinct(sim)
    counts = sim.scheduler.stats.as_dict()
    assert counts.pop("peak_window_pages") <= counts["peak_pages"]
    assert counts == {k: v for k, v in plain.scheduler.stats.as_dict().items() if k != "peak_window_pages"}


@examples(80)
@given(tight_jobs(), windows, st.sampled_from([0, 0, 1, 3, 10, 1000]), st.integers(0, 2))
def test_every_request_that_fits_alone_finishes(
    job: tuple[list[tuple], SchedulerConfig], window: int, more: int, lag: int
) -> None:
    """Chunks, branches, preemptions and evictions read what they should, in pools that are short of either page."""
    rows, config = job
    if lag:
        rows = [(r[0], [max(r[1])] * len(r[1]) if r[1] else [], 0, 0) for r in rows]
    sim = simulator(rows, windowed(config, window, more), lag)
    sim.run()
    stats = sim.scheduler.stats
    assert stats.prompt_tokens == live_distinct(sim)
    assert stats.peak_window_pages <= sim.held[0].num_pages - 1


@examples(50)
@given(rows, configs(num_pages=1000), windows, st.integers(0, 2))
def test_a_dry_run_uses_the_pages_of_a_run(rows: list[tuple], config: SchedulerConfig, window: int, lag: int) -> None:
    rows = [(prompt, [max(lengths)] * len(lengths) if lengths else [], 0, key) for prompt, lengths, _, key in rows]
    sim, dry = (simulator(rows, windowed(config, window), lag) for _ in range(2))
    sim.run()
    stats = sim.scheduler.stats
    dry.scheduler.dry_run(1 << 60, lag)
    assert dry.scheduler.group_peaks == [stats.peak_pages, stats.peak_window_pages]
    assert dry.scheduler.unended == 0


def test_a_dry_run_of_a_long_job_stops() -> None:
    sim = simulator([([i], [20], 0, 0) for i in range(9)], windowed(SchedulerConfig(100, 4, 3, 16), 8))
    sim.scheduler.dry_run(25)
    assert sim.scheduler.group_peaks[-1] > 0
    assert (sim.scheduler.unended, sim.scheduler.stats.sampled_tokens) == (9, 27)


@examples(50)
@given(tight_jobs(), windows, st.lists(st.tuples(st.integers(0, 30), st.integers(0, 13)), max_size=4))
def test_cancelled_requests_free_their_windows(
    job: tuple[list[tuple], SchedulerConfig], window: int, cancels: list[tuple[int, int]]
) -> None:
    simulator(job[0], windowed(job[1], window, 2)).run_cancelling(cancels)


@pytest.mark.parametrize(("window", "share"), [(512, 0.25), (1024, 0.30)])
def test_long_rows_hold_a_fraction(window: int, share: float) -> None:
    """The shape of Gemma 3, five of six layers with a window, with rows of 8,192 positions."""
    config = SchedulerConfig(num_pages=5000, page_size=16, max_num_seqs=8, max_tokens_per_step=1024)
    config = windowed(config, window, page_bytes=5)
    run = counted([[i] * 7937 for i in range(8)], np.full(8, 256), config)
    stats = run.stats
    kept = bytes_by_kind(config.cache_groups, [stats.peak_pages, stats.peak_window_pages])
    assert stats.peak_pages > 8 * 500
    assert sum(kept.values()) <= share * (1 + 5) * stats.peak_pages
    # The windows of seven rows, and the last chunk of the eighth prompt with what it sees.
    each = WindowGroup((), 1, window).most_pages(16)
    assert stats.peak_window_pages <= 8 * each + 1024 // 16
    assert stats.preemptions == stats.recomputed_tokens == 0


def run_shared(samples: list[int], seqs: int, window: int = 16) -> tuple[Simulator, list[int]]:
    """Rows with a common prefix of 200 tokens, and the pages of the window layers in each step."""
    config = SchedulerConfig(num_pages=1000, page_size=4, max_num_seqs=seqs, max_tokens_per_step=256)
    sim = simulator([([1] * 200 + [i] * 3, [n], 0, 0) for i, n in enumerate(samples)], windowed(config, window))
    used: list[int] = []
    sim.run(lambda _: used.append(sim.scheduler.group_pages_in_use[-1]))
    return sim, used


def test_a_prefix_keeps_its_window_while_a_row_has_to_start_from_it() -> None:
    """One slot: each of the rows starts when the one before has ended, far behind the prefix."""
    sim, used = run_shared([40] * 4, seqs=1)
    stats = sim.scheduler.stats
    assert stats.prompt_tokens == 200 + 4 * 3
    assert stats.recomputed_tokens == 0
    row = WindowGroup((), 1, 16).most_pages(4)
    assert 2 * row - 1 <= max(used[60:]) <= 2 * row + 1, "the prefix's window and the row's own"
    assert max(used[-30:-1]) <= row, "the last row has left the prefix"


def test_a_prefix_drops_its_window_when_all_rows_have_left_it() -> None:
    _, used = run_shared([60] * 5, seqs=5)
    row = WindowGroup((), 1, 16).most_pages(4)
    assert used[4] < 5 * row, "the rows share the prefix's last pages"
    assert max(used[30:]) <= 5 * row


def test_all_layers_may_have_a_window() -> None:
    """A page then costs nothing outside of the window layers' pool."""
    config = SchedulerConfig(num_pages=10_000, page_size=4, max_num_seqs=4, max_tokens_per_step=64)
    group = WindowGroup((0, 1), 8, 16)
    group = replace(group, num_pages=group.least_pages(4) + 4)
    config = replace(config, cache_groups=(group,))
    sim = simulator([([i] * 300, [50], 0, 0) for i in range(6)], config)
    sim.run()
    stats = sim.scheduler.stats
    assert bytes_by_kind([group], sim.scheduler.group_peaks) == {"window": 8 * stats.peak_window_pages}
    assert stats.peak_window_pages < group.num_pages


def test_a_pool_needs_room_for_two_windows() -> None:
    config = SchedulerConfig(num_pages=50, page_size=4, max_num_seqs=2, max_tokens_per_step=16)
    with pytest.raises(ValueError, match=r"window_pages must be at least 16, got 15"):
        windowed(config, 16, -1)
