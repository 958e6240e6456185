"""What the scheduler says about one step: lists and columns that the engine turns into tensors.

Vocabulary. A *node* is a segment of the prefix tree: prompt positions [start, end) that every prompt below it shares.
A *sequence* is one sample being generated. A *page* holds `page_size` consecutive positions of keys and values;
page tables are indexed by position // page_size. Page 0 is scratch: nothing reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from batchgen.plan.rows import DecodeRow, DecodeRows, SampleRow, SampleRows

__all__ = [
    "DecodeRow",
    "DecodeRows",
    "PageCopy",
    "PrefillChunk",
    "PrefixGroup",
    "SampleRow",
    "SampleRows",
    "SequenceStart",
    "StepPlan",
]


_NO_ROWS: Final = DecodeRows.of([])
_NO_DRAWS: Final = SampleRows.of([])


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy the first `tokens` positions of page `source` to page `target`, in every layer, before the step runs."""

    source: int
    target: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute positions [start, end) of one prompt prefix or of one preempted sequence.

    `request` gives the ids of prompt positions (any request below the node); positions at or past its prompt's end are
    output tokens of `sequence`. `pages` covers positions 0..end-1. With `store` false the positions' keys and values
    stand in the pages already and are not written again (a last prompt token computed anew for its logits).
    """

    request: int
    sequence: int | None
    start: int
    end: int
    pages: list[int]
    store: bool = True


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Decode rows that share positions [start_page * S, end_page * S): attended once for all of them.

    `rows` index into `StepPlan.decodes`. The groups a row is in are adjacent and begin at page 0; the row's own part
    begins where the last of them ends.
    """

    rows: list[int]
    pages: list[int]
    start_page: int
    end_page: int


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """`sequence` is sample `sample_index` of `request`, named here for the first time."""

    sequence: int
    request: int
    sample_index: int


@dataclass(slots=True)
class StepPlan:
    """One step. Every scheduled sequence gains exactly one token, by its `SampleRow`."""

    starts: list[SequenceStart] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    prefills: list[PrefillChunk] = field(default_factory=list)
    decodes: DecodeRows = field(default_factory=lambda: _NO_ROWS)
    groups: list[PrefixGroup] = field(default_factory=list)
    samples: SampleRows = field(default_factory=lambda: _NO_DRAWS)

    @property
    def tokens(self) -> int:
        """Flat tokens of the step, T."""
        return sum(c.end - c.start for c in self.prefills) + len(self.decodes)
