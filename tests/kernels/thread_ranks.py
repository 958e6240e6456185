"""`Ranks` whose ranks are threads of this process, for tests of what the ranks compute."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from batchgen.kernels.ranks import Ranks

Result = TypeVar("Result")


class ThreadRanks(Ranks):
    """One of `count` ranks, which exchange through `board`."""

    def __init__(self, rank: int, count: int, barrier: Barrier, board: list[Any]) -> None:
        super().__init__(rank, count)
        self._barrier, self._board = barrier, board

    def _reduce(self, x: Tensor, how: Any) -> None:
        both = self._gather(x)
        x.copy_(both.sum(0) if how == dist.ReduceOp.SUM else both.amax(0))

    def _gather(self, x: Tensor) -> Tensor:
        self._board[self.rank] = x.clone()
        self._barrier.wait(60)
        found = torch.stack([part.to(x.dtype) for part in self._board])
        self._barrier.wait(60)
        return found


def in_ranks(count: int, body: Callable[[Ranks], Result]) -> list[Result]:
    """What `body` returns on each of `count` ranks."""
    barrier, board = Barrier(count), [None] * count

    def run(rank: int) -> Result:
        try:
            return body(ThreadRanks(rank, count, barrier, board))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return [each.result() for each in [pool.submit(run, rank) for rank in range(count)]]
