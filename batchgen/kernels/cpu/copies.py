"""Heads of pages copied in one compiled call for all layers.

PyTorch takes two operations a cache and copies whole pages, which costs a small model more than computing a position
or two; this reads and writes only the positions asked for.
"""

from __future__ import annotations

from ctypes import addressof, byref, c_int64, c_void_p
from typing import Final

import torch
from torch import Tensor

from batchgen.kernels.cpu.background import COPY, recording
from batchgen.kernels.cpu.library import library
from batchgen.kernels.cpu.structs import PageCopies
from batchgen.kernels.types import KVPool

__all__ = ["copy_pages"]

_SERIAL: Final = 1 << 18
"""Fewer bytes than this are copied by one thread: waking others takes as long."""


def copy_pages(pool: KVPool, copies: Tensor) -> None:
    """See `kernels.copies.copy_pages`; the pool is the CPU's, of any dtype, and `copies` contiguous. Can be recorded.

    Moves `positions * K * D * itemsize` bytes a cache and copy, read and written once.
    """
    if pool.beside is not None:
        pool.beside.write(copies[:, 1].numpy())
    caches = (*pool.keys, *pool.values)
    assert copies.is_contiguous()
    assert all(cache.is_contiguous() for cache in caches)
    sizes = [cache.stride(1) * cache.element_size() for cache in caches]
    places = (c_void_p * len(caches))(*(cache.data_ptr() for cache in caches))
    bytes_of = (c_int64 * len(caches))(*sizes)
    call = PageCopies(
        addressof(places), addressof(bytes_of), copies.data_ptr(), len(caches), len(copies), pool.page_size
    )
    moved = sum(sizes) * pool.page_size * len(copies)
    noted = recording()
    if noted is None:
        library().bg_page_copies(byref(call), 1 if moved < _SERIAL else torch.get_num_threads())
    else:
        noted.add(COPY, call, None, places, bytes_of, caches, copies)
