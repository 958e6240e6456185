"""Launches that are compiled ahead of time: every launch that a model can need, on meta tensors.

Sizes are those of real models: hidden sizes, heads, and vocabularies of few blocks, not divisible by 16, and large.
`steps` has the same launches in steps of another size, which must not need other machine code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.chips import GroupedTile, chip_tuning
from batchgen.kernels.counts import CountLists, Penalties
from batchgen.kernels.gpu import counts, filtering, logprobs, noise, sampling, shaping, top
from batchgen.kernels.gpu.activation import gated
from batchgen.kernels.gpu.attention import TritonAttention
from batchgen.kernels.gpu.conv import causal_conv
from batchgen.kernels.gpu.deterministic_attention import DeterministicTritonAttention
from batchgen.kernels.gpu.heads import qk_norm_rope_cache
from batchgen.kernels.gpu.linear_attention import linear_attention
from batchgen.kernels.gpu.lora import add_lora
from batchgen.kernels.gpu.matmul import linear
from batchgen.kernels.gpu.merge import merge_parts
from batchgen.kernels.gpu.moe import moe_experts, route
from batchgen.kernels.gpu.norm import add_rms_norm, rms_norm
from batchgen.kernels.gpu.quantized_matmul import linear as quantized_linear
from batchgen.kernels.gpu.rope import rope_tables
from batchgen.kernels.gpu.selective_scan import selective_scan
from batchgen.kernels.heads import HeadNorms
from batchgen.kernels.lora import OUTPUT_BLOCK, LoraPairs, LoraStack, LoraStep, LoraTiles
from batchgen.kernels.mixers.states import RunBatch
from batchgen.kernels.moe import Experts, Gating, Routing
from batchgen.kernels.quantization import FP8, INT4, INT8, GroupedWeight, Scheme
from batchgen.kernels.sampling import SamplingColumns
from batchgen.kernels.shaping import bitmask_width
from batchgen.kernels.types import E4M3, AttentionArgs, AttentionBatch, ChunkPages, GroupPages, KVPool, LayerKV

META = torch.device("meta")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, F16, F32)
Cases = Iterator[tuple[str, Callable[[], object]]]


def empty(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def ints(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int64)


def launches() -> Cases:
    """(name, call of a launcher) of every case."""
    for dtype in DTYPES:
        for cases in (_dense, _heads, _products, _quantized, _mixers, _logits, _drawing, _grouped, _attention):
            yield from cases(_name(dtype), dtype)
    yield from _float32()


STEP_SIZES = (1, 16, 17, 1000)


def steps() -> Cases:
    """Launches of steps of other sizes: tokens, rows, pairs, work items, the room of tables."""
    name = _name(BF16)
    for size in STEP_SIZES:
        for cases in (by_row(size), _grouped(name, BF16, size), _attended(size), _quantized(name, BF16, size)):
            yield from ((f"{case} at {size}", thunk) for case, thunk in cases)


def by_row(rows: int) -> Cases:
    """Operations whose result for a row is a function of that row only, in a step of `rows` rows."""
    for cases in (_dense, _heads, _products, _mixers, _logits, _drawing):
        yield from cases(_name(BF16), BF16, rows)
    yield from _float32(rows)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _float32(rows: int = 5) -> Cases:
    """Operations that write logits in float32, on lists of counts with several widths."""
    logits, whole, column, pairs = empty(rows, 151_936), ints(rows), empty(rows), ints(3 * rows)
    yield "row_keys[int64]", partial(noise.row_keys, whole, whole, whole)
    yield "add_bias[float32]", partial(shaping.add_bias, logits, pairs, pairs, empty(3 * rows))
    for width in (64, 256, 4096):
        lists = CountLists.empty(16 * -(-(rows + 1) // 16), width, META)
        yield "count_tokens", partial(counts.count_tokens, lists, whole, whole, whole, width)
        penalties = Penalties(column, column, column)
        yield "penalise[float32]", partial(counts.penalise, logits, whole, whole, lists, penalties, 100 + rows)


def _dense(name: str, dtype: torch.dtype, rows: int = 7) -> Cases:
    for activation in ("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu"):
        yield f"gated[{name},{activation}]", partial(gated, empty(rows, 2 * 3072, dtype=dtype), activation)
    for width in (576, 1024, 2048, 4096, 8192, 16384):  # others use the tile of the next power of 2
        x, delta, weight = (empty(*shape, dtype=dtype) for shape in ((rows, width), (rows, width), (width,)))
        yield f"rms_norm[{name},H={width}]", partial(rms_norm, x, weight, 1e-6)
        yield f"add_rms_norm[{name},H={width}]", partial(add_rms_norm, x, delta, weight, 1e-6)
    heads = empty(rows, 48, 128, dtype=dtype)[:, :32]
    yield f"rms_norm[{name},heads,D=128]", partial(rms_norm, heads, heads[0, 0], 1e-6)
    for dim in (64, 80, 96, 128, 256):
        yield f"rope_tables[{name},D={dim}]", partial(rope_tables, empty(dim // 2), 1.0, ints(rows), dtype)


HEADS = ((9, 3, 64), (32, 8, 64), (32, 32, 80), (32, 32, 96), (16, 8, 128), (32, 8, 128), (64, 8, 128), (8, 4, 256))
"""Heads, kv heads, head size. The tile depends only on the head size, except for models with very few heads."""


def _heads(name: str, dtype: torch.dtype, rows: int = 7) -> Cases:
    make = partial(empty, dtype=dtype)
    for heads, kv_heads, dim in HEADS:
        tables = make(rows, 1, dim), make(rows, 1, dim)
        pool = make(4 + rows, 16, kv_heads, dim), make(4 + rows, 16, kv_heads, dim)
        for normed in (False, True):
            norms = HeadNorms(make(dim), make(dim), 1e-6) if normed else None
            qkv = make(rows, heads + 2 * kv_heads, dim)
            case = f"qk_norm_rope_cache[{name},N={heads},K={kv_heads},D={dim},norm={int(normed)}]"
            yield case, partial(qk_norm_rope_cache, qkv, norms, tables, *pool, ints(rows))
        codes = [empty(4 + rows, 16, kv_heads, dim, dtype=E4M3) for _ in range(2)]
        yield f"{case[:-1]},fp8]", partial(qk_norm_rope_cache, qkv, norms, tables, *codes, ints(rows))


LAYERS = ((1024, 1024), (2048, 1024), (1024, 4096), (4096, 4096), (1024, 6144), (4096, 28672), (1024, 151_936))
"""Inputs and outputs of layers of 0.6B and 8B models, and of an output head."""


def _products(name: str, dtype: torch.dtype, rows: int = 256) -> Cases:
    make = partial(empty, dtype=dtype)
    for inputs, outputs in LAYERS if dtype == BF16 else LAYERS[2:5]:
        yield f"linear[{name},I={inputs},O={outputs}]", partial(linear, make(rows, inputs), make(outputs, inputs))
    x, weight = make(rows, 1024), make(1024, 4096)
    yield f"linear[{name},bias]", partial(linear, x, weight.view(4096, 1024), make(4096))
    yield f"linear[{name},transposed weight]", partial(linear, x, weight.T)
    yield f"linear[{name},odd sizes]", partial(linear, make(rows, 100), make(1000, 100))


WEIGHTS = ((4096, 4096, 128), (4096, 28672, 128), (4096, 4096, 32), (1000, 1000, 64))
"""Inputs, outputs and inputs of a group."""


def _quantized(name: str, dtype: torch.dtype, rows: int | None = None) -> Cases:
    for scheme in (FP8, INT8, INT4):
        for inputs, outputs, size in WEIGHTS if dtype == BF16 else WEIGHTS[:1]:
            weight = _grouped_weight(scheme, outputs, inputs, size)
            kind = f"{name},{scheme.dtype},I={inputs},O={outputs},S={size}".replace("torch.", "")
            for count in (5, 20, 100, 300) if rows is None else (rows,):
                x = empty(count, inputs, dtype=dtype)
                yield f"quantized_linear[{kind},T={count}]", partial(quantized_linear, x, weight)
        if rows is None:
            yield (
                f"quantized_linear[{kind},bias]",
                partial(quantized_linear, x[:100], weight, empty(outputs, dtype=dtype)),
            )


def _grouped_weight(scheme: Scheme, outputs: int, inputs: int, size: int) -> GroupedWeight:
    groups, paired = -(-inputs // size), scheme is INT4
    numbers = empty(outputs, groups, size // 2 if paired else size, dtype=scheme.dtype)
    zeros = empty(outputs, groups, dtype=torch.uint8) if paired else None
    return GroupedWeight(numbers, empty(outputs, groups), inputs, scheme, zeros)


CONVOLUTIONS = {
    "lfm2": (2048, 3, False, None),
    "qwen3_next": (8192, 4, False, "silu"),
    "mamba": (5120, 4, True, "silu"),
}
"""Channels, width, whether there is a bias, activation."""
LINEAR = {
    "qwen3_next": (16, 32, 128, 128, True, False),
    "olmo_hybrid": (30, 30, 96, 192, True, False),
    "kimi_linear": (32, 32, 128, 128, True, True),
    "mamba2": (1, 64, 128, 64, False, False),
    "falcon_h1": (2, 48, 256, 64, False, False),
}
"""Groups, heads, key and value size, whether there is a delta rule, whether channels decay by themselves."""


def _mixers(name: str, dtype: torch.dtype, rows: int = 7) -> Cases:
    make, tokens = partial(empty, dtype=dtype), 2 * rows
    whole = partial(ints, rows)
    runs = [(ints(rows, longest), whole(), whole()) for longest in (rows + 1, 1)]
    batches = [RunBatch(*run, whole(), None) for run in runs] + [RunBatch(*runs[1], None, None)]
    for kind, (channels, width, biased, activation) in CONVOLUTIONS.items():
        weight, bias = make(channels, width), make(channels) if biased else None
        given = make(tokens, channels), weight, bias, make(rows, width, channels), batches, activation
        yield f"causal_conv[{name},{kind}]", partial(causal_conv, *given)
    for kind, (groups, heads, key, value, delta, channels) in LINEAR.items():
        keys, stored = empty(tokens, groups, key), make(tokens, heads, value)
        if not delta:
            keys, stored = make(tokens, groups, key), empty(tokens, heads, value)
        decay, beta = empty(tokens, heads, *[key] * channels), make(tokens, heads) if delta else None
        given = keys, keys, stored, decay, beta, empty(rows, heads, key, value), batches
        yield f"linear_attention[{name},{kind}]", partial(linear_attention, *given)
    x, share, states = make(tokens, 5120), make(tokens, 16), empty(rows, 5120, 16)
    yield f"selective_scan[{name}]", partial(selective_scan, x, x, empty(5120, 16), share, share, states, batches)


def _logits(name: str, dtype: torch.dtype, rows: int = 7) -> Cases:
    tokens, known, pairs = ints(rows), empty(rows), ints(3 * rows)
    for vocab in (8192, 50_257, 151_936, 262_144):
        logits = empty(rows, vocab, dtype=dtype)
        yield f"argmax_lse[{name},V={vocab}]", partial(logprobs.argmax_lse, logits)
    yield f"log_normalizers[{name}]", partial(logprobs.log_normalizers, logits)
    yield f"token_logprobs[{name}]", partial(logprobs.token_logprobs, logits, tokens)
    yield f"token_logprobs[{name},known]", partial(logprobs.token_logprobs, logits, tokens, known)
    yield f"top_logprobs[{name},k=20]", partial(logprobs.top_logprobs, logits, 20)
    for k in (0, 20, 128, 1024):
        yield f"gather_logprobs[{name},k={k}]", partial(logprobs.gather_logprobs, logits, tokens, k)
    yield f"mask_tokens[{name}]", partial(logprobs.mask_tokens, logits, tokens, tokens)
    for vocab in (512, 50_257, 151_936):
        logits, masks = empty(rows, vocab, dtype=dtype), empty(rows, bitmask_width(vocab), dtype=torch.int32)
        twice = empty(2 * rows, vocab, dtype=dtype)
        yield f"apply_bitmask[{name},V={vocab}]", partial(shaping.apply_bitmask, logits, masks)
        yield f"apply_bitmask[{name},V={vocab},rows]", partial(shaping.apply_bitmask, twice, masks, tokens)
    yield f"keep_only[{name}]", partial(shaping.keep_only, logits, tokens, pairs, pairs)
    yield f"drew_masked[{name}]", partial(shaping.drew_masked, logits, tokens, tokens)
    for room in top.GROUPS:  # every capacity for k; rows without groups use the same kernels
        yield f"largest[{name},k={room}]", partial(top.largest, logits, room)


def _drawing(name: str, dtype: torch.dtype, rows: int = 4) -> Cases:
    columns = SamplingColumns(empty(rows), ints(rows), empty(rows), empty(rows), ints(rows), None, ())
    four = (columns.temperature, columns.top_k, columns.top_p, columns.min_p)
    for vocab in (151_936, 50_257):  # with and without 16-byte alignment
        logits = empty(rows, vocab, dtype=dtype)
        yield f"sample[{name},V={vocab}]", partial(sampling.sample, logits, columns)
        yield f"filtered_scores[{name},V={vocab}]", partial(filtering.filtered_scores, logits, *four, columns.top_k)


# Adapters and experts.


def lora_pairs(adapters: int, width: int, inputs: int, outputs: int, dtype: torch.dtype) -> LoraPairs:
    """Adapters of at most `width` ranks."""
    pairs, whole = LoraPairs([None] * adapters), partial(empty, dtype=torch.int32)
    pairs._stack = LoraStack(
        empty(adapters * width, inputs, dtype=dtype), empty(adapters * width, outputs, dtype=dtype),
        whole(adapters, 2), whole(adapters, outputs // OUTPUT_BLOCK, 2), width,
    )  # fmt: skip
    return pairs


def _lora(dtype: torch.dtype, width: int, rows: int, tokens: int = 512) -> None:
    inputs, outputs, count = 4096, 6144, -(-tokens // rows)
    piece = ints(tokens + 3 * count)  # both are uploaded in one transfer: the second begins where the first ends
    tiles = LoraTiles(piece[:tokens], piece[tokens:].view(count, 3), rows)
    pairs = lora_pairs(3, width, inputs, outputs, dtype)
    add_lora(empty(tokens, outputs, dtype=dtype), empty(tokens, inputs, dtype=dtype), LoraStep((), tiles), pairs)


GATINGS = {
    "silu": Gating(),
    "gelu": Gating("gelu"),
    "gelu_pytorch_tanh": Gating("gelu_pytorch_tanh"),
    "relu": Gating("relu"),
    "gpt_oss": Gating("quick_gelu", interleaved=True, limit=7.0, shift=1.0),
    "limited": Gating(limit=10.0),
}
ROUTINGS = {
    "mixtral,E=8": (8, Routing(2), False),
    "qwen3,E=128": (128, Routing(8), False),
    "qwen2,E=60": (60, Routing(4, renormalise=False), False),
    "deepseek_v2,E=160": (160, Routing(6, groups=8, top_groups=3, renormalise=False, scale=16.0), False),
    "deepseek_v3,E=256": (256, Routing(8, "sigmoid", 8, 4, "top2", scale=2.5), True),
    "softmax with a bias,E=64": (64, Routing(6), True),
}


def _experts(dtype: torch.dtype, gating: Gating, tile: GroupedTile | None, tokens: int = 512) -> None:
    hidden, inner, experts, chosen = 2048, 768, 64, 8
    make = partial(empty, dtype=dtype)
    layer = Experts(make(experts, 2 * inner, hidden), make(experts, hidden, inner), gating=gating)
    if gating.interleaved:  # such models keep their weights transposed
        up, down = make(experts, hidden, 2 * inner).transpose(1, 2), make(experts, inner, hidden).transpose(1, 2)
        layer = Experts(up, down, make(experts, 2 * inner), make(experts, hidden), gating)
    moe_experts(make(tokens, hidden), ints(tokens, chosen), empty(tokens, chosen), layer, tile)


def _grouped(name: str, dtype: torch.dtype, tokens: int = 512) -> Cases:
    for rows, tile in chip_tuning(META).grouped["float32" if dtype == F32 else "half"].items():
        for gating, made in GATINGS.items():
            if gating in ("silu", "gpt_oss") or (dtype == BF16 and rows == 64):
                yield f"moe_experts[{name},{gating},rows={rows}]", partial(_experts, dtype, made, tile, tokens)
    yield f"moe_experts[{name},silu]", partial(_experts, dtype, Gating(), None, tokens)
    for rules, (experts, routing, biased) in ROUTINGS.items():
        if dtype != F16:
            bias = empty(experts) if biased else None
            yield f"route[{name},{rules}]", partial(route, empty(tokens, experts, dtype=dtype), routing, bias)
    for width in (16, 32, 64):
        for rows in (16, 64):
            yield f"add_lora[{name},ranks={width},rows={rows}]", partial(_lora, dtype, width, rows, tokens)


# Attention, with the tiles of the chip compiled for.

WINDOW: dict[str, Any] = {"window": 4096}
ALL: dict[str, Any] = {"window": 4096, "softcap": 50.0, "sinks": True}
FP8_CACHE: dict[str, Any] = {"fp8": True}
ATTENTION: tuple[tuple[torch.dtype, int, int, int, int, int, dict[str, Any]], ...] = (
    *((BF16, 16, 8, dim, dim, 16, {}) for dim in (64, 80, 96, 112, 128, 256)),
    (BF16, 16, 16, 192, 128, 16, {}),
    (BF16, 14, 2, 64, 64, 16, {}),
    (BF16, 32, 1, 128, 128, 16, {}),
    (BF16, 32, 8, 128, 128, 64, {}),
    (BF16, 32, 8, 128, 128, 16, WINDOW),
    *((BF16, 16, 8, dim, dim, 16, ALL) for dim in (64, 128, 256)),
    *((F16, 16, 8, dim, dim, 16, {}) for dim in (64, 128, 256)),
    *((F32, 16, 8, dim, dim, 16, {}) for dim in (64, 128, 256)),
    *((F32, 16, 8, dim, dim, 16, ALL) for dim in (64, 128, 256)),
    *((BF16, 16, 8, dim, dim, 16, FP8_CACHE) for dim in (64, 128, 256)),
    (F16, 32, 8, 128, 128, 16, FP8_CACHE | WINDOW),
)
"""dtype, heads, kv heads, key and value size, page size, options."""

LATENTS: tuple[tuple[torch.dtype, int, int, int, dict[str, Any]], ...] = (
    *((BF16, heads, 576, 512, {}) for heads in (16, 20, 128)),
    *((dtype, 16, 576, 512, ALL) for dtype in DTYPES),
    *((BF16, heads, 288, 256, {}) for heads in (16, 40)),
)
"""dtype, heads, key and latent size, options, of layers whose values are the first numbers of the keys."""


def _attention(name: str, dtype: torch.dtype) -> Cases:
    for of, heads, kv_heads, key_dim, value_dim, page_size, options in ATTENTION:
        if of == dtype:
            sizes = f"{name},N={heads},K={kv_heads},D={key_dim},Dv={value_dim},S={page_size}"
            sizes += "".join(f",{option}" for option in options)
            layer = LayerKV(kv_heads, key_dim, value_dim)
            for kind, attend in (("", _whole_step), ("deterministic_", _deterministic_step)):
                yield f"{kind}attention[{sizes}]", partial(attend, dtype, heads, layer, page_size, options)
    for of, heads, key_dim, value_dim, options in LATENTS:
        if of == dtype:
            sizes = ",".join((f"{name},N={heads},D={key_dim},latent={value_dim}", *options))
            layer = LayerKV(1, key_dim, value_dim, latent=True)
            yield f"attention[{sizes}]", partial(_whole_step, dtype, heads, layer, 16, options)
    for dim in (64, 128, 256):
        parts = empty(7, 16, dim, dtype=dtype), empty(16, 7).T, empty(7, 16, dim), empty(7, 16)
        yield f"merge_parts[{name},D={dim}]", partial(merge_parts, *parts)


ROWS = 130


def _whole_step(dtype: torch.dtype, heads: int, layer: LayerKV, page_size: int, options: dict[str, Any]) -> None:
    """A step with work for every launch: a chunk, groups of many rows and of one, long rows that are split."""
    pages = np.ones(-(-4096 // page_size), np.int64)
    groups = [GroupPages(np.arange(128), pages[:2], 0), GroupPages(np.array([128]), pages[:2], 0)]
    start, lens = np.full(ROWS, 2 * page_size), np.where(np.arange(ROWS) < 129, 20, 4000)
    start[129] = 0
    pool, batch = _step(_cache_dtype(dtype, options), layer, page_size, groups, lens, start)
    _attend(TritonAttention(pool, batch, multiprocessors=132), batch, dtype, heads, layer, options)


def _cache_dtype(dtype: torch.dtype, options: dict[str, Any]) -> torch.dtype:
    return E4M3 if options.get("fp8") else dtype


def _deterministic_step(
    dtype: torch.dtype, heads: int, layer: LayerKV, page_size: int, options: dict[str, Any]
) -> None:
    """A step with a chunk, a group and decode rows, whose launches must use the same machine code."""
    groups = [GroupPages(np.arange(128), np.ones(256 // page_size, np.int64), 0)]
    start = np.where(np.arange(ROWS) < 128, 256, 0)
    pool, batch = _step(_cache_dtype(dtype, options), layer, page_size, groups, np.full(ROWS, 20), start)
    _attend(DeterministicTritonAttention(pool, batch), batch, dtype, heads, layer, options)


def _attended(rows: int) -> Cases:
    yield "attention", partial(_steps_of, rows)
    parts = empty(rows, 16, 128, dtype=BF16), empty(16, rows).T, empty(rows, 16, 128), empty(rows, 16)
    yield "merge_parts", partial(merge_parts, *parts)


def _steps_of(rows: int) -> None:
    """Several steps of `rows` rows: with and without a chunk, with and without groups, short and long contexts."""
    layer = LayerKV(8, 128, 128)
    for number, (chunk, grouped) in enumerate(itertools.product((0, 1, 16, rows), (0, 1, rows // 2, rows))):
        length = (1, 33, 4000)[number % 3]
        groups = [GroupPages(np.arange(grouped), np.ones(2, np.int64), 0)] if grouped else []
        start = np.where(np.arange(rows) < grouped, 32, 0)
        pool, batch = _step(BF16, layer, 16, groups, np.full(rows, length), start, chunk, max(length, chunk))
        for attention in (TritonAttention(pool, batch, multiprocessors=132), DeterministicTritonAttention(pool, batch)):
            _attend(attention, batch, BF16, 16, layer, {})


def _step(
    dtype: torch.dtype, layer: LayerKV, page_size: int, groups: list[GroupPages], lens: Any, start: Any,
    chunk: int = 256, context: int = 4000,
) -> tuple[KVPool, AttentionBatch]:  # fmt: skip
    """`chunk` queries at the end of `context` positions, and rows of `lens` positions from `start` on."""
    pages = np.ones(-(-4096 // page_size), np.int64)
    chunks = [ChunkPages(0, chunk, context, pages[: -(-context // page_size)])] if chunk else []
    table, slots = np.zeros((len(lens), len(pages)), np.int64), ints(chunk + len(lens))
    batch = AttentionBatch(slots, chunks, chunk, groups, table, lens, start, int(lens.max()))
    return KVPool.allocate([layer], 512, page_size, dtype, META), batch


def _attend(
    attention: Any, batch: AttentionBatch, dtype: torch.dtype, heads: int, layer: LayerKV, options: dict[str, Any]
) -> None:
    options = {name: value for name, value in options.items() if name != "fp8"}
    if options.get("sinks"):
        options = options | {"sinks": empty(heads, dtype=dtype)}
    query = empty(batch.slot_mapping.shape[0], heads, layer.key_dim, dtype=dtype)
    attention.attend_stored(0, query, AttentionArgs(0.1, **options))
