"""Positions shared inside a page are copied, never recomputed, because that is always cheaper."""

from __future__ import annotations

import pytest

from batchgen.bench.shapes import SHAPES
from batchgen.plan.scheduler import SchedulerConfig
from tests.plan.simulator import Simulator

BALANCE = 600
"""Upper bound of the operations that a processor does while its memory moves a byte."""
ITEM_BYTES = 2


@pytest.mark.parametrize("name", SHAPES)
def test_copying_a_position_is_faster_than_computing_it(name: str) -> None:
    shape = SHAPES[name]
    moved = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim * ITEM_BYTES  # keys and values, read and written
    layers = shape.parameters - shape.vocab * shape.hidden * (1 if shape.tied else 2)
    assert 2 * layers > 2 * BALANCE * moved


@pytest.mark.parametrize("shared", range(1, 10))
def test_copies_of_a_small_example(shared: int) -> None:
    """Three rows after some shared tokens, with pages of four: the first continues in the last page, two copy it."""
    prompts = [[1] * shared + [last] for last in (2, 3, 4)]
    sim = Simulator(prompts, [[2]] * 3, [2] * 3, SchedulerConfig(100, 4, 8, 64))
    sim.run()
    stats = sim.scheduler.stats
    assert (stats.prompt_tokens, stats.recomputed_tokens) == (shared + 3, 0)
    assert stats.page_copies == (2 if shared % 4 else 0)
