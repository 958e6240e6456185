"""The bytes that one token puts into a text, where it stands in the middle of it."""

from __future__ import annotations

import re

from batchgen.text.tokenizer import Tokenizer

__all__ = ["TokenBytes"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict[int, bytes]):
    """Token id -> its bytes, found as tokens come up; ids past the vocabulary have none.

    Joined over a sequence they are its text with special tokens, as it stands behind other text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        # Where no ordinary word is found a special token does: it is written out here.
        self._anchor = tokenizer.anchor or tuple(tokenizer.encode_plain(["a"])[0][:1])
        self._before = tokenizer.decode(self._anchor, skip_special_tokens=False)

    def __missing__(self, token: int) -> bytes:
        self[token] = found = self._find(token)
        return found

    def _find(self, token: int) -> bytes:
        tokenizer = self._tokenizer
        spelled = tokenizer.id_to_token(token)
        if spelled is None:
            return b""
        if token in tokenizer.special_ids:
            return spelled.encode()
        if tokenizer.spelled_bytes is not None:
            return tokenizer.spelled_bytes[token]
        byte = _BYTE_TOKEN.fullmatch(spelled) if tokenizer.byte_fallback else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        # Behind another word a decoder shows whether this one brings a space along, or joins without one.
        both = tokenizer.decode([*self._anchor, token], skip_special_tokens=False)
        return both.removeprefix(self._before).encode()
