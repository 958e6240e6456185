"""Keys and values in E4M3: what is stored, and attention over it, against the same numbers in full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.kernels import heads
from batchgen.kernels.attention.torch_attention import TorchAttention
from batchgen.kernels.gpu import heads as gpu
from batchgen.kernels.heads import HeadNorms
from batchgen.kernels.pooled import in_e4m3, of_cache
from batchgen.kernels.types import E4M3, PagedAttention
from tests.kernels.gpu.attention_cases import (
    KERNELS,
    OPTIONS,
    SPLITTING,
    attention_of,
    built,
    check,
    mixed,
    small_step,
    tree,
    with_sinks,
)
from tests.kernels.steps import Step


def in_codes(step: Step) -> tuple[Step, Step]:
    """The step with all its keys and values rounded to E4M3, with a pool of its dtype and with one of codes."""

    def rounded(x: Tensor) -> Tensor:
        return of_cache(in_e4m3(x)).to(x.dtype)

    key, value = rounded(step.key), rounded(step.value)
    pools = [
        replace(step.pool, keys=[change(x) for x in step.pool.keys], values=[change(x) for x in step.pool.values])
        for change in (rounded, in_e4m3)
    ]
    full, codes = (replace(step, pool=pool, key=key, value=value) for pool in pools)
    assert codes.pool.caches[0].dtype == E4M3
    return full, codes


MAKES: dict[str, Callable[[Step], PagedAttention]] = {
    **KERNELS,
    "splitting": partial(attention_of, tuning=SPLITTING),
    "torch": lambda step: TorchAttention(step.pool, step.batch),
}
CASES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    *((mixed, {"heads": 3}, options) for options in (OPTIONS[0], OPTIONS[-1])),
    (tree, {"heads": 4, "kv_heads": 2}, {}),
    *((small_step, {"heads": 6, "kv_heads": 2, "key_dim": dim, "value_dim": dim}, {}) for dim in (7, 80)),
    *((small_step, {"dtype": dtype, "key_dim": 64, "value_dim": 64}, {}) for dtype in (torch.bfloat16, torch.float16)),
]


@pytest.mark.parametrize("make", MAKES)
def test_attention_is_that_of_the_same_numbers_in_full(make: str) -> None:
    for fill, shape, options in CASES:
        full, codes = in_codes(built(fill, **shape))
        check(MAKES[make](codes), full, **with_sinks(options, full.query.shape[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("normed", [False, True])
def test_stored_codes_are_the_nearest(dtype: torch.dtype, normed: bool) -> None:
    dim, kv_heads, slots = 16, 2, torch.tensor([3, 0, 7, 9, 1])
    qkv = (torch.randn(5, 8, dim, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    norms = HeadNorms(torch.ones(dim, dtype=dtype), torch.full((dim,), 40.0, dtype=dtype), 1e-6) if normed else None
    tables = tuple(torch.rand(5, 1, dim, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(2))
    pools = [[torch.zeros(3, 4, kv_heads, dim, dtype=E4M3) for _ in range(2)] for _ in range(2)]
    queries = [
        op(qkv, norms, tables, *pool, slots)
        for op, pool in zip((gpu.qk_norm_rope_cache, heads.qk_norm_rope_cache), pools, strict=True)
    ]
    torch.testing.assert_close(*queries, rtol=1e-2, atol=1e-2)
    assert torch.equal(pools[0][1], pools[1][1])
    # Rotated keys may differ in the last bit before they are rounded.
    assert (pools[0][0] != pools[1][0]).float().mean() < 0.02
    torch.testing.assert_close(of_cache(pools[0][0]), of_cache(pools[1][0]), rtol=0.07, atol=2.0**-9)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter
def test_every_bfloat16_is_stored_as_its_nearest() -> None:
    """Ties, numbers past the largest, denormal ones, infinities and not-a-numbers."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(64, 1, 1024)
    qkv = torch.cat([torch.zeros_like(every), torch.zeros_like(every), every], 1)
    tables = torch.ones(64, 1, 1024, dtype=qkv.dtype), torch.zeros(64, 1, 1024, dtype=qkv.dtype)
    keys, values = (torch.zeros(4, 16, 1, 1024, dtype=E4M3) for _ in range(2))
    gpu.qk_norm_rope_cache(qkv, None, tables, keys, values, torch.arange(64))
    got, expected = of_cache(values).flatten(), of_cache(in_e4m3(every)).flatten()
    assert torch.equal(got.nan_to_num(1e3), expected.nan_to_num(1e3))
    assert float(got[got.isfinite()].abs().max()) == 448
    assert int(got.isnan().sum()) == int(every.isnan().sum())
