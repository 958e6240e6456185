"""Reading of rows with images and sounds: each item is looked at, numbered, and given what it becomes in its prompt.

`MediaSupport` is what a model offers for them, found when the first row has one, since its libraries take long to load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from batchgen.engine.media.embeds_reader import TensorFiles
from batchgen.engine.media.sources import Floats, GivenFeatures, GivenItems, Source, StoredItem
from batchgen.errors import ErrorCode, RowError
from batchgen.media.sources import is_url
from batchgen.media.store import MediaStore
from batchgen.models.base import Model, ModelSpec
from batchgen.models.media.encoder import MediaEncoder
from batchgen.models.media.processor import ItemRefused, MediaProcessor, PreparedItem
from batchgen.request.fields.media import MediaItem
from batchgen.request.fields.media_items import DistinctItem, MediaItems, PlacedItem
from batchgen.request.fields.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from batchgen.request.table.request_table import ParsedRow, RequestTable


class MediaSupport:
    """What a model offers for images and sounds.

    Args:
        spec: the model's spec; None for a model that takes none.
        find: the model's processor, or why it takes none.
        load: loads the towers of a loaded model.
        open_store: a store of a job's items, whose sounds have this rate, with a temporary file in this folder.
    """

    def __init__(
        self,
        spec: ModelSpec | None,
        find: Callable[[], MediaProcessor | str],
        load: Callable[[Model], MediaEncoder],
        open_store: Callable[[int, Path | None], MediaStore],
    ) -> None:
        self.spec = spec
        """The model's spec."""
        self._find = find
        self._load = load
        self.open_store = open_store
        """Opens the store of a job."""
        self._encoder: MediaEncoder | None = None

    @cached_property
    def processor(self) -> MediaProcessor | str:
        """The processor, or why there is none."""
        return self._find()

    @property
    def audio_rate(self) -> int:
        """Samples per second of decoded sounds; 0 if the model takes none."""
        return 0 if isinstance(self.processor, str) else self.processor.audio_rate

    def encoder(self, model: Model) -> MediaEncoder:
        """The towers, loaded once.

        Raises:
            ModelError: they cannot be loaded.
        """
        if self._encoder is None:
            self._encoder = self._load(model)
        return self._encoder

    def prepare(self, item: DistinctItem) -> PreparedItem | Floats:
        """An item as its tower reads it, or the features that its row gives."""
        assert not isinstance(self.processor, str)
        source: Source = item.source
        made = source.prepare(self.processor, item)
        return replace(made, adapter=item.adapter) if isinstance(made, PreparedItem) else made

    def adapter_of(self, name: str | None) -> int | None:
        """Index of the adapter of this name, if it changes the towers."""
        if name is None or self.spec is None or not any(self.spec.tower_adapters):
            return None
        index = self.spec.adapters.index(name)
        return None if self.spec.tower_adapters[index] is None else index


def no_media(reason: str) -> MediaSupport:
    """The support of a model that takes no images or sounds."""

    def missing(*_: Any) -> Any:
        raise AssertionError(reason)

    return MediaSupport(None, lambda: reason, missing, missing)


def has_media(row: ParsedRow) -> bool:
    """Whether a prompt of a row has images or sounds."""
    several = len(row.prompts) > 1 and any(getattr(prompt, "media", ()) for prompt in row.prompts)
    return bool(several or getattr(row.prompts[0], "media", ()))


class MediaReader:
    """Numbers the items of rows in a table."""

    def __init__(self, table: RequestTable, support: MediaSupport, files: TensorFiles) -> None:
        self._table = table
        self._support = support
        self._files = files

    @cached_property
    def _folder(self) -> Path | None:
        return None if self._table.embeds is None else self._table.embeds.folder

    @cached_property
    def _store(self) -> MediaStore:
        return self._support.open_store(self._support.audio_rate, self._folder)

    @cached_property
    def _given(self) -> GivenItems:
        spec, processor = self._support.spec, self._support.processor
        assert spec is not None
        assert not isinstance(processor, str)
        return GivenItems(spec, processor, self._files, self._folder)

    def begin(self, row: ParsedRow) -> int:
        """Begin to fetch the items of a row that are at URLs; returns how many are not fetched yet."""
        begun, processor = 0, self._support.processor
        for prompt in row.prompts:
            items = [item for item in getattr(prompt, "media", ()) if item.form == "raw"]
            if any(is_url(item.source) for item in items) and not isinstance(processor, str):
                begun += self._store.begin_all(items) if all(item.kind in processor.kinds for item in items) else 0
        return begun

    def end_fetching(self) -> None:
        """Fetch nothing any more that `read` does not ask for."""
        if "_store" in vars(self):
            self._store.end_fetching()

    def read(self, row: ParsedRow) -> ParsedRow:
        """The row with its items read and numbered.

        Raises:
            RowError: `unsupported_field` if the model takes no such items, `media_error` if one cannot be used.
        """
        adapter = self._support.adapter_of(row.params.lora_path)
        return row._replace(prompts=tuple(self._with_items(prompt, adapter) for prompt in row.prompts))

    def _with_items(self, prompt: Prompt, adapter: int | None) -> Prompt:
        if not isinstance(prompt, TextPrompt | TokenPrompt | ChatPrompt) or not prompt.media:
            return prompt
        placed = tuple(self._placed(prompt, [item for item in prompt.media if isinstance(item, MediaItem)], adapter))
        if isinstance(prompt, TokenPrompt):
            return TokenPrompt(prompt.ids, placed)
        return prompt._replace(media=placed)

    def _placed(self, prompt: Prompt, items: Sequence[MediaItem], adapter: int | None) -> list[PlacedItem]:
        processor, spec = self._support.processor, self._support.spec
        for item in items:
            _check(item, processor)
        assert not isinstance(processor, str)
        assert spec is not None
        raw = iter(self._raw([item for item in items if item.form == "raw"], processor))
        if self._table.media is None:
            self._table.media = MediaItems(spec.vocab_size)
        placed = []
        for item in items:
            distinct, text = next(raw) if item.form == "raw" else self._given.read(item, prompt, items)
            if adapter is not None and not isinstance(distinct.source, GivenFeatures):
                distinct = replace(distinct, adapter=adapter)
            number = self._table.media.add(distinct)
            placed.append(PlacedItem(number, item.place, distinct, processor.placeholder(item.kind), text))
        closing, end = processor.closing
        return [*placed[:-1], placed[-1]._replace(text=placed[-1].text + closing, end=end)]

    def _raw(self, items: Sequence[MediaItem], processor: MediaProcessor) -> list[tuple[DistinctItem, str]]:
        """The images and sounds themselves of a prompt, and the text that each becomes."""
        if not items:
            return []
        headers = self._store.add_all(items)
        distinct = []
        try:
            expansions = processor.expand(headers)
        except ItemRefused as refused:
            raise items[refused.index].error(str(refused)) from None
        for item, header, made in zip(items, headers, expansions, strict=True):
            kind, digest, place, source = item.kind, header.digest, item.place, StoredItem(self._store, header)
            shape = (made.features, made.token_id, made.layout, made.grouped)
            distinct.append((DistinctItem(kind, digest, place, *shape, source), made.text))
        return distinct


def _check(item: MediaItem, processor: MediaProcessor | str) -> None:
    if isinstance(processor, str):
        problem = f"cannot be given to this model: {processor}"
    elif item.kind not in processor.kinds:
        taken = " and ".join(_PLURALS[kind] for kind in sorted(processor.kinds))
        problem = f"is {_NAMES[item.kind]}, and this model takes {taken} alone"
    else:
        return
    raise RowError(ErrorCode.UNSUPPORTED_FIELD, f"`{item.place}` {problem}; leave it out", item.field)


_NAMES = {"image": "an image", "audio": "a sound"}
_PLURALS = {"image": "images", "audio": "sounds"}
