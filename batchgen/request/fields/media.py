"""Images and audio as a row gives them, checked for their form only: no file is read, nothing is decoded.

`MediaField` checks `image_data` and `audio_data`, and `media_part` one part of a message's content;
`prompts.with_media` gives each prompt its items.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, get_args

from batchgen.errors import ErrorCode, RowError
from batchgen.request.checks import error_at, invalid, json_type, show, whole

MediaKind = Literal["image", "audio"]
MediaForm = Literal["raw", "processor_output", "precomputed_embedding"]
"""What an item holds: an image or a sound, the output of the model's processor, or the features themselves."""
Detail = Literal["auto", "low", "high", "original"]
MEDIA_FIELDS: Final[Mapping[MediaKind, str]] = {"image": "image_data", "audio": "audio_data"}
"""Kind -> the field of a row that holds items of it."""

_FORMS: Final = get_args(MediaForm)[1:]
_PARTS: Final[Mapping[str, tuple[MediaKind, tuple[str, ...]]]] = {
    "image": ("image", ("image", "image_url", "url", "path", "base64")),
    "image_url": ("image", ("image_url", "url")),
    "input_image": ("image", ("image_url", "url")),
    "audio": ("audio", ("audio", "audio_url", "url", "path", "base64")),
    "audio_url": ("audio", ("audio_url", "url")),
    "input_audio": ("audio", ("input_audio",)),
}
"""Type of a part -> its kind, and the keys that may hold its item."""
_BARE: Final = frozenset({"image", "audio"})
"""Types of parts that may leave their item to `image_data` or `audio_data`."""
_VIDEO: Final = frozenset({"video", "video_url", "input_video"})
_REFUSED: Final = _VIDEO | {"file", "input_file"}
_NOTES: Final = frozenset({"type", "cache_control", "uuid", "id", "index"})
"""Keys of a part that say nothing about its item."""
_HOLDERS: Final = ("array", "bytes", "data", "base64", "url", "path")
"""Keys of an object that may hold an item; of `array` or `bytes` and a `path`, the first counts."""
_SOUND_FORMATS: Final = ("flac", "mp3", "ogg", "opus", "wav")
"""Values of `format` next to the `data` of a sound; the file itself says what it is."""
_WANTED: Final = "must be a file below --media-root, a data: URL, base64, or in Python bytes"


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """One item of a prompt."""

    kind: MediaKind
    source: Any
    """str: a path, `data:` URL, URL or base64; bytes: an encoded file; a numpy array or PIL image; (array, rate in Hz)
    of a sound; for the other forms a mapping of their values by name."""
    place: str
    """How messages name it, such as `image_data[1]` or `messages[0].content[2]`."""
    detail: Detail | None = None
    """OpenAI's `detail` of an image."""
    form: MediaForm = "raw"

    @property
    def field(self) -> str:
        """The row's field that holds it."""
        return self.place.partition("[")[0]

    def error(self, problem: str) -> RowError:
        """`media_error` whose message is "`place` problem"."""
        return error_at(ErrorCode.MEDIA_ERROR, self.place, problem)


class MediaData(NamedTuple):
    """The value of `image_data` or `audio_data`: one item for all prompts, or a list."""

    name: str
    """The field."""
    items: tuple[MediaItem | tuple[MediaItem, ...] | None, ...]
    is_list: bool

    def of_prompts(self, count: int) -> list[tuple[MediaItem, ...]]:
        """The items of each of `count` prompts: a list has those of a single prompt, else one entry for each prompt.

        Raises:
            RowError: `invalid_field`: it has another number of entries.
        """
        if not self.items:
            return [()] * count
        nested = any(type(entry) is tuple for entry in self.items)
        if not self.is_list:
            return [_group(self.items[0])] * count
        if count == 1 and not nested:
            return [tuple(entry for entry in self.items if isinstance(entry, MediaItem))]
        if len(self.items) != count:
            what = "a list of lists has one list for each prompt" if nested else "a list has one item for each prompt"
            raise invalid(self.name, f"has {len(self.items)} entries, but the row has {count} prompts: {what}")
        return [_group(entry) for entry in self.items]


def _group(entry: MediaItem | tuple[MediaItem, ...] | None) -> tuple[MediaItem, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


@dataclass(frozen=True, slots=True)
class MediaField:
    """Check of a field of items: one, a list, or a list of lists; nulls and empty strings mean none."""

    kind: MediaKind

    def __call__(self, name: str, value: Any) -> MediaData:
        """The items of the field, or `invalid_field`."""
        if type(value) is MediaData:
            return value
        if not isinstance(value, list | tuple) or _is_sound(self.kind, value):
            item = self._item(name, value)
            return MediaData(name, () if item is None else (item,), is_list=False)
        entries = tuple(self._entry(f"{name}[{index}]", entry) for index, entry in enumerate(value))
        if any(type(entry) is tuple for entry in entries):
            entries = tuple(_group(entry) for entry in entries)
        return MediaData(name, entries, is_list=True)

    def _entry(self, place: str, value: Any) -> MediaItem | tuple[MediaItem, ...] | None:
        if not isinstance(value, list | tuple) or _is_sound(self.kind, value):
            return self._item(place, value)
        items = (self._item(f"{place}[{index}]", item) for index, item in enumerate(value))
        return tuple(item for item in items if item is not None)

    def _item(self, place: str, value: Any) -> MediaItem | None:
        if value is None or (isinstance(value, str | bytes) and not value):
            return None
        return media_item(self.kind, place, value)


class MediaMessages(tuple[Mapping[str, Any], ...]):
    """Messages of which some have parts with media: `{"type": "image", "item": MediaItem}`, or without `item`."""

    __slots__ = ()


def media_part(place: str, part: Mapping[str, Any]) -> dict[str, Any] | None:
    """The form of a media part in `MediaMessages`; None for a part of a type without media.

    Raises:
        RowError: `invalid_field`; `unsupported_field` for video and files.
    """
    if part["type"] in _REFUSED:
        remedy = "send frames of it as images" if part["type"] in _VIDEO else "send text, images or audio"
        problem = f"is a part of type {part['type']}, which is not supported; {remedy}"
        raise error_at(ErrorCode.UNSUPPORTED_FIELD, place, problem)
    if part["type"] not in _PARTS:
        return None
    kind, holders = _PARTS[part["type"]]
    values = {key: value for key, value in part.items() if key not in _NOTES and value is not None}
    detail = values.pop("detail", None) if kind == "image" else None
    held = [key for key in holders if key in values]
    odd = next((key for key in values if key not in holders), held[1] if len(held) > 1 else None)
    if odd is not None:
        raise invalid(place, f"is a part of type {part['type']}, which has no key {show(odd)} next to its item")
    if not held:
        if part["type"] not in _BARE:
            raise invalid(place, f"is a part of type {part['type']} and needs `{holders[0]}`")
        if detail is not None:
            raise invalid(place, "has `detail`, but no image")
        return {"type": kind}
    return {"type": kind, "item": media_item(kind, place, values[held[0]], detail)}


def media_item(kind: MediaKind, place: str, value: Any, detail: Any = None) -> MediaItem:
    """One item in any of its forms.

    Raises:
        RowError: `invalid_field`.
    """
    if isinstance(value, Mapping):
        if _is_one_of(value.get("format"), _FORMS):
            return _prepared(kind, place, value)
        if detail is None:
            detail = value.get("detail")
        value = _held(kind, place, value)
    if detail is not None and (kind != "image" or not _is_one_of(detail, get_args(Detail))):
        raise invalid(place, f"has a `detail` of {show(detail)}; it is one of {', '.join(get_args(Detail))}")
    return MediaItem(kind, _source(kind, place, value), place, detail)


def _prepared(kind: MediaKind, place: str, value: Mapping[str, Any]) -> MediaItem:
    """An item that a processor or an encoder has made."""
    held = {str(key): item for key, item in value.items() if key != "format" and item is not None}
    form: MediaForm = "processor_output" if value["format"] == "processor_output" else "precomputed_embedding"
    if form == "precomputed_embedding" and "feature" not in held:
        raise invalid(place, 'of format precomputed_embedding needs "feature"')
    if not held:
        raise invalid(place, "of format processor_output has no values")
    return MediaItem(kind, held, place, form=form)


def _held(kind: MediaKind, place: str, value: Mapping[str, Any]) -> Any:
    """The item that an object holds: {url, detail}, {data, format}, {bytes, path}, {array, sampling_rate}."""
    fields = {key: item for key, item in value.items() if item is not None and key != "detail"}
    held = [key for key in _HOLDERS if key in fields]
    if held[:1] == ["array"] or held[:1] == ["bytes"]:
        fields.pop("path", None)  # where the values came from
        held = [key for key in held if key != "path"]
    rate, file_format = fields.pop("sampling_rate", None), fields.pop("format", None)
    odd = next((key for key in fields if key not in held[:1]), None)
    if odd is not None or not held:
        known = ", ".join(_HOLDERS)
        what = f"has the key {show(odd)}" if odd is not None else "is an object without an item"
        raise invalid(place, f"{what}; an object has one of {known}")
    if file_format is not None and (kind != "audio" or not _is_one_of(file_format, _SOUND_FORMATS)):
        raise invalid(place, f"has a `format` of {show(file_format)}; it is one of {', '.join(_SOUND_FORMATS)}")
    if held == ["array"] and kind == "audio":
        return _sound(place, (fields["array"], rate))
    if rate is not None:
        raise invalid(place, "has a `sampling_rate`, which only the `array` of a sound has")
    if type(fields[held[0]]) is not str and held[0] in ("url", "path", "base64", "data"):
        raise invalid(place, f"has `{held[0]}`, which must be a string, got {json_type(fields[held[0]])}")
    return fields[held[0]]


def _source(kind: MediaKind, place: str, value: Any) -> Any:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and value:
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview) and len(value):
        return bytes(value)
    if _is_sound(kind, value):
        return _sound(place, value)
    if kind == "image" and hasattr(value, "getexif"):  # a PIL image; no row of a file holds one
        return value
    if kind == "image" and (array := _array(value)) is not None:
        return array
    if isinstance(value, str | bytes | bytearray):
        raise invalid(place, "is empty")
    more = ", a PIL image or an array" if kind == "image" else " or (array, sampling rate)"
    raise invalid(place, f"{_WANTED}{more}, got {json_type(value)}")


def _is_sound(kind: MediaKind, value: Any) -> bool:
    """Whether a value is (samples, rate)."""
    if kind != "audio" or not isinstance(value, list | tuple) or len(value) != 2:
        return False
    import numpy as np  # not needed where options are listed

    samples, rate = value
    is_array = isinstance(samples, np.ndarray | list | tuple) or hasattr(samples, "detach")
    return is_array and (type(rate) in (int, float) or isinstance(rate, np.number))


def _sound(place: str, value: Any) -> tuple[Any, int]:
    import numpy as np  # not needed where options are listed

    samples, rate = value
    number = whole(rate.item() if isinstance(rate, np.number) else rate)
    if number is None or number <= 0:
        raise invalid(place, f"needs a sampling rate in Hz, a whole number, got {show(rate)}")
    array = _array(samples)
    if array is None:
        try:
            array = np.array(samples, np.float32)
        except (TypeError, ValueError, OverflowError):
            raise invalid(place, "has samples that are not numbers") from None
    return array, number


def _is_one_of(value: Any, words: Sequence[str]) -> bool:
    return type(value) is str and value in words  # an array has no truth value


def _array(value: Any) -> Any:
    """A numpy array of an array or tensor; None for anything else."""
    import numpy as np  # not needed where options are listed

    if hasattr(value, "detach"):  # a torch tensor; numpy has no bfloat16
        value = value.detach()
        return (value.float() if value.is_floating_point() else value).cpu().numpy()
    return value if isinstance(value, np.ndarray) else None


def items_of(entries: Sequence[MediaItem], kind: MediaKind) -> tuple[MediaItem, ...]:
    """The items of one kind, in order."""
    return tuple(item for item in entries if item.kind == kind)
