"""Prompts followed by texts to score: the border between them, checked against the bytes of the tokens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from batchgen.errors import ErrorCode, RowError
from batchgen.text.encode import Encoder
from batchgen.text.prompt_texts import join_texts
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.cases import examples
from tests.text.conftest import KINDS, SENTENCES, encode, encode_error

pytestmark = pytest.mark.field("completion", "completions")

piece = st.one_of(
    st.sampled_from(SENTENCES),
    st.text(alphabet="aenot .,é東ń—\n", max_size=8),
    st.sampled_from(SENTENCES).flatmap(lambda s: st.integers(0, len(s)).map(lambda n: s[:n])),
)


def byte_sizes(tokenizer: Tokenizer, kind: str, ids: list[int]) -> list[int]:
    """Number of UTF-8 bytes of each token's text."""
    if kind == "bytelevel":
        assert tokenizer.byte_level_tokens is not None
        return [len(tokenizer.byte_level_tokens[token]) for token in ids]
    spelled = [tokenizer.id_to_token(token) or "" for token in ids]
    found = [1 if re.fullmatch("<0x..>", s) else len(s.replace("▁", " ").encode()) for s in spelled]
    return [found[0] - 1, *found[1:]] if found else []  # without the space that the normaliser adds in front


@examples(200)
@given(prompt=piece.filter(bool), text=piece.filter(bool), kind=st.sampled_from(["bytelevel", "bytefallback"]))
def test_the_scored_part_starts_at_the_prompts_end(
    tokenizers: dict[str, Tokenizer], prompt: str, text: str, kind: str
) -> None:
    tokenizer = tokenizers[kind]
    ((ids, start),) = tokenizer.encode_continuations(prompt, [text])
    assert ids == tokenizer.encode_plain([prompt + text])[0]
    end, inside = 0, 0
    for size in byte_sizes(tokenizer, kind, ids):
        end += size
        inside += end <= len(prompt.encode())
    assert end == len((prompt + text).encode())
    assert start == inside


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer_splits_between_words(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    prompt, texts = "The quick brown fox", [" jumps over", " lazy dog."]
    for (ids, start), text in zip(tokenizer.encode_continuations(prompt, texts), texts, strict=True):
        assert ids == tokenizer.encode_plain([prompt + text])[0]
        assert ids[:start] == tokenizer.encode_plain([prompt])[0], "no token crosses the border"
        assert tokenizer.decode(ids[start:]).strip() == text.strip()


def test_trimmed_offsets_do_not_move_the_border(tmp_path: Path) -> None:
    """Byte-level post-processors trim spaces off token offsets, but the spaces still belong to the tokens."""
    letters = {letter: index for index, letter in enumerate(["f", "o", "b", "a", "r", "Ġ", "oĠ", "<s>"])}
    backend = Backend(models.BPE(letters, [("o", "Ġ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>").save_pretrained(tmp_path)
    ((ids, start),) = Tokenizer.load(tmp_path).encode_continuations("foo", [" bar"])
    assert ids == [0, 1, 6, 2, 3, 4]
    assert start == 2


def test_given_ids_are_concatenated_unchanged(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode_plain([" dog"])[0]
    joined = join_texts(tokenizer, None, [7, 8], [(9, 10), " dog", (11,)])
    assert [(item.ids, item.start) for item in joined] == [([7, 8, 9, 10], 2), ([7, 8, *plain], 2), ([7, 8, 11], 2)]
    alone = tokenizer.encode_plain(["The fox"])[0]
    (after_text,) = join_texts(tokenizer, "The fox", alone, [(9, 10)])
    assert (after_text.ids, after_text.start) == ([*alone, 9, 10], len(alone))


def test_a_text_without_tokens_is_an_error(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(RowError, match="without tokens") as caught:
        list(join_texts(tokenizers["wordpiece"], "The fox", [5], [" dog", "  "]))
    assert (caught.value.info.code, caught.value.info.param) == (ErrorCode.INVALID_FIELD, "completions")


def test_scoring_rows_are_encoded_prompt_by_text(tokenizer: Tokenizer) -> None:
    encoder = Encoder(tokenizer, tokenizer.vocab_size, 64)
    found = encode(encoder, {"text": ["The quick", "Hello there"], "completions": [" brown fox", [9]]})
    bos = tokenizer.prefix_ids
    plain = [bos + ids for ids in tokenizer.encode_plain(["The quick", "Hello there"])]
    assert [(p.prompt_index, p.text_index, p.max_new_tokens) for p in found] == [
        *((0, 0, 0), (0, 1, 0)),
        *((1, 0, 0), (1, 1, 0)),
    ]
    assert [p.ids[: p.score_start] for p in found] == [plain[0], plain[0], plain[1], plain[1]]
    assert found[0].ids == tokenizer.encode(["The quick brown fox"])[0]
    assert found[1].ids == [*plain[0], 9]
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    (answer,) = encode(encoder, {**chat, "completion": " you"})
    (alone,) = encode(encoder, chat)
    assert answer.ids[: answer.score_start] == alone.ids
    assert tokenizer.decode(answer.ids[answer.score_start :]) == " you"


def test_scoring_rows_out_of_range_or_too_long_are_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Encoder(tokenizer, tokenizer.vocab_size, 8)
    size = tokenizer.vocab_size
    error = encode_error(encoder, {"input_ids": [5], "completions": [[6], [size]]})
    assert (error.code, error.param) == (ErrorCode.TOKEN_OUT_OF_RANGE, "completions")
    long = encode_error(encoder, {"input_ids": [5] * 4, "completion": [6] * 6})
    assert long.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert "4 tokens" in long.message
    whole = encode(encoder, {"input_ids": [5] * 4, "completion": [6] * 5})
    assert len(whole[0].ids) == 9, "the last token has no place in the context"
    monkeypatch.setattr(tokenizer, "prefix_ids", [])
    assert len(tokenizer.encode_plain([" fox"])[0]) == 1, "' fox' is one token"
    straddling = encode_error(encoder, {"text": " f", "completion": "ox"})
    assert (straddling.code, straddling.param) == (ErrorCode.EMPTY_PROMPT, "text")


@pytest.mark.parametrize(("side", "kept"), [("left", [7, 8, 9]), ("right", [5, 6, 7])])
def test_truncation_cuts_the_prompt_alone(tokenizer: Tokenizer, side: str, kept: list[int]) -> None:
    encoder = Encoder(tokenizer, tokenizer.vocab_size, 8, side)  # type: ignore[arg-type]
    (prompt,) = encode(encoder, {"input_ids": [5, 6, 7, 8, 9], "completion": [10] * 5})
    assert (prompt.ids, prompt.score_start) == ([*kept, *[10] * 5], 3)
    too_long = encode_error(encoder, {"input_ids": [5], "completion": [10] * 9})
    assert too_long.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED
