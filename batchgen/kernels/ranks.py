"""The ranks that compute one model together, each with a slice of its weights: what each one has, and their exchange.

All ranks call the same operations in the same order.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """One rank's place among `count`; a subclass exchanges with the others. A rank alone exchanges nothing.

    Args:
        rank: from 0.
        count: of all ranks.
    """

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count
        self.in_order = False
        """Whether sums are added in the order of the ranks, so that they depend on no size."""

    def part(self, total: int, unit: int = 1) -> slice:
        """Its share of `total` numbers in whole units, of which only the last one may be shorter.

        The first ranks have a unit more than others if there is a rest.
        """
        return self.part_of(self.rank, total, unit)

    def part_of(self, rank: int, total: int, unit: int = 1) -> slice:
        """As `part`, of another rank."""
        each, rest = divmod(-(-total // unit), self.count)
        start = each * rank + min(rank, rest)
        return slice(min(total, start * unit), min(total, (start + each + (rank < rest)) * unit))

    def heads(self, heads: int, kv_heads: int) -> tuple[slice, slice]:
        """Its query heads, and the key heads that they attend to.

        Each rank has whole groups of query heads. With more ranks than key heads, several ranks have copies of one
        key head, and share its query heads. `heads` must be at least the number of ranks.
        """
        each = heads // kv_heads
        if self.count <= kv_heads:
            held = self.part(kv_heads)
            return slice(held.start * each, held.stop * each), held
        head = self.rank * kv_heads // self.count
        first, end = (-(-at * self.count // kv_heads) for at in (head, head + 1))  # the ranks with this head
        part = Ranks(self.rank - first, end - first).part(each)
        return slice(head * each + part.start, head * each + part.stop), slice(head, head + 1)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, which may be overwritten."""
        if self.count > 1:
            if self.in_order and self.count > 2:
                return torch.stack(list(self.gather(x))).sum(0)
            x = x.contiguous()
            self._reduce(x, dist.ReduceOp.SUM)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """The largest of all ranks' `x`, by element; `x` may be overwritten."""
        if self.count > 1:
            x = x.contiguous()
            self._reduce(x, dist.ReduceOp.MAX)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """[ranks, ...]: all ranks' `x` [...], of one shape."""
        return x[None] if self.count == 1 else self._gather(x.contiguous())

    def whole(self, x: Tensor, total: int, unit: int = 1) -> Tensor:
        """[R, `total`]: all ranks' columns `x` [R, their `part`]."""
        parts = [self.part_of(rank, total, unit) for rank in range(self.count)]
        sizes = [part.stop - part.start for part in parts]
        padded = x.new_zeros(x.shape[0], max(sizes))
        padded[:, : x.shape[1]] = x
        return torch.cat([each[:, :size] for each, size in zip(self.gather(padded), sizes, strict=True)], 1)

    def _reduce(self, x: Tensor, how: Any) -> None:
        """Replace `x` on every rank by the sum or the largest."""
        raise NotImplementedError("a rank of several exchanges through a subclass")

    def _gather(self, x: Tensor) -> Tensor:
        raise NotImplementedError("a rank of several exchanges through a subclass")


ALONE: Final = Ranks()
"""The one rank of a model that one process computes."""
