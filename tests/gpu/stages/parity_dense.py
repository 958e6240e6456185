"""Norms, activations, and the fused kernel of head norm, rope and cache write."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from batchgen.kernels.heads import HeadNorms
from tests.gpu.compare import judge, judge_equal, poisoned
from tests.gpu.lab import Lab
from tests.gpu.registry import Labelled, parity
from tests.gpu.under_test import kernel, reference
from tests.gpu.ways import three_ways

EPS = 1e-6
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "quick_gelu")


@parity(
    "rms_norm",
    [
        {"rows": 256, "width": 1024},
        {"rows": 1, "width": 4096},
        {"rows": 8192, "width": 2048},
        {"rows": 77, "width": 5120},
        {"rows": 63, "width": 576},
        {"rows": 3, "width": 100},
    ],
    [{"rows": 3, "width": 20}],
)
def rms_norm(lab: Lab, dtype: torch.dtype, *, rows: int, width: int) -> Iterator[Labelled]:
    x, weight = lab.randn(rows, width, dtype=dtype) * 3, lab.randn(width, dtype=dtype)
    ways = three_ways("rms_norm", x, weight, EPS)
    yield "norm", judge(ways.got, ways.plain, ways.truth, dtype)


@parity(
    "rms_norm",
    [{"rows": 256, "heads": 16, "kv_heads": 8, "width": 128}],
    [{"rows": 2, "heads": 2, "kv_heads": 1, "width": 16}],
)
def rms_norm_of_heads(
    lab: Lab, dtype: torch.dtype, *, rows: int, heads: int, kv_heads: int, width: int
) -> Iterator[Labelled]:
    """Strided rows: the query heads inside a fused projection."""
    fused = lab.randn(rows, heads + 2 * kv_heads, width, dtype=dtype)
    weight = lab.randn(width, dtype=dtype)
    with poisoned():
        got = kernel("rms_norm")(fused[:, :heads], weight, EPS)
    plainly = reference("rms_norm")
    plain, truth = plainly(fused[:, :heads], weight, EPS), plainly(fused[:, :heads].double(), weight.double(), EPS)
    yield "norm", judge(got, plain, truth, dtype)


@parity(
    "add_rms_norm",
    [{"rows": 256, "width": 1024}, {"rows": 4099, "width": 4096}, {"rows": 7, "width": 576}],
    [{"rows": 3, "width": 20}],
)
def add_rms_norm(lab: Lab, dtype: torch.dtype, *, rows: int, width: int) -> Iterator[Labelled]:
    x, delta = lab.randn(rows, width, dtype=dtype) * 4, lab.randn(rows, width, dtype=dtype)
    weight = lab.randn(width, dtype=dtype)
    ways = three_ways("add_rms_norm", x, delta, weight, EPS)
    yield "sum", judge(*ways.args(0), dtype)
    yield "norm", judge(ways.got, ways.plain, ways.truth, dtype)


@parity(
    "gated",
    [{"rows": 256, "width": 3072}, {"rows": 4096, "width": 14336}, {"rows": 5, "width": 1001}],
    [{"rows": 3, "width": 20}],
)
def gated(lab: Lab, dtype: torch.dtype, *, rows: int, width: int) -> Iterator[Labelled]:
    gate_up = lab.randn(rows, 2 * width, dtype=dtype) * 3
    for activation in ACTIVATIONS:
        ways = three_ways("gated", gate_up, activation)
        yield activation, judge(ways.got, ways.plain, ways.truth, dtype)


@parity(
    "qk_norm_rope_cache",
    [
        {"rows": 256, "heads": 16, "kv_heads": 8, "dim": 128, "norm": 1},
        {"rows": 2048, "heads": 32, "kv_heads": 8, "dim": 128, "norm": 0},
        {"rows": 33, "heads": 9, "kv_heads": 3, "dim": 64, "norm": 0},
        {"rows": 5, "heads": 4, "kv_heads": 1, "dim": 80, "norm": 1},
        {"rows": 70, "heads": 4, "kv_heads": 2, "dim": 256, "norm": 1},
    ],
    [
        {"rows": 3, "heads": 3, "kv_heads": 1, "dim": 16, "norm": 1},
        {"rows": 3, "heads": 3, "kv_heads": 1, "dim": 16, "norm": 0},
    ],
)
def qk_norm_rope_cache(
    lab: Lab, dtype: torch.dtype, *, rows: int, heads: int, kv_heads: int, dim: int, norm: int
) -> Iterator[Labelled]:
    qkv = lab.randn(rows, heads + 2 * kv_heads, dim, dtype=dtype)
    norms = HeadNorms(*(lab.randn(dim, dtype=dtype) for _ in range(2)), EPS) if norm else None
    angles = lab.rand(rows, 1, dim // 2) * 6
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    page = 16
    pages = rows // page + 3
    slots = lab.rand(pages * page).argsort()[:rows]
    caches = [torch.full((pages, page, kv_heads, dim), torch.nan, dtype=dtype, device=lab.device) for _ in range(2)]
    ways = three_ways("qk_norm_rope_cache", qkv, norms, (cos, sin), *caches, slots)
    yield "queries", judge(ways.got, ways.plain, ways.truth, dtype)
    for name, index in (("keys", 3), ("values", 4)):
        stored = [cache.flatten(0, 1) for cache in ways.args(index)]
        yield name, judge(*(cache[slots] for cache in stored), dtype)
        others = torch.ones(pages * page, dtype=torch.bool, device=lab.device)
        others[slots] = False
        untouched = stored[0][others].isnan()
        yield f"{name} elsewhere", judge_equal(untouched, torch.ones_like(untouched))


@parity(
    "rope_tables",
    [{"rows": 256, "dim": 128}, {"rows": 4097, "dim": 64}, {"rows": 1, "dim": 80}],
    [{"rows": 3, "dim": 16}],
)
def rope_tables(lab: Lab, dtype: torch.dtype, *, rows: int, dim: int) -> Iterator[Labelled]:
    """Positions up to 128k. Angles are float32 products, as in the models' code, also for the true values."""
    inverse = 1.0 / 500000.0 ** (torch.arange(0, dim, 2, device=lab.device) / dim)
    positions, scale = lab.randint(0, 131072, rows), 1.25
    ways = three_ways("rope_tables", inverse, scale, positions, dtype)
    angles = (positions[:, None].float() * inverse).double()[:, None]
    cos, sin = angles.cos() * scale, angles.sin() * scale
    yield "cos", judge(ways.got[0], ways.plain[0], torch.cat((cos, cos), -1), dtype)
    yield "sin", judge(ways.got[1], ways.plain[1], torch.cat((-sin, sin), -1), dtype)
