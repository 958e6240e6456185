"""Prefetch of keys and values by products: the right lines for each thread, each once."""

from __future__ import annotations

from ctypes import byref, c_int64, c_void_p
from pathlib import Path

import pytest
import torch

from batchgen.kernels.cpu.attention import CompiledAttention
from batchgen.kernels.cpu.library import library, loaded
from batchgen.kernels.types import AttentionArgs
from tests.kernels.steps import Shape, Step, StepBuilder

CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
pytestmark = [
    pytest.mark.skipif(not loaded(), reason="no C++ compiler here"),
    pytest.mark.skipif(not CACHE.exists(), reason="the size of this processor's last level of cache is not known"),
]

LINE = 64
CHUNK = 1024
MOST_BYTES = 16 << 20


def fetched(step: Step, lines: int, *, deterministic: bool = False, threads: int = 1, share: int = 0) -> list[int]:
    """Addresses of the lines that a thread prefetches, taken `lines` at a time."""
    attention = CompiledAttention(step.pool, step.batch, threads, deterministic=deterministic)
    stack = attention.stack(step.query, torch.empty_like(step.query), AttentionArgs(1.0), [None])
    lasting = (c_void_p * (2 * (MOST_BYTES // LINE)))()
    found = library().bg_fetched_lines
    found.restype = c_int64
    given = (
        byref(stack.struct),
        c_int64(1),
        c_int64(0),
        c_int64(share),
        c_int64(lines),
        lasting,
        c_int64(len(lasting)),
    )
    return [int(line or 0) for line in lasting[: found(*given)]]


def lines_of(step: Step, pages: list[int]) -> tuple[set[int], set[int]]:
    """Addresses of the lines of the pages' keys, and of their values."""

    def of(cache: torch.Tensor) -> set[int]:
        size = cache[0].numel() * cache.element_size()
        return {cache.data_ptr() + page * size + at for page in pages for at in range(0, size, LINE)}

    return of(step.pool.keys[0]), of(step.pool.values[0])


@pytest.mark.parametrize(
    ("lines", "dtype"), [(16, torch.float32), (16, torch.bfloat16), (63, torch.bfloat16), (1024, torch.float32)]
)
def test_only_what_decode_rows_read_is_fetched(lines: int, dtype: torch.dtype) -> None:
    b = StepBuilder(Shape(4, 2, 64, 64, dtype=dtype), num_pages=600)
    b.chunk(63, past=100)
    rows = [b.decode(length) for length in (1, 63, 100, 17, 1000, 16)]
    b.group(rows[:4], 2 * 16, 2)  # rows that attend together
    step = b.build()
    got = fetched(step, lines)
    keys, values = lines_of(step, [page for _, _, pages in b.rows for page in pages])
    assert set(got) <= keys | values
    if lines % 16 == 0:  # otherwise the rest of the last chunk is left to attention
        assert keys <= set(got)
        assert len(values - set(got)) <= lines  # the take that begins with the last keys skips as many values
    if lines == 16:  # one chunk each: none is skipped or fetched twice
        assert sorted(got) == sorted(keys | values)


def test_each_thread_fetches_what_its_own_items_read() -> None:
    b = StepBuilder(Shape(4, 2, 64, 64, dtype=torch.bfloat16), num_pages=600)
    for _ in range(9):
        b.decode(48)
    step = b.build()
    lists = CompiledAttention(step.pool, step.batch, 2)
    work = lists.work(0, 4)
    got = [set(fetched(step, 16, threads=2, share=share)) for share in (0, 1)]
    for share in (0, 1):
        items = work.items[work.shares[share] : work.shares[share + 1]]
        pages = {
            int(page)
            for _, _, at, _, first, end, *_ in items
            for page in work.pages[at + first // 16 : at + -(-end // 16)]
        }
        assert got[share] == set.union(*lines_of(step, sorted(pages)))
    assert not got[0] & got[1]


def test_no_more_is_fetched_than_half_of_the_cache() -> None:
    b = StepBuilder(Shape(4, 4, 128, 128), num_pages=1600)
    b.decode(24_000)
    got = fetched(b.build(), 16)
    half = (int(CACHE.read_text().strip().removesuffix("K")) << 10) // 2
    assert 0.9 * min(half, MOST_BYTES) < len(got) * LINE <= min(half, MOST_BYTES)


@pytest.mark.parametrize(
    ("shape", "lines", "deterministic"),
    [
        (Shape(4, 2, 64, 64), 64 * 16 + 1, False),  # too many at once
        (Shape(4, 2, 64, 32), 16, False),  # values shorter than keys
        (Shape(1, 1, 16, 16, page_size=8), 16, False),  # pages that are not whole chunks
        (Shape(16, 2, 64, 64), 16, False),  # more query rows per key head than are computed row by row
        (Shape(4, 2, 64, 64), 16, True),  # deterministic lists use tiles only
    ],
)
def test_what_is_not_fetched(shape: Shape, lines: int, deterministic: bool) -> None:
    b = StepBuilder(shape)
    b.decode(100)
    assert fetched(b.build(), lines, deterministic=deterministic) == []


def test_nothing_is_fetched_for_chunks() -> None:
    b = StepBuilder(Shape(4, 2, 64, 64))
    b.chunk(63, past=100)
    assert fetched(b.build(), 16) == []
