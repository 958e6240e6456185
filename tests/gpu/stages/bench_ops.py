"""Microbenchmarks of norms, activations, the cache write, sampling, logprobs and logits processing.

Operations on logits are compared with the lm_head's product for models of 1,024, 2,048 and 4,096 (`PRODUCTS`), which
every step computes. Logits are in the model's dtype where they are read, and float32 where they are written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F

from batchgen.kernels.bitmask import bitmask_width
from batchgen.kernels.counts import Penalties
from batchgen.kernels.heads import HeadNorms
from tests.gpu.lab import Lab
from tests.gpu.registry import Shape, bench
from tests.gpu.report import Figure, figure
from tests.gpu.stages.parity_logits import lists_of
from tests.gpu.stages.parity_sampling import MODES, keys_of, logits_of
from tests.gpu.under_test import kernel

DTYPE = torch.bfloat16
WIDE = DTYPE.itemsize
EPS = 1e-6

WIDTHS: list[Shape] = [{"rows": rows, "width": width} for rows in (256, 8192) for width in (1024, 2048, 4096)]
LOGITS: list[Shape] = [{"rows": 256, "vocab": vocab} for vocab in (151936, 128256)]
TOY_LOGITS: list[Shape] = [{"rows": 2, "vocab": 150}]
PRODUCTS = (1024, 2048, 4096)
TOY_PRODUCTS = (32,)
TOP = 20
PENALISED = 300
"""Number of distinct tokens of a row with penalties."""


@bench("rms_norm", WIDTHS, [{"rows": 2, "width": 32}])
def rms_norm(lab: Lab, *, rows: int, width: int) -> Iterator[Figure]:
    x, weight = lab.randn(rows, width, dtype=DTYPE), lab.randn(width, dtype=DTYPE)
    operation = kernel("rms_norm")
    timing = lab.time(lambda: operation(x, weight, EPS))
    yield figure(lab, "rms_norm", "norm", {"rows": rows, "width": width}, timing, bytes=WIDE * width * (2 * rows + 1))


@bench("add_rms_norm", WIDTHS, [{"rows": 2, "width": 32}])
def add_rms_norm(lab: Lab, *, rows: int, width: int) -> Iterator[Figure]:
    x, delta = (lab.randn(rows, width, dtype=DTYPE) for _ in range(2))
    weight = lab.randn(width, dtype=DTYPE)
    operation = kernel("add_rms_norm")
    timing = lab.time(lambda: operation(x, delta, weight, EPS))
    size = WIDE * width * (4 * rows + 1)
    yield figure(lab, "add_rms_norm", "residual and norm", {"rows": rows, "width": width}, timing, bytes=size)


@bench(
    "gated",
    [{"rows": rows, "width": width} for rows in (256, 8192) for width in (3072, 8192, 14336)],
    [{"rows": 2, "width": 32}],
)
def gated(lab: Lab, *, rows: int, width: int) -> Iterator[Figure]:
    gate_up = lab.randn(rows, 2 * width, dtype=DTYPE)
    operation = kernel("gated")
    timing = lab.time(lambda: operation(gate_up, "silu"))
    yield figure(lab, "gated", "silu(gate) * up", {"rows": rows, "width": width}, timing, bytes=3 * WIDE * rows * width)


@bench(
    "qk_norm_rope_cache",
    [
        {"rows": rows, "heads": heads, "kv_heads": 8, "dim": 128, "norm": norm}
        for rows in (256, 8192)
        for heads, norm in ((16, 1), (32, 0))
    ],
    [{"rows": 2, "heads": 2, "kv_heads": 1, "dim": 16, "norm": 1}],
)
def qk_norm_rope_cache(lab: Lab, *, rows: int, heads: int, kv_heads: int, dim: int, norm: int) -> Iterator[Figure]:
    shape = {"rows": rows, "heads": heads, "kv_heads": kv_heads, "dim": dim, "norm": norm}
    qkv = lab.randn(rows, heads + 2 * kv_heads, dim, dtype=DTYPE)
    norms = HeadNorms(*(lab.randn(dim, dtype=DTYPE) for _ in range(2)), EPS) if norm else None
    tables = lab.randn(rows, 1, dim, dtype=DTYPE), lab.randn(rows, 1, dim, dtype=DTYPE)
    page = 16
    caches = [torch.zeros(rows // page + 2, page, kv_heads, dim, dtype=DTYPE, device=lab.device) for _ in range(2)]
    slots = lab.rand(caches[0].shape[0] * page).argsort()[:rows]
    operation = kernel("qk_norm_rope_cache")
    timing = lab.time(lambda: operation(qkv, norms, tables, *caches, slots))
    size = WIDE * rows * dim * (2 * (heads + 2 * kv_heads) + 2) + 8 * rows
    yield figure(lab, "qk_norm_rope_cache", "norm, rope, cache write", shape, timing, bytes=size)


def lm_head_times(lab: Lab, rows: int, vocab: int) -> dict[str, float]:
    """Microseconds of the products that give [rows, vocab] logits, by model width; measured once per shape."""
    kept = lab.kept.get(("lm_head", rows, vocab))
    if kept is None:
        kept = {}
        for width in TOY_PRODUCTS if lab.toy else PRODUCTS:
            x, weight = lab.randn(rows, width, dtype=DTYPE), lab.randn(vocab, width, dtype=DTYPE)
            kept[f"lm_head {width}"] = lab.time(lambda x=x, weight=weight: F.linear(x, weight)).p50
            del weight
        lab.kept["lm_head", rows, vocab] = kept
    return dict(kept)


@bench("sample", LOGITS, TOY_LOGITS)
def sample(lab: Lab, *, rows: int, vocab: int) -> Iterator[Figure]:
    logits, against = logits_of(lab, rows, vocab).to(DTYPE), lm_head_times(lab, rows, vocab)
    operation = kernel("sample")
    for name, mode in MODES.items():
        columns = mode.columns(rows, lab.device).with_keys(keys_of(rows).to(lab.device))
        timing = lab.time(lambda columns=columns: operation(logits, columns))
        made = figure(lab, "sample", name, {"rows": rows, "vocab": vocab}, timing, bytes=WIDE * rows * vocab)
        yield replace(made, against=against)


@bench("argmax_lse", LOGITS, TOY_LOGITS)
def argmax_lse(lab: Lab, *, rows: int, vocab: int) -> Iterator[Figure]:
    logits, operation = logits_of(lab, rows, vocab).to(DTYPE), kernel("argmax_lse")
    timing = lab.time(lambda: operation(logits))
    made = figure(lab, "argmax_lse", "largest, lse", {"rows": rows, "vocab": vocab}, timing, bytes=WIDE * rows * vocab)
    yield replace(made, against=lm_head_times(lab, rows, vocab))


@bench("token_logprobs", LOGITS, TOY_LOGITS)
def token_logprobs(lab: Lab, *, rows: int, vocab: int) -> Iterator[Figure]:
    logits, tokens = logits_of(lab, rows, vocab).to(DTYPE), lab.randint(0, vocab, rows)
    operation = kernel("token_logprobs")
    timing = lab.time(lambda: operation(logits, tokens))
    made = figure(lab, "token_logprobs", "a token's", {"rows": rows, "vocab": vocab}, timing, bytes=WIDE * rows * vocab)
    yield replace(made, against=lm_head_times(lab, rows, vocab))


@bench("top_logprobs", LOGITS, TOY_LOGITS)
def top_logprobs(lab: Lab, *, rows: int, vocab: int) -> Iterator[Figure]:
    logits, operation = logits_of(lab, rows, vocab).to(DTYPE), kernel("top_logprobs")
    timing = lab.time(lambda: operation(logits, TOP))
    shape = {"rows": rows, "vocab": vocab, "k": TOP}
    made = figure(lab, "top_logprobs", "the largest", shape, timing, bytes=WIDE * rows * vocab)
    yield replace(made, against=lm_head_times(lab, rows, vocab))


@bench("penalise", LOGITS, TOY_LOGITS)
def penalise(lab: Lab, *, rows: int, vocab: int) -> Iterator[Figure]:
    """A step's cost of penalties: applying them to the listed tokens, and counting the next token."""
    logits, lists = logits_of(lab, rows, vocab), lists_of(lab, rows, vocab, PENALISED)
    lists.used[1:] = most = min(PENALISED, vocab)
    index, ones = torch.arange(rows, device=lab.device), torch.ones(rows, device=lab.device)
    operation = kernel("penalise")
    timing = lab.time(lambda: operation(logits, index, index + 1, lists, Penalties(ones, ones, ones), most))
    shape = {"rows": rows, "vocab": vocab, "pairs": rows * most}
    # 32 bytes, the smallest memory transaction, are read and written per logit.
    made = figure(lab, "penalise", "three penalties", shape, timing, bytes=rows * most * (64 + 4 + 4))
    yield replace(made, against=lm_head_times(lab, rows, vocab))
    operation, drawn = kernel("count_tokens"), lists.ids[1:, most // 2].long()
    timing = lab.time(lambda: operation(lists, index + 1, index, drawn, most + 1))
    made = figure(lab, "count_tokens", "tokens that are known", shape, timing, bytes=rows * most * 4)
    yield replace(made, against=lm_head_times(lab, rows, vocab))


@bench("apply_bitmask", LOGITS, TOY_LOGITS)
def apply_bitmask(lab: Lab, *, rows: int, vocab: int) -> Iterator[Figure]:
    """Half of all tokens are masked; bytes written are whole cache lines, which are all of them."""
    logits, words = logits_of(lab, rows, vocab), bitmask_width(vocab)
    masks = lab.randint(-(1 << 31), 1 << 31, rows, words).int()
    operation = kernel("apply_bitmask")
    timing = lab.time(lambda: operation(logits, masks))
    made = figure(
        lab, "apply_bitmask", "every row", {"rows": rows, "vocab": vocab}, timing, bytes=4 * rows * (vocab + words)
    )
    yield replace(made, against=lm_head_times(lab, rows, vocab))
