"""Request shapes: whether each input row was a chat request, had `echo` and was a batch line, three bits per row in the
output's footer.

`batchgen export` needs them to write the matching response; the output's columns do not contain them.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.errors import InputError
from batchgen.request.table.columns import Column, Columns


class RowShape(NamedTuple):
    """Shape of the request of one row."""

    chat: bool
    """Whether the answer is a `chat.completion`; otherwise a `text_completion`."""
    echo: bool
    """Whether text and logprobs begin with the prompt."""
    line: bool = False
    """Whether the row was an OpenAI batch line."""


class RowShapes(Columns):
    """Request shapes by row index, added in ascending order."""

    _columns = ("_rows", "_bits")

    def __init__(self) -> None:
        self._rows = Column("q")
        self._bits = Column("B")

    def add(self, row_index: int, chat: bool = False, echo: bool = False, line: bool = False) -> None:
        """Add a row; of a bad row only `line` is known."""
        self.pack(self._rows)
        self._rows.append(row_index)
        self._bits.append(chat | echo << 1 | line << 2)

    def encode(self) -> str:
        """All shapes in order of their rows, as text for the footer."""
        return _encode(self._bits.values().tobytes())

    @staticmethod
    def decode(text: str) -> list[RowShape]:
        """The inverse of `encode`: one shape for each distinct `row_index` of the file, in order.

        Raises:
            InputError: the text is damaged.
        """
        return [_SHAPES[bits] for bits in _decode(text)]

    @staticmethod
    def merged(texts: Sequence[str], rows: Sequence[npt.NDArray[np.int64]]) -> str:
        """Merge the encoded shapes of several files.

        Args:
            texts: the encoded shapes of each file.
            rows: the distinct row indexes of each file, in ascending order.
        """
        bits = np.concatenate([np.frombuffer(_decode(text), np.uint8) for text in texts])
        order = np.argsort(np.concatenate(rows), kind="stable")
        return _encode(bits[order].tobytes())


_SHAPES = tuple(RowShape(bool(bits & 1), bool(bits & 2), bool(bits & 4)) for bits in range(8))


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
