"""The plan of streamed weights, and the copies of a stream on a device that shows reads at wrong times."""

from __future__ import annotations

import random

import pytest
import torch

from batchgen.kernels.device import HOST, Device
from batchgen.kernels.stream import LayerStream, StreamPlan, copy_rate, in_lines, plan_stream
from tests.engine.fake_device import LateDevice


def test_the_most_blocks_that_fit_stay_on_the_device() -> None:
    """Of ten blocks of 100 bytes next to 50 others, in every room."""
    streamed = {room: len(plan_stream([100] * 10, 50, room).streamed) for room in range(250, 1101, 100)}
    assert streamed == {250: 10, 350: 9, 450: 8, 550: 7, 650: 6, 750: 5, 850: 3, 950: 2, 1050: 0}
    assert plan_stream([100] * 10, 50, 1050) == StreamPlan((100,) * 10, 50)
    assert plan_stream([100] * 10, 50, 250).slots == 2
    alone = plan_stream([100] * 10, 50, 249)
    assert (alone.streamed, alone.slots, alone.device_bytes) == (tuple(range(10)), 1, 150), "not next to two slots"


@pytest.mark.parametrize(
    ("blocks", "room", "streamed", "slots"), [(1, 40, 0, 0), (2, 50, 2, 1), (3, 70, 3, 1), (3, 90, 2, 1)]
)
def test_models_of_few_blocks(blocks: int, room: int, streamed: int, slots: int) -> None:
    plan = plan_stream([40] * blocks, 10, room)
    assert (len(plan.streamed), plan.slots) == (streamed, slots)
    assert (plan.device_bytes <= room) == bool(streamed), "one block cannot be streamed"


def test_a_plan_keeps_its_promises() -> None:
    rng = random.Random(0)
    for _ in range(300):
        blocks, others = [rng.randint(1, 90) for _ in range(rng.randint(1, 12))], rng.randint(0, 50)
        room = rng.randint(0, sum(blocks) + others)
        plan = plan_stream(blocks, others, room)
        resident = [size for i, size in enumerate(blocks) if i not in plan.streamed]
        assert plan.pass_bytes + sum(resident) == sum(blocks)
        assert plan.device_bytes == others + sum(resident) + plan.slots * plan.slot_bytes
        assert not plan.streamed or len(plan.streamed) >= 2 * plan.slots > 0
        more = plan_stream(blocks, others, room + 10)
        if plan.device_bytes <= room:
            assert more.device_bytes <= room + 10
            assert len(more.streamed) <= len(plan.streamed)


def streamed(plan: StreamPlan, device: Device) -> tuple[LayerStream, dict[int, tuple[torch.Tensor, ...]], list[list]]:
    """A stream, the places of each block's three tensors, and their values."""
    generator = torch.Generator().manual_seed(1)
    values = [
        [torch.randn(5, 3, generator=generator).T, torch.randn(7, generator=generator).bfloat16(), torch.arange(4) + i]
        for i in range(len(plan.blocks))
    ]
    stream = LayerStream(plan, device)
    places = {}
    for block in plan.streamed:
        first = stream.move(block, values[block][:2])
        places[block] = (*first, *stream.move(block, values[block][2:]))
    return stream, places, values


SIZE = 3 * in_lines(1)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(("blocks", "room"), [(2, 1), (3, 1), (3, 2), (4, 2), (5, 2), (5, 3), (8, 5), (9, 2)])
def test_blocks_are_there_when_they_compute_and_cross_the_bus_once_a_pass(blocks: int, room: int, late: bool) -> None:
    device = LateDevice() if late else HOST
    plan = plan_stream([SIZE] * blocks, 0, room * SIZE)
    stream, places, values = streamed(plan, device)
    assert plan.streamed
    for number in range(4):
        for block, _ in enumerate(stream.over([None] * blocks)):
            for place, value in zip(places.get(block, ()), values[block], strict=False):
                assert place.is_contiguous()
                assert torch.equal(place, value), (number, block)
    counts = stream.counts()
    assert counts == {
        "offload_passes": 4,
        "offload_weight_bytes": 4 * plan.pass_bytes,
        "offload_planned_bytes": 4 * plan.pass_bytes,
    }
    if isinstance(device, LateDevice):  # what waits in the slots is there for the next pass
        assert device.counts.copied_ahead == 4 * plan.pass_bytes + plan.slots * SIZE


def test_a_pass_that_ends_early_is_followed_by_a_whole_one() -> None:
    stream, places, values = streamed(plan_stream([SIZE] * 6, 0, 2 * SIZE), LateDevice())
    for end in (3, 1, 5, 4, 6, 6):
        for block, _ in enumerate(stream.over([None] * 6)):
            assert torch.equal(places[block][0], values[block][0])
            if block == end:
                break


def test_a_block_that_is_done_may_not_be_read_any_more() -> None:
    stream, places, values = streamed(plan_stream([SIZE] * 4, 0, 2 * SIZE), LateDevice())
    stream.enter(0)
    assert torch.equal(places[0][0], values[0][0])
    stream.leave(0)
    assert places[0][0].isnan().all()
    assert places[2][0].isnan().all(), "the next one of its slot is still on its way"


def test_the_copy_rate_is_a_number() -> None:
    assert copy_rate(HOST) > 0
