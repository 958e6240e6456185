"""What stays in few bits: products over stored weights, and attention over keys and values in E4M3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.nn import functional

from batchgen.kernels.pooled import in_e4m3, of_cache
from batchgen.kernels.types import AttentionArgs
from tests.gpu.compare import judge, judge_equal, poisoned
from tests.gpu.device import Gpu
from tests.gpu.registry import DTYPES, LOW, Labelled, case
from tests.gpu.stages.attention_steps import heads_shape, mixed_step
from tests.kernels.oracle import attend_by_token
from tests.kernels.stored_weights import KINDS, grouped

_SIZES = [
    {"outer": 6144, "inner": 4096, "size": 128},
    {"outer": 4096, "inner": 12288, "size": 128},
    {"outer": 1001, "inner": 1000, "size": 64},
]
_TOY_SIZES = [{"outer": 20, "inner": 96, "size": 32}]


@case(
    "parity",
    "stored weights",
    [{"kind": kind, "rows": rows, **sizes} for kind in KINDS for sizes in _SIZES for rows in (1, 48, 300)],
    [{"kind": kind, "rows": 5, **sizes} for kind in KINDS for sizes in _TOY_SIZES],
    LOW,
)
def stored_products(
    gpu: Gpu, dtype: torch.dtype, *, kind: str, rows: int, outer: int, inner: int, size: int
) -> Iterator[Labelled]:
    from batchgen.kernels.gpu.quantized_matmul import dequantised, linear

    weight = grouped(kind, outer, inner, size).to(gpu.device)
    dense = weight.dense()
    yield "dequantised", judge_equal(dequantised(weight, dtype), dense.to(dtype))
    x, bias = gpu.randn(rows, inner, dtype=dtype), gpu.randn(outer, dtype=dtype)
    truth = x.double() @ dense.double().T + bias.double()
    with poisoned():
        got = linear(x, weight, bias)
    yield "product", judge(got, functional.linear(x, dense.to(dtype), bias), truth, dtype)


@case(
    "parity",
    "fp8 cache",
    [
        {"heads": 16, "kv_heads": 8, "dim": 128, "rows": 48, "longest": 900, "new": 300, "past": 96},
        {"heads": 12, "kv_heads": 4, "dim": 80, "rows": 24, "longest": 300, "new": 150, "past": 33, "window": 64},
    ],
    [{"heads": 4, "kv_heads": 2, "dim": 16, "rows": 3, "longest": 18, "new": 5, "past": 16}],
    DTYPES,
)
def attention_over_codes(
    gpu: Gpu, dtype: torch.dtype, *, rows: int, longest: int, new: int, past: int, window: int = 0, **heads: int
) -> Iterator[Labelled]:
    shape = heads_shape(heads["heads"], heads["kv_heads"], heads["dim"], 16, dtype)
    step = mixed_step(gpu, shape, [(new, 0), (new // 3 + 1, past), (1, past + 3)], rows, longest, [(1, 5), (2, 5)])
    args = AttentionArgs(step.query.shape[-1] ** -0.5, window or None)
    keys, values = (of_cache(in_e4m3(pool)).to(dtype) for pool in step.filled())
    truth, plain = (
        attend_by_token(step.batch, step.query, keys, values, args, compute) for compute in (torch.float64, dtype)
    )
    pool = replace(step.pool, keys=[in_e4m3(x) for x in step.pool.keys], values=[in_e4m3(x) for x in step.pool.values])
    codes = replace(step, pool=pool)
    attention = gpu.attention("triton", codes)
    with poisoned():
        got = attention.attend(0, step.query, step.key, step.value, args)
    slots = step.batch.slot_mapping
    yield "stored keys", judge_equal(pool.keys[0].flatten(0, 1)[slots], in_e4m3(step.key))
    yield "stored values", judge_equal(pool.values[0].flatten(0, 1)[slots], in_e4m3(step.value))
    yield "attention", judge(got, plain, truth, dtype)
