"""Images without a library: a store, a processor and towers whose features are a function of the pixels.

An image is a [height, width, 3] uint8 array with even sides. Each 2 x 2 patch is one feature. `Counted` says what was
done; `hold` lets decoding wait, and images whose first pixel is 255 cannot be decoded.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.config.engine_config import EngineConfig
from batchgen.engine.engine import Engine
from batchgen.engine.front_end import FrontEnd
from batchgen.engine.media.reader import MediaSupport
from batchgen.errors import ErrorCode, ModelError, RowError
from batchgen.models.base import ModelSpec
from batchgen.models.media.processor import PreparedItem
from batchgen.request.fields.media import MediaItem
from batchgen.text.fit import Truncate
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.engine.reference import eager_model, save_with_words
from tests.models.loading import load_model

Pixels = npt.NDArray[np.uint8]

FEATURE, BEGIN, END = 200, 201, 202
"""Ids of a feature, and of what surrounds an image; the placeholder is the word of a feature."""
HIDDEN = 64


@dataclass(frozen=True)
class FakeHeader:
    kind: Any
    digest: str
    size: tuple[int, ...]
    pixels: Pixels


@dataclass(frozen=True)
class FakeExpansion:
    text: str
    token_id: int
    features: int
    layout: Any = field(default_factory=dict)
    grouped: bool = False


@dataclass
class Counted:
    """What was done with each image, by digest."""

    decoded: Counter[str] = field(default_factory=Counter)
    encoded: Counter[str] = field(default_factory=Counter)
    batches: list[int] = field(default_factory=list)


class FakeMedia:
    """Store, processor and towers in one."""

    kinds = frozenset({"image"})
    audio_rate = 0
    closing = ("", "")

    def __init__(self, *, wrapped: bool = True) -> None:
        self.counted = Counted()
        self.hold = Event()
        self.hold.set()
        self._wrapped = wrapped
        self._lock = Lock()
        self._digests: dict[bytes, str] = {}

    def placeholder(self, kind: str) -> str:
        return f"w{FEATURE}"

    def add_all(self, items: Sequence[MediaItem]) -> list[FakeHeader]:
        return [self._header(item) for item in items]

    def end_fetching(self) -> None:
        pass

    def _header(self, item: MediaItem) -> FakeHeader:
        pixels = np.asarray(item.source)
        if pixels.shape[0] > 64:
            raise RowError(ErrorCode.MEDIA_ERROR, f"`{item.place}` is too large", item.field)
        digest = hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()
        return FakeHeader(item.kind, digest, (pixels.shape[1], pixels.shape[0]), pixels)

    def decode(self, header: FakeHeader) -> Pixels:
        self.hold.wait(30)
        with self._lock:
            self.counted.decoded[header.digest] += 1
        if header.pixels[0, 0, 0] == 255:
            raise RowError(ErrorCode.MEDIA_ERROR, "`image_data` cannot be decoded", "image_data")
        return header.pixels

    def expand(self, headers: Sequence[FakeHeader]) -> tuple[FakeExpansion, ...]:
        found = []
        for header in headers:
            count = header.size[0] * header.size[1] // 4
            words = [f"w{FEATURE}"] * count
            words = [f"w{BEGIN}", *words, f"w{END}"] if self._wrapped else words
            found.append(FakeExpansion(" ".join(words), FEATURE, count))
        return tuple(found)

    def prepare(self, header: FakeHeader, decoded: Pixels, *, grouped: bool = False) -> PreparedItem:
        patches = patches_of(decoded)
        with self._lock:
            self._digests[patches.tobytes()] = header.digest
        return PreparedItem("image", FEATURE, len(patches), {"patches": torch.from_numpy(patches)})

    def encode(self, items: Sequence[PreparedItem]) -> list[Tensor]:
        assert len({item.shape for item in items}) == 1
        self.counted.batches.append(len(items))
        found = [item.tensors["patches"].numpy() for item in items]
        for patches in found:
            if patches.shape[1:] != (12,):
                raise ModelError("the towers cannot read this")
            self.counted.encoded[self._digests.get(patches.tobytes(), "given")] += 1
        return [features_of(patches) for patches in found]

    def positions(self, ids: Tensor, layouts: Sequence[Any]) -> tuple[Tensor, int]:
        raise AssertionError("positions are plain")

    def token_text(self, token_id: int) -> str:
        return f"w{token_id}"

    def support(self, spec: ModelSpec) -> MediaSupport:
        own: Any = self
        return MediaSupport(spec, lambda: own, lambda model: own, lambda rate, folder: own)


def patches_of(pixels: Pixels) -> npt.NDArray[np.float32]:
    """[features, 12]"""
    height, width, _ = pixels.shape
    tiles = pixels.reshape(height // 2, 2, width // 2, 2, 3).swapaxes(1, 2).reshape(-1, 12)
    return (tiles / np.float32(128) - 1).astype(np.float32)


def features_of(patches: npt.NDArray[np.float32]) -> Tensor:
    """[features, H]"""
    projection = torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(7)) * 0.2
    return torch.from_numpy(patches) @ projection


def picture(seed: int, height: int = 4, width: int = 4) -> Pixels:
    """A random image."""
    return np.random.default_rng(seed).integers(0, 250, (height, width, 3)).astype(np.uint8)


def broken(seed: int) -> Pixels:
    """An image that cannot be decoded."""
    pixels = picture(seed)
    pixels[0, 0, 0] = 255
    return pixels


def save_model(folder: Path) -> Path:
    """A tiny model with one word for each id."""
    return save_with_words("llama", folder)


def media_engine(folder: Path, fake: FakeMedia, truncate: Truncate = "none", **options: Any) -> Engine:
    """An engine whose model takes images."""
    config = EngineConfig(model=str(folder), dtype="float32", **{"page_size": 4, "attention": "torch", **options})
    model = load_model(str(folder), dtype="float32", device="cpu")
    front_end = FrontEnd.build(config, model.spec, Tokenizer.load(folder, model=folder), {}, truncate=truncate)
    return Engine.from_front_end(model, replace(front_end, media=fake.support(model.spec)))


def row(text: str, *pictures: Pixels, **fields: Any) -> dict[str, Any]:
    """A greedy row: `#` is an image in a text of numbers."""
    words = [f"w{FEATURE}" if word == "#" else f"w{word}" for word in text.split()]
    common = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True, "return_logprob": True}
    media = {"image_data": list(pictures)} if pictures else {}
    return {"text": " ".join(words), **media, **common, **fields}


def prompt_ids(text: str, *pictures: Pixels) -> list[int]:
    """The ids of the prompt of such a row."""
    rest, found = list(pictures), list[int]()
    for word in text.split():
        if word == "#":
            found += [BEGIN, *[FEATURE] * len(patches_of(rest.pop(0))), END]
        else:
            found.append(int(word))
    return found


def expected(folder: Path, text: str, *pictures: Pixels, new_tokens: int = 6) -> tuple[list[int], list[float]]:
    """Greedy ids and logprobs of transformers' eager model, given the prompt's embeddings."""
    model, ids = eager_model(folder), torch.tensor(prompt_ids(text, *pictures))
    with torch.inference_mode():
        embeds = model.get_input_embeddings()(ids).clone()
        if pictures:
            embeds[ids == FEATURE] = torch.cat([features_of(patches_of(pixels)) for pixels in pictures])
        out: list[int] = []
        logprobs: list[float] = []
        for _ in range(new_tokens):
            scores = model(inputs_embeds=embeds[None]).logits[0, -1].log_softmax(-1)
            out.append(int(scores.argmax()))
            logprobs.append(float(scores[out[-1]]))
            embeds = torch.cat([embeds, model.get_input_embeddings()(torch.tensor(out[-1:]))])
    return out, logprobs
