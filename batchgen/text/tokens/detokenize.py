"""Tokens to text: incremental detokenization, and the bytes of single tokens.

The cost per token does not grow with the text. The pieces that `append` and `flush` return, joined, are exactly
`Tokenizer.decode_output` of all ids. Byte-level tokens are decoded as bytes, and only an incomplete character at the
end waits. Any other decoder decodes the last stable token and the pending ones again for each token: such decoders
treat a token by the one before it (a first token loses its leading space, bytes join to characters), so one token of
context is enough.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from batchgen.request.fields.params import SamplingParams
from batchgen.text.tokens.tokenizer import ByteLevelTokens, Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""U+FFFD, the replacement for bytes that are not a complete character."""


class _Segment(Protocol):
    """Incremental decoder of a stretch of tokens; see `Detokenizer` for the methods."""

    def append(self, token: int) -> str: ...
    def tail(self) -> str: ...
    def flush(self) -> str: ...


class _ByteLevelSegment:
    """Segment of byte-level tokens: an incremental UTF-8 decoder over their bytes."""

    def __init__(self, pieces: ByteLevelTokens) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, token: int) -> str:
        return self._decoder.decode(self._pieces[token])

    def tail(self) -> str:
        return self._decoder.getstate()[0].decode("utf-8", "replace")

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowSegment:
    """Segment of tokens of any other decoder: the last stable token and the pending ones are decoded together.

    A run of byte tokens (`<0xE2>`) is pending until it ends: one invalid byte makes the decoder replace the whole run.
    """

    def __init__(self, tokenizer: Tokenizer, first: bool) -> None:
        """`first`: the segment is the output's first, which follows the prompt."""
        self._tokenizer = tokenizer
        self._context = [*tokenizer.decode_prefix] if first else []
        self._pending: list[int] = []
        self._context_length = len(tokenizer.decode_prefix_text) if first else 0
        """Number of characters of the decoded window that belong to the context."""

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
        stable = text[self._context_length :]
        # A token without characters gives no context for the next, so the older context stays in front of it.
        self._context = [token] if spelled else [*self._context, *self._pending]
        self._pending = []
        self._context_length = len(self._decode(self._context))
        return stable

    def tail(self) -> str:
        return self._decode([*self._context, *self._pending])[self._context_length :] if self._pending else ""

    def flush(self) -> str:
        stable = self.tail()
        self._context, self._pending, self._context_length = [], [], 0
        return stable

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class Detokenizer:
    """Incremental `Tokenizer.decode_output` of one sequence, with the same two options."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids
        self._skip = skip_special_tokens
        self._spaces = spaces_between_special_tokens
        self._segment = self._new_segment(first=True)

    def _new_segment(self, *, first: bool) -> _Segment:
        pieces = self._tokenizer.byte_level_tokens
        return _WindowSegment(self._tokenizer, first) if pieces is None else _ByteLevelSegment(pieces)

    def append(self, token: int) -> str:
        """Add the next token and return the new stable text, which no later token can change."""
        if token not in self._special:
            return self._segment.append(token)
        if self._skip:
            return ""
        if self._spaces:
            return self._segment.append(token)
        before = self._segment.flush()
        self._segment = self._new_segment(first=False)
        return before + (self._tokenizer.id_to_token(token) or "")

    @property
    def tail(self) -> str:
        """Text beyond the pieces returned so far, if the sequence ended here."""
        return self._segment.tail()

    def flush(self) -> str:
        """Return the rest of the text; nothing may be appended afterwards."""
        return self._segment.flush()


def add_echo_and_suffix(text: str, prompt_ids: Sequence[int], params: SamplingParams, tokenizer: Tokenizer) -> str:
    """The completion's `text`, after the prompt's text where `echo` is set and before `suffix`.

    Args:
        text: the completion's text, with the space that separates it from the prompt, if there is one.
        prompt_ids: [P] token ids of the prompt.
        params: the row's parameters.
        tokenizer: the model's tokenizer.
    """
    prompt = echo_text(prompt_ids, tokenizer) if params.echo else ""
    return f"{prompt}{text}{params.suffix or ''}"


def echo_text(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The prompt's text with special tokens written out, without the BOS that the tokenizer adds."""
    prefix = tokenizer.prefix_ids
    ids = [int(token) for token in prompt_ids]
    without_bos = ids[len(prefix) :] if ids[: len(prefix)] == prefix else ids
    return tokenizer.decode(without_bos, skip_special_tokens=False)


class TokenBytes(dict[int, bytes]):
    """Token id -> its bytes, filled on first use; ids past the vocabulary have none.

    The bytes of a sequence, joined, are its text after other text, with special tokens written out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        # Without an ordinary word in the vocabulary a special token serves: special tokens are written out here.
        self._prefix = tokenizer.decode_prefix or tuple(tokenizer.encode_plain(["a"])[0][:1])
        self._prefix_text = tokenizer.decode(self._prefix, skip_special_tokens=False)

    def __missing__(self, token: int) -> bytes:
        self[token] = piece = self._find(token)
        return piece

    def _find(self, token: int) -> bytes:
        tokenizer = self._tokenizer
        spelled = tokenizer.id_to_token(token)
        if spelled is None:
            return b""
        if token in tokenizer.special_ids:
            return spelled.encode()
        if tokenizer.vocab_bytes is not None:
            return tokenizer.vocab_bytes[token]
        byte = _BYTE_TOKEN.fullmatch(spelled) if tokenizer.byte_fallback else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        # After another word the decoder shows whether this token begins with a space.
        both = tokenizer.decode([*self._prefix, token], skip_special_tokens=False)
        return both.removeprefix(self._prefix_text).encode()
