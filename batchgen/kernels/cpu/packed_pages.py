"""Cache of repacked KV pages, for pages that many rows attend to.

Where many query rows attend to the same positions, the compiled kernels repack keys and values for the bfloat16 dot
instruction (`attention_dot.h`) in *units* of as many positions as a register has lanes. The pages of a prefix group
give the same units in every step, so the kernels keep them here. Each unit has a stamp, the version of the page that it
was packed from; a unit is valid until its page is written to.
"""

from __future__ import annotations

from ctypes import Array, Structure, c_int64, c_void_p
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from batchgen.kernels.attention.work_items import Words
from batchgen.kernels.layouts import dots_are_faster
from batchgen.kernels.types import Ints, KVPool, LayerKV

_LANES: Final = 16
"""Positions of a unit: lanes of a register on processors that have the instruction."""
_HEAD_NUMBERS: Final = 32
"""Head sizes are padded to a multiple of this."""


class _Packed(Structure):
    """`Packed` of attention.h."""

    _fields_ = (("words", c_void_p), ("stamps", c_void_p), ("pages", c_int64))


class PackedPages:
    """Packed units of a pool's first pages, bfloat16. The system provides memory when it is first written to."""

    def __init__(self, layers: list[LayerKV], pages: int, page_size: int) -> None:
        """`pages`: units of pages [0, pages) of the pool can be kept."""
        self.pages = pages
        sizes = [_page_words(layer, page_size) for layer in layers]
        self.words = [np.zeros((x.kv_heads, pages, size), np.int32) for x, size in zip(layers, sizes, strict=True)]
        """Per layer [K, pages, 32-bit words of a page]."""
        self.stamps = [np.zeros((x.kv_heads, pages, page_size // _LANES), np.int32) for x in layers]
        """Per layer [K, pages, units of a page]: the page version that each unit was packed from; 0: no unit."""
        self._versions = np.ones(pages, np.int32)
        places = zip(self.words, self.stamps, strict=True)
        self.structs: Array[Any] = (_Packed * len(layers))(
            *(_Packed(words.ctypes.data, stamps.ctypes.data, pages) for words, stamps in places)
        )
        """`Packed` of each layer."""

    def write(self, pages: Ints) -> None:
        """Invalidate the units of pages [n], which are about to be written to."""
        self._versions[pages[pages < self.pages]] += 1

    def versions(self, pages: Words, common: Ints) -> Words:
        """Versions of a work list's pages, for `AttentionList::versions`.

        Args:
            pages: [P] pages of the list.
            common: indexes of the pages whose units are stored; stored units of other pages are only read.

        Returns:
            [P] version of each page, negative for pages whose units are not stored; 0 for pages without room.
        """
        versions = np.zeros(len(pages), np.int32)
        inside = pages < self.pages
        versions[inside] = -self._versions[pages[inside]]
        versions[common] *= -1
        return versions


@dataclass(frozen=True, slots=True)
class PackedPool(KVPool):
    """A pool with the packed units of its pages. Writers to its pages call `packed.write`."""

    packed: PackedPages = field(kw_only=True)


def packed_pool(pool: KVPool, room: int) -> KVPool:
    """The pool with packed units of as many pages as fit in `room` bytes; the pool itself if kernels use none."""
    both = zip(pool.keys, pool.values, strict=True)
    layers = [LayerKV(keys.shape[2], keys.shape[3], values.shape[3]) for keys, values in both]
    page_bytes = 4 * sum(layer.kv_heads * _page_words(layer, pool.page_size) for layer in layers)
    fitting = min(pool.num_pages, room // page_bytes) if page_bytes else 0
    if fitting < 1 or pool.keys[0].dtype != torch.bfloat16 or pool.page_size % _LANES or not dots_are_faster():
        return pool
    packed = PackedPages(layers, fitting, pool.page_size)
    return PackedPool(pool.keys, pool.values, pool.page_size, pool.latent, packed=packed)


def _page_words(layer: LayerKV, page_size: int) -> int:
    """32-bit words of one page's units for one key head."""
    padded = sum(-(-dim // _HEAD_NUMBERS) * _HEAD_NUMBERS for dim in (layer.key_dim, layer.value_dim))
    return page_size * padded // 2
