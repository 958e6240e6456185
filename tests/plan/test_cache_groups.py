"""Cache groups: bytes of several groups that are planned together."""

from __future__ import annotations

from dataclasses import replace

from batchgen.plan.cache_groups import CacheGroup, bytes_by_kind
from batchgen.plan.scheduler import SchedulerConfig
from tests.plan.test_scheduler import simulator

WIDE, NARROW = CacheGroup((0, 2), 300), CacheGroup((1,), 100)


def test_two_groups_are_planned_together() -> None:
    """Pages cost as much as those of one group of their sum; the plan is the same in both cases."""
    pages = 9
    rows = [([1, 2, 3, i], [6], 0, 0) for i in range(6)]
    config = SchedulerConfig(pages, page_size=2, max_num_seqs=4, max_tokens_per_step=16)
    plans = []
    for groups in ((WIDE, NARROW), (CacheGroup((0, 1, 2), 400),)):
        sim = simulator(rows, replace(config, cache_groups=groups))
        sim.run()
        stats = sim.scheduler.stats
        assert bytes_by_kind(groups, sim.scheduler.group_peaks) == {"full": 400 * stats.peak_pages}
        assert stats.peak_pages > 4
        plans.append(stats.as_dict())
    assert plans[0] == plans[1]
