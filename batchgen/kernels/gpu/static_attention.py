"""Triton attention of decode-only steps inside graphs: made once, refilled with each step's work lists."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchgen.kernels import types
from batchgen.kernels.chips import ChipTuning
from batchgen.kernels.device import Device
from batchgen.kernels.gpu.attention import (
    Heads,
    ListKind,
    TritonAttention,
    UploadedList,
    list_shape,
    multiprocessors_of,
)
from batchgen.kernels.gpu.static_lists import Capacity, pack_static
from batchgen.kernels.gpu.work_list import ListShape, WorkList, plan_step
from batchgen.kernels.types import AttentionBatch, KVPool

__all__ = ["DecodeWork", "StaticAttention", "StaticPlanner"]


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """A decode-only step planned on the host: a list for each kind of layer that is known so far."""

    batch: AttentionBatch
    tokens: int
    """Its rows with the padding."""
    lists: dict[ListKind, tuple[WorkList, Capacity]]

    @property
    def launches(self) -> tuple[tuple[int, ...], ...]:
        """The grids of all launches: what a graph that runs this step was recorded with. Empty: nothing is known."""
        return tuple(capacity.launches for _, capacity in self.lists.values())


class StaticPlanner:
    """Plans decode-only steps over one pool (the `DecodePlanner` protocol).

    Which kinds of lists a model's layers ask for is learned from the first step that runs.
    """

    def __init__(
        self, pool: KVPool, device: Device, tuning: ChipTuning | None = None, multiprocessors: int | None = None
    ) -> None:
        """Over `pool`, with lists uploaded through `device`; `tuning` and `multiprocessors` as `TritonAttention`."""
        self.pool = pool
        self.device = device
        self.tuning = tuning
        self._multiprocessors = multiprocessors_of(device.torch_device) if multiprocessors is None else multiprocessors
        self._shapes: dict[ListKind, ListShape] = {}

    def plan(self, batch: AttentionBatch, tokens: int) -> DecodeWork:
        """Plan a step.

        Args:
            batch: R decode rows, and no chunks. Its slots are not looked at.
            tokens: R or more; those from R on are padding.
        """
        assert not batch.chunks
        assert batch.decode_start == 0
        return DecodeWork(batch, tokens, {kind: self._plan(kind, batch, tokens) for kind in self._shapes})

    def attention(self, slots: Tensor, work: types.DecodeWork) -> StaticAttention:
        """Attention that stays, of tokens whose keys and values go to `slots` [tokens] int64, filled with `work`."""
        assert isinstance(work, DecodeWork)
        assert slots.shape[0] == work.tokens
        return StaticAttention(self, slots, work, self._multiprocessors)

    def learn(self, kind: ListKind, shape: ListShape, work: DecodeWork) -> tuple[WorkList, Capacity]:
        """A kind of list that some layer asks for, and a step's."""
        self._shapes[kind] = shape
        return self._plan(kind, work.batch, work.tokens)

    def _plan(self, kind: ListKind, batch: AttentionBatch, tokens: int) -> tuple[WorkList, Capacity]:
        shape = self._shapes[kind]
        work = plan_step(batch, shape, tokens)
        return work, Capacity.of(work, tokens, shape.small.wanted)


class StaticAttention(TritonAttention):
    """Attention that stays (the `StaticAttention` protocol): all that its launches read stands at fixed addresses."""

    def __init__(self, planner: StaticPlanner, slots: Tensor, work: DecodeWork, multiprocessors: int) -> None:
        """See `StaticPlanner.attention`."""
        batch = AttentionBatch(slots, device=planner.device)
        super().__init__(planner.pool, batch, planner.tuning, multiprocessors)
        self._planner = planner
        self._work = work
        self._places: dict[ListKind, tuple[Capacity, Tensor]] = {}
        for kind, (listed, capacity) in work.lists.items():
            self._make(kind, listed, capacity)

    @property
    def launches(self) -> tuple[tuple[int, ...], ...]:
        """The grids of all its launches, as in `DecodeWork.launches`."""
        return tuple(capacity.launches for capacity, _ in self._places.values())

    def refill(self, work: types.DecodeWork) -> bool:
        """Take the next step's lists; False, and nothing is changed, where they are too large for their places."""
        assert isinstance(work, DecodeWork)
        if work.lists.keys() != self._places.keys():
            return False
        if not all(self._places[kind][0].holds(needed) for kind, (_, needed) in work.lists.items()):
            return False
        self._work = work
        for kind, (listed, _) in work.lists.items():
            self._lists[kind] = replace(self._lists[kind], work=listed)
            self._fill(kind, listed)
        return True

    def _list(self, heads: Heads, dtype: torch.dtype, window: int | None, groups_only: bool = False) -> UploadedList:
        assert not groups_only, "parts of prefixes alone are for steps that stand outside of graphs"
        kind = (heads, window, groups_only)
        if kind not in self._lists:
            shape = list_shape(self._tuning, self._multiprocessors, heads, dtype, self._pool.page_size, window)
            self._make(kind, *self._planner.learn(kind, shape, self._work))
        return self._lists[kind]

    def _make(self, kind: ListKind, work: WorkList, capacity: Capacity) -> None:
        sections = capacity.sections()
        device = self._planner.device.torch_device
        packed = torch.zeros(sections[-1].stop, dtype=torch.int32, device=device)
        large, groups, small, tokens, starts, counts, positions, rows, parts, pages = (packed[s] for s in sections)
        self._places[kind] = (capacity, packed)
        self._lists[kind] = UploadedList(
            work,
            items=(large, groups, small),
            lists=(rows, positions, pages, parts),
            merges=(tokens, starts, counts),
            num_parts=capacity.parts,
        )
        self._fill(kind, work)

    def _fill(self, kind: ListKind, work: WorkList) -> None:
        capacity, packed = self._places[kind]
        lens = self._work.batch.decode_lens
        rows = 0 if lens is None else len(lens)
        self._planner.device.upload_into(pack_static(work, capacity, rows), packed)
