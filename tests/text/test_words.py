"""Bad words as ids, for every kind of tokenizer."""

from __future__ import annotations

import pytest

from batchgen.errors import ErrorCode, RowError
from batchgen.text.tokenizer import Tokenizer
from batchgen.text.words import bad_sequences
from tests.text.conftest import KINDS

WORDS = ["quick", "Hello", "numbers", "add", "you"]


def holds(ids: list[int], words: tuple[tuple[int, ...], ...]) -> bool:
    return any(tuple(ids[i : i + len(word)]) == word for word in words for i in range(len(ids)))


@pytest.mark.field("bad_words")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("lead", ["", " "])
def test_the_word_is_found_at_a_beginning_behind_a_space_and_behind_a_break(
    tokenizers: dict[str, Tokenizer], kind: str, word: str, lead: str
) -> None:
    tokenizer = tokenizers[kind]
    found = bad_sequences([lead + word], tokenizer, tokenizer.vocab_size)
    assert all(tokenizer.decode(ids).strip() == word for ids in found)
    texts = [word, f"The {word}", f"a\n{word}", f"The {word} dog"]
    # This one's learned merges cross blanks, as those of no model do: a word in a text may be spelled otherwise.
    for text in texts[:1] if kind == "bytefallback" else texts:
        (ids,) = tokenizer.encode_plain([text])
        assert holds(ids, found), text
    (other,) = tokenizer.encode_plain(["lazy fox"])
    assert not holds(other, found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_leading_space_says_nothing(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    forms = [bad_sequences([text], tokenizer, tokenizer.vocab_size) for text in ("fox", " fox", "  fox")]
    assert forms[0] == forms[1] == forms[2]


def test_byte_level_words_have_two_forms(tokenizer: Tokenizer) -> None:
    plain, spaced = tokenizer.encode_plain(["fox", " fox"])
    assert bad_sequences(["fox"], tokenizer, tokenizer.vocab_size) == (tuple(plain), tuple(spaced))
    assert bad_sequences([" "], tokenizer, tokenizer.vocab_size) == (tuple(tokenizer.encode_plain([" "])[0]),)


def test_ids_pass_through_and_each_sequence_stands_once(tokenizer: Tokenizer) -> None:
    (fox,) = tokenizer.encode_plain(["fox"])
    words = bad_sequences([(3, 4), "fox", (3, 4), tuple(fox), (9,)], tokenizer, tokenizer.vocab_size)
    assert words[0] == (3, 4)
    assert words[-1] == (9,)
    assert len(set(words)) == len(words) == 4
    assert bad_sequences([(3, 4), (3, 400)], tokenizer, 400) == ((3, 4),), "nothing past the vocabulary is ever drawn"


@pytest.mark.parametrize("kind", KINDS)
def test_words_without_tokens_are_refused(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    for word in (" ", "\n"):
        if any(tokenizer.encode_plain([word, "\n" + word])):
            assert bad_sequences([word], tokenizer, tokenizer.vocab_size)
            continue
        with pytest.raises(RowError, match="gives no tokens") as caught:
            bad_sequences([word], tokenizer, tokenizer.vocab_size)
        assert (caught.value.info.code, caught.value.info.param) == (ErrorCode.INVALID_FIELD, "bad_words")
