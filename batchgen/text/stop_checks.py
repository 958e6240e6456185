"""Stops that could never end a row, found before anything is generated."""

from __future__ import annotations

import re
from functools import lru_cache

from batchgen.errors import ErrorCode, RowError
from batchgen.request.checks import show
from batchgen.request.params import SamplingParams
from batchgen.text.detokenize import REPLACEMENT
from batchgen.text.token_bytes import TokenBytes
from batchgen.text.tokenizer import Tokenizer

_SPACE_MARK = "▁"


def check_stops(params: SamplingParams, tokenizer: Tokenizer) -> None:
    """Refuse stop strings that no output can hold, and patterns of special tokens that the text does not show.

    Raises:
        RowError: `invalid_field`.
    """
    names = _special_names(tokenizer) if params.stop or params.stop_regex else ()
    for text in params.stop:
        if missing := unwritable(tokenizer, text):
            what = f"{show(text)}, which no output can hold: no token of the model's vocabulary has {show(missing)}"
            raise RowError(ErrorCode.INVALID_FIELD, f"`stop` is {what}; leave it out", "stop")
    for pattern in params.stop_regex if params.skip_special_tokens else ():
        name = next((name for name in names if re.escape(name) in pattern), None)
        if name is not None:
            what = f"names the special token {show(name)}, which is no part of the text"
            remedy = "name it in `stop` or `stop_token_ids`, or set `skip_special_tokens` to false"
            raise RowError(ErrorCode.INVALID_FIELD, f"`stop_regex` {what}; {remedy}", "stop_regex")


def unwritable(tokenizer: Tokenizer, text: str) -> str:
    """The characters of a text that no sequence of tokens can have, special tokens aside; "" if there are none."""
    rest = dict.fromkeys(text)
    if not rest.keys() - _characters(tokenizer):
        return ""
    for name in sorted(_special_names(tokenizer), key=len, reverse=True):
        text = text.replace(name, "")
    return "".join(character for character in dict.fromkeys(text) if not _is_writable(tokenizer, character))


def _is_writable(tokenizer: Tokenizer, character: str) -> bool:
    if character in _characters(tokenizer):
        return True
    if character == REPLACEMENT:  # what incomplete bytes are written as
        return bool(_bytes(tokenizer))
    return bool(_bytes(tokenizer)) and _bytes(tokenizer).issuperset(character.encode())


@lru_cache(maxsize=8)
def _special_names(tokenizer: Tokenizer) -> tuple[str, ...]:
    return tuple(str(tokenizer.id_to_token(token)) for token in sorted(tokenizer.special_ids))


@lru_cache(maxsize=8)
def _characters(tokenizer: Tokenizer) -> frozenset[str]:
    """Characters of single tokens. Those of spellings that the decoder replaces by others are left out."""
    if tokenizer.vocab_bytes is not None:
        return frozenset(map(chr, range(0x80))) if _bytes(tokenizer).issuperset(range(0x80)) else frozenset()
    ids = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids]
    spellings = [tokenizer.id_to_token(token) or "" for token in ids]
    found = {" ", *"".join(spellings)}
    marked = next((token for token, text in zip(ids, spellings, strict=True) if _SPACE_MARK in text), None)
    if marked is not None and _SPACE_MARK not in tokenizer.decode([marked, marked]):
        found.discard(_SPACE_MARK)
    return frozenset(found)


@lru_cache(maxsize=8)
def _bytes(tokenizer: Tokenizer) -> frozenset[int]:
    """Bytes that tokens can give one by one; none for a vocabulary of characters."""
    ids = (token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids)
    if tokenizer.vocab_bytes is not None:
        return frozenset(byte for token in ids for byte in tokenizer.vocab_bytes[token])
    if not tokenizer.byte_fallback:
        return frozenset()
    pieces = TokenBytes(tokenizer)
    names = (f"<0x{byte:02X}>" for byte in range(256))
    found = (tokenizer.token_to_id(name) for name in names)
    return frozenset(byte for token in found if token is not None for byte in pieces[token])
