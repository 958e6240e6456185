"""What each input row of a job was in the terms of OpenAI's endpoints: two bits a row, kept in the output's footer.

The output's columns say nothing of the request's shape, and `batchgen export` needs it to answer in kind.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.columns import Columns
from batchgen.errors import InputError

__all__ = ["RowShape", "RowShapes"]


class RowShape(NamedTuple):
    """One row's request."""

    chat: bool
    """A conversation, so that its answer is a `chat.completion`; else a `text_completion`."""
    echo: bool
    """The prompt stands in front of the output, in text and logprobs."""


class RowShapes(Columns):
    """Shapes by row index, added in rising order: 9 bytes a row in memory."""

    _columns = ("_rows", "_bits")

    def __init__(self) -> None:
        self._rows = array("q")
        self._bits = array("B")

    def add(self, row_index: int, chat: bool = False, echo: bool = False) -> None:
        """Remember a row of the output; a bad row has no shape of its own."""
        self._rows.append(row_index)
        self._bits.append(chat | echo << 1)

    def encode(self) -> str:
        """All shapes in order of their rows, as the footer keeps them."""
        return _encode(bytes(self._bits))

    @staticmethod
    def decode(text: str) -> list[RowShape]:
        """What `encode` made: one shape for each distinct `row_index` of the file, in order.

        Raises:
            InputError: it is damaged.
        """
        return [_SHAPES[bits] for bits in _decode(text)]

    @staticmethod
    def merged(texts: Sequence[str], rows: Sequence[npt.NDArray[np.int64]]) -> str:
        """The shapes of several files as those of one.

        Args:
            texts: what `encode` made for each file.
            rows: the distinct row indexes of each file, in rising order.
        """
        bits = np.concatenate([np.frombuffer(_decode(text), np.uint8) for text in texts])
        order = np.argsort(np.concatenate(rows), kind="stable")
        return _encode(bits[order].tobytes())


_SHAPES = tuple(RowShape(bool(bits & 1), bool(bits & 2)) for bits in range(4))


def _encode(bits: bytes) -> str:
    return base64.b64encode(zlib.compress(bits, 9)).decode("ascii")


def _decode(text: str) -> bytes:
    try:
        bits = zlib.decompress(base64.b64decode(text, validate=True))
    except (binascii.Error, zlib.error, ValueError):
        bits = b"\xff"
    if bits and max(bits) >= len(_SHAPES):
        raise InputError("the footer's `row_shapes` is damaged. Check where the file came from.")
    return bits
