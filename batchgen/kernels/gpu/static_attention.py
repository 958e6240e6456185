"""Triton attention of decode-only steps inside CUDA graphs: made once, refilled with each step's work lists.

A graph replays the launches of its capture; between steps only the contents of the lists change. `pack_static` writes a
step's `WorkList` to the sections that a `Capacity` fixes, and fills the rest of the grids with items that do nothing.
The grids are part of a graph, so they are in its key (`Capacity.launches`). They and the other sections only have to be
large enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels import types
from batchgen.kernels.attention.work_items import Words
from batchgen.kernels.device import Device
from batchgen.kernels.gpu.attention import ListKind, Shape, StepLists, TritonAttention, UploadedList
from batchgen.kernels.gpu.work_list import FIELDS, WorkList
from batchgen.kernels.pooled import PooledAttention
from batchgen.kernels.types import AttentionArgs, AttentionBatch, KVPool, PagedAttention

_LEAST_ITEMS = 16
"""Least grid of groups: programs without work cost little, further graphs more."""
_LEAST_PAGES = 1024
_ALIGNMENT = 4
"""int32 numbers that sections are aligned to (16 bytes), as in `work_list`."""
_ROWS_AT, _COUNT, _PART_AT = 0, 1, 8
"""Fields of an item; see `work_list._NAMES`."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes that a static list has room for."""

    items: tuple[int, ...]
    """By launch: the grid. The last one is that of the decode rows."""
    merges: int
    """Tokens of the merge launch; 0: no merge launch."""
    tokens: int
    """Flat tokens of the step, padding included."""
    rows: int
    parts: int
    pages: int

    @staticmethod
    def of(work: WorkList) -> Capacity:
        """Room for the list of a decode-only step and for similar ones."""
        tokens = _length(work.positions)
        return Capacity(
            items=(*(_grid(work.count(number)) for number in range(len(work.items) - 1)), tokens + work.split_items),
            merges=tokens if work.num_merges else 0,
            tokens=tokens,
            rows=_power(_length(work.rows)),
            parts=_power(work.num_parts),
            pages=max(_LEAST_PAGES, _power(2 * _length(work.pages))),  # contexts grow
        )

    @property
    def launches(self) -> tuple[int, ...]:
        """Launch sizes, which a graph cannot change."""
        return (*self.items, self.merges, self.tokens)

    def holds(self, other: Capacity) -> bool:
        """Whether a list that needs the other capacity fits this one's launches and sections: the rest does nothing."""
        small = other.rows <= self.rows and other.parts <= self.parts and other.pages // 2 <= self.pages
        grids = zip_longest((self.merges, *self.items[:-1]), (other.merges, *other.items[:-1]), fillvalue=0)
        return small and self.tokens == other.tokens and all(own >= needed for own, needed in grids)

    def sections(self) -> list[slice]:
        """Slices of: items of each launch, merges' tokens, starts and counts, positions, rows, parts, pages.

        Pages are last, so that their unused room need not be uploaded.
        """
        items = [FIELDS * count for count in self.items]
        lengths = [*items, self.merges, self.merges, self.merges, self.tokens, self.rows, self.parts, self.pages]
        at, sections = 0, []
        for length in lengths:
            sections.append(slice(at, at + length))
            at += -(-length // _ALIGNMENT) * _ALIGNMENT
        return sections


def pack_static(work: WorkList, capacity: Capacity, rows: int) -> Words:
    """Lay out a step's list for `capacity`: the packed array up to the last used page.

    Args:
        work: the list, of `capacity.tokens` tokens.
        capacity: sizes that hold it. Launches that the list does not have, before its last one, stay empty.
        rows: decode rows of the step. Tokens from there on are padding: items without keys write zeros for them.
    """
    *fixed, pages = capacity.sections()
    last = len(capacity.items) - 1
    used = _length(work.pages)
    packed = np.zeros(pages.start + used, np.int32)
    *shared, own = work.items
    shared += [slice(0, 0)] * (last - len(shared))
    sections = [*shared, own, *work.merges, work.positions, work.rows, work.parts, work.pages]
    for section, place in zip(sections, [*fixed, pages], strict=True):
        length = _length(section)
        assert length <= place.stop - place.start, "the list is larger than its section"
        packed[place.start : place.start + length] = work.packed[section]
    merged = fixed[last + 1]
    packed[merged.start + work.num_merges : merged.stop] = -1
    padding = packed[fixed[last]].reshape(-1, FIELDS)[work.count(-1) :][: capacity.tokens - rows]
    assert len(padding) == capacity.tokens - rows
    padding[:, _ROWS_AT] = np.arange(rows, capacity.tokens)
    padding[:, _COUNT] = 1
    padding[:, _PART_AT] = work.direct
    return packed


def _grid(count: int) -> int:
    return 0 if count == 0 else max(_LEAST_ITEMS, _power(count))


def _power(count: int) -> int:
    return 0 if count == 0 else 1 << (count - 1).bit_length()


def _length(section: slice) -> int:
    return int(section.stop - section.start)


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """A decode-only step planned on the host: one list per known kind of layer."""

    batch: AttentionBatch
    tokens: int
    """Rows of the step, padding included."""
    lists: dict[ListKind, tuple[WorkList, Capacity]]

    @property
    def launches(self) -> tuple[tuple[int, ...], ...]:
        """Grids of all launches, which the graph of this step must have. Empty: no kind of layer is known yet."""
        return tuple(capacity.launches for _, capacity in self.lists.values())


class StaticPlanner:
    """Planner of decode-only steps over one pool (the `DecodePlanner` protocol).

    The kinds of lists that a model's layers need are learned from the first step that runs.
    """

    def __init__(self, pool: KVPool, device: Device, make: Callable[..., PagedAttention] = TritonAttention) -> None:
        """Plan over `pool`, upload through `device`; `make(pool, batch, lists=...)` gives the attention of a step."""
        self.pool = pool
        self.device = device
        self.make = make
        self._shapes: dict[ListKind, Shape] = {}

    def plan(self, batch: AttentionBatch, tokens: int) -> DecodeWork:
        """Plan a step.

        Args:
            batch: R decode rows and no chunks. Its slot mapping is not read.
            tokens: R or more; those from R on are padding.
        """
        assert not batch.chunks
        assert batch.decode_start == 0
        return DecodeWork(batch, tokens, {kind: self._plan(kind, batch, tokens) for kind in self._shapes})

    def attention(self, slots: Tensor, work: types.DecodeWork) -> StaticAttention:
        """Static attention of tokens whose keys and values go to `slots` [tokens] int64, filled with `work`."""
        assert isinstance(work, DecodeWork)
        assert slots.shape[0] == work.tokens
        return StaticAttention(self, slots, work)

    def learn(self, kind: ListKind, shape: Shape, work: DecodeWork) -> tuple[WorkList, Capacity]:
        """Register a kind of list that a layer needs, and plan it for the step."""
        self._shapes[kind] = shape
        return self._plan(kind, work.batch, work.tokens)

    def _plan(self, kind: ListKind, batch: AttentionBatch, tokens: int) -> tuple[WorkList, Capacity]:
        work = self._shapes[kind].plan(batch, tokens)
        return work, Capacity.of(work)


class _StaticLists(StepLists):
    """Work lists at fixed addresses, with room for those of other steps."""

    def __init__(self, planner: StaticPlanner, batch: AttentionBatch, work: DecodeWork) -> None:
        super().__init__(batch)
        self._planner = planner
        self._work = work
        self._places: dict[ListKind, tuple[Capacity, Tensor]] = {}
        for kind, planned in work.lists.items():
            self._lists[kind] = self._place(kind, *planned)

    @property
    def launches(self) -> tuple[tuple[int, ...], ...]:
        """Grids of all launches, as in `DecodeWork.launches`."""
        return tuple(capacity.launches for capacity, _ in self._places.values())

    def refill(self, work: DecodeWork) -> bool:
        """Upload the next step's lists; False, with nothing changed, if they do not fit."""
        if work.lists.keys() != self._places.keys():
            return False
        if not all(self._places[kind][0].holds(needed) for kind, (_, needed) in work.lists.items()):
            return False
        self._work = work
        for kind, (listed, _) in work.lists.items():
            self._lists[kind] = replace(self._lists[kind], work=listed)
            self._fill(kind, listed)
        return True

    def _make(self, kind: ListKind, shape: Shape) -> UploadedList:
        assert not kind[2], "partial results of prefixes are not supported inside graphs"
        return self._place(kind, *self._planner.learn(kind, shape, self._work))

    def _place(self, kind: ListKind, work: WorkList, capacity: Capacity) -> UploadedList:
        sections = capacity.sections()
        packed = torch.zeros(sections[-1].stop, dtype=torch.int32, device=self._planner.device.torch_device)
        *items, tokens, starts, counts, positions, rows, parts, pages = (packed[s] for s in sections)
        self._places[kind] = (capacity, packed)
        self._fill(kind, work)
        return UploadedList(
            work,
            items=tuple(items),
            lists=(rows, positions, pages, parts),
            merges=(tokens, starts, counts),
            num_parts=capacity.parts,
        )

    def _fill(self, kind: ListKind, work: WorkList) -> None:
        capacity, packed = self._places[kind]
        lens = self._work.batch.decode_lens
        rows = 0 if lens is None else len(lens)
        self._planner.device.upload_into(pack_static(work, capacity, rows), packed)


class StaticAttention(PooledAttention):
    """Attention with fixed addresses of everything that its launches read (the `StaticAttention` protocol)."""

    def __init__(self, planner: StaticPlanner, slots: Tensor, work: DecodeWork) -> None:
        """See `StaticPlanner.attention`."""
        self._pool, self._batch = planner.pool, AttentionBatch(slots, uploader=planner.device)
        self._lists = _StaticLists(planner, self._batch, work)
        self._attention = planner.make(self._pool, self._batch, lists=self._lists)

    @property
    def launches(self) -> tuple[tuple[int, ...], ...]:
        """Grids of all launches, as in `DecodeWork.launches`."""
        return self._lists.launches

    def refill(self, work: types.DecodeWork) -> bool:
        """Upload the next step's lists; False, with nothing changed, if they do not fit."""
        assert isinstance(work, DecodeWork)
        return self._lists.refill(work)

    def attend_stored(self, layer: int, query: Tensor, args: AttentionArgs) -> Tensor:
        """Attend over the stored keys and values. See `PagedAttention.attend_stored`."""
        return self._attention.attend_stored(layer, query, args)
