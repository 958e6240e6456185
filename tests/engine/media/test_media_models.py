"""Rows with images and audio equal the library's greedy output, for small checkpoints of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchgen import Engine
from tests.engine.reference import NEAR_TIE
from tests.models.media_steps import Item, Parts, library_inputs, library_logits, load, media_row
from tests.models.test_packed_types import SCALED
from tests.models.tiny_media import FAMILIES, Family, family_of, save_media
from tests.models.tiny_media_more import MORE

NEW_TOKENS = 5
FIELDS = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, "return_logprob": True}
BYTES = 257
"""Number of tokens that all families share; special ones follow."""
SMALL, WIDE, TALL = Item("image", (60, 40), 1), Item("image", (120, 60), 2), Item("image", (33, 90), 3)
LOW, HIGH = Item("audio", (4000,), 1), Item("audio", (7000,), 2)
CASES: dict[str, list[Parts]] = {
    "image": [
        ["one ", SMALL, " tells"],
        ["one ", SMALL, " shows"],
        ["one ", WIDE, " tells"],
        [TALL, "then ", SMALL, " or", WIDE, "?"],
        [SMALL, "+", SMALL, "twice"],
    ],
    "audio": [["hear ", LOW, " now"], ["hear ", LOW, " then"], [HIGH, "then ", LOW, "?"]],
}
WORDS: Parts = ["only words"]
OPTIONS: list[dict[str, Any]] = [{}, {"max_tokens_per_step": 24, "max_num_seqs": 3}]
OPTIONS += [{"deterministic": True, "page_size": 16}]


def cases_of(name: str) -> list[Parts]:
    family = family_of(name)
    both: list[Parts] = [["see ", SMALL, " hear ", LOW, "."]] if len(family.kinds) > 1 else []
    cases = [*(case for kind in family.kinds for case in CASES[kind]), *both, WORDS]
    if not family.several:
        cases = [case for case in cases if sum(isinstance(part, Item) for part in case) < 2]
    return [[piece for part in case for piece in _pieces(part, family)] for case in cases]


def _pieces(part: str | Item, family: Family) -> Parts:
    """A part of a prompt as the family has it: its items with ends, its sounds of one length if it pads them."""
    if isinstance(part, str):
        return [part]
    return [family.ends[0], LOW if family.pads and part == HIGH else part, family.ends[1]]


def greedy(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[list[int], list[float], int]:
    """Ids and logprobs of the library, and the number of ids up to the first near tie or token of an item.

    The library takes such a token in an output for a further item.
    """
    ids: list[int] = []
    logprobs: list[float] = []
    settled = NEW_TOKENS
    for step in range(NEW_TOKENS):
        scores = library_logits(model, inputs, ids)[-1].log_softmax(-1)
        first, second = scores.topk(2).values.tolist()
        settled = min(settled, step) if first - second < NEAR_TIE else settled
        ids.append(int(scores.argmax()))
        logprobs.append(first)
        if ids[-1] >= BYTES:
            settled = min(settled, step + 1)
            break
    return ids, logprobs, settled


def check(family: str, folder: Path) -> None:
    model, library = save_media(family, folder)
    cases = cases_of(family)
    loaded = load(folder, library)
    inputs = [library_inputs(loaded, parts) for parts in cases]
    expected = [greedy(model, each) for each in inputs]
    rows = [media_row(loaded.processor, parts, **FIELDS) for parts in cases]
    for options in OPTIONS:
        engine = Engine(str(folder), dtype="float32", max_model_len=512, **{"page_size": 4, **options})
        found = engine.generate(rows, ordered=True)
        for done, (ids, logprobs, settled), given in zip(found, expected, inputs, strict=True):
            assert done.error is None, done.error
            differing = int((np.array(done.prompt_ids) != given["input_ids"][0].numpy()).sum())
            assert differing == 0 or family_of(family).ends_differ
            assert list(done.output_ids or ())[:settled] == ids[:settled], options
            if family not in SCALED:  # the library forgets a factor of their logits
                assert done.output_logprobs is not None
                np.testing.assert_allclose(done.output_logprobs[:settled], logprobs[:settled], atol=1e-4, rtol=0)
        distinct = {(part.kind, part.size, part.seed) for parts in cases for part in parts if isinstance(part, Item)}
        assert engine.last_run.loop.counts()["media_encoded"] >= len(distinct)


def test_images_next_to_each_other_are_separate(tmp_path: Path) -> None:
    """The library takes them for one image, so its positions are written out here."""
    model, library = save_media("qwen2_vl", tmp_path)
    loaded, parts = load(tmp_path, library), [SMALL, WIDE, "two"]
    inputs = library_inputs(loaded, parts)
    position, axes = 0, list[torch.Tensor]()
    for time, height, width in inputs["image_grid_thw"].tolist():
        assert time == 1
        at = torch.stack(torch.meshgrid(torch.arange(height // 2), torch.arange(width // 2), indexing="ij"))
        axes.append(torch.cat((torch.zeros(1, at[0].numel()), at.flatten(1))) + position)
        position += max(height, width) // 2
    axes.append(torch.arange(3 + NEW_TOKENS).expand(3, -1) + position)
    positions, ids, logprobs = torch.cat(axes, 1).long()[:, None], list[int](), list[float]()
    for step in range(NEW_TOKENS):
        seen = positions[..., : inputs["input_ids"].shape[1] + step]
        scores = library_logits(model, {**inputs, "position_ids": seen}, ids)[-1].log_softmax(-1)
        ids.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
    engine = Engine(str(tmp_path), dtype="float32", max_model_len=512)
    (done,) = engine.generate([media_row(loaded.processor, parts, **FIELDS)])
    assert done.error is None, done.error
    assert list(done.output_ids or ()) == ids
    np.testing.assert_allclose(done.output_logprobs, logprobs, atol=1e-4, rtol=0)


def test_the_error_of_a_size_that_the_processor_refuses_names_the_item(tmp_path: Path) -> None:
    save_media("qwen2_vl", tmp_path)
    thin = Item("image", (4000, 2)).decoded
    text = "<|image_pad|><|image_pad|>"
    engine = Engine(str(tmp_path), dtype="float32", max_model_len=512)
    (done,) = engine.generate([{"text": text, "image_data": [SMALL.decoded, thin], "max_new_tokens": 1}])
    assert (done.error.code, done.error.param) == ("media_error", "image_data")
    assert done.error.message.startswith("`image_data[1]` cannot be taken by the model's processor (")
    assert done.error.message.endswith("; give another image")


QUICK = ("llava", "qwen2_vl", "qwen3_5")


@pytest.mark.parametrize("family", QUICK)
def test_rows_equal_the_library(family: str, tmp_path: Path) -> None:
    check(family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in (*FAMILIES, *MORE) if family not in QUICK])
def test_rows_of_every_family_equal_the_library(family: str, tmp_path: Path) -> None:
    check(family, tmp_path)
