"""Spans of positions that see one another, as the features of an image do in some models: a chunk never ends in one.

A span is a run of features of one item in a prompt, with no other token between them. Prompts branch in front of an
item or behind it, since all of its features have one id, so only the budget of a step, or its pages, could end a chunk
in it. In other models it is a whole prompt with items, which shares keys and values with equal prompts alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]


class Spans(Protocol):
    """The spans of all prompts."""

    @property
    def exceed_window(self) -> bool:
        """Whether, in a layer with a window, a position sees those of its span that are behind its window."""
        ...

    @property
    def longest(self) -> int:
        """No span has more positions."""
        ...

    def whole(self, request: int, end: int) -> int:
        """`end`, or the start of the span of a request's prompt that it would cut."""
        ...

    def within(self, request: int, start: int, end: int) -> list[tuple[int, int]]:
        """The parts in [start, end) of the spans of a request's prompt, in order."""
        ...


@dataclass(frozen=True, slots=True)
class PromptSpans:
    """Prompts each of which is one span."""

    lengths: npt.NDArray[np.int64]
    """[N] positions of each request's prompt that see one another, from its start; 0: none."""
    exceed_window: bool = True
    alone: bool = False
    """Whether nothing else of the requests is computed, so that one whose prompt a step cannot hold is not begun."""

    @property
    def longest(self) -> int:
        """See `Spans.longest`."""
        return int(self.lengths.max(initial=0))

    def whole(self, request: int, end: int) -> int:
        """See `Spans.whole`."""
        return 0 if end < self.lengths[request] else end

    def within(self, request: int, start: int, end: int) -> list[tuple[int, int]]:
        """See `Spans.within`."""
        end = min(end, int(self.lengths[request]))
        return [(start, end)] if start < end else []


@dataclass(frozen=True, slots=True)
class ItemSpans:
    """The spans of items, found in the ids of all prompts.

    Ids from `first_id` on are features: each of an item has the id `first_id` plus the item's number.
    """

    tokens: Int32s
    """[total] ids of all prompts."""
    offsets: npt.NDArray[np.int32] | npt.NDArray[np.int64]
    """[N + 1] bounds of the prompts."""
    first_id: int
    features: npt.NDArray[np.int64]
    """[items] features of each item; 1 for one whose features are causal."""
    exceed_window: bool = False

    @property
    def longest(self) -> int:
        """See `Spans.longest`."""
        return int(self.features.max(initial=0))

    def whole(self, request: int, end: int) -> int:
        """See `Spans.whole`."""
        first, after = int(self.offsets[request]), int(self.offsets[request + 1])
        at = first + end
        if not first < at < after:
            return end
        token = self.tokens[at]
        if token < self.first_id or token != self.tokens[at - 1]:
            return end
        before = self.tokens[first:at] == token
        begun = int(before.sum()) % int(self.features[token - self.first_id])
        return end - min(begun, int(np.argmin(before[::-1])) or end)

    def within(self, request: int, start: int, end: int) -> list[tuple[int, int]]:
        """See `Spans.within`."""
        first, after = int(self.offsets[request]), int(self.offsets[request + 1])
        end = min(end, after - first)
        ids = self.tokens[first : first + end]
        places = np.flatnonzero(ids[start:] >= self.first_id) + start
        if not len(places):
            return []
        edges = np.flatnonzero((np.diff(places) != 1) | (np.diff(ids[places]) != 0)) + 1
        parts = []
        for run in np.split(places, edges):
            low, high, token = int(run[0]), int(run[-1]) + 1, int(ids[run[0]])
            size = int(self.features[token - self.first_id])
            if size == 1:
                continue
            begun = int((ids[:low] == token).sum()) % size
            while low < high:
                stop = min(high, low + size - begun)
                parts.append((low, stop))
                low, begun = stop, 0
        return parts
