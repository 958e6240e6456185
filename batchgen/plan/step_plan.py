"""Plan of one step, which the engine turns into tensors, and its split into two steps if the device runs out of memory.

Vocabulary. A *node* is a segment of the prefix tree: prompt positions [start, end) that every prompt below it shares.
A *sequence* is one sample being generated. A *page* holds `page_size` consecutive positions of keys and values;
page tables are indexed by position // page_size. Page 0 is scratch: nothing reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from batchgen.plan.cache_groups import StateSpan
from batchgen.plan.rows import DecodeRow, DecodeRows, SampleRow, SampleRows
from batchgen.plan.spans import Spans

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
    "split_decodes",
    "split_plan",
]

Int64 = npt.NDArray[np.int64]

_NO_ROWS: Final = DecodeRows.of([])
_NO_SAMPLES: Final = SampleRows.of([])


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy the first `tokens` positions of page `source` to page `target`, in every layer, before the step runs."""

    source: int
    target: int
    tokens: int
    pages: Sequence[tuple[int, int]]
    """Source and target in each cache group"""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute positions [start, end) of one prompt prefix or of one preempted sequence."""

    request: int
    """Request that gives the ids of prompt positions: any request below the node."""
    sequence: int | None
    """Sequence that gives the ids of positions at or past its prompt's end; None for a chunk of a node."""
    start: int
    end: int
    pages: list[int]
    """Pages of positions 0..end-1."""
    store: bool = True
    """False if the keys and values are in the pages already (a last prompt token recomputed for its logits). Then the
    state that is read holds the token, too."""
    states: tuple[StateSpan, ...] = ()
    """The spans [start, ..., end) between which the state is kept, in order; empty: the model has no states."""


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Decode rows that attend to the shared positions [start_page * S, end_page * S) together.

    The groups of a row are adjacent and begin at page 0; the row's own part begins where the last of them ends.
    """

    rows: list[int]
    """Indices into `StepPlan.decodes`."""
    pages: list[int]
    start_page: int
    end_page: int


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """A sequence that begins in this step: sample `sample_index` of `request`."""

    sequence: int
    request: int
    sample_index: int


@dataclass(slots=True)
class StepPlan:
    """Plan of one step. Every scheduled sequence gains exactly one token, by its `SampleRow`."""

    starts: list[SequenceStart] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    prefills: list[PrefillChunk] = field(default_factory=list)
    decodes: DecodeRows = field(default_factory=lambda: _NO_ROWS)
    groups: list[PrefixGroup] = field(default_factory=list)
    samples: SampleRows = field(default_factory=lambda: _NO_SAMPLES)
    group_pages: Sequence[Int64 | None] = (None,)
    """By cache group: its page by page of the tables here, for pages whose positions the step stores or sees; valid
    until the next step is planned. None: the same page."""

    @property
    def tokens(self) -> int:
        """Number of flat tokens in the step, T."""
        return sum(c.end - c.start for c in self.prefills) + len(self.decodes)

    def pages_used(self, page_size: int) -> tuple[Int64, Int64]:
        """Pages of page tables that hold positions before the step's, and those that it stores to, each once."""
        held, new = set[int](), set[int]()
        for chunk in self.prefills:
            held.update(chunk.pages[: -(-(chunk.start if chunk.store else chunk.end) // page_size)])
            new.update(chunk.pages[chunk.start // page_size : -(-chunk.end // page_size)] if chunk.store else ())
        for position, pages in zip(self.decodes.positions.tolist(), self.decodes.pages, strict=True):
            held.update(pages[: -(-position // page_size)])
            new.add(pages[position // page_size])
        return np.array(sorted(held), np.int64), np.array(sorted(new), np.int64)


def split_plan(
    plan: StepPlan, page_size: int, at_tokens: int | None = None, spans: Spans | None = None
) -> tuple[StepPlan, StepPlan] | None:
    """Split a plan into two that, run one after the other, are equivalent to it.

    Flat tokens and samples keep their order. A chunk may be cut between two positions. A chunk of a single token is
    first stored and then recomputed, without being stored, for its samples; of several samples each part gets half.
    `starts` and `copies` belong to the first part.

    Args:
        plan: the step; unchanged lists are shared, not copied.
        page_size: S, positions per page.
        at_tokens: flat tokens of the first part, clamped to 1..T-1; None: half of them.
        spans: spans that no part may cut: they move the place in front of one, or behind it.

    Returns:
        The two parts; None if nothing can be split: a single token with at most one sample, which need not be stored or
        has no sample; or a single span.
    """
    total = plan.tokens
    if total < 2:
        return _split_samples(plan) if total else None
    at = min(max(total // 2 if at_tokens is None else at_tokens, 1), total - 1)
    if spans is not None:
        at = _outside_spans(plan.prefills, at, spans)
        if at == total:
            return None
    left, right = _cut_chunks(plan.prefills, at, page_size)
    begun = sum(chunk.end - chunk.start for chunk in left)
    decodes = at - begun
    mine = int((plan.samples.tokens < at).sum())
    first = StepPlan(
        starts=plan.starts,
        copies=plan.copies,
        prefills=left,
        decodes=plan.decodes[:decodes],
        groups=_slice_groups(plan.groups, 0, decodes),
        samples=plan.samples[:mine],
        group_pages=plan.group_pages,
    )
    second = StepPlan(
        prefills=right,
        decodes=plan.decodes[decodes:],
        groups=_slice_groups(plan.groups, decodes, len(plan.decodes)),
        samples=SampleRows(plan.samples.sequence_ids[mine:], plan.samples.tokens[mine:] - at),
        group_pages=plan.group_pages,
    )
    return first, second


def split_decodes(plan: StepPlan) -> tuple[StepPlan, StepPlan]:
    """Split a plan with chunks into its decode rows, which all sample, and the rest: run in this order, they equal it.

    Rows and chunks read what earlier steps have stored and what they store themselves, so none waits for another.
    `starts` and `copies` belong to the first part.
    """
    rows = len(plan.decodes)
    decodes = replace(plan, prefills=[], samples=SampleRows(plan.decodes.sequence_ids, np.arange(rows)))
    rest = plan.samples[: len(plan.samples) - rows]
    return decodes, StepPlan(prefills=plan.prefills, samples=rest, group_pages=plan.group_pages)


def _outside_spans(chunks: list[PrefillChunk], at: int, spans: Spans) -> int:
    """`at`, or the start of the span that it would cut; its end if the step begins with that span."""
    begin = 0
    for chunk in chunks:
        end = begin + chunk.end - chunk.start
        if begin < at < end:
            before = max(begin, begin + spans.whole(chunk.request, chunk.start + at - begin) - chunk.start)
            if before:
                return before
            while at < end and spans.whole(chunk.request, chunk.start + at) <= chunk.start:
                at += 1
            return at
        begin = end
    return at


def _split_samples(plan: StepPlan) -> tuple[StepPlan, StepPlan] | None:
    """Split the samples of a single token."""
    count = len(plan.samples)
    if not plan.prefills or count < (1 if plan.prefills[0].store else 2):
        return None
    states = tuple(span._replace(source=span.slot) for span in plan.prefills[0].states)
    again = [replace(plan.prefills[0], store=False, states=states)]
    return (
        replace(plan, samples=plan.samples[: count // 2]),
        StepPlan(prefills=again, samples=plan.samples[count // 2 :], group_pages=plan.group_pages),
    )


def _cut_chunks(chunks: list[PrefillChunk], at: int, page_size: int) -> tuple[list[PrefillChunk], list[PrefillChunk]]:
    """The chunks of the first `at` flat tokens, and those of the rest."""
    for i, chunk in enumerate(chunks):
        length = chunk.end - chunk.start
        if at < length:
            if not at:
                return chunks[:i], chunks[i:]
            middle = chunk.start + at
            before, after = _cut_states(chunk.states, middle)
            head = replace(chunk, end=middle, pages=chunk.pages[: -(-middle // page_size)], states=before)
            return [*chunks[:i], head], [replace(chunk, start=middle, states=after), *chunks[i + 1 :]]
        at -= length
    return chunks, []


def _cut_states(spans: tuple[StateSpan, ...], at: int) -> tuple[tuple[StateSpan, ...], tuple[StateSpan, ...]]:
    """The spans before a position and those behind it: one that holds it goes on from its own slot."""
    before = [span for span in spans if span.end <= at]
    after = [span for span in spans if span.end > at]
    if after and not (before and before[-1].end == at):
        first = after[0]
        before.append(first._replace(end=at))
        after[0] = first._replace(source=first.slot)
    return tuple(before), tuple(after)


def _slice_groups(groups: list[PrefixGroup], low: int, high: int) -> list[PrefixGroup]:
    """The groups among decode rows [low, high), with rows counted from `low`.

    Groups of a single row are dropped: the row's own part then begins earlier. Deeper groups are subsets of those
    above, so no row keeps a group after losing one above it.
    """
    among = (replace(group, rows=[row - low for row in group.rows if low <= row < high]) for group in groups)
    return [group for group in among if len(group.rows) > 1]
