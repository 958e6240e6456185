"""Prompts with images and audio through batchgen's model, and through the library's processor and model."""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from batchgen.kernels.mixers.states import StatePool
from batchgen.models.base import Model, ModelInput, TokenEmbeds
from batchgen.models.checkpoint.folder import check_model_folder
from batchgen.models.library.media_config import PREFIXED
from batchgen.models.media.encoder import MediaEncoder, load_media_encoder
from batchgen.models.media.processor import MediaProcessor, find_media_processor
from tests.models.loading import load_model
from tests.models.packed import PagedCache, pooled_states

DECODED = 4
"""Last tokens of each prompt, which are run one by one."""


@dataclass(frozen=True)
class Item:
    """A random image or sound, with its header's fields."""

    kind: Any
    size: tuple[int, ...]
    seed: int = 0

    @property
    def decoded(self) -> Any:
        rng = np.random.default_rng(self.seed)
        if self.kind == "audio":
            return rng.normal(0, 0.3, self.size[0]).astype(np.float32)
        width, height = self.size
        return Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))


Parts = list[str | Item]


def media_row(processor: MediaProcessor, parts: Parts, **fields: Any) -> dict[str, Any]:
    """A row whose text has a placeholder for each item."""
    text = "".join(part if isinstance(part, str) else processor.placeholder(part.kind) for part in parts)
    row: dict[str, Any] = {"text": text, **fields}
    for kind in ("image", "audio"):
        own = [part.decoded for part in parts if isinstance(part, Item) and part.kind == kind]
        if own:
            row[f"{kind}_data"] = own if kind == "image" else [(sound, processor.audio_rate) for sound in own]
    return row


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt as batchgen's model reads it."""

    ids: Tensor
    spans: list[tuple[int, int]]
    """Runs of features, or the whole prompt."""
    features: Tensor
    """[E, W] of all spans in order."""
    rope: Tensor | None


@dataclass(frozen=True, eq=False)
class Loaded:
    """A checkpoint's model, processor and encoder."""

    model: Model
    processor: MediaProcessor
    encoder: MediaEncoder
    library: Any
    """The library's processor."""

    def prompt(self, parts: Parts, after: Sequence[int] = ()) -> Prompt:
        """A prompt of texts and items, followed by the ids `after`."""
        items = [part for part in parts if isinstance(part, Item)]
        expansions = iter(made := self.processor.expand(items))
        texts = [part if isinstance(part, str) else next(expansions).text for part in parts]
        if items and self.processor.closing[1]:
            last = max(index for index, part in enumerate(parts) if isinstance(part, Item))
            texts = [*texts[: last + 1], self.processor.closing[0], *texts[last + 1 :], self.processor.closing[1]]
        text = "".join(texts)
        ids = torch.tensor([*self.library.tokenizer(text, add_special_tokens=False)["input_ids"], *after])
        prepared = [
            self.processor.prepare(item, item.decoded, grouped=found.grouped)
            for item, found in zip(items, made, strict=True)
        ]
        features = [self.encoder.encode([item])[0] for item in prepared]
        assert [len(rows) for rows in features] == [found.features for found in made]
        assert all(rows.abs().sum(1).min() > 0 for rows in features)
        places = (
            torch.isin(ids, torch.tensor([found.token_id for found in made], dtype=torch.int64)).nonzero().flatten()
        )
        rope = None
        if self.model.spec.rope_axes:
            rope, following = self.encoder.positions(ids[: len(ids) - len(after)], [found.layout for found in made])
            rope = torch.cat((rope, torch.arange(len(after)).expand(len(rope), -1) + following), 1)
        spans: list[tuple[int, int]] = []
        at = 0
        for item, rows in zip(items, features, strict=True):
            found = places[at : at + len(rows)].tolist()
            at += len(rows)
            if item.kind == "image":
                spans += runs(found)
        if items and self.model.spec.bidirectional == "prompt":
            spans = [(0, len(ids) - len(after))]
        return Prompt(
            ids, spans, torch.cat(features) if features else torch.zeros(0, self.model.spec.features_size), rope
        )

    def token_ids(self) -> Tensor:
        """Ids of placeholders."""
        return torch.tensor(
            [self.processor.expand([Item(kind, SIZES[kind])])[0].token_id for kind in self.processor.kinds]
        )


SIZES: dict[str, tuple[int, ...]] = {"image": (40, 30), "audio": (4000,)}


def runs(places: list[int]) -> list[tuple[int, int]]:
    """[start, end) of each run of consecutive numbers."""
    found: list[tuple[int, int]] = []
    for place in places:
        if found and found[-1][1] == place:
            found[-1] = (found[-1][0], place + 1)
        else:
            found.append((place, place + 1))
    return found


def load(folder: Path, library: Any, context: int = 512) -> Loaded:
    """Load all of a checkpoint that media need."""
    model = load_model(folder, dtype="float32", device="cpu", max_model_len=context)
    checked = check_model_folder(folder)
    processor = find_media_processor(checked)
    assert isinstance(processor, MediaProcessor), processor
    return Loaded(model, processor, load_media_encoder(checked, model.spec), library)


def _ends(prompt: Prompt, whole: bool) -> set[int]:
    """Where a chunk of a prompt may end."""
    inside = {at for start, end in prompt.spans for at in range(start + 1, end)} if whole else set()
    return set(range(1, len(prompt.ids) - DECODED + 1)) - inside


def step_logits(loaded: Loaded, prompts: list[Prompt], seed: int = 0) -> list[Tensor]:
    """`logits_of` prompts of a checkpoint with a processor."""
    return logits_of(loaded.model, prompts, loaded.token_ids(), seed)


def logits_of(model: Model, prompts: list[Prompt], of_media: Tensor, seed: int = 0) -> list[Tensor]:
    """Logits [n, V] of every token, in packed steps: prompts in random chunks, their last tokens one by one.

    `of_media`: ids of placeholders.
    """
    rng, whole = random.Random(seed), model.spec.bidirectional
    cache = PagedCache(model.spec, len(prompts), pages_each=-(-max(len(p.ids) for p in prompts) // 4))
    pool = StatePool.allocate(model.spec.states, len(prompts) + 1, model.spec.dtype, model.spec.device)
    done, got = [0] * len(prompts), [[] for _ in prompts]  # type: ignore[var-annotated]
    while any(at < len(prompt.ids) for at, prompt in zip(done, prompts, strict=True)):
        step: list[tuple[int, int, int]] = []
        for number, prompt in enumerate(prompts):
            if rng.random() < 0.2:
                continue
            chunks = sorted(at for at in _ends(prompt, whole) if at > done[number])
            if chunks:
                step.insert(0, (number, done[number], rng.choice(chunks)))
            elif done[number] < len(prompt.ids):
                step.append((number, done[number], done[number] + 1))
        if not step:
            continue
        step.sort(key=lambda part: part[2] - part[1] == 1)
        states = pooled_states(pool, [(number, end - start) for number, start, end in step])
        hidden = model.hidden(replace(_inputs(model, cache, prompts, step, of_media), states=states))
        rows = model.logits(hidden).split([end - start for _, start, end in step])
        for (number, _, end), logits in zip(step, rows, strict=True):
            got[number].append(logits)
            done[number] = end
    return [torch.cat(rows) for rows in got]


def _inputs(
    model: Model, cache: PagedCache, prompts: list[Prompt], step: list[tuple[int, int, int]], of_media: Tensor
) -> ModelInput:
    rows, values, ropes, spans, at = [], [], [], [], 0
    for number, start, end in step:
        prompt = prompts[number]
        media = torch.isin(prompt.ids, of_media)
        inside = media.nonzero().flatten()
        chosen = (inside >= start) & (inside < end)
        rows.append(inside[chosen] - start + at)
        values.append(prompt.features[chosen])
        if prompt.rope is not None:
            ropes.append(prompt.rope[:, start:end])
        spans += [(a - start + at, b - start + at) for a, b in prompt.spans if start <= a < end]
        at += end - start
    attention = cache.spanned_step(
        [(number, end - start) for number, start, end in step],
        spans if model.spec.bidirectional else [],
        exceed=model.spec.bidirectional == "prompt",
    )
    embeds = TokenEmbeds(torch.cat(rows), torch.cat(values))
    return ModelInput(
        torch.cat([prompts[number].ids[start:end] for number, start, end in step]),
        torch.cat([torch.arange(start, end) for _, start, end in step]),
        attention,
        embeds=embeds if len(embeds.rows) else None,
        rope_positions=torch.cat(ropes, 1) if ropes else None,
    )


def library_inputs(loaded: Loaded, parts: Parts) -> dict[str, Tensor]:
    """What the library's own processor makes of a whole prompt."""
    text = "".join(part if isinstance(part, str) else loaded.processor.placeholder(part.kind) for part in parts)
    options: dict[str, Any] = {}
    images = [part.decoded for part in parts if isinstance(part, Item) and part.kind == "image"]
    sounds = [part.decoded for part in parts if isinstance(part, Item) and part.kind == "audio"]
    if images:
        options["images"] = [images]
    if sounds:
        options |= {"audio": sounds, "sampling_rate": loaded.processor.audio_rate}
    if loaded.processor.closing[1] and not images:  # it takes no text alone
        return dict(loaded.library.tokenizer([text], return_tensors="pt"))
    try:
        found = loaded.library(text=[text], return_tensors="pt", return_mm_token_type_ids=True, **options)
    except TypeError:
        found = loaded.library(text=[text], return_tensors="pt", **options)
    return dict(found)


def library_logits(model: Any, inputs: dict[str, Tensor], after: Sequence[int]) -> Tensor:
    """The library's logits [n, V] of a prompt and the ids `after` it."""
    model = getattr(model, "thinker", model)  # of a class whose other parts speak
    names = inspect.signature(model.forward).parameters
    accepted = {name: value for name, value in inputs.items() if name in names and name != "labels"}
    more = torch.tensor([list(after)])
    for name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in accepted:
            is_suffix = name == "token_type_ids" and model.config.model_type in PREFIXED
            added = more if name == "input_ids" else torch.full_like(more, is_suffix or name == "attention_mask")
            accepted[name] = torch.cat((accepted[name], added.to(accepted[name].dtype)), 1)
    with torch.no_grad():
        logits: Tensor = model(**accepted, use_cache=False).logits[0].float()
    return logits
