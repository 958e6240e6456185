"""Images and audio as a model's own processor of transformers prepares them: the tokens that they become, from their
sizes alone, and the tensors that towers read. Reads no weights.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, local
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.errors import ModelError, UsageError, first_line
from batchgen.models.checkpoint.folder import ModelFolder
from batchgen.models.library.media_config import PREFIXED, media_config, read_processor
from batchgen.models.library.model import silence_library
from batchgen.request.fields.media import MediaKind

_KINDS: Final[tuple[MediaKind, ...]] = ("image", "audio")
_PART: Final[dict[MediaKind, tuple[str, ...]]] = {
    "image": ("image_processor",),
    "audio": ("feature_extractor", "audio_processor"),
}
"""Attributes of a processor that read an item of a kind."""
_PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json")
_SEPARATOR: Final = "\x1f"
"""Between the items of a text: no processor changes it, and no tokenizer of a vocabulary sees it."""
OF_TEXT: Final = frozenset(("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"))
"""Outputs of a processor that are not an item's."""
MOST_OF_LAYOUT: Final = 16
"""Most numbers of an array of a layout."""
_PROBES: Final = ((300, 140), (90, 260))
"""Sizes of two images that show whether a processor treats an image among several otherwise."""


_ONE_KIND: Final = frozenset(("phi4_multimodal",))
"""Types whose features of one kind depend on whether a prompt has items of the other."""
_EMBED_LAST: Final = frozenset(("gemma3n",))
"""Types whose towers have an embedding of the token that ends an item. In a prompt it has the id of a feature."""
_NO_PIXELS: Final[Mapping[str, Any]] = {"resample": 0, "do_rescale": False, "do_normalize": False}
"""Settings of an image processor whose results have the sizes alone: the nearest pixel, as it is."""


class ItemRefused(Exception):
    """A processor cannot take an item. The message follows the item's name."""

    index = 0
    """The item's place among those that were given together."""


class Header(Protocol):
    """Facts of an item that are known without decoding it."""

    @property
    def kind(self) -> MediaKind:
        """Kind of the item."""

    @property
    def size(self) -> tuple[int, ...]:
        """Image: (width, height); audio: (samples,)."""


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """One item in its prompt: its text, features and layout."""

    text: str
    """Replaces the placeholder in the text, before it is tokenised."""
    token_id: int
    """Each of these ids in the expanded text is one feature."""
    features: int
    layout: Mapping[str, npt.NDArray[np.int64]]
    """Small arrays, by the processor's names, that positions need."""
    grouped: bool = False
    """Whether the item is treated as one of several: its features differ from those of the same item alone."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedItem:
    """One item as its tower reads it."""

    kind: MediaKind
    token_id: int
    features: int
    tensors: Mapping[str, Tensor]
    """By the names of the library's forward."""
    last_id: int | None = None
    """Id of a token after the features that the towers embed too, as one more feature; None: there is none."""
    adapter: int | None = None
    """Index of the adapter that changes the towers; None: none does."""

    @property
    def shape(self) -> tuple[object, ...]:
        """Items of equal shape can be encoded together: none is padded by the length of another."""
        parts = ((name, tuple(value.shape), value.dtype) for name, value in sorted(self.tensors.items()))
        valid = (int(value.sum()) for name, value in sorted(self.tensors.items()) if name.endswith("mask"))
        return (self.kind, self.token_id, self.last_id, self.adapter, self.features, *parts, *valid)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(value.nbytes for value in self.tensors.values())


class MediaProcessor:
    """A model's own processor of images and audio, created by `find_media_processor`. Threads may call it."""

    def __init__(self, processor: Any, config: Any) -> None:
        self._processor = processor
        self._tokenizer = processor.tokenizer = _Recorder(processor.tokenizer)
        self._config = config
        self._expansions: dict[tuple[object, ...], Expansion] = {}
        self.closing = (str(self._tokenizer.bos_token), "\n") if config.model_type in PREFIXED else ("", "")
        """What follows the last image of a prompt, and what ends a prompt with images."""
        self._placeholders = {kind: token for kind in _KINDS if (token := _placeholder(processor, kind)) is not None}
        self._nested = True
        """Whether the images of a prompt are given as a list of one list."""
        self._ends = ("", "")
        """What the processor wants before and after the placeholder of an image."""
        self._quick: Mapping[str, Any] = {}
        """Settings with which the image processor gives the same sizes with less work."""
        self._groups = self._probe_images() if "image" in self._placeholders else False
        for kind in self._placeholders:
            self._expand(kind, _PROBES[0] if kind == "image" else (self.audio_rate,), False)

    @property
    def kinds(self) -> frozenset[MediaKind]:
        """Kinds of items that prompts may have."""
        return frozenset(self._placeholders)

    @property
    def audio_rate(self) -> int:
        """Samples per second of the audio that the model reads; 0 if it reads none."""
        part = _part_of(self._processor, "audio")
        return 0 if "audio" not in self.kinds or part is None else int(part.sampling_rate)

    def placeholder(self, kind: MediaKind) -> str:
        """The token that represents one item of a kind in a prompt."""
        return self._placeholders[kind]

    def token_text(self, token_id: int) -> str:
        """Text of a token."""
        return str(self._tokenizer.convert_ids_to_tokens(token_id))

    def expand(self, headers: Sequence[Header]) -> tuple[Expansion, ...]:
        """Expansions of the items of one prompt, in their order.

        Raises:
            ItemRefused: the processor cannot take an item of this size, or these kinds together.
        """
        kinds = [header.kind for header in headers]
        if self._config.model_type in _ONE_KIND and len(set(kinds)) > 1:
            problem = f"cannot go with images: a {self._config.model_type} model encodes audio otherwise next to them"
            raise _refused(f"{problem}; give images or audio", kinds.index("audio"))
        grouped = self._groups and sum(header.kind == "image" for header in headers) > 1
        expansions = []
        for index, header in enumerate(headers):
            try:
                expansions.append(self._expand(header.kind, header.size, grouped and header.kind == "image"))
            except ItemRefused as refused:
                raise _refused(str(refused), index) from None
        return tuple(expansions)

    def prepare(self, header: Header, decoded: Any, *, grouped: bool = False) -> PreparedItem:
        """One item, an upright RGB image or mono samples, as its tower reads it.

        Args:
            header: what is known of the item.
            decoded: the image, or float32 samples at `audio_rate`.
            grouped: as in the item's `Expansion`.

        Raises:
            ItemRefused: the processor cannot take it.
        """
        expansion = self._expand(header.kind, header.size, grouped)
        tensors = self._run(header.kind, decoded, grouped)[1]
        last = self._last_token(header.kind)
        last_id = None if last is None else last[1]
        return PreparedItem(header.kind, expansion.token_id, expansion.features, tensors, last_id)

    def _expand(self, kind: MediaKind, size: tuple[int, ...], grouped: bool) -> Expansion:
        key = (kind, size, grouped)
        expansion = self._expansions.get(key)
        if expansion is None:
            text, tensors = self._run(kind, _blank(kind, size), grouped, sizes_alone=True)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"] if grouped else self._tokenizer.ids
            token_id = self._feature_id(kind, ids)
            last = self._last_token(kind)
            if last is not None:
                text = text.replace(last[0], str(self._tokenizer.convert_ids_to_tokens(token_id)))
                ids = [token_id if token == last[1] else token for token in ids]
            layout = {
                name: value.to(torch.int64).numpy()
                for name, value in tensors.items()
                if value.numel() <= MOST_OF_LAYOUT and not value.is_floating_point()
            }
            masks = [value for name, value in tensors.items() if name.endswith("feature_attention_mask")]
            if masks:
                layout["audio_seqlens"] = masks[0].sum(-1).to(torch.int64).numpy()
            expansion = self._expansions[key] = Expansion(text, token_id, ids.count(token_id), layout, grouped)
        return expansion

    def _last_token(self, kind: MediaKind) -> tuple[str, int] | None:
        """The token after an item's features that towers embed instead of the text decoder, and its id."""
        if self._config.model_type not in _EMBED_LAST:
            return None
        token = str(getattr(self._tokenizer, "eoi_token" if kind == "image" else "eoa_token"))
        return token, int(self._tokenizer.convert_tokens_to_ids(token))

    def _feature_id(self, kind: MediaKind, ids: Sequence[int]) -> int:
        """The id among those of an expansion of a feature."""
        tower = getattr(self._config, "vision_config" if kind == "image" else "audio_config", None)
        for holder in (self._config, self._processor, tower, self._tokenizer):
            for name in (f"{kind}_token_id", f"{kind}_token_index"):
                token_id = getattr(holder, name, None)
                if isinstance(token_id, int) and token_id in ids:
                    return token_id
        raise ModelError(
            f"The processor of this {self._config.model_type} model expands an item of {kind} to text without the "
            f"token {kind}_token_id of config.json. Check that tokenizer and processor belong to the model."
        )

    def _run(
        self, kind: MediaKind, item: Any, grouped: bool, *, sizes_alone: bool = False
    ) -> tuple[str, dict[str, Tensor]]:
        """The text that replaces an item's placeholder, and the item's tensors; those of pixels are not exact if
        `sizes_alone` matter.

        Raises:
            ItemRefused: the processor cannot take it.
        """
        items = [item, _blank(kind, (8, 8))] if grouped else [item]
        before, after = self._ends if kind == "image" else ("", "")
        text = _SEPARATOR.join([f"{before}{self._placeholders[kind]}{after}"] * len(items))
        try:
            expanded, tensors = self._expanded(kind, text, items, self._quick if sizes_alone else {})
        except Exception as error:  # processors raise errors of many types
            raise ItemRefused(
                f"cannot be taken by the model's processor ({first_line(error)}); give another {kind}"
            ) from None
        own = expanded.split(_SEPARATOR)[0].removeprefix(before).removesuffix(after)
        return own, {name: value[:1] if grouped else value for name, value in tensors.items()}

    def _expanded(
        self, kind: MediaKind, text: str, items: list[Any], settings: Mapping[str, Any] = {}
    ) -> tuple[str, dict[str, Tensor]]:
        """The text that the processor tokenises in place of `text`, and the tensors of its items.

        `settings` are those of its image processor for this call.
        """
        if kind == "image":
            options: dict[str, Any] = {"images": [items] if self._nested else items}
            options |= {"images_kwargs": dict(settings)} if settings else {}
        else:
            options = {"audio": items, "sampling_rate": self.audio_rate}
        made = self._processor(text=[text], return_tensors="pt", **options)
        expanded = self._tokenizer.text
        if self.closing != ("", ""):
            last = expanded.rfind(self._placeholders["image"]) + len(self._placeholders["image"])
            expanded = expanded[:last] + expanded[last:].removeprefix(self.closing[0]).removesuffix(self.closing[1])
        return expanded, {name: _as_tensor(value) for name, value in made.items() if name not in OF_TEXT}

    def _probe_images(self) -> bool:
        """Whether images together become something else than each alone; also finds how images are given.

        Raises:
            ModelError: the processor changes the text around images.
        """
        blanks = [_blank("image", size) for size in _PROBES]
        token = self._find_form(blanks)
        alone = [self._expanded("image", token, [blank])[0] for blank in blanks]
        together = self._expanded("image", _SEPARATOR.join([token] * 2), blanks)[0].split(_SEPARATOR)
        around = self._expanded("image", f"a{token}b{token}{token}c", [*blanks, blanks[0]])[0]
        if around != f"a{together[0]}b{together[1]}{together[0]}c":
            raise ModelError("it changes the text around images")
        with suppress(Exception):  # a processor may not have these settings
            if [self._expanded("image", token, [blank], _NO_PIXELS)[0] for blank in blanks] == alone:
                self._quick = _NO_PIXELS
        return together != alone

    def _find_form(self, blanks: list[Any]) -> str:
        """Find how the processor takes the images of a prompt; returns an image's placeholder with its ends."""
        start, end = (getattr(self._processor, f"image_{name}_token", None) or "" for name in ("start", "end"))
        forms = [(nested, ends) for ends in (("", ""), (start, end)) for nested in (True, False)]
        for form in forms:
            self._nested, self._ends = form
            token = self._placeholders["image"].join(self._ends)
            try:
                self._expanded("image", token * len(blanks), blanks)
                return token
            except Exception:  # as in _run
                if form == forms[-1]:
                    raise
        raise AssertionError("the last form returns or raises")


class _Recorder:
    """A processor's tokenizer, which keeps the last text of each thread and its ids."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._given = local()

    @property
    def text(self) -> str:
        """The last text that this thread tokenised."""
        return str(self._given.text)

    @property
    def ids(self) -> list[int]:
        """The ids of the last text that this thread tokenised."""
        return [int(token) for token in self._given.ids]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any = None, *args: Any, **options: Any) -> Any:
        self._given.text = text if isinstance(text, str) else text[0]
        with self._lock:  # settings of padding are changed in place
            made = self._tokenizer(text, *args, **options)
        self._given.ids = made["input_ids"] if isinstance(text, str) else made["input_ids"][0]
        return made


def _refused(problem: str, index: int) -> ItemRefused:
    error = ItemRefused(problem)
    error.index = index
    return error


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return torch.stack(list(value)) if len({v.shape for v in value}) == 1 else torch.cat(list(value))
    return torch.as_tensor(np.asarray(value))


def _blank(kind: MediaKind, size: tuple[int, ...]) -> Any:
    if kind == "audio":
        return np.zeros(size[0], np.float32)
    from PIL import Image  # of the extra `media`

    return Image.new("RGB", (size[0], size[1]))


def _part_of(processor: Any, kind: MediaKind) -> Any:
    parts = (getattr(processor, name, None) for name in _PART[kind])
    return next((part for part in parts if part is not None), None)


def _placeholder(processor: Any, kind: MediaKind) -> str | None:
    token = getattr(processor, f"{kind}_placeholder_token", None) or getattr(processor, f"{kind}_token", None)
    return token if isinstance(token, str) and _part_of(processor, kind) is not None else None


def find_media_processor(folder: ModelFolder) -> MediaProcessor | str:
    """The processor of a model; else why images and audio cannot be given to the model, in words.

    Raises:
        UsageError: the library that all processors need is missing.
    """
    config = media_config(folder)
    if isinstance(config, str):
        return config
    if importlib.util.find_spec("PIL") is None:
        raise UsageError("images and sounds need the library Pillow; pip install 'batchgen[media]'")
    try:
        with silence_library():
            processor, missing = read_processor(folder, config)
            ours = MediaProcessor(processor, config)
    except Exception as error:  # constructors of many authors raise errors of many types
        return f"the model's processor cannot be used: {first_line(error)}"
    if ours.kinds:
        return ours
    reasons = [reason for name, reason in missing.items() if name != "video_processor"]
    return f"the model's processor cannot be used: {reasons[0] if reasons else 'it names no token for an item'}"


def processor_digest(folder: ModelFolder) -> str | None:
    """Digest of the files that say how images and audio are prepared; None if the folder has none."""
    files = [file for name in _PROCESSOR_FILES if (file := folder.path / name).is_file()]
    return hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest() if files else None
