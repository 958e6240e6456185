"""Long texts: tokenised in pieces with the ids that they have as a whole, and no further than the context needs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from batchgen.errors import ErrorCode
from batchgen.text import encode as encoding
from batchgen.text import prompt_texts
from batchgen.text.encode import Encoder
from batchgen.text.prompt_texts import ROW_TEXT_BYTES, UNCUT_CHARACTERS, LongTexts
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.text.conftest import KINDS, SENTENCES, encode, encode_error

CONTEXT = 64


def prose(characters: int, seed: int = 0) -> str:
    chosen = random.Random(seed)
    text = ""
    while len(text) < characters:
        text += chosen.choice(SENTENCES) + chosen.choice([" ", "\n", "\n\n", "  ", "\t", "…", "🙂 "])
    return text[:characters]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["start", "end"])
def test_a_part_has_the_ids_of_the_whole_text(
    tokenizers: dict[str, Tokenizer], kind: str, side: Literal["start", "end"]
) -> None:
    tokenizer = tokenizers[kind]
    for seed in range(2):
        text = prose(30_000, seed)
        whole = tokenizer.encode_plain([text])[0]
        part = LongTexts(tokenizer, CONTEXT).part(text, side)
        assert CONTEXT <= len(part.ids) < len(whole)
        assert not part.is_whole
        assert part.ids == (whole[: len(part.ids)] if side == "start" else whole[-len(part.ids) :])
        every = LongTexts(tokenizer, len(whole) + 1)
        every.piece = 1 << 14
        assert every.part(text, side) == (text, whole, True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("truncate", ["left", "right"])
def test_a_long_text_is_truncated_as_its_ids_would_be(
    tokenizers: dict[str, Tokenizer], kind: str, truncate: Literal["left", "right"]
) -> None:
    tokenizer = tokenizers[kind]
    encoder = Encoder(tokenizer, tokenizer.vocab_size, CONTEXT, truncate)
    for text in (prose(20_000), "<s>" + prose(20_000, 1)):
        ids = tokenizer.encode([text])[0]
        bos = tokenizer.prefix_ids
        kept = CONTEXT - 10
        right = ids[:kept]
        left = bos + ids[len(ids) - kept + len(bos) :]
        (prompt,) = encode(encoder, {"text": text, "max_new_tokens": 10})
        assert prompt.ids == (left if truncate == "left" else right)
    assert encoder.truncated == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("truncate", ["left", "right"])
def test_texts_to_score_are_tokenised_behind_the_end_of_a_long_prompt(
    tokenizers: dict[str, Tokenizer], kind: str, truncate: Literal["left", "right"]
) -> None:
    tokenizer = tokenizers[kind]
    encoder = Encoder(tokenizer, tokenizer.vocab_size, CONTEXT, truncate)
    bos = tokenizer.prefix_ids
    for end in (" Answer: ", " jump"):
        text, scored = prose(20_000) + end, ["ing", "yes", " fox"]
        prompts = encode(encoder, {"text": text, "completions": scored})
        wanted = tokenizer.encode_continuations(text, scored)
        for prompt, (ids, start) in zip(prompts, wanted, strict=True):
            kept = CONTEXT - len(ids[start:])
            left = bos + ids[start - kept + len(bos) : start]
            right = (ids[:kept] if ids[: len(bos)] == bos else bos + ids)[:kept]
            assert prompt.ids == (left if truncate == "left" else right) + ids[start:]
            assert prompt.score_start == kept


@pytest.mark.parametrize("truncate", ["left", "right"])
def test_a_text_that_cannot_be_cut_is_truncated_all_the_same(
    tokenizers: dict[str, Tokenizer], truncate: Literal["left", "right"]
) -> None:
    tokenizer = tokenizers["bytelevel"]
    text = "a" * (2 * UNCUT_CHARACTERS)
    (prompt,) = encode(Encoder(tokenizer, tokenizer.vocab_size, CONTEXT, truncate), {"text": text, "max_new_tokens": 4})
    (a,) = tokenizer.encode_plain(["a"])[0]
    assert prompt.ids == tokenizer.prefix_ids + [a] * (CONTEXT - 4 - len(tokenizer.prefix_ids))


@pytest.mark.parametrize("truncate", ["none", "left", "right"])
@pytest.mark.parametrize("context", [2500, 20_000])
def test_a_text_of_one_letter_is_cut_for_every_context(
    tmp_path: Path, context: int, truncate: Literal["none", "left", "right"]
) -> None:
    """Of a letter whose tokens have 16 of them, so that the first piece does not fill the context."""
    letters = ["a" * (1 << power) for power in range(5)]
    backend = Backend(models.BPE({each: index for index, each in enumerate(letters)}, [(a, a) for a in letters[:-1]]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    encoder = Encoder(tokenizer, tokenizer.vocab_size, context, truncate)
    row = {"text": "a" * (UNCUT_CHARACTERS + 100_000), "max_new_tokens": 4}
    if truncate == "none":
        assert f"the context is {context}" in encode_error(encoder, row).message
    else:
        (prompt,) = encode(encoder, row)
        assert len(prompt.ids) == context - 4


TOO_LONG: dict[str, dict[str, Any]] = {
    "text": {"text": prose(20_000)},
    "several": {"text": ["fox", prose(20_000)]},
    "conversation": {"messages": [{"role": "user", "content": prose(20_000)}]},
    "one letter": {"text": "a" * 3_000_000},
    "scored": {"text": prose(20_000), "completion": "a"},
    "text to score": {"text": "fox", "completions": ["a", prose(20_000)]},
    "raw line": {"method": "POST", "url": "/v1/completions", "body": {"prompt": prose(20_000)}},
}


@pytest.mark.parametrize("row", TOO_LONG.values(), ids=TOO_LONG)
def test_a_text_that_can_never_fit_is_refused_with_numbers(tokenizer: Tokenizer, row: dict[str, Any]) -> None:
    error = encode_error(Encoder(tokenizer, tokenizer.vocab_size, CONTEXT), row)
    assert error.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED
    size = "3000000" if "text" in row and len(row["text"]) == 3_000_000 else "20"
    assert f"has {size}" in error.message
    assert "the context is 64" in error.message


@pytest.mark.parametrize("kind", KINDS)
def test_what_fits_is_never_refused(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """Normalisers and decoders of some kinds drop or shorten text: the tokens count, and not the characters."""
    tokenizer = tokenizers[kind]
    for text in (
        "fox" + " " * 40_000,
        " \n" * 20_000,
        "fox dog " * 6_000,
        "\u0301" * 20_000,
        "x" * 20_000,
        prose(20_000),
    ):
        ids = tokenizer.encode([text])[0]
        (prompt,) = encode(Encoder(tokenizer, tokenizer.vocab_size, len(ids) + 1), {"text": text})
        assert prompt.ids == ids
        error = encode_error(Encoder(tokenizer, tokenizer.vocab_size, max(1, len(ids))), {"text": text})
        assert error.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_a_stretch_without_a_place_to_cut_has_a_limit(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["wordpiece"]  # one token for a word without end
    encoder = Encoder(tokenizer, tokenizer.vocab_size, CONTEXT)
    assert encode(encoder, {"text": "x" * UNCUT_CHARACTERS})
    error = encode_error(encoder, {"text": "x" * (UNCUT_CHARACTERS + 1)})
    assert (error.code, str(UNCUT_CHARACTERS) in error.message) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, True)


def test_the_prompts_of_a_row_have_a_limit_of_text(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(tokenizer, tokenizer.vocab_size, CONTEXT)
    monkeypatch.setattr(prompt_texts, "ROW_TEXT_BYTES", 40)
    assert encode(encoder, {"text": ["a" * 20, "é" * 5 + "a" * 10]})
    assert encode_error(encoder, {"text": ["a" * 21, "é" * 5 + "a" * 10]}).code == ErrorCode.INVALID_FIELD
    assert encode(encoder, {"text": "a" * 41}), "one prompt is bounded by the context"
    assert ROW_TEXT_BYTES == 16 << 20


def test_the_texts_to_score_have_a_limit_of_tokens(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(tokenizer, tokenizer.vocab_size, CONTEXT)
    row = {"input_ids": [[5, 6], [7]], "completions": [[8], [9, 10]]}
    monkeypatch.setattr(encoding, "SCORED_TOKENS", 12)
    assert len(encode(encoder, row)) == 4
    monkeypatch.setattr(encoding, "SCORED_TOKENS", 11)
    error = encode_error(encoder, row)
    assert (error.code, error.param) == (ErrorCode.INVALID_FIELD, "completions")
