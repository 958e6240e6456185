"""Memory of packed weights, which every step reads from end to end.

Weights of a model stand side by side in large pieces of memory, for which numpy asks the system for huge pages: where
it gives them, the processor looks up a five-hundredth of the addresses.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["PIECE", "weight_memory"]

PIECE: Final = 64 << 20
"""Bytes of a piece. numpy asks for huge pages from 4 MiB on; the larger a piece, the less stands at its ends."""
_ALONE: Final = PIECE // 4
"""More bytes than this have a piece of their own: what is left of one, which nobody touches, is less."""
_LINE: Final = 64
"""Weights begin at a cache line."""


class _Piece:
    """The piece that is being filled. It goes when no weight stands in it any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: Callable[[], npt.NDArray[np.uint8] | None] = lambda: None
        self._used = 0

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """[size] bytes from a cache line on, that nobody else has."""
        with self._lock:
            memory = self._memory()
            if memory is None or self._used + size > len(memory):
                memory = np.empty(PIECE, np.uint8)
                self._memory, self._used = weakref.ref(memory), _to_line(memory)
            taken = memory[self._used : self._used + size]
            self._used += size + -size % _LINE
            return taken


_piece: Final = _Piece()


def weight_memory(count: int, dtype: torch.dtype) -> Tensor:
    """[count] numbers from a cache line on, whatever they are."""
    size = count * dtype.itemsize
    if size <= _ALONE:
        return torch.from_numpy(_piece.take(size)).view(dtype)
    memory = np.empty(size + _LINE, np.uint8)
    begin = _to_line(memory)
    return torch.from_numpy(memory[begin : begin + size]).view(dtype)


def _to_line(memory: npt.NDArray[np.uint8]) -> int:
    """Bytes before the first cache line that begins there."""
    return -memory.ctypes.data % _LINE
