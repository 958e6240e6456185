"""`MediaPlan`: how much the images and sounds of a job are, known before it runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchgen.plan.tree import blocks
from batchgen.request.table import RequestTable


@dataclass(frozen=True, slots=True)
class MediaPlan:
    """Figures of a job's images and sounds. Names are those of the report."""

    items: int
    """Distinct images and sounds, each of which is decoded and encoded once."""
    images: int
    sounds: int
    megapixels: float
    """Pixels of the distinct images, in millions."""
    audio_seconds: float
    """Length of the distinct sounds."""
    encoded_tokens: int
    """Tokens of the distinct items: the work of the encoder."""
    prompt_tokens: int
    """Tokens of all prompts that items became."""


def plan_media(table: RequestTable, audio_rate: int) -> MediaPlan | None:
    """Count the items of a table; None if no row has any. `audio_rate`: samples per second."""
    items = table.media
    if items is None:
        return None
    found = [items[number] for number in range(len(items))]
    images = [item for item in found if item.kind == "image"]
    samples = sum(int(item.source.size[0]) for item in found if item.kind == "audio")
    prompt_tokens = 0
    for part in blocks(len(table.tokens)):
        prompt_tokens += int((table.tokens[part] >= items.vocab_size).sum())
    return MediaPlan(
        items=len(found),
        images=len(images),
        sounds=len(found) - len(images),
        megapixels=round(sum(int(np.prod(item.source.size)) for item in images) / 1e6, 3),
        audio_seconds=round(samples / max(1, audio_rate), 1),
        encoded_tokens=sum(item.features for item in found),
        prompt_tokens=prompt_tokens,
    )
