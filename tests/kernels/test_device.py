"""What `CudaDevice` asks of torch's CUDA graphs, on a stand-in that keeps their rules without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch

from batchgen.kernels.device import CudaDevice


class Rules:
    """Pools that know how many graphs hold them, and the current stream."""

    def __init__(self) -> None:
        self.holders: Counter[int] = Counter()
        """By pool, also of those that no graph holds any more: a library's workspace keeps their memory."""
        self.stream = "default"
        self.open: int | None = None
        """The pool that the allocator gives memory of."""
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
    release: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.release is not None:
            self.release()


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Rules:
    rules, handles = Rules(), count()

    @contextmanager
    def on(stream: str) -> Iterator[None]:
        before, rules.stream = rules.stream, stream
        try:
            yield
        finally:
            rules.stream = before

    @contextmanager
    def graph(graph: FakeGraph, pool: int, **_: Any) -> Iterator[None]:
        rules.stream, before = "capture", rules.stream
        rules.capture(graph, pool)
        yield  # what is raised here ends torch's own block without a look at the stream and the allocator
        rules.stream, rules.open = before, None

    def end(device: int, pool: int) -> None:
        if rules.open != pool:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        rules.open = None

    for name, stand_in in {
        "CUDAGraph": FakeGraph,
        "graph": graph,
        "graph_pool_handle": lambda: next(handles),
        "current_stream": lambda device: rules.stream,
        "stream": on,
        "current_device": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    return rules


def test_graphs_share_a_pool_for_as_long_as_one_of_them_is_there(rules: Rules) -> None:
    device = CudaDevice(torch.device("cuda"))
    kept = [device.capture(lambda: None)]
    kept.append(device.capture(lambda: None))
    del kept[0]
    kept.append(device.capture(lambda: None))
    assert rules.used == [0, 0, 0]
    kept.clear()  # as at the end of a rehearsal
    kept.append(device.capture(lambda: None))
    kept.append(device.capture(lambda: None))
    assert rules.used == [0, 0, 0, 1, 1]


def test_a_capture_that_fails_leaves_stream_and_allocator_as_they_were(rules: Rules) -> None:
    def body() -> None:
        assert rules.stream == "capture"
        raise RuntimeError("operation not permitted when stream is capturing")

    device = CudaDevice(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="not permitted"):
        device.capture(body)
    assert (rules.stream, rules.open) == ("default", None)
    assert device.capture(lambda: None) is not None
