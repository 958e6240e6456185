"""Keys and values of pages that rows attend to together, kept from step to step in the order that kernels multiply.

The compiled kernels bring what many query rows attend to into the order of the processor's dot instruction
(`attention_dot.h`), in *units* of as many positions as a register has lanes. Of pages that a prefix group shares that
would be done anew in every step, and in every one give the same. So kernels keep such units here, and take them as long
as their page has not been written to: each has a stamp, the version of its page that it was made of.
"""

from __future__ import annotations

from ctypes import Array, Structure, c_int64, c_void_p
from typing import Any, Final

import numpy as np
import torch

from batchgen.kernels.layouts import dots_are_faster
from batchgen.kernels.types import Ints, LayerKV
from batchgen.kernels.work_items import Words

__all__ = ["PackedPages", "packed_pages"]

_LANES: Final = 16
"""Of a register that has the instruction: positions of a unit."""
_HEAD_NUMBERS: Final = 32
"""Numbers of a head are kept in multiples of so many."""


class _Packed(Structure):
    """`Packed` of attention.h."""

    _fields_ = (("words", c_void_p), ("stamps", c_void_p), ("pages", c_int64))


class PackedPages:
    """Room for the units of a pool's first pages, bfloat16. Memory is taken when it is first written to."""

    def __init__(self, layers: list[LayerKV], pages: int, page_size: int) -> None:
        """`pages`: pages [0, pages) of the pool may be kept."""
        self.pages = pages
        sizes = [_page_words(layer, page_size) for layer in layers]
        self.words = [np.zeros((x.kv_heads, pages, size), np.int32) for x, size in zip(layers, sizes, strict=True)]
        """Per layer [K, pages, words of a page]."""
        self.stamps = [np.zeros((x.kv_heads, pages, page_size // _LANES), np.int32) for x in layers]
        """Per layer [K, pages, units of a page]: the version of the page that each was made of; 0: of none."""
        self._versions = np.ones(pages, np.int32)
        places = zip(self.words, self.stamps, strict=True)
        self.structs: Array[Any] = (_Packed * len(layers))(
            *(_Packed(words.ctypes.data, stamps.ctypes.data, pages) for words, stamps in places)
        )
        """Per layer, as kernels see it."""

    def write(self, pages: Ints) -> None:
        """Pages [n] are about to be written to: what was made of them is worth nothing after that."""
        self._versions[pages[pages < self.pages]] += 1

    def versions(self, pages: Words, common: Ints) -> Words:
        """What kernels are told beside a list of pages [P].

        Args:
            pages: the list.
            common: indexes of those whose units are to be kept; others are taken where they are there already.

        Returns:
            [P] version of each, negative of those that are not to be kept; 0 beyond the pages there is room for.
        """
        found = np.zeros(len(pages), np.int32)
        inside = pages < self.pages
        found[inside] = -self._versions[pages[inside]]
        found[common] *= -1
        return found


def packed_pages(
    layers: list[LayerKV], dtype: torch.dtype, page_size: int, pages: int, room: int
) -> PackedPages | None:
    """Room for as many of a pool's `pages` as `room` bytes hold; None where none fits, or kernels would take none."""
    page_bytes = 4 * sum(x.kv_heads * _page_words(x, page_size) for x in layers)
    fitting = min(pages, room // page_bytes) if page_bytes else 0
    if dtype != torch.bfloat16 or page_size % _LANES or fitting < 1 or not dots_are_faster():
        return None
    return PackedPages(layers, fitting, page_size)


def _page_words(layer: LayerKV, page_size: int) -> int:
    """32-bit words of a page's units of one key head."""
    padded = sum(-(-dim // _HEAD_NUMBERS) * _HEAD_NUMBERS for dim in (layer.key_dim, layer.value_dim))
    return page_size * padded // 2
