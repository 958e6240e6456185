"""A tokenizer's vocabulary as bytes: what a grammar needs to know of each token."""

from __future__ import annotations

import re
from random import Random

from batchgen.errors import ErrorCode, RowError
from batchgen.text.token_bytes import TokenBytes
from batchgen.text.tokenizer import Tokenizer

__all__ = ["VOCABULARIES", "Vocabularies"]

VOCABULARIES = ("text", "json", "tag")
"""Kinds of vocabulary: of plain text, of JSON in one line, and of structural tags, where special tokens have text."""

_CONTROL = re.compile(rb"[\x00-\x1f]")
_TRIALS = 32


class Vocabularies:
    """The bytes of every token, by kind of constraint; a token with none is never drawn under it.

    Special tokens have none, since the text leaves them out, except in structural tags. Tokens that hold control
    characters have none in JSON: it is written in one line, and its strings escape them. Ids of the end-of-sequence set
    have none anywhere.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size` is the model's; ids past the tokenizer's have no bytes."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._pieces: list[bytes] | None = None

    def __getitem__(self, kind: str) -> list[bytes]:
        """Bytes of each of the model's V tokens.

        Raises:
            RowError: `unsupported_field`, where the text of a token depends on its neighbours.
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
    if tokenizer.spelled_bytes is None:
        _check_pieces(tokenizer, pieces)
    return pieces + [b""] * (vocab_size - known)


def _check_pieces(tokenizer: Tokenizer, pieces: list[bytes]) -> None:
    """Hold the pieces to whole texts: a leading blank may be lost, nothing else may change.

    Raises:
        RowError: `unsupported_field`.
    """
    rng = Random(0)
    plain = [token for token, piece in enumerate(pieces) if piece and token not in tokenizer.special_ids]
    for size in (1, 2, 8) * _TRIALS if plain else ():
        ids = rng.choices(plain, k=size)
        text, joined = tokenizer.decode(ids, False), b"".join(pieces[token] for token in ids)
        if text.encode() not in (joined, joined[1:] if joined[:1] == b" " else joined) and "\ufffd" not in text:
            message = (
                "the model's tokenizer spells tokens by their neighbours, so a constraint cannot tell what a token "
                "writes; remove the constraint"
            )
            raise RowError(ErrorCode.UNSUPPORTED_FIELD, message)
