"""Microbenchmarks of paged decode, shared prefixes and prefill, with Triton and flash, and torch on contiguous keys.

Only `attend_stored` is timed: the fused kernel that stores keys and values is timed in `bench_ops`. The step's work
items are prepared before the timing, as the engine does once per step and not per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F

from batchgen.kernels.types import AttentionArgs, PagedAttention
from tests.gpu.device import Gpu, Timing
from tests.gpu.registry import Shape, case
from tests.gpu.report import Figure, figure
from tests.gpu.stages.attention_steps import decode_step, grouped_step, heads_shape, prefill_step
from tests.kernels.steps import Step

DTYPE = torch.bfloat16
BACKENDS = ("triton", "flash")

_QWEN_06 = {"heads": 16, "kv_heads": 8, "dim": 128}
_LLAMA_1 = {"heads": 32, "kv_heads": 8, "dim": 64}
_LLAMA_8 = {"heads": 32, "kv_heads": 8, "dim": 128}
_TOY = {"heads": 4, "kv_heads": 2, "dim": 16}

DECODE: list[Shape] = [
    {"rows": 256, "context": 1024, **_LLAMA_8},
    {"rows": 256, "context": 1024, **_QWEN_06},
    {"rows": 256, "context": 1024, **_LLAMA_1},
    {"rows": 32, "context": 32768, **_LLAMA_8},
]
PREFIX: list[Shape] = [
    {"rows": rows, "shared": 2000, **heads} for rows in (256, 1024) for heads in (_QWEN_06, _LLAMA_8)
]
PREFILL: list[Shape] = [{"tokens": tokens, **heads} for tokens in (2048, 8192) for heads in (_QWEN_06, _LLAMA_8)]
PAGE = 16


def attend_time(gpu: Gpu, attention: PagedAttention, step: Step) -> Timing:
    """Time of a layer's attention over `step`, with its keys and values stored before."""
    keys, values, slots = attention.cache(0)
    keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots] = step.key, step.value
    scale = step.query.shape[-1] ** -0.5
    return gpu.time(lambda: attention.attend_stored(0, step.query, AttentionArgs(scale)))


def decode_bytes(rows: int, context: int, heads: int, kv_heads: int, dim: int) -> int:
    """Bytes of keys, values and queries read, and of results written."""
    return rows * DTYPE.itemsize * dim * (2 * context * kv_heads + 2 * heads)


def _decode(backend: str) -> Callable[..., Iterator[Figure]]:
    def run(gpu: Gpu, *, rows: int, context: int, heads: int, kv_heads: int, dim: int) -> Iterator[Figure]:
        shape = {"rows": rows, "context": context, "heads": heads, "kv_heads": kv_heads, "dim": dim}
        step = decode_step(gpu, heads_shape(heads, kv_heads, dim, PAGE, DTYPE), rows, context, context)
        timing = attend_time(gpu, gpu.attention(backend, step), step)
        size = decode_bytes(rows, context, heads, kv_heads, dim)
        made = figure(gpu, backend, "paged decode", shape, timing, bytes=size)
        yield replace(made, against={"sdpa": _sdpa_decode(gpu, rows, context, heads, kv_heads, dim).p50})

    return run


def _sdpa_decode(gpu: Gpu, rows: int, context: int, heads: int, kv_heads: int, dim: int) -> Timing:
    """Time of torch's attention over contiguous keys, with contexts of equal length."""
    query = gpu.randn(rows, heads, 1, dim, dtype=DTYPE)
    key, value = (gpu.randn(rows, kv_heads, context, dim, dtype=DTYPE) for _ in range(2))
    return gpu.time(lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True))


def _prefix(backend: str) -> Callable[..., Iterator[Figure]]:
    def run(gpu: Gpu, *, rows: int, shared: int, heads: int, kv_heads: int, dim: int) -> Iterator[Figure]:
        """Compared with the same rows without sharing, and with torch over contiguous keys."""
        shape = {"rows": rows, "shared": shared, "heads": heads, "kv_heads": kv_heads, "dim": dim}
        layer, pages = heads_shape(heads, kv_heads, dim, PAGE, DTYPE), shared // PAGE
        step = grouped_step(gpu, layer, rows, [(1, pages)], 1)
        size = DTYPE.itemsize * dim * (2 * shared * kv_heads + 2 * rows * heads)
        operations = 4 * rows * pages * PAGE * heads * dim
        made = figure(
            gpu,
            backend,
            "shared prefix",
            shape,
            attend_time(gpu, gpu.attention(backend, step), step),
            bytes=size,
            flops=operations,
        )
        del step
        flat = decode_step(gpu, layer, rows, pages * PAGE + 1, pages * PAGE + 1)
        against = {"not shared": attend_time(gpu, gpu.attention(backend, flat), flat).p50}
        query = gpu.randn(1, heads, rows, dim, dtype=DTYPE)
        key, value = (gpu.randn(1, kv_heads, pages * PAGE, dim, dtype=DTYPE) for _ in range(2))
        against["sdpa"] = gpu.time(lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True)).p50
        yield replace(made, against=against)

    return run


def _prefill(backend: str) -> Callable[..., Iterator[Figure]]:
    def run(gpu: Gpu, *, tokens: int, heads: int, kv_heads: int, dim: int) -> Iterator[Figure]:
        shape = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "dim": dim}
        step = prefill_step(gpu, heads_shape(heads, kv_heads, dim, PAGE, DTYPE), [(tokens, 0)])
        operations = 4 * (tokens * (tokens + 1) // 2) * heads * dim
        size = DTYPE.itemsize * dim * tokens * (2 * kv_heads + 2 * heads)
        made = figure(
            gpu,
            backend,
            "prefill",
            shape,
            attend_time(gpu, gpu.attention(backend, step), step),
            bytes=size,
            flops=operations,
        )
        query, key, value = (x.transpose(0, 1)[None] for x in (step.query, step.key, step.value))
        peer = gpu.time(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True))
        yield replace(made, against={"sdpa": peer.p50})

    return run


for _backend in BACKENDS:
    _op = "attention" if _backend == "triton" else _backend
    case("bench", _op, DECODE, [{"rows": 2, "context": 24, **_TOY}], name=f"{_backend}_decode")(_decode(_backend))
    case("bench", _op, PREFIX, [{"rows": 3, "shared": 32, **_TOY}], name=f"{_backend}_prefix")(_prefix(_backend))
    case("bench", _op, PREFILL, [{"tokens": 12, **_TOY}], name=f"{_backend}_prefill")(_prefill(_backend))
