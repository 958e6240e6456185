"""Bytes of byte-level tokens, without asking the backend for each."""

from __future__ import annotations

from typing import Any

__all__ = ["BytePieces"]


def _byte_alphabet() -> dict[str, int]:
    """The character by which byte-level BPE writes each byte: printable Latin-1 as itself, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    alphabet.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return alphabet


_ALPHABET = _byte_alphabet()


class BytePieces(dict[int, bytes]):
    """Token id -> its bytes, filled as tokens come up; ids past the vocabulary have none.

    A token with a character outside the byte alphabet (an added token) stands for its own UTF-8, as in the backend.
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
