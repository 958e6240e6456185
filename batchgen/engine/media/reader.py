"""Reading of rows with images and sounds: each item is looked at, numbered, and given what it becomes in its prompt.

`MediaSupport` is what a model offers for them, found when the first row has one, since its libraries take long to load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from batchgen.errors import ErrorCode, RowError
from batchgen.media.store import ItemHeader, MediaStore
from batchgen.models.base import Model
from batchgen.models.media_encoder import MediaEncoder
from batchgen.models.media_processor import MediaProcessor, PreparedItem
from batchgen.request.media import MediaItem
from batchgen.request.media_items import DistinctItem, MediaItems, PlacedItem
from batchgen.request.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from batchgen.request.table import ParsedRow, RequestTable


@dataclass(frozen=True, slots=True)
class StoredItem:
    """`DistinctItem.source`: where an item is."""

    store: MediaStore
    header: ItemHeader

    @property
    def size(self) -> tuple[int, ...]:
        """Image: (width, height); audio: (samples,)."""
        return self.header.size


class MediaSupport:
    """What a model offers for images and sounds.

    Args:
        vocab_size: V, the model's vocabulary.
        find: the model's processor, or why it takes none.
        load: loads the towers of a loaded model.
        open_store: a store of a job's items, whose sounds have this rate, with a temporary file in this folder.
    """

    def __init__(
        self,
        vocab_size: int,
        find: Callable[[], MediaProcessor | str],
        load: Callable[[Model], MediaEncoder],
        open_store: Callable[[int, Path | None], MediaStore],
    ) -> None:
        self.vocab_size = vocab_size
        self._find = find
        self._load = load
        self.open_store = open_store
        """Opens the store of a job."""
        self._encoder: MediaEncoder | None = None

    @cached_property
    def found(self) -> MediaProcessor | str:
        """The processor, or why there is none."""
        return self._find()

    @property
    def audio_rate(self) -> int:
        """Samples per second of decoded sounds; 0 if the model takes none."""
        return 0 if isinstance(self.found, str) else self.found.audio_rate

    def encoder(self, model: Model) -> MediaEncoder:
        """The towers, loaded once.

        Raises:
            ModelError: they cannot be loaded.
        """
        if self._encoder is None:
            self._encoder = self._load(model)
        return self._encoder

    def prepare(self, item: DistinctItem) -> PreparedItem:
        """An item as its tower reads it."""
        assert not isinstance(self.found, str)
        stored: StoredItem = item.source
        return self.found.prepare(stored.header, stored.store.decode(stored.header), grouped=item.grouped)


def no_media(reason: str) -> MediaSupport:
    """The support of a model that takes no images or sounds."""

    def missing(*_: Any) -> Any:
        raise AssertionError(reason)

    return MediaSupport(0, lambda: reason, missing, missing)


def has_media(row: ParsedRow) -> bool:
    """Whether a prompt of a row has images or sounds."""
    prompts = row.prompts
    return bool(
        getattr(prompts[0], "media", ()) or (len(prompts) > 1 and any(getattr(p, "media", ()) for p in prompts))
    )


class MediaReader:
    """Numbers the items of rows in a table."""

    def __init__(self, table: RequestTable, support: MediaSupport) -> None:
        self._table = table
        self._support = support
        self._store: MediaStore | None = None

    def read(self, row: ParsedRow) -> ParsedRow:
        """The row with its items read and numbered.

        Raises:
            RowError: `unsupported_field` if the model takes no such items, `media_error` if one cannot be used.
        """
        return row._replace(prompts=tuple(map(self._with_items, row.prompts)))

    def _with_items(self, prompt: Prompt) -> Prompt:
        if not isinstance(prompt, TextPrompt | TokenPrompt | ChatPrompt) or not prompt.media:
            return prompt
        placed = tuple(self._placed([item for item in prompt.media if isinstance(item, MediaItem)]))
        if isinstance(prompt, TokenPrompt):
            return TokenPrompt(prompt.ids, placed)
        return prompt._replace(media=placed)

    def _placed(self, given: Sequence[MediaItem]) -> list[PlacedItem]:
        processor = self._support.found
        for item in given:
            self._check(item, processor)
        assert not isinstance(processor, str)
        if self._store is None:
            folder = None if self._table.embeds is None else self._table.embeds.folder
            self._store = self._support.open_store(processor.audio_rate, folder)
        headers = self._store.add_all(given)
        expansions = processor.expand(headers)
        if self._table.media is None:
            self._table.media = MediaItems(self._support.vocab_size)
        found = []
        for item, header, made in zip(given, headers, expansions, strict=True):
            distinct = DistinctItem(
                item.kind,
                header.digest,
                item.place,
                made.features,
                made.token_id,
                made.layout,
                made.grouped,
                StoredItem(self._store, header),
            )
            number = self._table.media.add(distinct)
            found.append(PlacedItem(number, item.place, distinct, processor.placeholder(item.kind), made.text))
        return found

    def _check(self, item: MediaItem, processor: MediaProcessor | str) -> None:
        if isinstance(processor, str):
            problem = f"cannot be given to this model: {processor}"
        elif item.kind not in processor.kinds:
            problem = f"is {_NAMES[item.kind]}, and this model takes {' and '.join(sorted(processor.kinds))} alone"
        elif item.form != "raw":
            problem = f"is of format {item.form}, which is not supported yet; give the {item.kind} itself"
        else:
            return
        raise RowError(ErrorCode.UNSUPPORTED_FIELD, f"`{item.place}` {problem}; leave it out", item.field)


_NAMES = {"image": "an image", "audio": "a sound"}
