"""Deterministic attention: its lists, and each token alone and in a batch. `test_attention` compares its results.

The interpreter's products are numpy's, whose rounding differs from a tensor core's. So batch invariance is tested
twice: on lists, where every token's steps must be a function of its position, and on numbers whose sums are exact in
any order: integer queries and keys, and values of which only one counts in each sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen.kernels.gpu.deterministic_list import DeterministicListShape, plan_deterministic
from batchgen.kernels.gpu.launch import recording
from batchgen.kernels.gpu.work_list import FIELDS, WorkList
from batchgen.kernels.types import AttentionBatch, ChunkPages
from tests.cases import examples
from tests.kernels.oracle import visible_slots
from tests.kernels.steps import (
    Shape,
    Step,
    StepBuilder,
    any_batch,
    group_of_some,
    one_token,
    only_rows,
)

from .attention_cases import OPTIONS, attend, built, deterministic_of, mixed, small_step, tree, with_sinks

# Each token alone.


def exact_in_any_order(step: Step) -> Step:
    """The step with exact sums: integer queries and keys, values that are 0 except one per 16 keys."""
    step.query = (step.query * 2).round()
    step.key = (step.key * 2).round()
    step.pool.keys[0] = (step.pool.keys[0] * 2).round()
    tokens = visible_slots(step.batch, step.pool.page_size)
    values = step.pool.values[0].flatten(0, 1)  # [slots, K, Dv]
    heights = torch.arange(1, values.shape[0] + 1, dtype=values.dtype)
    for position, slots in tokens:
        places = torch.arange(position + 1)
        values[slots] = 0
        values[slots, :, places % 16] = heights[slots, None]
    step.value = values[step.batch.slot_mapping].clone()
    return step


def alone(step: Step, token: int) -> Step:
    """One token of a step whose keys and values are stored, as a separate chunk."""
    position, slots = visible_slots(step.batch, step.pool.page_size)[token]
    pages = (slots[:: step.pool.page_size] // step.pool.page_size).numpy()
    at = slice(token, token + 1)
    batch = AttentionBatch(step.batch.slot_mapping[at], [ChunkPages(0, 1, position + 1, pages)], decode_start=1)
    return Step(step.pool, batch, step.query[at], step.key[at], step.value[at])


@pytest.mark.parametrize(
    ("fill", "page_size", "options"),
    [*((mixed, 16, options) for options in OPTIONS), (mixed, 5, OPTIONS[-1]), (tree, 16, OPTIONS[0])],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_token_is_the_same_alone(
    fill: Callable[[StepBuilder], None], page_size: int, options: dict[str, Any]
) -> None:
    step = exact_in_any_order(built(fill, heads=3, page_size=page_size))
    options = with_sinks(options, 3)
    together = attend(deterministic_of(step), step, **options)
    assert not together.isnan().any()
    for token in range(0, len(together), 7):
        one = alone(step, token)
        assert torch.equal(attend(deterministic_of(one), one, **options)[0], together[token]), token


# The lists.


def items_of(work: WorkList, launch: int) -> list[list[int]]:
    return work.packed[work.items[launch]].reshape(-1, FIELDS)[:, :9].tolist()


def steps_of_tokens(
    batch: AttentionBatch, work: WorkList, shape: DeterministicListShape
) -> list[list[tuple[int, list[int]]]]:
    """By token, in order: the start of each step that shows it any key, and the pool slots of these keys."""
    pages, rows, positions = (work.packed[s] for s in (work.pages, work.rows, work.positions))
    seen: list[list[tuple[int, list[int]]]] = [[] for _ in range(batch.slot_mapping.shape[0])]
    aside, done = set(), set()
    for launch in range(len(work.items)):
        for rows_at, count, page_at, base, first, begin, end, resumed, saves_state in items_of(work, launch):
            assert 1 <= count <= shape.queries
            assert begin % shape.keys == 0
            assert base % shape.page_size == 0
            assert end % shape.keys == 0 or not saves_state
            tokens = rows[rows_at : rows_at + count].tolist()
            for token in tokens:
                assert token not in done
                assert (token in aside) == bool(resumed)
                (aside if saves_state else done).add(token)
                for at in range(begin, end, shape.keys):
                    keys = np.arange(max(at, first), min(at + shape.keys, end))
                    keys = keys[keys <= positions[token]]
                    if shape.window is not None:
                        keys = keys[keys > positions[token] - shape.window]
                    if len(keys):
                        places = keys - base
                        assert places.min() >= 0
                        slots = pages[page_at + places // shape.page_size] * shape.page_size + keys % shape.page_size
                        seen[token].append((at, slots.tolist()))
    assert done == set(range(len(seen)))
    return seen


@examples(100)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60), st.integers(0, 3)), max_size=9),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), max_size=8),
    st.sampled_from([None, 1, 7, 30]),
    st.sampled_from([1, 5, 16, 24]),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([16, 32]),
    st.integers(0, 1 << 20),
)
def test_a_token_s_steps_are_a_function_of_its_position(
    chunks: list[tuple[int, int, int]],
    rows: list[tuple[int, int]],
    window: int | None,
    page_size: int,
    queries: int,
    keys: int,
    seed: int,
) -> None:
    batch = any_batch(chunks, rows, page_size, seed)
    shape = DeterministicListShape(page_size, window, queries, keys)
    found = steps_of_tokens(batch, plan_deterministic(batch, shape), shape)
    for steps, (position, slots) in zip(found, visible_slots(batch, page_size), strict=True):
        first = 0 if window is None else max(0, position - window + 1)
        assert [at for at, _ in steps] == list(range(first // keys * keys, position + 1, keys))
        for at, shown in steps:
            assert shown == slots[max(first, at) : min(position + 1, at + keys)].tolist()


@pytest.mark.parametrize(
    ("pages", "items", "keys_read"),
    [(5, [[[0, 64, 0, 1]], [[64, 100, 1, 0]] * 6], 64 + 6 * 36), (1, [[[0, 36, 0, 0]] * 6], 6 * 36)],
    ids=["whole steps once", "shorter than a step"],
)
def test_a_group_s_whole_steps_are_computed_once(pages: int, items: list[Any], keys_read: int) -> None:
    b = StepBuilder(Shape(4, 2))
    b.group([b.decode(20, own_start=16 * pages) for _ in range(6)], 0, pages)
    work = plan_deterministic(b.build().batch, DeterministicListShape(16, None, 8, 32))
    assert [[item[5:] for item in items_of(work, launch)] for launch in range(len(work.items))] == items
    assert (work.keys_read, len(work.items)) == (keys_read, 1 + (pages > 1))


def test_sections_begin_at_multiples_of_16_bytes_and_the_longest_items_come_first() -> None:
    work = plan_deterministic(
        any_batch([(7, 2, 0), (30, 9, 0)], [(5, 0), (3, 1), (9, 2)], 5, 0), DeterministicListShape(5, None, 8, 16)
    )
    for section in (*work.items, work.rows, work.positions, work.pages):
        assert section.start % 4 == 0
    for launch in range(len(work.items)):
        assert (np.diff([item[6] - item[5] for item in items_of(work, launch)]) <= 0).all()


def test_every_launch_of_every_step_runs_the_same_machine_code() -> None:
    seen: list[dict[str, Any]] = []

    def note(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        seen.append({"kernel": kernel, **constants})

    steps = [
        built(fill, heads=4, kv_heads=2) for fill in (mixed, small_step, one_token, only_rows, group_of_some, tree)
    ]
    with recording(note):
        for step in steps:
            attend(deterministic_of(step), step)
    assert len(seen) > len(steps)
    assert all(launch == seen[0] for launch in seen)
