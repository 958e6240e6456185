"""`CudaDevice`'s use of torch's CUDA graphs, with a fake that applies their rules without a GPU."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch

from batchgen.kernels.device import CudaDevice


class FakeAllocator:
    """Memory pools with the number of graphs that use them, and the current stream."""

    def __init__(self) -> None:
        self.holders: Counter[int] = Counter()
        """Graphs by pool, including pools without graphs, whose memory a library's workspace keeps."""
        self.stream = "default"
        self.open: int | None = None
        """The pool that the allocator allocates from."""
        self.used: list[int] = []
        """The pools of all captures, in order."""

    def capture(self, graph: FakeGraph, pool: int) -> None:
        if pool in self.holders and not self.holders[pool]:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.holders[pool] += 1
        self.used.append(pool)
        self.open = pool
        graph.release = lambda: self.holders.subtract([pool])


class FakeGraph:
    fake: FakeAllocator
    release: Callable[[], None] | None = None

    def capture_begin(self, pool: int, **_: Any) -> None:
        self.fake.capture(self, pool)

    def capture_end(self) -> None:
        if sys.exc_info()[0] is not None:  # torch's call raises and leaves the allocator in the capture
            raise RuntimeError("operation failed due to a previous error during capture")
        self.fake.open = None

    def __del__(self) -> None:
        if self.release is not None:
            self.release()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    fake, handles = FakeAllocator(), count()

    @contextmanager
    def on(stream: str) -> Iterator[None]:
        before, fake.stream = fake.stream, stream
        try:
            yield
        finally:
            fake.stream = before

    def end(device: int, pool: int) -> None:
        if fake.open != pool:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        fake.open = None

    for name, replacement in {
        "CUDAGraph": FakeGraph,
        "Stream": lambda device: "capture",
        "graph_pool_handle": lambda: next(handles),
        "current_stream": lambda device: fake.stream,
        "stream": on,
        "current_device": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(FakeGraph, "fake", fake, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    return fake


def test_graphs_share_a_pool_while_one_of_them_exists(fake: FakeAllocator) -> None:
    device = CudaDevice(torch.device("cuda"))
    kept = [device.capture(lambda: None)]
    kept.append(device.capture(lambda: None))
    del kept[0]
    kept.append(device.capture(lambda: None))
    assert fake.used == [0, 0, 0]
    kept.clear()  # as at the end of a dummy run
    kept.append(device.capture(lambda: None))
    kept.append(device.capture(lambda: None))
    assert fake.used == [0, 0, 0, 1, 1]


def test_a_failed_capture_restores_stream_and_allocator(fake: FakeAllocator) -> None:
    def body() -> None:
        assert fake.stream == "capture"
        raise RuntimeError("operation not permitted when stream is capturing")

    device = CudaDevice(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="previous error"):
        device.capture(body)
    assert (fake.stream, fake.open) == ("default", None)
    assert device.capture(lambda: None) is not None
