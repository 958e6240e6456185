"""Static attention, refilled step after step, against PyTorch and against attention made for each step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.kernels.attention.torch_attention import TorchAttention
from batchgen.kernels.device import HOST
from batchgen.kernels.gpu.attention import TritonAttention
from batchgen.kernels.gpu.deterministic_attention import DeterministicTritonAttention
from batchgen.kernels.gpu.deterministic_list import DeterministicListShape
from batchgen.kernels.gpu.static_attention import Capacity, StaticAttention, StaticPlanner, pack_static
from batchgen.kernels.gpu.work_list import FIELDS, ListShape, TileSize
from batchgen.kernels.types import AttentionArgs, KVPool, PagedAttention
from tests.kernels.closeness import assert_as_close
from tests.kernels.steps import Shape, Step, StepBuilder

from .attention_cases import SCALE, SPLITTING, TILES, attend, deterministic_of

SHAPE = Shape(2, 1)


def decodes(rows: int, seed: int, longest: int = 60, shape: Shape = SHAPE, levels: int = 3) -> Step:
    """Decode rows without a group, and in groups of up to `levels` levels, which branch below the first."""
    rng = np.random.default_rng(seed)
    b = StepBuilder(shape, seed=seed)
    size = shape.page_size
    depths, branch = rng.integers(0, levels + 1, rows), rng.integers(0, 2, rows)
    depths[0] = levels
    for depth in depths:
        b.decode(int(rng.integers(1, longest)), own_start=2 * size * int(depth))
    for level in range(levels):  # each level ends where the next begins, and includes the rows of the level below
        for some in (branch == 0, branch == 1) if level else (branch >= 0,):
            inside = np.flatnonzero(some & (depths > level))
            if len(inside):
                b.group(rng.permutation(inside).tolist(), 2 * size * level, 2)
    return b.build()


def triton(tuning: Any) -> Callable[..., PagedAttention]:
    return partial(TritonAttention, tuning=tuning, multiprocessors=1)


class StaticRunner:
    """A planner over one pool that copies each step's contents into it, and the static attentions made so far."""

    def __init__(self, tokens: int, make: Callable[..., PagedAttention], shape: Shape = SHAPE) -> None:
        self.tokens = tokens
        like = decodes(1, 0, shape=shape).pool
        self.pool = KVPool([x.clone() for x in like.keys], [x.clone() for x in like.values], shape.page_size)
        self.planner = StaticPlanner(self.pool, HOST, make)
        self.made: list[StaticAttention] = []

    def attend(self, step: Step, **options: Any) -> Tensor:
        """[T, N, Dv] of the padded step, with an existing attention if its lists are large enough."""
        for mine, theirs in ((self.pool.keys, step.pool.keys), (self.pool.values, step.pool.values)):
            mine[0].copy_(theirs[0])
        work = self.planner.plan(step.batch, self.tokens)
        found = next((a for a in self.made if a.refill(work)), None)
        if found is None:
            slots = torch.zeros(self.tokens, dtype=torch.int64)
            found = self.planner.attention(slots, work)
            self.made.append(found)
        return self.run(found, step, **options)

    def run(self, attention: StaticAttention, step: Step, **options: Any) -> Tensor:
        """[T, N, Dv] of the padded step."""
        rows = step.query.shape[0]
        attention.cache(0)[2].zero_()[:rows] = step.batch.slot_mapping

        def padded(x: Tensor) -> Tensor:
            return torch.cat([x, torch.full((self.tokens - rows, *x.shape[1:]), torch.nan, dtype=x.dtype)])

        args = AttentionArgs(SCALE, **options)
        out = attention.attend(0, padded(step.query), padded(step.key), padded(step.value), args)
        assert (out[rows:] == 0).all(), "results of padding tokens must be zeros"
        return out[:rows]


def expected(step: Step, tuning: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Results of the PyTorch backend, and of a new Triton attention."""
    makers = TorchAttention(step.pool, step.batch), TritonAttention(step.pool, step.batch, tuning, 1)
    plain, fresh = (attend(attention, step, **options) for attention in makers)
    return plain, fresh


@pytest.mark.parametrize(
    ("tuning", "options", "dtype"),
    [
        (TILES, {}, torch.float32),
        (SPLITTING, {"window": 21, "softcap": 2.0}, torch.float32),
        (SPLITTING, {"sinks": torch.linspace(-3, 3, 2)}, torch.bfloat16),
        (TILES, {"window": 21}, torch.float16),
    ],
    ids=["whole", "split-window", "split-sinks", "whole-window"],
)
def test_refilled_attention_equals_fresh_attention(tuning: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    shape = Shape(2, 1, dtype=dtype)
    runner = StaticRunner(6, triton(tuning), shape)
    for seed, rows in enumerate([6, 3, 5, 4]):
        step = decodes(rows, seed, longest=40, shape=shape)
        plain, fresh = expected(step, tuning, **options)
        got = runner.attend(step, **options)
        if dtype == torch.float32:
            assert_as_close(got, plain, plain.double())
        assert torch.equal(got, fresh), "the same items in the same order give the same bits"
    assert len(runner.made) < 4, "some steps shared their attention"


@pytest.mark.parametrize(
    ("page_size", "options", "dtype"),
    [
        (16, {}, torch.float32),
        (5, {"window": 21, "softcap": 2.0}, torch.float32),
        (8, {"sinks": torch.linspace(-3, 3, 2)}, torch.bfloat16),
    ],
    ids=["plain", "window", "sinks"],
)
def test_deterministic_attention_has_the_same_bits_in_launches_of_any_size(
    page_size: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """The launches of a step with groups of three levels run steps of fewer, whose missing levels are empty."""
    shape = Shape(2, 1, page_size=page_size, dtype=dtype)
    runner = StaticRunner(9, partial(DeterministicTritonAttention, tuning=TILES), shape)
    for seed, (rows, levels) in enumerate([(9, 3), (5, 1), (3, 0), (7, 2), (8, 3)]):
        step = decodes(rows, seed, longest=40, shape=shape, levels=levels)
        fresh = attend(deterministic_of(step), step, **options)
        assert torch.equal(runner.attend(step, **options), fresh)
    assert len(runner.made) == 1


def test_layers_of_several_windows_have_separate_lists() -> None:
    runner = StaticRunner(8, triton(SPLITTING))
    for seed in range(2):
        step = decodes(5 + seed, seed, longest=40)
        for window in (None, 9):
            plain, fresh = expected(step, SPLITTING, window=window)
            got = runner.attend(step, window=window)
            assert_as_close(got, plain, plain.double())
            assert torch.equal(got, fresh)


def test_lists_that_do_not_fit_are_rejected_and_unchanged() -> None:
    runner = StaticRunner(16, triton(SPLITTING))
    few, many = decodes(2, 1, longest=20), decodes(16, 2, longest=90)
    before = runner.attend(few)
    [attention] = runner.made
    assert not attention.refill(runner.planner.plan(many.batch, 16))
    assert torch.equal(runner.run(attention, few), before)


SHAPES = [
    *(
        ListShape(16, None, TileSize(8, 16, split, wanted), TileSize(2, 16, split, wanted))
        for wanted in (1, 7, 64)
        for split in (16, 1 << 20)
    ),
    *(DeterministicListShape(16, window, queries, keys) for window, queries, keys in ((None, 3, 32), (20, 1, 16))),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_list_fits_the_capacity_it_asks_for(shape: ListShape | DeterministicListShape) -> None:
    """The grid of decode rows follows from their padded number only, whatever the splits of long runs."""
    grids = set()
    for seed in range(12):
        step = decodes(1 + seed % 9, seed, longest=400)
        work = shape.plan(step.batch, tokens=12)
        capacity = Capacity.of(work)
        assert capacity.holds(capacity)
        rows = step.query.shape[0]
        packed = pack_static(work, capacity, rows)
        last = len(work.items) - 1
        for launch in range(last + 1):
            items = packed[capacity.sections()[launch]].reshape(-1, FIELDS)
            assert np.array_equal(items[: work.count(launch)], work.packed[work.items[launch]].reshape(-1, FIELDS))
            idle = items[work.count(launch) :]
            assert idle[:, 1].sum() == (12 - rows if launch == last else 0)
            assert not idle[:, 2:8].any(), "padding items must read nothing"
        grids.add(capacity.items[last])
        assert capacity.items[last] == 12 + (shape.small.wanted if isinstance(shape, ListShape) else 0)
        assert {*capacity.items[:last]} <= {0, 16, 32, 64, 128, 256, 512}
        assert capacity.merges in (0, 12)
    assert len(grids) == 1
