"""Large results in bounded memory: what is in flight, in which order it is read, and that nothing is read twice."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from batchgen.engine.output_ring import OutputRing
from batchgen.kernels.device import HOST, Array, Device
from tests.engine.fake_device import LateDevice


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["host", "late"])
def test_everything_is_handed_over_once_in_order_and_within_the_budget(seed: int, kind: str) -> None:
    rng = Random(seed)
    device: Device = HOST if kind == "host" else LateDevice()
    budget = rng.choice([0, 64, 1000, 10**9])
    ring = OutputRing(device, budget)
    got: list[int] = []
    unread: list[int] = []
    largest = waiting = 0

    def sent(size: int) -> int:
        values = torch.arange(size, dtype=torch.int32)
        place = len(unread)
        unread.append(0)

        def take(arrays: list[Array]) -> None:
            assert [array.tolist() for array in arrays] == [list(range(size)), [place]]
            got.append(place)

        return ring.send([values, torch.tensor([place])], take)

    for _ in range(60):
        size = rng.randint(0, 40)
        largest = max(largest, 4 * size + 8)
        number = sent(size)
        assert number == len(unread)
        assert ring.bytes_in_flight <= max(budget, 4 * size + 8)
        if rng.random() < 0.3:
            waiting = rng.randint(waiting, number)
            ring.read(waiting)
            assert got[:waiting] == list(range(waiting))
    ring.read(len(unread))
    assert got == list(range(60))
    assert ring.bytes_in_flight == 0
    assert ring.peak_bytes <= max(budget, largest)
    if budget in (0, 10**9):
        assert (ring.early_reads > 0) == (not budget)
    if isinstance(device, LateDevice):
        assert device.unread["outputs"] == 0
        assert not any(wait.overtook for wait in device.counts.waits)
        assert device.counts.downloads["outputs"] == 60


def test_a_result_larger_than_the_ring_goes_alone() -> None:
    ring = OutputRing(LateDevice(), budget=100)
    got: list[int] = []
    for size in (10, 1000, 10):
        ring.send([torch.zeros(size, dtype=torch.uint8)], lambda arrays: got.append(len(arrays[0])))
    assert got == [10, 1000]
    assert (ring.bytes_in_flight, ring.peak_bytes, ring.early_reads) == (10, 1000, 2)


def test_values_are_those_of_the_device_when_they_are_read() -> None:
    device = LateDevice()
    ring = OutputRing(device)
    got: list[np.ndarray] = []
    number = ring.send([torch.ones(3, dtype=torch.bfloat16)], lambda arrays: got.extend(arrays))
    assert not got
    ring.read(number)
    ring.read(number)
    assert [array.tolist() for array in got] == [[0x3F80] * 3]
