"""Bytes of each token of a vocabulary, as the grammar compiler needs them."""

from __future__ import annotations

import re
from random import Random

from batchgen.errors import ErrorCode, RowError
from batchgen.text.tokens.token_bytes import TokenBytes
from batchgen.text.tokens.tokenizer import Tokenizer

VOCABULARIES = ("text", "json", "tag")
"""Kinds of vocabulary: plain text, JSON on one line, and structural tags, in which special tokens have text."""

_CONTROL = re.compile(rb"[\x00-\x1f]")
_TRIALS = 32


class Vocabularies:
    """Bytes of every token, by kind of vocabulary; tokens with no bytes are never sampled under a constraint.

    Special tokens have no bytes, since the text leaves them out, except in structural tags. Tokens with control
    characters have none in JSON, which is written on one line with such characters escaped. End-of-sequence ids never
    have any.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: size of the model's vocabulary; ids past the tokenizer's vocabulary have no bytes."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._pieces: list[bytes] | None = None

    def __getitem__(self, kind: str) -> list[bytes]:
        """[V] bytes of each token of the model's vocabulary, for a kind of `VOCABULARIES`.

        Raises:
            RowError: `unsupported_field`: the text of a token depends on its neighbours.
        """
        if self._pieces is None:
            self._pieces = _pieces(self._tokenizer, self._vocab_size)
        barred = set(self._tokenizer.eos_ids)
        if kind != "tag":
            barred |= self._tokenizer.special_ids
        pieces = list(self._pieces)
        for token in barred:
            if token < self._vocab_size:
                pieces[token] = b""
        if kind == "json":
            pieces = [b"" if _CONTROL.search(piece) else piece for piece in pieces]
        return pieces


def _pieces(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    known = min(vocab_size, tokenizer.vocab_size)
    found = TokenBytes(tokenizer)
    pieces = [found[token] for token in range(known)]
    if tokenizer.vocab_bytes is None:
        _check_pieces(tokenizer, pieces)
    return pieces + [b""] * (vocab_size - known)


def _check_pieces(tokenizer: Tokenizer, pieces: list[bytes]) -> None:
    """Compare joined pieces with decoded texts: only a leading space may differ.

    Raises:
        RowError: `unsupported_field`: something else differs.
    """
    rng = Random(0)
    plain = [token for token, piece in enumerate(pieces) if piece and token not in tokenizer.special_ids]
    for size in (1, 2, 8) * _TRIALS if plain else ():
        ids = rng.choices(plain, k=size)
        text, joined = tokenizer.decode(ids, False), b"".join(pieces[token] for token in ids)
        if text.encode() not in (joined, joined[1:] if joined[:1] == b" " else joined) and "\ufffd" not in text:
            message = (
                "the model's tokenizer decodes tokens depending on their neighbours, so the text of a single token is "
                "unknown to a constraint; remove the constraint"
            )
            raise RowError(ErrorCode.UNSUPPORTED_FIELD, message)
