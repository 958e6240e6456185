"""Work lists of fixed sizes: the same sections at the same places step after step, so that a graph can read them.

A graph starts the launches it was recorded with. What changes between steps is the lists' contents: `pack_static`
writes a step's `WorkList` at the places that a `Capacity` fixes, and fills what is left of the grids with items that do
nothing. The grids are part of a graph, so they are in its key (`Capacity.launches`); the other sections only have to be
large enough.

Decode-only steps. Knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchgen.kernels.gpu.work_list import FIELDS, GROUPS, LARGE, SMALL, WorkList
from batchgen.kernels.work_items import Words

__all__ = ["Capacity", "pack_static"]

_LEAST_ITEMS = 16
"""Items of the smallest grid of groups: programs without work cost little, a graph more."""
_LEAST_PAGES = 1024
_ALIGNMENT = 4
"""As in `work_list`: sections begin at multiples of 16 bytes."""
_ROWS_AT, _COUNT, _PART_AT = 0, 1, 8
"""Fields of an item: see `work_list._NAMES`."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a static list has room for."""

    items: tuple[int, int, int]
    """Per launch: the grid."""
    merges: int
    """Tokens of the merge launch; 0: there is no such launch."""
    tokens: int
    """Flat tokens of the step, the padding included."""
    rows: int
    parts: int
    pages: int

    @staticmethod
    def of(work: WorkList, tokens: int, split_items: int) -> Capacity:
        """Room for a step's list and for others alike.

        Args:
            work: the list of a decode-only step.
            tokens: its flat tokens with the padding.
            split_items: by how many items the split of long runs can exceed the rows (`TileSize.wanted`).
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
        """What a graph cannot change."""
        return (*self.items, self.merges, self.tokens)

    def holds(self, other: Capacity) -> bool:
        """Whether a list that asked for the other capacity fits this one's launches and its sections."""
        small = other.rows <= self.rows and other.parts <= self.parts and other.pages // 2 <= self.pages
        return small and self.launches == other.launches

    def sections(self) -> list[slice]:
        """Items of the three launches, merges' tokens, starts and counts, positions, rows, parts, pages.

        The pages come last, so that what there is room for beyond a step's need not be uploaded.
        """
        items = [FIELDS * count for count in self.items]
        lengths = [*items, self.merges, self.merges, self.merges, self.tokens, self.rows, self.parts, self.pages]
        at, sections = 0, []
        for length in lengths:
            sections.append(slice(at, at + length))
            at += -(-length // _ALIGNMENT) * _ALIGNMENT
        return sections


def pack_static(work: WorkList, capacity: Capacity, rows: int) -> Words:
    """A step's list laid out for `capacity`: the beginning of the packed array, up to the last of its pages.

    Args:
        work: the list, of `capacity.tokens` tokens.
        capacity: one that holds it.
        rows: decode rows of the step. The tokens from there on are padding: items without keys write zeros for them.
    """
    *fixed, pages = capacity.sections()
    used = _length(work.pages)
    packed = np.zeros(pages.start + used, np.int32)
    given = [*work.items, *work.merges, work.positions, work.rows, work.parts, work.pages]
    for section, place in zip(given, [*fixed, pages], strict=True):
        length = _length(section)
        assert length <= place.stop - place.start, "the list is larger than its place"
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
