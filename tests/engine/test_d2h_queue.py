"""`D2HQueue`: bytes in flight, order of reads, and that each result is read once."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from batchgen.engine.memory.d2h_queue import D2HQueue
from batchgen.kernels.device import HOST, Array, Device
from tests.engine.fake_device import LateDevice


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["host", "late"])
def test_each_result_is_read_once_in_order_and_within_the_budget(seed: int, kind: str) -> None:
    rng = Random(seed)
    device: Device = HOST if kind == "host" else LateDevice()
    budget = rng.choice([0, 64, 1000, 10**9])
    d2h_queue = D2HQueue(device, budget)
    got: list[int] = []
    unread: list[int] = []
    largest = waiting = 0

    def sent(size: int) -> int:
        values = torch.arange(size, dtype=torch.int32)
        place = len(unread)
        unread.append(0)

        def consume(arrays: list[Array]) -> None:
            assert [array.tolist() for array in arrays] == [list(range(size)), [place]]
            got.append(place)

        return d2h_queue.send([values, torch.tensor([place])], consume)

    for _ in range(60):
        size = rng.randint(0, 40)
        largest = max(largest, 4 * size + 8)
        number = sent(size)
        assert number == len(unread)
        assert d2h_queue.bytes_in_flight <= max(budget, 4 * size + 8)
        if rng.random() < 0.3:
            waiting = rng.randint(waiting, number)
            d2h_queue.read(waiting)
            assert got[:waiting] == list(range(waiting))
    d2h_queue.read(len(unread))
    assert got == list(range(60))
    assert d2h_queue.bytes_in_flight == 0
    assert d2h_queue.peak_bytes <= max(budget, largest)
    if budget in (0, 10**9):
        assert (d2h_queue.forced_syncs > 0) == (not budget)
    if isinstance(device, LateDevice):
        assert device.unread["outputs"] == 0
        assert not any(wait.overtook for wait in device.counts.waits)
        assert device.counts.downloads["outputs"] == 60


def test_a_result_larger_than_the_queue_is_sent_alone() -> None:
    d2h_queue = D2HQueue(LateDevice(), budget=100)
    got: list[int] = []
    for size in (10, 1000, 10):
        d2h_queue.send([torch.zeros(size, dtype=torch.uint8)], lambda arrays: got.append(len(arrays[0])))
    assert got == [10, 1000]
    assert (d2h_queue.bytes_in_flight, d2h_queue.peak_bytes, d2h_queue.forced_syncs) == (10, 1000, 2)


def test_values_are_read_late_and_once() -> None:
    device = LateDevice()
    d2h_queue = D2HQueue(device)
    got: list[np.ndarray] = []
    number = d2h_queue.send([torch.ones(3, dtype=torch.bfloat16)], lambda arrays: got.extend(arrays))
    assert not got
    d2h_queue.read(number)
    d2h_queue.read(number)
    assert [array.tolist() for array in got] == [[0x3F80] * 3]
