"""Images and audio of every family, against the library's own processor and eager model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from batchgen.models.deterministic import DeterministicModel
from tests.models.media_steps import (
    DECODED,
    Item,
    Parts,
    library_inputs,
    library_logits,
    load,
    logits_of,
    step_logits,
)
from tests.models.test_packed_types import SCALED
from tests.models.tiny_media import FAMILIES, family_of, save_media
from tests.models.tiny_media_more import MORE

torch.set_num_threads(1)

AFTER = (40, 70, 33, 99)
COMMON = ("qwen2_vl", "qwen3_vl", "gemma3", "gemma4_runs", "llava", "qwen2_5_omni_thinker", "qwen2_audio")
"""Families that every run of the tests covers: one of each kind of computation."""
IMAGES: list[Parts] = [
    ["one ", Item("image", (60, 40), 1), " tells"],
    [Item("image", (33, 90), 2), "then ", Item("image", (60, 40), 1), " or", Item("image", (120, 30), 3), "?"],
    ["only words"],
]
SOUNDS: list[Parts] = [
    ["hear ", Item("audio", (4000,), 1), " now"],
    [Item("audio", (7000,), 2), "then ", Item("audio", (4000,), 1), "?"],
    ["only words"],
]


def _with_ends(case: Parts, ends: tuple[str, str]) -> Parts:
    return [piece for part in case for piece in ([ends[0], part, ends[1]] if isinstance(part, Item) else [part])]


def _shortened(part: str | Item) -> str | Item:
    """All sounds of one length."""
    return replace(part, size=(4000,)) if isinstance(part, Item) and part.kind == "audio" else part


def check(name: str, folder: Path) -> None:
    reference, library = save_media(name, folder)
    loaded, family = load(folder, library), family_of(name)
    assert sorted(loaded.processor.kinds) == sorted(family_of(name).kinds)
    cases = [case for kind in family_of(name).kinds for case in (IMAGES if kind == "image" else SOUNDS)]
    if family_of(name).pads:
        cases = [
            [replace(p, size=(4000,)) if isinstance(p, Item) and p.kind == "audio" else p for p in c] for c in cases
        ]
    if not family_of(name).several:
        cases = [case for case in cases if sum(isinstance(part, Item) for part in case) < 2]
    cases = [_with_ends(case, family_of(name).ends) for case in cases]
    if len(family_of(name).kinds) > 1:
        cases.append(["see ", Item("image", (60, 40), 1), " hear ", Item("audio", (4000,), 1), "."])
    expected, prompts = [], []
    for parts in cases:
        inputs = library_inputs(loaded, parts)
        prompts.append(loaded.prompt(parts, AFTER))
        same = prompts[-1].ids[:-DECODED] == inputs["input_ids"][0]
        assert int((~same).sum()) == (sum(isinstance(part, Item) for part in parts) if family.ends_differ else 0)
        expected.append(library_logits(reference, inputs, AFTER))
    for seed in range(2):
        for ours, theirs in zip(step_logits(loaded, prompts, seed), expected, strict=True):
            factor = (ours * theirs).sum() / (ours * ours).sum() if name in SCALED else 1.0
            torch.testing.assert_close(ours * factor, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", COMMON)
def test_prompts_with_items_equal_the_library(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in (*FAMILIES, *MORE) if name not in COMMON])
def test_further_families_equal_the_library(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_deterministic_models_give_a_prompt_the_same_bits_in_every_step(name: str, tmp_path: Path) -> None:
    _, library = save_media(name, tmp_path)
    loaded = load(tmp_path, library)
    prompts = [loaded.prompt(parts, AFTER) for parts in IMAGES]
    model = DeterministicModel(loaded.model, (16,))
    alone = [logits_of(model, [prompt], loaded.token_ids())[0] for prompt in prompts]
    for seed in range(2):
        for ours, theirs in zip(logits_of(model, prompts, loaded.token_ids(), seed), alone, strict=True):
            assert torch.equal(ours, theirs)
