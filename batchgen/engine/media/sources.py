"""Where the items of a job are: in the media store, or given as what a processor or an encoder makes of them.

`GivenItems` reads the latter two. Each source prepares its item in any thread.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from batchgen.engine.media.embeds_reader import TensorFiles, matrix_of
from batchgen.errors import ErrorCode
from batchgen.media.store import ItemHeader, MediaStore
from batchgen.models.base import ModelSpec
from batchgen.models.media.processor import (
    MOST_OF_LAYOUT,
    OF_TEXT,
    Expansion,
    ItemRefused,
    MediaProcessor,
    PreparedItem,
)
from batchgen.request.checks import error_at, invalid
from batchgen.request.fields.media import MediaItem, MediaKind
from batchgen.request.fields.media_items import DistinctItem
from batchgen.request.fields.prompts import Prompt, TokenPrompt, embeddings
from batchgen.request.table.embeds_store import EmbedsStore
from batchgen.request.table.unnamed_file import UnnamedFile

Floats = npt.NDArray[np.float32]

_GROWTH: Final = 8
"""Bytes of an item in memory for each number that it holds, while it is decoded and prepared."""
_CHANNELS: Final = 3


class Source(Protocol):
    """Where an item is."""

    @property
    def size(self) -> tuple[int, ...]:
        """Image: (width, height); audio: (samples,); empty for what is not decoded."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the item in memory while it is prepared, about."""
        ...

    def prepare(self, processor: MediaProcessor, item: DistinctItem) -> PreparedItem | Floats:
        """The item as its tower reads it, or its features [F, W]."""
        ...


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item of the media store."""

    store: MediaStore
    header: ItemHeader

    @property
    def size(self) -> tuple[int, ...]:
        """See `Source.size`."""
        return self.header.size

    @property
    def nbytes(self) -> int:
        """See `Source.nbytes`."""
        return math.prod(self.size) * _GROWTH * (_CHANNELS if self.header.kind == "image" else 1)

    def prepare(self, processor: MediaProcessor, item: DistinctItem) -> PreparedItem | Floats:
        """See `Source.prepare`."""
        try:
            return processor.prepare(self.header, self.store.decode(self.header), grouped=item.grouped)
        except ItemRefused as refused:
            raise item.error(str(refused)) from None


@dataclass(frozen=True, slots=True)
class GivenFeatures:
    """Features that a row gives."""

    store: EmbedsStore
    first: int
    count: int
    size: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """See `Source.nbytes`."""
        return self.count * self.store.size * 4

    def prepare(self, processor: MediaProcessor, item: DistinctItem) -> PreparedItem | Floats:
        """See `Source.prepare`."""
        return self.store.rows(self.first, self.first + self.count)


@dataclass(frozen=True, slots=True)
class GivenOutput:
    """A processor's output that a row gives."""

    file: UnnamedFile
    arrays: Mapping[str, tuple[int, tuple[int, ...], npt.DTypeLike]]
    """Name -> offset in the file, shape, dtype."""
    size: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """See `Source.nbytes`."""
        return sum(math.prod(shape) * np.dtype(kind).itemsize for _, shape, kind in self.arrays.values())

    def prepare(self, processor: MediaProcessor, item: DistinctItem) -> PreparedItem | Floats:
        """See `Source.prepare`."""
        tensors = {name: torch.from_numpy(self.file.read_array(*where)) for name, where in self.arrays.items()}
        return PreparedItem(item.kind, item.token_id, item.features, tensors)


@dataclass(frozen=True, slots=True)
class _Blank:
    """A header of an item that is not there, for what such items become."""

    kind: MediaKind
    size: tuple[int, ...]


class GivenItems:
    """Reads items that are given as features or as a processor's output.

    Values are stored in files without a name, in `folder`.
    """

    def __init__(self, spec: ModelSpec, processor: MediaProcessor, files: TensorFiles, folder: Path | None) -> None:
        self._spec = spec
        self._processor = processor
        self._files = files
        self._features = EmbedsStore(spec.features_size, folder)
        self._file = UnnamedFile("media", folder)
        self._outputs: dict[str, GivenOutput] = {}
        """By digest"""

    def read(self, item: MediaItem, prompt: Prompt, items: Sequence[MediaItem]) -> tuple[DistinctItem, str]:
        """An item of a prompt, and the text that it becomes. `items`: all items of the prompt.

        Raises:
            RowError: `media_error`, `invalid_field` or `unsupported_field`.
        """
        size = (64, 64) if item.kind == "image" else (self._processor.audio_rate,)
        (usual,) = self._processor.expand([_Blank(item.kind, size)])
        if item.form == "precomputed_embedding":
            return self._with_features(item, usual)
        return self._with_output(item, usual, prompt, items)

    def _with_features(self, item: MediaItem, usual: Expansion) -> tuple[DistinctItem, str]:
        odd = sorted(item.source.keys() - {"feature"})
        if odd:
            raise invalid(item.place, f"has the key {odd[0]!r}; features have `feature` alone")
        if self._spec.rope_axes:
            problem = "of format precomputed_embedding has no size, which this model computes positions from"
            raise error_at(ErrorCode.UNSUPPORTED_FIELD, item.place, f"{problem}; give the {item.kind}")
        matrices = embeddings(item.place, item.source["feature"])
        if len(matrices) != 1:
            raise invalid(item.place, f"has {len(matrices)} matrices; give one, [tokens, values]")
        values = matrix_of(item.place, matrices[0], self._features.size, self._files)
        if not len(values):
            raise invalid(item.place, "has no features")
        digest = hashlib.sha256(f"features {item.kind}".encode() + values.tobytes()).hexdigest()
        source = GivenFeatures(self._features, self._features.add(values), len(values))
        made = DistinctItem(item.kind, digest, item.place, len(values), usual.token_id, {}, False, source)
        return made, _text_of(usual, self._processor.token_text(usual.token_id), len(values))

    def _with_output(
        self, item: MediaItem, usual: Expansion, prompt: Prompt, items: Sequence[MediaItem]
    ) -> tuple[DistinctItem, str]:
        if not isinstance(prompt, TokenPrompt) or sum(other.kind == item.kind for other in items) > 1:
            problem = f"of format processor_output needs `input_ids` with all its tokens, and no other {item.kind}"
            raise error_at(ErrorCode.UNSUPPORTED_FIELD, item.place, problem)
        features = prompt.ids.count(usual.token_id)
        if not features:
            raise item.error(f"has no token in `input_ids`: none is {usual.token_id}, the id of its features")
        arrays, layout = dict[str, npt.NDArray[Any]](), dict[str, npt.NDArray[np.int64]]()
        digest = hashlib.sha256(f"output {item.kind} {features}".encode())
        for name, value in sorted(item.source.items()):
            if name == "format" or name in OF_TEXT:
                continue
            values = arrays[name] = self._array(f"{item.place}.{name}", item, value)
            digest.update(f" {name} {values.shape} {values.dtype} ".encode() + values.tobytes())
            if values.dtype == np.int64 and values.size <= MOST_OF_LAYOUT:
                layout[name] = values
        if not arrays:
            raise invalid(item.place, "has no values of a processor's output")
        known = digest.hexdigest()
        if known not in self._outputs:
            written = {name: (self._file.write(each), each.shape, each.dtype) for name, each in arrays.items()}
            self._outputs[known] = GivenOutput(self._file, written)
        source = self._outputs[known]
        made = DistinctItem(item.kind, known, item.place, features, usual.token_id, layout, False, source)
        return made, usual.text

    def _array(self, place: str, item: MediaItem, value: Any) -> npt.NDArray[Any]:
        """An array of a processor's output, int64 or float32."""
        if isinstance(value, str):
            value = self._files.read(place, value)
        elif hasattr(value, "detach"):  # a torch tensor; numpy has no bfloat16
            value = value.detach().cpu()
            value = value.float().numpy() if value.is_floating_point() else value.numpy()
        try:
            values = np.asarray(value)
        except ValueError:  # lists of different lengths
            values = np.asarray(None)
        if values.dtype.kind not in "fiub":
            raise invalid(item.place, f"has values of {place.rpartition('.')[2]} that are not an array of numbers")
        if values.dtype.kind != "f":
            return values.astype(np.int64)
        with np.errstate(over="ignore"):  # values beyond float32 become infinite, which is an error
            values = values.astype(np.float32)
        if not np.isfinite(values).all():
            raise invalid(item.place, f"has an infinite or NaN value in {place.rpartition('.')[2]}")
        return values


def _text_of(usual: Expansion, token: str, features: int) -> str:
    """The text of an item with so many features: framed as `usual`, unless that is made of several parts."""
    begin, *between, end = usual.text.split(token)
    separators = set(between)
    if len(separators) > 1:
        return token * features
    return begin + "".join(separators).join([token] * features) + end
