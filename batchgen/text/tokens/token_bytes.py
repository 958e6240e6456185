"""Bytes that each token adds to a text when other text precedes it."""

from __future__ import annotations

import re

from batchgen.text.tokens.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


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
