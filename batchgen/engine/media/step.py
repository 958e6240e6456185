"""`StepMedia`: what images and sounds add to the tensors of a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.media.feed import MediaFeed
from batchgen.kernels.device import Device
from batchgen.models.base import TokenEmbeds
from batchgen.plan.step_plan import PrefillChunk
from batchgen.request.fields.media_items import MediaItems
from batchgen.request.table.request_table import RequestTable

Int64 = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Layout = Mapping[str, npt.NDArray[np.int64]]
FindPositions = Callable[[Int64, Sequence[Layout]], tuple[Int64, int]]
"""Ids [P] of a prompt and the layouts of its items -> rotary positions [A, P], and that of the token behind it."""

_KEPT: Final = 256
"""Prompts whose positions are kept, those of the last chunks."""
_UNKNOWN: Final = np.iinfo(np.int64).min


class StepEmbeds:
    """The tokens of a step that are given as embeddings."""

    def __init__(self) -> None:
        self._host: list[tuple[Int64, Floats]] = []
        self._device: list[tuple[Int64, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._host or self._device)

    def add(self, rows: Int64, values: Floats | Tensor) -> None:
        """Give flat tokens [E] their values [E, W], on the host or on the device."""
        if isinstance(values, np.ndarray):
            self._host.append((rows, values))
        else:
            self._device.append((rows, values))

    def upload(self, device: Device) -> TokenEmbeds:
        """All of them on the device."""
        rows = np.concatenate([rows for rows, _ in (*self._host, *self._device)])
        if not self._host:
            (uploaded,), values = device.upload(rows), list[Tensor]()
        else:
            uploaded, *values = device.upload(rows, np.concatenate([values for _, values in self._host]))
        values += [each.float() for _, each in self._device]
        return TokenEmbeds(uploaded, values[0] if len(values) == 1 else torch.cat(values))


@dataclass(frozen=True, slots=True)
class _Block:
    """Positions of the features of an item that begins at 0."""

    positions: Int64
    """[A, F]"""
    advance: int
    """Position of the token behind it."""


class StepMedia:
    """Lays out the images and sounds of a job's prompts, step by step.

    Args:
        axes: A, axes of rotary positions; 0: positions are plain numbers.
    """

    def __init__(self, table: RequestTable, features: MediaFeed, axes: int, find_positions: FindPositions) -> None:
        assert table.media is not None
        self._table = table
        self._items: MediaItems = table.media
        self._features = features
        self._find = find_positions
        self._known: OrderedDict[int, Int64] = OrderedDict()
        """Request -> [A, P] positions of its prompt"""
        self._axes = axes
        self._blocks: dict[Hashable, _Block | None] = {}
        """Kind of item -> its positions"""
        self._shifts = np.full(len(table) if axes else 0, _UNKNOWN)
        """[N] what is added to a request's positions behind its prompt"""
        self._plain: set[int] = set()
        """Requests without items that were seen"""

    def embed(self, chunks: Sequence[PrefillChunk], ids: Int64, embeds: StepEmbeds) -> None:
        """Add the features of a step's chunks to `embeds`. Their ids [T] become the model's own placeholder ids.

        The ids of all tokens of the step are given; those of the chunks come first.
        """
        first_id, at = self._items.vocab_size, 0
        for chunk in chunks:
            part = ids[at : at + chunk.end - chunk.start]
            stored = self._table.stored_ids(chunk.request)
            own = part[: max(0, len(stored) - chunk.start)]
            for token in np.unique(own[own >= first_id]).tolist():
                number = token - first_id
                here = np.flatnonzero(own == token)
                before = int((stored[: chunk.start] == token).sum())
                rows = (before + np.arange(len(here))) % self._items[number].features
                embeds.add(here + at, self._features.rows(number, rows))
                # The model's table of embeddings may not hold the placeholder.
                own[here] = self._items[number].token_id if self._items[number].token_id < first_id else 0
            at += len(part)

    def rope_positions(self, chunks: Sequence[PrefillChunk], positions: Int64, decoding: Int64) -> Int64 | None:
        """[A, T] rotary positions of a step's tokens; None: they are plain numbers.

        `positions`: [T] of the tokens in their sequences; `decoding`: [R] requests of the decode rows.
        """
        if not self._axes:
            return None
        axes = np.tile(positions, (self._axes, 1))
        at = 0
        for chunk in chunks:
            length = chunk.end - chunk.start
            prompt = self._prompt(chunk.request)
            if prompt is not None:
                inside = prompt[:, chunk.start : chunk.end]
                axes[:, at : at + inside.shape[1]] = inside
                axes[:, at + inside.shape[1] : at + length] += self._shifts[chunk.request]
            at += length
        shifts = self._shifts[decoding]
        if (shifts == _UNKNOWN).any():
            for request in np.unique(decoding[shifts == _UNKNOWN]).tolist():
                self._prompt(request)
            shifts = self._shifts[decoding]
        axes[:, at:] += shifts
        return axes

    def _prompt(self, request: int) -> Int64 | None:
        """[A, P] positions of a prompt; None for one without items. Sets its shift."""
        if request in self._plain:
            return None
        positions = self._known.get(request)
        if positions is None:
            numbers = self._table.media_of(request)
            if not numbers:
                self._shifts[request] = 0
                self._plain.add(request)
                return None
            positions, following = self._positions(request, numbers)
            self._shifts[request] = following - positions.shape[1]
            self._known[request] = positions
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(request)
        return positions

    def _positions(self, request: int, numbers: Sequence[int]) -> tuple[Int64, int]:
        """Rotary positions of a prompt with items, and that of the token behind it.

        Text goes on by one on all axes from wherever it begins, and an item has the same positions from where it
        begins: the library is asked once for each kind of item. So items next to each other are separate, too. Of a
        model where that does not hold, it is asked for each prompt.
        """
        places = np.flatnonzero(self._table.stored_ids(request) >= self._items.vocab_size)
        length, at, position, used = len(self._table.stored_ids(request)), 0, 0, 0
        rotary = np.empty((self._axes, length), np.int64)
        for number in numbers:
            own = places[used : used + self._items[number].features]
            try:
                block = None if own[-1] - own[0] >= len(own) else self._block(number)
                if block is None:
                    ids = self._table.prompt_ids(request).astype(np.int64)
                    return self._find(ids, [self._items[each].layout for each in numbers])
            except Exception:  # the library reads a layout that the row gives, and raises errors of many types
                self._features.fail(number, "has values from which the model's positions cannot be computed")
                break
            first = int(own[0])
            rotary[:, at:first] = np.arange(position, position + first - at)
            position += first - at
            rotary[:, own] = block.positions + position
            at, position, used = first + len(own), position + block.advance, used + len(own)
        rotary[:, at:] = np.arange(position, position + length - at)
        return rotary, position + length - at

    def _block(self, number: int) -> _Block | None:
        """Positions of an item that begins at 0; None if those of a second one in a prompt are others."""
        item = self._items[number]
        key = (item.token_id, item.features, item.layout_key)
        if key not in self._blocks:
            text = np.array([[int(not item.token_id)]])  # any id but the item's
            one = np.full((1, item.features), item.token_id)
            ids = np.concatenate((text, one, text, one, text), axis=1)[0]
            positions, after = self._find(ids, [item.layout, item.layout])
            first, second = positions[:, 1 : item.features + 1], positions[:, item.features + 2 : -1]
            advance, rest = divmod(after - 3, 2)
            plain = not rest and (positions[:, [0, item.features + 1, -1]] == [0, advance + 1, after - 1]).all()
            same = plain and (second - first == advance + 1).all()
            self._blocks[key] = _Block(first - 1, advance) if same else None
        return self._blocks[key]
