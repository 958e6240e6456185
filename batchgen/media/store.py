"""`MediaStore`: the items of a job, each distinct one once. Reading a row needs their headers alone.

An item is known by the digest of its bytes, however a row gives it. The bytes of a file stay in the file, which is
checked again when they are read; others are written to an unnamed temporary file that ends with the store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from batchgen.media.faults import MediaFault
from batchgen.media.images import array_pixels, check_pixels, decode_image, image_of, image_size, upright_pixels
from batchgen.media.root import MediaRoot
from batchgen.media.sounds import SoundHeader, array_sound, check_sound, decode_sound, resampled, sound_header
from batchgen.media.sources import check_bytes, data_url_bytes, inline_bytes, is_url, scheme_of
from batchgen.media.urls import FetchedUrls, MediaUrls
from batchgen.request.checks import show
from batchgen.request.fields.media import MediaItem, MediaKind
from batchgen.request.table.unnamed_file import UnnamedFile

MEDIA_OPTIONS: Final = "media_root", "allow_media_url", "max_image_pixels", "max_audio_seconds", "max_media_items"
"""Options of a run that decide which items are accepted."""
Decoded = Any
"""`PIL.Image.Image` in RGB, or [samples] float32."""
_MAX_KNOWN: Final = 1 << 16
"""Most files and URLs that are not read again for each row that names them."""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Most of what a row may ask to be decoded, checked before anything is."""

    image_pixels: int
    """Pixels of an image."""
    audio_seconds: float
    """Length of a sound."""
    items: int
    """Items of a prompt."""


@dataclass(frozen=True, slots=True)
class ItemHeader:
    """Properties of an item that need no decoding."""

    kind: MediaKind
    digest: str
    """SHA-256 of the encoded bytes and the kind; of an array its type, shape and values."""
    size: tuple[int, ...]
    """Of an image (width, height), upright; of a sound (samples at the model's rate,)."""


class _FileState(NamedTuple):
    path: Path
    size: int
    mtime: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """An item, where its bytes are, and what they are."""

    header: ItemHeader
    place: str
    """Of the first row that gave it, for errors."""
    where: _FileState | tuple[int, int]
    """A file, or (offset, size) in the temporary file."""
    values: SoundHeader | tuple[int, int] | None
    """Of values that are not encoded: the sound's header or the image's size."""


class MediaStore:
    """The distinct items of one job. Rows may be added by one thread while others decode."""

    def __init__(
        self,
        root: MediaRoot,
        limits: MediaLimits,
        audio_rate: int,
        urls: MediaUrls | None = None,
        folder: Path | None = None,
    ) -> None:
        """Create an empty store.

        Args:
            root: the folder whose files rows may name.
            limits: limits of items.
            audio_rate: rate of decoded sounds, in Hz.
            urls: what may be fetched; nothing without it.
            folder: where the temporary file is created; None uses the system's folder.
        """
        self._root = root
        self._limits = limits
        self._rate = audio_rate
        self._spill = UnnamedFile("media", folder)
        self._fetched = FetchedUrls(urls or MediaUrls(()), self._spill)
        self._entries: dict[str, _Entry] = {}
        self._known: dict[tuple[MediaKind, _FileState | str], ItemHeader] = {}
        """Headers by the state of a file, or by URL."""

    def __len__(self) -> int:
        return len(self._entries)

    def begin_all(self, items: Sequence[MediaItem]) -> int:
        """Begin to fetch the items of one prompt that are at URLs; returns how many are not fetched yet."""
        if len(items) > self._limits.items:
            return 0
        sources = [item.source for item in items if is_url(item.source) and (item.kind, item.source) not in self._known]
        return sum(map(self._fetched.begin, sources))

    def end_fetching(self) -> None:
        """Fetch nothing any more that `add` does not ask for."""
        self._fetched.close()

    def add_all(self, items: Sequence[MediaItem]) -> tuple[ItemHeader, ...]:
        """The headers of the items of one prompt.

        Raises:
            RowError: as `add`, or `media_error` for more items than a prompt may have.
        """
        if len(items) > self._limits.items:
            problem = f"is one of {len(items)} items of a prompt; at most {self._limits.items} are allowed"
            raise items[self._limits.items].error(f"{problem}: give fewer, or raise --max-media-items")
        return tuple(map(self.add, items))

    def add(self, item: MediaItem) -> ItemHeader:
        """Find an item's bytes, check them against the limits, and remember where they are.

        Raises:
            RowError: `media_error`, naming the item, the reason and the remedy.
            UsageError: a library that the item needs is not installed.
            OutputError: the disk is full or cannot be written.
        """
        try:
            source = item.source
            if item.form != "raw":
                raise MediaFault(f"is of format {item.form}, which cannot be decoded; give the {item.kind} itself")
            if isinstance(source, bytes):
                return self._add_bytes(item, source)
            if isinstance(source, str):
                return self._add_text(item, source)
            return self._add_values(item)
        except MediaFault as fault:
            raise item.error(str(fault)) from None

    def decode(self, header: ItemHeader) -> Decoded:
        """An added item: an image in RGB, upright, or [samples] float32 at the store's rate, mono. For any thread.

        Raises:
            RowError: `media_error`: it is damaged, or its file has changed.
        """
        entry = self._entries[header.digest]
        try:
            data = self._bytes(header, entry)
            if isinstance(entry.values, SoundHeader):
                return resampled([np.frombuffer(data, np.float32)], entry.values, self._rate)
            if entry.values is not None:
                return image_of(data, entry.values)
            return decode_image(data) if header.kind == "image" else decode_sound(data, self._rate)
        except MediaFault as fault:
            raise MediaItem(header.kind, None, entry.place).error(str(fault)) from None

    def _add_text(self, item: MediaItem, source: str) -> ItemHeader:
        scheme = scheme_of(source)
        if scheme == "data":
            return self._add_bytes(item, data_url_bytes(source))
        if is_url(source):
            return self._known.get((item.kind, source)) or self._add_url(item, source)
        if scheme == "file":
            return self._add_file(item, self._root.resolve_url(source, item.place))
        if scheme is not None and source.startswith("//", len(scheme) + 1):
            raise MediaFault(f"names {show(source)}; a URL begins with file:, data:, http: or https:")
        if (data := inline_bytes(source)) is not None:
            return self._add_bytes(item, data)
        return self._add_file(item, self._root.resolve(source, item.place))

    def _add_url(self, item: MediaItem, url: str) -> ItemHeader:
        where = self._fetched.get(url)
        check_bytes(where[1])
        return self._learn(item.kind, url, self._add_encoded(item, self._spill.read(*where), where))

    def _add_file(self, item: MediaItem, path: Path) -> ItemHeader:
        try:
            state = path.stat()
            where = _FileState(path, state.st_size, state.st_mtime_ns)
            if (known := self._known.get((item.kind, where))) is not None:
                return known
            check_bytes(where.size)
            data = path.read_bytes()
        except OSError as error:
            raise MediaFault(f"cannot be read ({error.strerror or error}); correct the file") from None
        return self._learn(item.kind, where, self._add_encoded(item, data, where))

    def _learn(self, kind: MediaKind, where: _FileState | str, header: ItemHeader) -> ItemHeader:
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[kind, where] = header
        return header

    def _add_bytes(self, item: MediaItem, data: bytes) -> ItemHeader:
        check_bytes(len(data))
        return self._add_encoded(item, data, None)

    def _add_encoded(self, item: MediaItem, data: bytes, where: _FileState | tuple[int, int] | None) -> ItemHeader:
        """Add encoded bytes, which are written to the temporary file unless they are somewhere."""
        digest = _digest(item.kind, data)
        if digest in self._entries:
            return self._entries[digest].header
        if item.kind == "image":
            size: tuple[int, ...] = image_size(data, self._limits.image_pixels)
        else:
            size = (sound_header(data, self._limits.audio_seconds).length(self._rate),)
        header = ItemHeader(item.kind, digest, size)
        self._entries[digest] = _Entry(header, item.place, where or self._spilled(data), None)
        return header

    def _add_values(self, item: MediaItem) -> ItemHeader:
        """Add an image of the library, an array of pixels, or (samples, rate)."""
        values: SoundHeader | tuple[int, int]
        if item.kind == "image":
            data, values = self._pixels(item.source)
            size: tuple[int, ...] = values
        else:
            samples = array_sound(item.source[0])
            values = SoundHeader(len(samples), item.source[1])
            check_sound(values, self._limits.audio_seconds)
            data, size = samples.tobytes(), (values.length(self._rate),)
        digest = _digest(item.kind, data, repr(tuple(values)))
        if digest in self._entries:
            return self._entries[digest].header
        header = ItemHeader(item.kind, digest, size)
        self._entries[digest] = _Entry(header, item.place, self._spilled(data), values)
        return header

    def _pixels(self, source: Any) -> tuple[bytes, tuple[int, int]]:
        """RGB bytes of an array or an image of the library, and (width, height)."""
        is_array = isinstance(source, np.ndarray)
        if not is_array:
            check_pixels(source.width, source.height, self._limits.image_pixels)
        pixels = array_pixels(source) if is_array else upright_pixels(source)
        height, width = pixels.shape[:2]
        check_pixels(width, height, self._limits.image_pixels)
        return pixels.tobytes(), (width, height)

    def _spilled(self, data: bytes) -> tuple[int, int]:
        return self._spill.write(data), len(data)

    def _bytes(self, header: ItemHeader, entry: _Entry) -> bytes:
        if not isinstance(entry.where, _FileState):
            return self._spill.read(*entry.where)
        path = entry.where.path
        try:
            data = path.read_bytes() if path.stat().st_size == entry.where.size else b""
        except OSError:
            data = b""
        if _digest(header.kind, data) != header.digest:
            raise MediaFault(f"names {show(path.name)}, which has changed since the job began; run the job again")
        return data


def _digest(kind: MediaKind, data: bytes, values: str = "") -> str:
    digest = hashlib.sha256(f"{kind}\0{values}\0".encode())
    digest.update(data)
    return digest.hexdigest()
