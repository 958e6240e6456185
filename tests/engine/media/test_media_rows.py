"""Rows with images equal transformers' eager model given the features; each image is decoded and encoded once."""

from __future__ import annotations

from array import array
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from batchgen.engine.media.embeds_reader import TensorFiles
from batchgen.engine.media.sources import GivenItems
from batchgen.errors import RowError
from batchgen.media.root import MediaRoot
from batchgen.request.completion import Completion
from batchgen.request.fields.media import MediaItem
from batchgen.request.fields.prompts import TokenPrompt
from tests.engine.media.fake_media import (
    BEGIN,
    END,
    FEATURE,
    FakeMedia,
    broken,
    expected,
    features_of,
    media_engine,
    patches_of,
    picture,
    prompt_ids,
    row,
    save_model,
)
from tests.engine.reference import NEAR_TIE, assert_all_same
from tests.models.loading import load_model

A, B, C = picture(1), picture(2, 6, 4), picture(3, 8, 8)
PROMPTS: list[tuple[str, list[Any]]] = [
    ("5 6 # 7 8", [A]),
    ("5 6 # 7 9", [A]),  # shares the image with the first
    ("5 6 # 7 8", [B]),  # the same text with another image
    ("5 6 # # 9", [A, A]),
    ("5 6 # # 9", [A, B]),
    ("# 11 12 # 13 #", [C, A, B]),
    ("#", [C]),
    ("5 6 7 8 9", []),
    ("5 6 201 200 202 7", []),  # the model's own tokens in a text without images
    ("10 " * 20 + "# 4", [C]),
]


def output(patches: Any, ids: list[int]) -> dict[str, Any]:
    """A row whose image is the output of the processor."""
    given = row("", {"format": "processor_output", "patches": patches, "input_ids": [ids]})
    del given["text"]
    return {**given, "input_ids": ids}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[tuple[list[int], list[float]]]:
    return [expected(folder, text, *pictures) for text, pictures in PROMPTS]


def rows(**fields: Any) -> list[dict[str, Any]]:
    return [row(text, *pictures, **fields) for text, pictures in PROMPTS]


def assert_equal(found: list[Completion], wanted: list[tuple[list[int], list[float]]]) -> None:
    assert len(found) == len(wanted)
    for got, (ids, logprobs) in zip(found, wanted, strict=True):
        assert got.error is None, got.error
        assert list(got.output_ids or ()) == ids
        np.testing.assert_allclose(got.output_logprobs, logprobs, atol=NEAR_TIE, rtol=0)


CHUNKED = {"max_tokens_per_step": 7, "max_num_seqs": 4}  # chunks end inside of images
WAYS = [{}, {"max_num_seqs": 2}, CHUNKED, {"deterministic": True}, {"dedup": False, "attention": "compiled"}]


@pytest.mark.field("image_data")
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_rows_equal_the_eager_model(folder: Path, wanted: Any, options: dict[str, Any]) -> None:
    fake = FakeMedia()
    found = list(media_engine(folder, fake, **options).generate(rows(), ordered=True))
    assert_equal(found, wanted)
    assert set(fake.counted.decoded.values()) == set(fake.counted.encoded.values()) == {1}
    assert len(fake.counted.encoded) == 3


def test_preempted_rows_go_on_as_they_began(folder: Path) -> None:
    many = [row(f"{n} # {n} #", A, picture(n), max_new_tokens=70) for n in range(10, 40)]
    wanted = list(media_engine(folder, FakeMedia()).generate(many, ordered=True))
    fake = FakeMedia()
    engine = media_engine(folder, fake, kv_memory="1MiB")
    engine.admission = "free"
    found = list(engine.generate(many, ordered=True))
    assert engine.last_run.scheduler.stats.preemptions > 0
    assert_all_same(found, wanted)
    assert set(fake.counted.encoded.values()) == {1}


def test_rows_do_not_depend_on_their_order_and_neighbours(folder: Path, wanted: Any) -> None:
    engine, order = media_engine(folder, FakeMedia()), np.random.default_rng(0).permutation(len(PROMPTS)).tolist()
    shuffled = list(engine.generate([rows()[index] for index in order], ordered=True))
    assert_equal(shuffled, [wanted[index] for index in order])
    alone = [done for each in rows() for done in engine.generate([each])]
    assert_equal(alone, wanted)


def test_equal_images_share_tokens_and_others_do_not(folder: Path) -> None:
    engine = media_engine(folder, FakeMedia(), dedup=False)
    first, second, third, *_ = engine.generate(rows(), ordered=True)
    begun = prompt_ids("5 6 # 7", A)
    assert sorted((first.cached_tokens, second.cached_tokens)) == [len(["5", "6", "B"]), len(begun)]
    assert third.cached_tokens in (0, 3)  # as far as the text in front of the image and its first token
    shared = list(engine.generate([row("5 # 6", B), row("5 # 6", B.copy()), row("5 # 6", A)], ordered=True))
    assert sorted(done.cached_tokens or 0 for done in shared) == [0, 2, len(prompt_ids("5 # 6", B))]


def test_what_people_see_has_the_models_own_ids(folder: Path) -> None:
    done, text = media_engine(folder, FakeMedia()).generate(
        [row("5 # 7", A, echo=True, logprob_start_len=0, return_text_in_logprobs=True), row("5 7")], ordered=True
    )
    ids = prompt_ids("5 # 7", A)
    assert list(done.prompt_ids) == ids
    assert done.text.startswith(" ".join(f"w{token}" for token in ids))
    assert done.input_tokens_text == [f"w{token}" for token in ids]
    assert (done.prompt_tokens, done.media_tokens) == (len(ids), len(patches_of(A)))
    assert (text.prompt_tokens, text.media_tokens) == (2, None)


@pytest.mark.field("input_ids")
@pytest.mark.parametrize("ids", [[5, FEATURE, 7], [5, BEGIN, *[FEATURE] * 4, END, 7]], ids=["placeholder", "expanded"])
def test_ids_may_hold_a_placeholder_or_all_tokens(folder: Path, ids: list[int]) -> None:
    given = row("", A)
    del given["text"]
    (found,) = media_engine(folder, FakeMedia()).generate([{**given, "input_ids": ids}])
    assert_equal([found], [expected(folder, "5 # 7", A)])
    assert list(found.prompt_ids) == prompt_ids("5 # 7", A)


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (row("5 6", A), "media_error", "there are 1 of its kind, and 0 placeholders"),
        (row("5 # # 6", A), "media_error", "there are 1 of its kind, and 2 placeholders"),
        (row("# 6", A, B), "media_error", "there are 2 of its kind, and 1 placeholders"),
        (row("# 6", broken(5)), "media_error", "cannot be decoded"),
        (row("# 6", picture(1, 66, 2)), "media_error", "too large"),
        (row("# 6", picture(1, 64, 64)), "context_length_exceeded", "become 1024 tokens"),
        (row("1 " * 480 + "# # 3", C, C), "context_length_exceeded", "has 517 tokens"),
        (row("# 6", {"format": "processor_output", "x": 1}), "unsupported_field", "needs `input_ids`"),
        (row("# 6", {"format": "precomputed_embedding", "feature": [[1.0]]}), "invalid_field", "the model needs 64"),
        (row("# 6", {"format": "precomputed_embedding", "feature": "a:b"}), "invalid_field", "name a tensor as FILE"),
        (output([[1.0]], [200, 6]), "media_error", "cannot be encoded"),
        (output([["a"]], [200, 6]), "invalid_field", "not an array of numbers"),
        (output([[1.0]], [6]), "media_error", "has no token in `input_ids`"),
        ({**row("# 6"), "audio_data": [b"RIFF"]}, "unsupported_field", "is a sound, and this model takes images alone"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_a_bad_row_fails_alone(folder: Path, wanted: Any, given: dict[str, Any], code: str, words: str) -> None:
    engine = media_engine(folder, FakeMedia())
    bad, *good = engine.generate([given, *rows()], ordered=True)
    assert (str(bad.error.code), words in bad.error.message) == (code, True), bad.error
    assert_equal(good, wanted)


@pytest.mark.parametrize("inline", [True, False])
def test_features_and_processor_outputs_equal_the_image(folder: Path, tmp_path: Path, inline: bool) -> None:
    features, patches = features_of(patches_of(A)), torch.from_numpy(patches_of(A))
    save_file({"features": features, "patches": patches}, tmp_path / "given.safetensors")
    feature: Any = features.tolist() if inline else "given.safetensors:features"
    given: Any = patches.numpy() if inline else "given.safetensors:patches"
    fake = FakeMedia()
    rows = [
        row("5 6 # 7 8", A),
        row("5 6 # 7 8", {"format": "precomputed_embedding", "feature": feature}),
        row("5 6 # 7 9", {"format": "precomputed_embedding", "feature": feature}),
        output(given, prompt_ids("5 6 # 7 8", A)),
    ]
    engine = media_engine(folder, fake, media_root=str(tmp_path))
    found = list(engine.generate(rows, ordered=True))
    wanted = [expected(folder, text, A) for text in ("5 6 # 7 8", "5 6 # 7 8", "5 6 # 7 9", "5 6 # 7 8")]
    assert_equal(found, wanted)
    assert [done.media_tokens for done in found] == [4] * 4
    assert found[1].cached_tokens or found[2].cached_tokens
    assert fake.counted.encoded.total() == 2


def test_a_prompt_with_images_is_not_truncated(folder: Path) -> None:
    given = [row("1 " * 480 + "# # 3", C, C), row("1 " * 600)]
    refused, cut = media_engine(folder, FakeMedia(), truncate="left").generate(given, ordered=True)
    assert "a prompt with media is not cut" in refused.error.message
    assert cut.error is None


def test_all_rows_of_an_image_that_cannot_be_decoded_fail_and_no_others(folder: Path, wanted: Any) -> None:
    fake, odd = FakeMedia(), broken(9)
    bad = [row("5 6 # 7 8", odd), row("5 # # 7", A, odd), row("3 4 #", odd, n=2, temperature=1.0)]
    found = list(media_engine(folder, fake, max_num_seqs=2).generate([*rows(), *bad], ordered=True))
    assert_equal(found[: len(PROMPTS)], wanted)
    assert [done.error is not None and str(done.error.code) for done in found[len(PROMPTS) :]] == ["media_error"] * 3
    assert set(fake.counted.decoded.values()) == {1}


@pytest.mark.parametrize("fields", [{}, {"n": 3, "temperature": 1.0}, {"max_new_tokens": 0, "logprob_start_len": 0}])
def test_a_row_that_its_first_step_ends_fails_with_its_image(folder: Path, fields: dict[str, Any]) -> None:
    """Also if the step finds out, because decoding takes longer than planning."""
    fake, given = FakeMedia(), [row("5 #", broken(9), **{"max_new_tokens": 1, **fields})]
    engine = media_engine(folder, fake)
    fake.hold.clear()
    Timer(0.5, fake.hold.set).start()
    (failed,) = engine.generate(given)
    assert failed.error.code == "media_error"


def test_several_prompts_samples_scores_and_states(folder: Path) -> None:
    engine = media_engine(folder, FakeMedia())
    several = row("", [A], [B])
    several["text"] = ["w5 w200", "w6 w200"]
    given = [
        several,
        row("5 #", A, n=2, temperature=1.0, seed=1),
        {"text": "w5 w200", "image_data": A, "completions": ["w7 w8", [9, 200]], "id": "scored"},
        row("5 #", A, return_hidden_states=True),
    ]
    found = list(engine.generate(given, ordered=True))
    assert [done.error for done in found if done.error is not None] == []
    assert_equal(found[:2], [expected(folder, "5 #", A), expected(folder, "6 #", B)])
    assert [done.sample_index for done in found[2:4]] == [0, 1]
    scored, states = found[4:]
    assert [score.tokens for score in scored.scores] == [2, 2]
    assert scored.media_tokens == 8
    assert states.states[0].values.shape[0] == len(prompt_ids("5 #", A)) + 5


def test_a_second_job_encodes_its_own_images(folder: Path, wanted: Any) -> None:
    fake = FakeMedia()
    engine = media_engine(folder, fake)
    for _ in range(2):
        assert_all_same(engine.generate(rows(), ordered=True), engine.generate(rows(), ordered=True))
    assert set(fake.counted.encoded.values()) == {4}


def given_item(**values: Any) -> MediaItem:
    return MediaItem("image", {"patches": [[0.5]], **values}, "image_data[1]", form="processor_output")


def test_integers_of_a_processor_output_are_exact(folder: Path) -> None:
    fake: Any = FakeMedia()
    items = GivenItems(load_model(str(folder)).spec, fake, TensorFiles(MediaRoot(None)), None)
    item = given_item(grid=[[(1 << 24) + 1, 2]], scale=[0.25])
    distinct, _ = items.read(item, TokenPrompt(array("i", (FEATURE, 7))), [item])
    tensors = distinct.source.prepare(fake, distinct).tensors
    assert tensors["grid"].tolist() == distinct.layout["grid"].tolist() == [[(1 << 24) + 1, 2]]
    assert tensors["scale"].tolist() == [0.25]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_a_processor_output_is_finite(folder: Path, value: float) -> None:
    fake: Any = FakeMedia()
    items = GivenItems(load_model(str(folder)).spec, fake, TensorFiles(MediaRoot(None)), None)
    item = given_item(scale=[value])
    with pytest.raises(RowError, match=r"`image_data\[1\]` has an infinite or NaN value in scale"):
        items.read(item, TokenPrompt(array("i", (FEATURE, 7))), [item])
