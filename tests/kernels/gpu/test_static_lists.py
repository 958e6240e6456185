"""Attention that stays, refilled step after step, against the plain backend and against attention made anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.kernels.attention import TorchAttention
from batchgen.kernels.device import HOST
from batchgen.kernels.gpu.attention import TritonAttention
from batchgen.kernels.gpu.static_attention import DecodeWork, StaticAttention, StaticPlanner
from batchgen.kernels.gpu.static_lists import Capacity, pack_static
from batchgen.kernels.gpu.work_list import FIELDS, GROUPS, LARGE, SMALL, ListShape, TileSize, plan_step
from batchgen.kernels.types import KVPool
from tests.kernels.steps import Shape, Step, StepBuilder

from .closeness import assert_as_close
from .test_attention import SPLITTING, TILES

SCALE = 0.3
SHAPE = Shape(2, 1)
POISON = -(1 << 24)
"""As an index of anything, a fault."""


def decodes(rows: int, seed: int, longest: int = 60, shape: Shape = SHAPE) -> Step:
    """Decode rows alone, in groups of one level, and of two and three."""
    rng = np.random.default_rng(seed)
    b = StepBuilder(shape, seed=seed)
    size = shape.page_size
    depths = rng.integers(0, 4, rows)
    for depth in depths:
        b.decode(int(rng.integers(1, longest)), own_start=2 * size * int(depth))
    for level in range(3):  # each level ends where the next begins, and has the rows of the level below
        inside = np.flatnonzero(depths > level)
        if len(inside):
            b.group(rng.permutation(inside).tolist(), 2 * size * level, 2)
    return b.build()


class Stays:
    """A planner over one pool, which takes the contents of each step's, and attention of it per grids."""

    def __init__(self, tokens: int, tuning: Any, shape: Shape = SHAPE) -> None:
        self.tokens = tokens
        like = decodes(1, 0, shape=shape).pool
        self.pool = KVPool([x.clone() for x in like.keys], [x.clone() for x in like.values], shape.page_size)
        self.planner = StaticPlanner(self.pool, HOST, tuning, multiprocessors=1)
        self.made: list[StaticAttention] = []

    def attend(self, step: Step, **options: Any) -> Tensor:
        """[T, N, Dv] of the padded step: by attention that has stood before if its lists are large enough."""
        for mine, theirs in ((self.pool.keys, step.pool.keys), (self.pool.values, step.pool.values)):
            mine[0].copy_(theirs[0])
        rows = step.query.shape[0]
        work = self.planner.plan(step.batch, self.tokens)
        found = next((a for a in self.made if a.launches == work.launches and a.refill(work)), None)
        if found is None:
            slots = torch.zeros(self.tokens, dtype=torch.int64)
            found = self.planner.attention(slots, work)
            self.made.append(found)
        found.cache(0)[2].zero_()[:rows] = step.batch.slot_mapping

        def padded(x: Tensor) -> Tensor:
            return torch.cat([x, torch.full((self.tokens - rows, *x.shape[1:]), torch.nan, dtype=x.dtype)])

        out = found.attend(0, padded(step.query), padded(step.key), padded(step.value), scale=SCALE, **options)
        assert (out[rows:] == 0).all(), "padded tokens have results of their own"
        return out[:rows]


def expected(step: Step, tuning: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Of the plain backend, and of Triton's made anew."""
    given = (0, step.query, step.key, step.value)
    plain = TorchAttention(step.pool, step.batch).attend(*given, scale=SCALE, **options)
    return plain, TritonAttention(step.pool, step.batch, tuning, 1).attend(*given, scale=SCALE, **options)


@pytest.mark.parametrize("tuning", [TILES, SPLITTING], ids=["whole", "split"])
@pytest.mark.parametrize("options", [{}, {"window": 21, "softcap": 2.0}, {"sinks": torch.linspace(-3, 3, 2)}], ids=str)
def test_refilled_attention_equals_attention_made_anew(tuning: Any, options: dict[str, Any]) -> None:
    stays = Stays(tokens=6, tuning=tuning)
    for seed, rows in enumerate([6, 3, 5, 4]):
        step = decodes(rows, seed, longest=40)
        plain, anew = expected(step, tuning, **options)
        got = stays.attend(step, **options)
        assert_as_close(got, plain, plain.double())
        assert torch.equal(got, anew), "the same items in the same order give the same bits"
    assert len(stays.made) < 4, "some steps shared their attention"


def test_layers_of_several_windows_have_lists_of_their_own() -> None:
    stays = Stays(tokens=8, tuning=SPLITTING)
    for seed in range(2):
        step = decodes(5 + seed, seed, longest=40)
        for window in (None, 9):
            plain, anew = expected(step, SPLITTING, window=window)
            got = stays.attend(step, window=window)
            assert_as_close(got, plain, plain.double())
            assert torch.equal(got, anew)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    shape = Shape(2, 1, dtype=dtype)
    stays = Stays(tokens=4, tuning=SPLITTING, shape=shape)
    for seed in range(2):
        step = decodes(3, seed, longest=40, shape=shape)
        assert torch.equal(stays.attend(step), expected(step, SPLITTING)[1])


def test_what_stood_in_the_lists_before_does_not_matter() -> None:
    stays = Stays(tokens=8, tuning=SPLITTING)
    many, few = decodes(8, 1, longest=60), decodes(3, 2, longest=30)
    stays.attend(few)  # the kind of list is known from here on
    [(kind, (listed, _))] = stays.planner.plan(many.batch, 8).lists.items()
    room = Capacity(items=(16, 16, 16), merges=8, tokens=8, rows=64, parts=128, pages=1024)
    work = DecodeWork(many.batch, 8, {kind: (listed, room)})
    attention = stays.planner.attention(torch.zeros(8, dtype=torch.int64), work)
    small, _ = stays.planner.plan(few.batch, 8).lists[kind]
    # The few rows' list in the many rows' places, over ruins.
    ruins = np.full(room.sections()[-1].stop, POISON, np.int32)
    packed = pack_static(small, room, rows=3)
    ruins[: len(packed)] = packed
    [(_, place)] = attention._places.values()
    place.copy_(torch.from_numpy(ruins))
    for mine, theirs in ((stays.pool.keys, few.pool.keys), (stays.pool.values, few.pool.values)):
        mine[0].copy_(theirs[0])
    attention.cache(0)[2][:3] = few.batch.slot_mapping
    query, key, value = (torch.cat([x, x.new_zeros(5, *x.shape[1:])]) for x in (few.query, few.key, few.value))
    out = attention.attend(0, query, key, value, scale=SCALE)
    plain, _ = expected(few, SPLITTING)
    assert_as_close(out[:3], plain, plain.double())
    assert (out[3:] == 0).all()


def test_lists_that_do_not_fit_are_refused_untouched() -> None:
    stays = Stays(tokens=16, tuning=SPLITTING)
    few, many = decodes(2, 1, longest=20), decodes(16, 2, longest=90)
    stays.attend(few)
    [attention] = stays.made
    [(_, packed)] = attention._places.values()
    before = packed.clone()
    assert not attention.refill(stays.planner.plan(many.batch, 16))
    assert torch.equal(packed, before)


def list_shape(wanted: int, split: int) -> ListShape:
    return ListShape(16, None, TileSize(8, 16, split, wanted), TileSize(2, 16, split, wanted))


@pytest.mark.parametrize("wanted", [1, 7, 64])
@pytest.mark.parametrize("split", [16, 1 << 20])
def test_every_list_fits_the_capacity_it_asks_for(wanted: int, split: int) -> None:
    """Counted: the grid of decode rows follows from their padded number alone, however long runs are split."""
    shape = list_shape(wanted, split)
    grids = set()
    for seed in range(12):
        step = decodes(1 + seed % 9, seed, longest=400)
        work = plan_step(step.batch, shape, tokens=12)
        capacity = Capacity.of(work, 12, wanted)
        assert capacity.holds(capacity)
        rows = step.query.shape[0]
        packed = pack_static(work, capacity, rows)
        for launch in (LARGE, GROUPS, SMALL):
            items = packed[capacity.sections()[launch]].reshape(-1, FIELDS)
            assert np.array_equal(items[: work.count(launch)], work.packed[work.items[launch]].reshape(-1, FIELDS))
            idle = items[work.count(launch) :]
            assert idle[:, 1].sum() == (12 - rows if launch == SMALL else 0)
            assert not idle[:, 2:8].any(), "items of padding read nothing"
        grids.add(capacity.items[SMALL])
        assert capacity.items[SMALL] == 12 + wanted
        assert {capacity.items[LARGE], capacity.items[GROUPS]} <= {0, 16, 32, 64, 128, 256, 512}
        assert capacity.merges in (0, 12)
    assert len(grids) == 1
