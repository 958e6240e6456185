"""Token id sequences of `bad_words`, for every kind of tokenizer."""

from __future__ import annotations

import pytest

from batchgen.errors import ErrorCode, RowError
from batchgen.text.param_checks import bad_word_sequences
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.text.conftest import KINDS


def contains(ids: list[int], words: tuple[tuple[int, ...], ...]) -> bool:
    return any(tuple(ids[i : i + len(word)]) == word for word in words for i in range(len(ids)))


@pytest.mark.field("bad_words")
@pytest.mark.parametrize("kind", KINDS)
def test_bad_words_are_found_at_the_start_after_a_space_and_after_a_line_break(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    (other,) = tokenizer.encode_plain(["lazy fox"])
    for word in ("quick", "Hello", "numbers", "add", "you"):
        forms = [
            bad_word_sequences([form], tokenizer, tokenizer.vocab_size) for form in (word, f" {word}", f"  {word}")
        ]
        assert forms[0] == forms[1] == forms[2], "a leading space has no effect"
        assert all(tokenizer.decode(ids).strip() == word for ids in forms[0])
        texts = [word, f"The {word}", f"a\n{word}", f"The {word} dog"]
        # The merges of this tokenizer cross spaces, so words inside a text may be encoded otherwise.
        for ids in tokenizer.encode_plain(texts[:1] if kind == "bytefallback" else texts):
            assert contains(ids, forms[0]), word
        assert not contains(other, forms[0])


def test_byte_level_bad_words_have_two_sequences(tokenizer: Tokenizer) -> None:
    plain, spaced = tokenizer.encode_plain(["fox", " fox"])
    assert bad_word_sequences(["fox"], tokenizer, tokenizer.vocab_size) == (tuple(plain), tuple(spaced))
    assert bad_word_sequences([" "], tokenizer, tokenizer.vocab_size) == (tuple(tokenizer.encode_plain([" "])[0]),)


def test_given_ids_are_kept_and_sequences_are_distinct(tokenizer: Tokenizer) -> None:
    (fox,) = tokenizer.encode_plain(["fox"])
    words = bad_word_sequences([(3, 4), "fox", (3, 4), tuple(fox), (9,)], tokenizer, tokenizer.vocab_size)
    assert words[0] == (3, 4)
    assert words[-1] == (9,)
    assert len(set(words)) == len(words) == 4
    assert bad_word_sequences([(3, 4), (3, 400)], tokenizer, 400) == ((3, 4),), (
        "ids past the vocabulary are never sampled"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_words_without_tokens_are_refused(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    for word in (" ", "\n"):
        if any(tokenizer.encode_plain([word, "\n" + word])):
            assert bad_word_sequences([word], tokenizer, tokenizer.vocab_size)
            continue
        with pytest.raises(RowError, match="gives no tokens") as caught:
            bad_word_sequences([word], tokenizer, tokenizer.vocab_size)
        assert (caught.value.info.code, caught.value.info.param) == (ErrorCode.INVALID_FIELD, "bad_words")
