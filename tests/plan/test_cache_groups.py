"""Cache groups: bytes of several groups that are planned together, and kinds that are not planned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchgen.plan.cache_groups import CacheGroup, CacheKind, PageCounts, cache_bytes, pages_within
from batchgen.plan.scheduler import SchedulerConfig
from tests.plan.test_scheduler import simulator

WIDE, NARROW = CacheGroup("full", (0, 2), 300), CacheGroup("full", (1,), 100)


def test_two_groups_are_planned_together() -> None:
    """A budget of bytes holds as many pages as of one group of their sum; the plan is the same in both cases."""
    budget = 400 * 9 + 399
    pages = pages_within([WIDE, NARROW], budget)
    assert pages == 9
    assert cache_bytes([WIDE, NARROW], PageCounts(pages)) == 3600
    rows = [([1, 2, 3, i], [6], 0, 0) for i in range(6)]
    config = SchedulerConfig(pages, page_size=2, max_num_seqs=4, max_tokens_per_step=16)
    plans = []
    for groups in ((WIDE, NARROW), (CacheGroup("full", (0, 1, 2), 400),)):
        sim = simulator(rows, replace(config, cache_groups=groups))
        sim.run()
        stats = sim.scheduler.stats
        assert cache_bytes(groups, PageCounts(stats.peak_pages)) <= budget
        assert stats.peak_pages > 4
        plans.append(stats.as_dict())
    assert plans[0] == plans[1]


@pytest.mark.parametrize("kind", ["latent", "recurrent"])
def test_other_kinds_are_refused_by_name(kind: CacheKind) -> None:
    with pytest.raises(ValueError, match=rf"layers \[3, 4\] keep a {kind} cache; only these are planned: full, window"):
        CacheGroup(kind, (3, 4), 100)
