"""`TokenBytes`: the joined bytes of tokens are the decoded text."""

from __future__ import annotations

import pytest

from batchgen.text.tokens.detokenize import TokenBytes
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.text.conftest import KINDS, SENTENCES


@pytest.mark.parametrize("kind", KINDS)
def test_joined_token_bytes_are_the_decoded_text(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    pieces = TokenBytes(tokenizer)
    for text in [*SENTENCES, "naïve 東京 🦊", "a  b\n\tc"]:
        ids = [token for token in tokenizer.encode_plain([text])[0] if token not in tokenizer.special_ids]
        joined = b"".join(pieces[token] for token in ids).decode()
        assert joined == tokenizer.decode_output(ids, skip_special_tokens=False)
    for token in tokenizer.special_ids:
        assert pieces[token].decode() == tokenizer.id_to_token(token)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_past_the_vocabulary_have_no_bytes(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    assert TokenBytes(tokenizers[kind])[tokenizers[kind].vocab_size] == b""


def test_tokens_of_a_split_character_have_one_byte_each(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in ("bytelevel", "bytefallback"):
        tokenizer = tokenizers[kind]
        ids = tokenizer.encode_plain(["🦊"])[0]
        assert len(ids) > 1
        assert [len(TokenBytes(tokenizer)[token]) for token in ids[-3:]] == [1, 1, 1]
