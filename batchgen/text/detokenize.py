"""Text token by token: what a new token makes certain, at a cost that does not grow with the text.

The promise is exact: the pieces that `append` and `flush` return, joined, are `Tokenizer.decode_output` of all ids. Two
ways lead there. Byte-level tokens are bytes, and only an unfinished character at the end waits. For any other decoder
the last certain token and those after it are decoded anew; since those decoders treat a token by what is just before it
(a first token loses its leading space, bytes join to characters), one token of context is enough.
"""

from __future__ import annotations

import codecs
import re
from typing import Protocol

from batchgen.text.pieces import BytePieces
from batchgen.text.tokenizer import Tokenizer

__all__ = ["REPLACEMENT", "Detokenizer"]

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands for bytes that are no character, or not yet."""


class _Run(Protocol):
    """A stretch of tokens that are decoded together."""

    def append(self, token: int) -> str: ...
    def tail(self) -> str: ...
    def flush(self) -> str: ...


class _ByteRun:
    """Byte-level tokens: an incremental UTF-8 decoder over their bytes."""

    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, token: int) -> str:
        return self._decoder.decode(self._pieces[token])

    def tail(self) -> str:
        return self._decoder.getstate()[0].decode("utf-8", "replace")

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowRun:
    """Tokens of any other decoder: decodes the last certain token with the pending ones.

    A run of byte tokens (`<0xE2>`) waits for its end: one invalid byte makes the decoder replace the whole run.
    """

    def __init__(self, tokenizer: Tokenizer, begins: bool) -> None:
        """`begins`: it is the output's first, which stands behind the prompt."""
        self._tokenizer = tokenizer
        self._context = [*tokenizer.anchor] if begins else []
        self._pending: list[int] = []
        self._known = len(tokenizer.anchor_text) if begins else 0
        """Characters of the decoded window that belong to the context."""

    def append(self, token: int) -> str:
        spelled = self._tokenizer.id_to_token(token)
        if spelled is None:
            return ""  # past the vocabulary: decoders skip it
        self._pending.append(token)
        if self._tokenizer.byte_fallback and _BYTE_TOKEN.fullmatch(spelled):
            return ""
        text = self._decode([*self._context, *self._pending])
        if text.endswith(REPLACEMENT):
            return ""
        fresh = text[self._known :]
        # A token without characters gives no context for the next, so the older context stays in front of it.
        self._context = [token] if spelled else [*self._context, *self._pending]
        self._pending = []
        self._known = len(self._decode(self._context))
        return fresh

    def tail(self) -> str:
        return self._decode([*self._context, *self._pending])[self._known :] if self._pending else ""

    def flush(self) -> str:
        fresh = self.tail()
        self._context, self._pending, self._known = [], [], 0
        return fresh

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class Detokenizer:
    """Incremental `Tokenizer.decode_output` with the same two switches, for one sequence."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids
        self._skip = skip_special_tokens
        self._spaces = spaces_between_special_tokens
        self._run = self._new_run(begins=True)

    def _new_run(self, *, begins: bool) -> _Run:
        pieces = self._tokenizer.byte_pieces
        return _WindowRun(self._tokenizer, begins) if pieces is None else _ByteRun(pieces)

    def append(self, token: int) -> str:
        """Take the next token; the text that no later token can change, often that of the token itself."""
        if token not in self._special:
            return self._run.append(token)
        if self._skip:
            return ""
        if self._spaces:
            return self._run.append(token)
        before = self._run.flush()
        self._run = self._new_run(begins=False)
        return before + (self._tokenizer.id_to_token(token) or "")

    @property
    def tail(self) -> str:
        """What the text would have beyond the pieces returned so far, if it ended here."""
        return self._run.tail()

    def flush(self) -> str:
        """The rest of the text; nothing may be appended after."""
        return self._run.flush()
