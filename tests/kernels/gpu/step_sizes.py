"""Launches of steps of many sizes, which must not need other machine code than `aot_cases` compiles.

Each has a shape of those cases, with other values of what changes from step to step: tokens, rows, pairs, work
items, the room of tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.bitmask import bitmask_width
from batchgen.kernels.counts import CountLists, Penalties
from batchgen.kernels.gpu import bitmask, counts, filtering, logprobs, noise, sampling, shaping, top
from batchgen.kernels.gpu.activation import gated
from batchgen.kernels.gpu.attention import TritonAttention
from batchgen.kernels.gpu.deterministic_attention import DeterministicTritonAttention
from batchgen.kernels.gpu.heads import qk_norm_rope_cache
from batchgen.kernels.gpu.lora import add_lora
from batchgen.kernels.gpu.matmul import linear
from batchgen.kernels.gpu.merge import merge_parts
from batchgen.kernels.gpu.moe import moe_experts, route
from batchgen.kernels.gpu.norm import add_rms_norm, rms_norm
from batchgen.kernels.gpu.rope import rope_tables
from batchgen.kernels.heads import HeadNorms
from batchgen.kernels.lora import LoraStep, LoraTiles
from batchgen.kernels.moe import Experts, Routing
from batchgen.kernels.sampling import SamplingColumns
from batchgen.kernels.types import AttentionArgs, AttentionBatch, ChunkPages, GroupPages, KVPool, LayerKV

from .aot_cases import META, Cases, empty, ints, lora_pairs

SIZES = (1, 16, 17, 1000)
DTYPE = torch.bfloat16
VOCABS = 262_144, 151_936
"""Vocabularies of functions that read logits, and of those that select and mask, as in the cases of both."""


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    for size in SIZES:
        for make in (
            _dense,
            _logits,
            _shaping,
            _drawing,
            _adapters,
            _experts,
            _attention,
        ):
            yield from ((f"{name} at {size}", thunk) for name, thunk in make(size))


def _empty(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return empty(*shape, dtype=dtype)


def _dense(tokens: int) -> Cases:
    x, delta, weight = _empty(tokens, 4096), _empty(tokens, 4096), _empty(4096)
    yield "rms_norm", partial(rms_norm, x, weight, 1e-6)
    yield "add_rms_norm", partial(add_rms_norm, x, delta, weight, 1e-6)
    yield "gated", partial(gated, _empty(tokens, 2 * 3072), "silu")
    yield "rope_tables", partial(rope_tables, empty(64), 1.0, ints(tokens), DTYPE)
    yield "linear", partial(linear, _empty(tokens, 1024), _empty(4096, 1024))
    tables = _empty(tokens, 1, 128), _empty(tokens, 1, 128)
    pools = _empty(11 + tokens, 16, 8, 128), _empty(11 + tokens, 16, 8, 128)
    qkv, norm = _empty(tokens, 32 + 2 * 8, 128), _empty(128)
    yield (
        "qk_norm_rope_cache",
        partial(qk_norm_rope_cache, qkv, HeadNorms(norm, norm, 1e-6), tables, *pools, ints(tokens)),
    )


def _logits(rows: int) -> Cases:
    logits, tokens = _empty(rows, VOCABS[0]), ints(rows)
    yield "argmax_lse", partial(logprobs.argmax_lse, logits)
    yield "log_normalizers", partial(logprobs.log_normalizers, logits)
    yield "token_logprobs", partial(logprobs.token_logprobs, logits, tokens, empty(rows))
    for k in (0, 17, 20):
        yield f"gather_logprobs {k}", partial(logprobs.gather_logprobs, logits, tokens, k)
    yield "mask_tokens", partial(logprobs.mask_tokens, logits, tokens, tokens)


def _shaping(rows: int) -> Cases:
    logits, tokens = _empty(rows, VOCABS[1]), ints(rows)
    yield "largest", partial(top.largest, logits, 9)
    masks = _empty(rows, bitmask_width(VOCABS[1]), dtype=torch.int32)
    yield "apply_bitmask", partial(bitmask.apply_bitmask, logits, masks)
    yield "apply_bitmask of rows", partial(bitmask.apply_bitmask, _empty(2 * rows, VOCABS[1]), masks, tokens)
    scores, column, pairs = empty(rows, VOCABS[1]), empty(rows), ints(3 * rows)
    for width in (64, 4096):
        lists = CountLists.empty(16 * -(-(rows + 1) // 16), width, META)
        yield "count_tokens", partial(counts.count_tokens, lists, tokens, tokens, tokens, width)
        penalties = Penalties(column, column, column)
        yield "penalise", partial(counts.penalise, scores, tokens, tokens, lists, penalties, rows)
    yield "add_bias", partial(shaping.add_bias, scores, pairs, pairs, empty(3 * rows))
    yield "keep_only", partial(shaping.keep_only, logits, tokens, pairs, pairs)
    yield "drew_masked", partial(shaping.drew_masked, logits, tokens, tokens)


def _drawing(rows: int) -> Cases:
    logits, whole, floats = _empty(rows, VOCABS[1]), ints(rows), empty(rows)
    columns = SamplingColumns(floats, whole, floats, floats, whole, None, ())
    yield "row_keys", partial(noise.row_keys, whole, whole, whole)
    yield "sample", partial(sampling.sample, logits, columns)
    yield "filtered_scores", partial(filtering.filtered_scores, logits, floats, whole, floats, floats, whole)


def _adapters(tokens: int) -> Cases:
    inputs, outputs = 4096, 6144
    pairs = lora_pairs(3, 16, inputs, outputs, DTYPE)
    for rows in (16, 64):
        # Both are uploaded in one transfer: the second begins where the first ends.
        count = -(-tokens // rows)
        piece = ints(tokens + 3 * count)
        tiles = LoraTiles(piece[:tokens], piece[tokens:].view(count, 3), rows)
        x, out = _empty(tokens, inputs), _empty(tokens, outputs)
        yield f"add_lora of {rows}", partial(add_lora, out, x, LoraStep((), tiles), pairs)


def _experts(tokens: int) -> Cases:
    yield "route", partial(route, _empty(tokens, 128), Routing(8))
    weights = Experts(_empty(64, 2 * 768, 2048), _empty(64, 2048, 768))
    yield "moe_experts", partial(moe_experts, _empty(tokens, 2048), ints(tokens, 8), empty(tokens, 8), weights)


def _attention(rows: int) -> Cases:
    layer = LayerKV(8, 128, 128)
    yield "attention", partial(_attend, layer, rows)
    parts = _empty(rows, 16, 128), empty(16, rows).T, empty(rows, 16, 128), empty(rows, 16)
    yield "merge_parts", partial(merge_parts, *parts)


def _attend(layer: LayerKV, rows: int) -> None:
    """Several steps of `rows` rows: with and without a chunk, with and without groups, short and long contexts."""
    pool = KVPool.allocate([layer], 512, 16, DTYPE, META)
    for chunk in (0, 1, 16, rows):
        for grouped in (0, 1, rows // 2, rows):
            for length in (1, 33, 4000):
                pages = np.ones(-(-max(length, chunk) // 16), np.int64)
                chunks = [ChunkPages(0, chunk, max(length, chunk), pages)] if chunk else []
                groups = [GroupPages(np.arange(grouped), np.ones(2, np.int64), 0)] if grouped else []
                start = np.where(np.arange(rows) < grouped, 32, 0)
                table, lens = np.zeros((rows, len(pages)), np.int64), np.full(rows, length)
                batch = AttentionBatch(ints(chunk + rows), chunks, chunk, groups, table, lens, start, length)
                query = _empty(chunk + rows, 16, 128)
                TritonAttention(pool, batch, multiprocessors=132).attend_stored(0, query, AttentionArgs(0.1))
                DeterministicTritonAttention(pool, batch).attend_stored(0, query, AttentionArgs(0.1))


BY_ROW = (_dense, _logits, _shaping, _drawing)
"""Launches of operations whose result for a row is a function of that row only."""
