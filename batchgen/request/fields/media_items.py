"""Distinct images and sounds of a job, by number, and how a prompt's ids name them.

A token of a prompt that is a feature of item number m has the id V + m in the `RequestTable`, where V is the model's
vocabulary. Prompts therefore share the features of equal items, and never those of different ones, as they share
tokens, by their ids alone. Everything that a user sees has the model's own placeholder ids in their place.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.errors import ErrorCode, RowError
from batchgen.request.checks import error_at
from batchgen.request.fields.media import MediaKind

Ints = npt.NDArray[np.int32]

MOST_ITEMS = 1 << 30
"""Number of distinct items that a job may have, so that their ids fit into 31 bits with any vocabulary."""


@dataclass(frozen=True, slots=True)
class DistinctItem:
    """One image or sound of a job, as it becomes a part of prompts."""

    kind: MediaKind
    digest: str
    """Digest of its content and kind."""
    place: str
    """How messages name it, such as `image_data[1]`, in the first row that has it."""
    features: int
    """Number of tokens of a prompt that it becomes."""
    token_id: int
    """The model's id of each of these tokens."""
    layout: Mapping[str, npt.NDArray[np.int64]]
    """Small arrays by the processor's names that positions are computed from."""
    grouped: bool
    """Whether the processor treats it as one of several of a prompt, which gives other features than alone."""
    source: Any
    """Where it is, with its `size`: (width, height) of an image, (samples,) of a sound; empty if it is not decoded."""
    adapter: int | None = None
    """Index of the adapter that changes the towers that encode it; None: none does."""

    def error(self, problem: str) -> RowError:
        """`media_error` whose message is "`place` problem"."""
        return error_at(ErrorCode.MEDIA_ERROR, self.place, problem)

    @property
    def key(self) -> Hashable:
        """Equal for items whose features are equal."""
        return (self.digest, self.features, self.token_id, self.grouped, self.adapter, self.layout_key)

    @property
    def layout_key(self) -> Hashable:
        """Equal for equal layouts."""
        return tuple((name, value.shape, value.tobytes()) for name, value in sorted(self.layout.items()))


class PlacedItem(NamedTuple):
    """An item of one prompt, read and numbered."""

    number: int
    place: str
    """How messages name it."""
    item: DistinctItem
    placeholder: str
    """What the prompt's text has in its place."""
    text: str
    """What replaces the placeholder before the text is tokenised."""
    end: str = ""
    """What the whole prompt ends with. Then `text` holds the only BOS of the prompt, and nothing precedes it."""

    def error(self, problem: str) -> RowError:
        """`media_error` of its row, whose message is "`place` problem"."""
        return error_at(ErrorCode.MEDIA_ERROR, self.place, problem)


class MediaItems:
    """The distinct items of a job.

    Args:
        vocab_size: V, the id of the first item.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._items: list[DistinctItem] = []
        self._numbers: dict[Hashable, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        """The items for another process, without their sources."""
        return {**vars(self), "_items": [replace(item, source=None) for item in self._items]}

    def add(self, item: DistinctItem) -> int:
        """The number of an item, which is added if it is new."""
        number = self._numbers.setdefault(item.key, len(self._items))
        if number == len(self._items):
            assert number < MOST_ITEMS
            self._items.append(item)
        return number

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, number: int) -> DistinctItem:
        return self._items[number]

    def real_ids(self, ids: Ints) -> Ints:
        """[P] ids of a prompt with the model's placeholder ids in place of those of items."""
        places = np.flatnonzero(ids >= self.vocab_size)
        if not len(places):
            return ids
        real = ids.copy()
        numbers, index = np.unique(ids[places] - self.vocab_size, return_inverse=True)
        real[places] = np.array([self._items[number].token_id for number in numbers.tolist()], np.int32)[index]
        return real

    def in_prompt(self, ids: Ints) -> list[int]:
        """Numbers of the items of a prompt with these ids [P], in order, once for each time that it has one."""
        numbers = ids[ids >= self.vocab_size] - self.vocab_size
        items, at = [], 0
        while at < len(numbers):
            number = int(numbers[at])
            items.append(number)
            at += self._items[number].features
        return items


@dataclass(frozen=True, slots=True)
class MediaPlan:
    """Figures of a job's images and sounds. Names are those of the report."""

    items: int
    """Distinct images and sounds, each of which is decoded and encoded once."""
    images: int
    sounds: int
    megapixels: float
    """Pixels of the images that are decoded, in millions."""
    audio_seconds: float
    """Length of the sounds that are decoded."""
    encoded_tokens: int
    """Tokens of the distinct items: the work of the encoder."""
    prompt_tokens: int
    """Tokens of all prompts that items became."""
