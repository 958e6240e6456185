"""Triton attention of decode-only steps inside CUDA graphs: made once, refilled with each step's work lists.

A graph replays the launches of its capture; between steps only the contents of the lists change. `pack_static` writes a
step's `WorkList` to the sections that a `Capacity` fixes, and fills the rest of the grids with items that do nothing.
The grids are part of a graph, so they are in its key (`Capacity.launches`). They and the other sections only have to be
large enough.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels import types
from batchgen.kernels.attention.work_items import Words
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
from batchgen.kernels.gpu.work_list import FIELDS, GROUPS, LARGE, SMALL, ListShape, WorkList, plan_step
from batchgen.kernels.types import AttentionBatch, KVPool

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

    items: tuple[int, int, int]
    """By launch: the grid."""
    merges: int
    """Tokens of the merge launch; 0: no merge launch."""
    tokens: int
    """Flat tokens of the step, padding included."""
    rows: int
    parts: int
    pages: int

    @staticmethod
    def of(work: WorkList, tokens: int, split_items: int) -> Capacity:
        """Room for a step's list and for similar ones.

        Args:
            work: the list of a decode-only step.
            tokens: its flat tokens, padding included.
            split_items: most items by which splitting long runs exceeds the rows (`TileSize.wanted`).
        """
        return Capacity(
            items=(_grid(work.count(LARGE)), _grid(work.count(GROUPS)), tokens + split_items),
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
        grids = zip((*self.items, self.merges), (*other.items, other.merges), strict=True)
        return small and self.tokens == other.tokens and all(own >= needed for own, needed in grids)

    def sections(self) -> list[slice]:
        """Slices of: items of the three launches, merges' tokens, starts and counts, positions, rows, parts, pages.

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
        capacity: sizes that hold it.
        rows: decode rows of the step. Tokens from there on are padding: items without keys write zeros for them.
    """
    *fixed, pages = capacity.sections()
    used = _length(work.pages)
    packed = np.zeros(pages.start + used, np.int32)
    sections = [*work.items, *work.merges, work.positions, work.rows, work.parts, work.pages]
    for section, place in zip(sections, [*fixed, pages], strict=True):
        length = _length(section)
        assert length <= place.stop - place.start, "the list is larger than its section"
        packed[place.start : place.start + length] = work.packed[section]
    merged = fixed[SMALL + 1]
    packed[merged.start + work.num_merges : merged.stop] = -1
    padding = packed[fixed[SMALL]].reshape(-1, FIELDS)[work.count(SMALL) :][: capacity.tokens - rows]
    assert len(padding) == capacity.tokens - rows
    padding[:, _ROWS_AT] = np.arange(rows, capacity.tokens)
    padding[:, _COUNT] = 1
    padding[:, _PART_AT] = -1
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

    def __init__(
        self, pool: KVPool, device: Device, tuning: ChipTuning | None = None, multiprocessors: int | None = None
    ) -> None:
        """Plan over `pool`, upload through `device`; `tuning` and `multiprocessors` as in `TritonAttention`."""
        self.pool = pool
        self.device = device
        self.tuning = tuning
        self._multiprocessors = multiprocessors_of(device.torch_device) if multiprocessors is None else multiprocessors
        self._shapes: dict[ListKind, ListShape] = {}

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
        return StaticAttention(self, slots, work, self._multiprocessors)

    def learn(self, kind: ListKind, shape: ListShape, work: DecodeWork) -> tuple[WorkList, Capacity]:
        """Register a kind of list that a layer needs, and plan it for the step."""
        self._shapes[kind] = shape
        return self._plan(kind, work.batch, work.tokens)

    def _plan(self, kind: ListKind, batch: AttentionBatch, tokens: int) -> tuple[WorkList, Capacity]:
        shape = self._shapes[kind]
        work = plan_step(batch, shape, tokens)
        return work, Capacity.of(work, tokens, shape.small.wanted)


class StaticAttention(TritonAttention):
    """Attention with fixed addresses of everything that its launches read (the `StaticAttention` protocol)."""

    def __init__(self, planner: StaticPlanner, slots: Tensor, work: DecodeWork, multiprocessors: int) -> None:
        """See `StaticPlanner.attention`."""
        batch = AttentionBatch(slots, uploader=planner.device)
        super().__init__(planner.pool, batch, planner.tuning, multiprocessors)
        self._planner = planner
        self._work = work
        self._places: dict[ListKind, tuple[Capacity, Tensor]] = {}
        for kind, (listed, capacity) in work.lists.items():
            self._make(kind, listed, capacity)

    @property
    def launches(self) -> tuple[tuple[int, ...], ...]:
        """Grids of all launches, as in `DecodeWork.launches`."""
        return tuple(capacity.launches for capacity, _ in self._places.values())

    def refill(self, work: types.DecodeWork) -> bool:
        """Upload the next step's lists; False, with nothing changed, if they do not fit."""
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
        assert not groups_only, "partial results of prefixes are not supported inside graphs"

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
