"""Bytes of byte-level BPE tokens, computed from their spelling in the vocabulary."""

from __future__ import annotations

from typing import Any


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 is spelled as itself, other bytes from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    alphabet.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return alphabet


_ALPHABET = _byte_alphabet()


class ByteLevelTokens(dict[int, bytes]):
    """Token id -> its bytes, filled on first use; ids past the vocabulary have none.

    A token with a character outside the byte alphabet (an added token) has the UTF-8 of its spelling, as in the
    backend.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token: int) -> bytes:
        spelled: str = self._backend.id_to_token(token) or ""
        try:
            piece = bytes(_ALPHABET[character] for character in spelled)
        except KeyError:
            piece = spelled.encode()
        self[token] = piece
        return piece
