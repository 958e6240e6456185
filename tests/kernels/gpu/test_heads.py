"""`qk_norm_rope_cache` in Triton's interpreter, against PyTorch and float64: queries, cache, and unwritten slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels import heads as pytorch
from batchgen.kernels.gpu import heads as gpu
from batchgen.kernels.gpu.launch import recording
from batchgen.kernels.heads import HeadNorms
from batchgen.kernels.rope import rope_tables
from tests.kernels.closeness import DTYPES, assert_as_close

torch.set_num_threads(1)

SHAPES = ((1, 1, 2), (3, 1, 6), (9, 3, 16), (14, 2, 24), (4, 4, 64), (5, 5, 80), (33, 1, 32), (2, 1, 256))
"""Heads, kv heads, head size."""
EPS = 1e-6


@dataclass
class Case:
    heads: int
    kv_heads: int
    dim: int
    normed: bool = False
    tokens: int = 5
    page_size: int = 4
    pages: int = 6
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.qkv = self.randn(self.tokens, self.heads + 2 * self.kv_heads, self.dim)
        norms = (1 + 0.3 * self.randn(self.dim), 1 + 0.3 * self.randn(self.dim))
        self.norms: tuple[Tensor, Tensor] | tuple[None, None] = norms if self.normed else (None, None)
        positions = torch.randint(0, 5000, (self.tokens,), generator=self.generator)
        inv_freq = torch.rand(self.dim // 2, generator=self.generator)
        self.tables = rope_tables(inv_freq, 1.1, positions, self.dtype)
        self.slots = torch.randperm(self.pages * self.page_size, generator=self.generator)[: self.tokens]

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def pool(self) -> tuple[Tensor, Tensor]:
        shape = (self.pages, self.page_size, self.kv_heads, self.dim)
        dtype = self.cache_dtype or self.dtype
        return torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)

    def run(self, module: Any, pool: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Run it: the queries, and the keys and values at the step's slots."""
        before = self.qkv.clone()
        query = module.qk_norm_rope_cache(self.qkv, self.head_norms(), self.tables, *pool, self.slots)
        assert torch.equal(self.qkv, before)
        keys, values = (cache.flatten(0, 1) for cache in pool)
        return query, keys[self.slots], values[self.slots]

    def head_norms(self) -> HeadNorms | None:
        query, key = self.norms
        return None if query is None or key is None else HeadNorms(query, key, EPS)

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        wide = self.qkv.double()
        q, k, v = wide.split((self.heads, self.kv_heads, self.kv_heads), 1)
        return self._rotated(q, self.norms[0]), self._rotated(k, self.norms[1]), v

    def _rotated(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        cos, sin = (table.double() for table in self.tables)
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((high, low), -1) * sin


def check(case: Case) -> None:
    pool, plain_pool = case.pool(), case.pool()
    got, plain = case.run(gpu, pool), case.run(pytorch, plain_pool)
    for ours, theirs, exact in zip(got, plain, case.exact(), strict=True):
        assert_as_close(ours, theirs, exact)
    assert torch.equal(got[2], plain[2])  # values are copied
    assert got[0].is_contiguous()
    others = torch.ones(case.pages * case.page_size, dtype=torch.bool)
    others[case.slots] = False
    for cache in pool:
        assert bool(cache.flatten(0, 1)[others].isnan().all())  # nothing else is written


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_qk_norm_rope_cache(shape: tuple[int, int, int], normed: bool, dtype: torch.dtype) -> None:
    check(Case(*shape, normed=normed, dtype=dtype, seed=sum(shape)))


@pytest.mark.parametrize("tokens", [1, 2, 17])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_tokens_and_page_sizes(tokens: int, page_size: int) -> None:
    check(Case(4, 2, 8, normed=True, tokens=tokens, page_size=page_size, pages=20))


def test_a_cache_of_another_dtype() -> None:
    case = Case(4, 2, 8, normed=True, dtype=torch.bfloat16, cache_dtype=torch.float32)
    for ours, theirs in zip(case.run(gpu, case.pool()), case.run(pytorch, case.pool()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def test_a_projection_with_gaps_between_rows() -> None:
    case = Case(3, 1, 8)
    case.qkv = case.randn(2 * case.tokens, 9, 8)[::2, 2:7]
    check(case)


def test_caches_interleaved_with_other_layers() -> None:
    case = Case(3, 1, 8)
    wide = torch.full((case.pages, case.page_size, 3, 16), 7.0)
    pool = wide[:, :, 1:2, :8], wide[:, :, 2:3, 4:12]
    got = case.run(gpu, pool)
    for ours, theirs in zip(got, case.run(pytorch, case.pool()), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert bool((wide[:, :, 0] == 7.0).all())
    assert bool((wide[:, :, 1, 8:] == 7.0).all())


def test_tokens_that_share_a_slot_store_one_of_them() -> None:
    case = Case(2, 1, 4)
    case.slots = torch.tensor([0, 0, 5, 0, 9])
    pool = case.pool()
    query, _, _ = case.run(gpu, pool)
    expected, _, _ = case.run(pytorch, case.pool())
    torch.testing.assert_close(query, expected)
    assert any(torch.equal(pool[1][0, 0], case.qkv[i, 3:]) for i in (0, 1, 3))


def test_a_step_without_tokens() -> None:
    case = Case(2, 1, 4, tokens=0)
    assert case.run(gpu, case.pool())[0].shape == (0, 2, 4)


def test_specialisations_do_not_depend_on_the_step() -> None:
    seen: list[tuple[Any, ...]] = []

    def note(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        seen.append((kernel, [x for x in args if not isinstance(x, Tensor)], constants))

    with recording(note):
        for tokens in (1, 2, 16, 33):
            case = Case(9, 3, 16, normed=True, tokens=tokens, pages=40)
            gpu.qk_norm_rope_cache(case.qkv, case.head_norms(), case.tables, *case.pool(), case.slots)
    assert len(seen) == 4
    assert all(launch == seen[0] for launch in seen)


@settings(max_examples=15, deadline=None)
@given(
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 5),
    half=st.integers(1, 40),
    normed=st.booleans(),
    tokens=st.integers(1, 8),
    page_size=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_any_shape(
    kv_heads: int,
    group: int,
    half: int,
    normed: bool,
    tokens: int,
    page_size: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    check(
        Case(
            group * kv_heads, kv_heads, 2 * half,
            normed=normed, tokens=tokens, page_size=page_size, pages=9, dtype=dtype, seed=seed,
        )
    )  # fmt: skip
