"""Positions shared inside a page are copied, never computed anew; and why that is always the cheaper way."""

from __future__ import annotations

import pytest

from batchgen.job.bench.shapes import SHAPES
from batchgen.plan.scheduler import SchedulerConfig
from tests.plan.simulator import Simulator

BALANCE = 600
"""Operations that a processor makes while its memory moves a byte: H100 and B200 about 300, a CPU's core under 40."""
ITEM_BYTES = 2


@pytest.mark.parametrize("name", SHAPES)
def test_a_position_is_copied_in_less_than_it_is_computed(name: str) -> None:
    shape = SHAPES[name]
    moved = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim * ITEM_BYTES  # keys and values, read and written
    layers = shape.parameters - shape.vocab * shape.hidden * (1 if shape.tied else 2)
    assert 2 * layers > 2 * BALANCE * moved


@pytest.mark.parametrize("shared", range(1, 10))
def test_by_hand(shared: int) -> None:
    """Three rows after some shared tokens, pages of four: the first goes on in the last one's page, two copy it."""
    prompts = [[1] * shared + [last] for last in (2, 3, 4)]
    sim = Simulator(prompts, [[2]] * 3, [2] * 3, SchedulerConfig(100, 4, 8, 64))
    sim.run()
    stats = sim.scheduler.stats
    assert (stats.prompt_tokens, stats.recomputed_tokens) == (shared + 3, 0)
    assert stats.page_copies == (2 if shared % 4 else 0)
