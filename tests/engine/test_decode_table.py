"""`DecodeTable`, updated step by step, against a new table in every step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.engine.step.decode_table import DecodeTable
from batchgen.kernels.types import AttentionBatch
from batchgen.plan.scheduler import Scheduler, SchedulerConfig
from batchgen.plan.step_plan import DecodeRow, DecodeRows, StepPlan
from batchgen.plan.tree import build_tree


class Pages(list[int]):
    """A row's pages, which count how often rows are laid out from them."""

    laid_out = 0

    def __getitem__(self, index: Any) -> Any:
        Pages.laid_out += isinstance(index, slice)
        return super().__getitem__(index)


def filled(table: DecodeTable, plan: StepPlan) -> tuple[AttentionBatch, list[np.ndarray]]:  # type: ignore[type-arg]
    attention = AttentionBatch(slot_mapping=torch.empty(0, dtype=torch.int64))
    rows = replace(plan.decodes, pages=[Pages(pages) for pages in plan.decodes.pages])
    found = table.fill(attention, rows, plan.groups, plan.decodes.sequence_ids)
    return attention, list(found)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("pages", [60, 1000])
def test_incremental_updates_equal_a_new_table(page_size: int, pages: int) -> None:
    """Whole schedules with groups, rows that join and end, and preemptions in small pools."""
    rng = np.random.default_rng(page_size)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8] * 2 + rng.integers(10, 20, rng.integers(1, 9)).tolist() for _ in range(30)]
    offsets = np.concatenate([[0], np.cumsum([len(p) for p in prompts])]).astype(np.int64)
    tree = build_tree(np.concatenate(prompts).astype(np.int32), offsets)
    longest = rng.integers(1, 30, 30).astype(np.int32)
    needed = max(len(p) for p in prompts) + 30
    config = SchedulerConfig(
        num_pages=max(pages // page_size, -(-needed // page_size) + 3),
        page_size=page_size,
        max_num_seqs=12,
        max_tokens_per_step=64,
        group_min_saving=1,
    )
    scheduler = Scheduler(tree, np.ones(30, np.int32), longest, config)
    table = DecodeTable(page_size)
    steps = advanced = 0
    left: dict[int, int] = {}
    while (plan := scheduler.step()) is not None:
        if plan.decodes:
            before = Pages.laid_out
            got, arrays = filled(table, plan)
            advanced += Pages.laid_out == before
            want, expected = filled(DecodeTable(page_size), plan)
            for name in ("decode_pages", "decode_lens", "decode_own_start"):
                np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
            assert got.max_decode_len == want.max_decode_len
            for one, other in zip(got.groups, want.groups, strict=True):
                np.testing.assert_array_equal(one.rows, other.rows)
                np.testing.assert_array_equal(one.pages, other.pages)
            for one, other in zip(arrays, expected, strict=True):
                np.testing.assert_array_equal(one, other)
            rows = plan.decodes
            assert arrays[0].tolist() == [row.position for row in rows]
            slots = [row.pages[row.position // page_size] * page_size + row.position % page_size for row in rows]
            assert arrays[1].tolist() == slots
        left |= {start.sequence: int(longest[start.request]) for start in plan.starts}
        for sample in plan.samples:
            left[sample.sequence] -= 1
        sampled = [sample.sequence for sample in plan.samples]
        scheduler.commit([number for number in sampled if not left[number] or rng.random() < 0.02])
        steps += 1
    assert steps > 30
    assert advanced > 0


def test_rows_that_skipped_a_step_are_laid_out_again() -> None:
    """The same rows at other positions, for example after a failed step."""
    table, groups = DecodeTable(4), []
    for position in (5, 6, 6, 9, 10):
        plan = StepPlan(decodes=DecodeRows.of([DecodeRow(1, position, [7, 8, 9])]), groups=groups)
        attention, (positions, slots) = filled(table, plan)
        assert positions.tolist() == [position]
        assert slots.tolist() == [[7, 8, 9][position // 4] * 4 + position % 4]
        assert attention.decode_pages.tolist() == [[7, 8, 9][: position // 4 + 1]]
