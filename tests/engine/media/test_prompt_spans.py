"""Prompts all of whose tokens see one another, as in PaliGemma: they are computed whole and shared with equal ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchgen import Engine
from tests.engine.media.test_media_models import FIELDS, SMALL, TALL, WORDS, greedy
from tests.engine.reference import assert_all_same
from tests.models.media_steps import Item, Loaded, Parts, library_inputs, library_logits, load, media_row
from tests.models.tiny_media import save_media

CASES: list[Parts] = [
    [SMALL, "what is it"],
    [SMALL, "what is there"],  # the library's prompt begins alike, and each of its tokens is another
    [TALL, "what is it"],
    ["before ", SMALL, "what is it"],
    [SMALL, TALL, "differ"],
    WORDS,
]


@pytest.fixture(scope="module")
def paligemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Loaded]:
    folder = tmp_path_factory.mktemp("paligemma")
    model, library = save_media("paligemma2", folder)
    return folder, model, load(folder, library)


def engine_of(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), dtype="float32", max_model_len=512, **{"page_size": 4, **options})


def rows_of(loaded: Loaded, cases: list[Parts] = CASES, **fields: Any) -> list[dict[str, Any]]:
    return [media_row(loaded.processor, parts, **{**FIELDS, **fields}) for parts in cases]


@pytest.mark.parametrize("options", [{"max_tokens_per_step": 4, "max_num_seqs": 2}, {"deterministic": True}], ids=str)
def test_prompts_equal_the_library(paligemma: tuple[Path, Any, Loaded], options: dict[str, Any]) -> None:
    folder, model, loaded = paligemma
    found = engine_of(folder, **options).generate(rows_of(loaded), ordered=True)
    for done, parts in zip(found, CASES, strict=True):
        assert done.error is None, done.error
        inputs = library_inputs(loaded, parts)
        assert list(done.prompt_ids) == inputs["input_ids"][0].tolist()
        ids, logprobs, settled = greedy(model, inputs)
        assert list(done.output_ids or ())[:settled] == ids[:settled]
        assert done.output_logprobs is not None
        np.testing.assert_allclose(done.output_logprobs[:settled], logprobs[:settled], atol=1e-4, rtol=0)


def test_equal_prompts_share_all_and_others_nothing(paligemma: tuple[Path, Any, Loaded]) -> None:
    folder, _, loaded = paligemma
    engine = engine_of(folder, dedup=False)
    rows = rows_of(loaded, [CASES[0], CASES[1], CASES[0], ["what is it"], ["what is there"]], n=2)
    found = list(engine.generate(rows, ordered=True))
    cached = [[done.cached_tokens for done in found if done.row_index == index] for index in range(len(rows))]
    length = found[0].prompt_tokens
    assert sorted([*cached[0], *cached[2]]) == [0, length, length, length]
    assert sorted(cached[1]) == [0, found[2].prompt_tokens]
    assert max(*cached[3], *cached[4]) > 0
    assert min(*cached[3], *cached[4]) >= 0
    assert engine.last_run.loop.counts()["media_encoded"] == 1


def test_preempted_prompts_are_computed_whole_again(paligemma: tuple[Path, Any, Loaded]) -> None:
    folder, _, loaded = paligemma
    cases: list[Parts] = [[Item("image", (30, 30), n % 5), f"say {n} {70 * chr(97 + n % 26)}"] for n in range(32)]
    many = rows_of(loaded, cases, max_new_tokens=30)
    wanted = list(engine_of(folder).generate(many, ordered=True))
    engine = engine_of(folder, kv_memory="1MiB")
    engine.admission = "free"
    found = list(engine.generate(many, ordered=True))
    assert engine.last_run.scheduler.stats.preemptions > 0
    assert_all_same(found, wanted)


@pytest.mark.field("completions")
def test_texts_that_are_scored_are_causal(paligemma: tuple[Path, Any, Loaded]) -> None:
    folder, model, loaded = paligemma
    texts = ["a cat", "a dog"]
    rows = [{**media_row(loaded.processor, parts), "completions": texts} for parts in CASES[:2]]
    for done in engine_of(folder).generate(rows, ordered=True):
        assert done.error is None, done.error
        inputs = library_inputs(loaded, CASES[done.row_index])
        for text, score in zip(texts, done.scores, strict=True):
            ids = loaded.library.tokenizer(text, add_special_tokens=False)["input_ids"]
            logits = library_logits(model, inputs, ids).log_softmax(-1)[-len(ids) - 1 : -1]
            expected = [float(row[token]) for row, token in zip(logits, ids, strict=True)]
            assert score.sum == pytest.approx(sum(expected), abs=1e-3)


def test_ids_with_placeholders_become_what_the_text_becomes(paligemma: tuple[Path, Any, Loaded]) -> None:
    folder, _, loaded = paligemma
    (as_text,) = rows_of(loaded, CASES[:1])
    text = as_text.pop("text")
    ids = loaded.library.tokenizer(text, add_special_tokens=False)["input_ids"]
    rows = [{"text": text, **as_text}, {"input_ids": ids, **as_text}]
    whole = library_inputs(loaded, CASES[0])["input_ids"][0].tolist()
    for done in engine_of(folder).generate([*rows, {"input_ids": whole, **as_text}], ordered=True):
        assert done.error is None, done.error
        assert list(done.prompt_ids) == whole
