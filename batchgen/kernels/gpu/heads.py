"""Processing of the fused q, k, v projection in one pass: norms, rotation, and the store to the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.gpu.common import cached, power_of_2, rounded
from batchgen.kernels.gpu.launch import launch
from batchgen.kernels.heads import HeadNorms

_TILE = 2048
"""Elements per tile."""


@triton.jit
def _qk_norm_rope_cache(
    p_qkv, p_q_norm, p_k_norm, p_cos, p_sin, p_slots, p_query, p_keys, p_values, eps, qkv_token, qkv_head, table_token,
    key_slot, key_head, value_slot, value_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Of each token and head: rope(norm(x)) of q and k; q goes to the output, k and v to the token's slot.

        norm(x) = x / sqrt(mean(x^2) + eps) * w
        rope(x) = (x1 cos1 + x2 sin1, x2 cos2 + x1 sin2); the table of sines contains (-sin, sin)

    qkv [T, N + 2K, D] with strides (token, head, 1), norms [D], tables [T, D] with stride `table_token`, slots [T]
    int64, queries [T, N, D] contiguous, caches [slots, K, D] with strides (slot, head, 1), in E4M3 if of uint8. D = 2
    HALF.
    Grid: (T, blocks of BLOCK_HEADS of the N + 2K heads); the halves of a head are two tiles, so nothing is swapped.
    Float32 inside; rounded after the norm, after the product with the sines and after the sum, as in PyTorch. Bytes
    moved: the projection once in, once out.
    """
    i_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # [h]
    i_low = tl.arange(0, BLOCK_HALF)  # [d]
    i_high = i_low + HALF  # [d]
    m_half = i_low < HALF  # [d]
    m_q = i_head < HEADS  # [h]
    m_k = (i_head >= HEADS) & (i_head < HEADS + KV_HEADS)  # [h]
    m_v = (i_head >= HEADS + KV_HEADS) & (i_head < HEADS + 2 * KV_HEADS)  # [h]
    m_all = (i_head < HEADS + 2 * KV_HEADS)[:, None] & m_half[None, :]  # [h, d]
    dtype: tl.constexpr = p_query.dtype.element_ty

    p_heads = p_qkv + i_token * qkv_token + i_head.to(tl.int64)[:, None] * qkv_head  # [h, 1]
    b_low = tl.load(p_heads + i_low[None, :], mask=m_all, other=0.0)  # [h, d]
    b_high = tl.load(p_heads + i_high[None, :], mask=m_all, other=0.0)  # [h, d]

    i_slot = tl.load(p_slots + i_token).to(tl.int64)
    i_kv = (i_head - HEADS - KV_HEADS).to(tl.int64)[:, None]  # [h, 1]
    p_value = p_values + i_slot * value_slot + i_kv * value_head  # [h, 1]
    tl.store(p_value + i_low[None, :], cached(b_low, p_values.dtype.element_ty), mask=m_v[:, None] & m_half[None, :])
    tl.store(p_value + i_high[None, :], cached(b_high, p_values.dtype.element_ty), mask=m_v[:, None] & m_half[None, :])

    b_low, b_high = b_low.to(tl.float32), b_high.to(tl.float32)  # [h, d]
    if NORM:
        b_squares = tl.sum(b_low * b_low, axis=1) + tl.sum(b_high * b_high, axis=1)  # [h]
        b_scale = tl.rsqrt(b_squares / (2 * HALF) + eps)[:, None]  # [h, 1]
        b_q_low, b_q_high = _halves(p_q_norm, i_low, i_high, m_half)  # [d]
        b_k_low, b_k_high = _halves(p_k_norm, i_low, i_high, m_half)  # [d]
        b_weight_low = tl.where(m_q[:, None], b_q_low[None, :], b_k_low[None, :])  # [h, d]
        b_weight_high = tl.where(m_q[:, None], b_q_high[None, :], b_k_high[None, :])  # [h, d]
        b_low = rounded(b_low * b_scale * b_weight_low, dtype).to(tl.float32)  # [h, d]
        b_high = rounded(b_high * b_scale * b_weight_high, dtype).to(tl.float32)  # [h, d]
    b_cos_low, b_cos_high = _halves(p_cos + i_token * table_token, i_low, i_high, m_half)  # [d]
    b_sin_low, b_sin_high = _halves(p_sin + i_token * table_token, i_low, i_high, m_half)  # [d]
    b_crossed_low = rounded(b_high * b_sin_low[None, :], dtype).to(tl.float32)  # [h, d]
    b_crossed_high = rounded(b_low * b_sin_high[None, :], dtype).to(tl.float32)  # [h, d]
    b_low = rounded(b_crossed_low + b_low * b_cos_low[None, :], dtype)  # [h, d]
    b_high = rounded(b_crossed_high + b_high * b_cos_high[None, :], dtype)  # [h, d]

    p_q = p_query + (i_token * HEADS + i_head.to(tl.int64)[:, None]) * (2 * HALF)  # [h, 1]
    tl.store(p_q + i_low[None, :], b_low, mask=m_q[:, None] & m_half[None, :])
    tl.store(p_q + i_high[None, :], b_high, mask=m_q[:, None] & m_half[None, :])
    p_key = p_keys + i_slot * key_slot + (i_head - HEADS).to(tl.int64)[:, None] * key_head  # [h, 1]
    tl.store(p_key + i_low[None, :], cached(b_low, p_keys.dtype.element_ty), mask=m_k[:, None] & m_half[None, :])
    tl.store(p_key + i_high[None, :], cached(b_high, p_keys.dtype.element_ty), mask=m_k[:, None] & m_half[None, :])


@triton.jit
def _halves(p_row, i_low, i_high, m_half):
    """Both halves [d] of a row, in float32."""
    b_low = tl.load(p_row + i_low, mask=m_half, other=0.0).to(tl.float32)
    return b_low, tl.load(p_row + i_high, mask=m_half, other=0.0).to(tl.float32)


def qk_norm_rope_cache(
    qkv: Tensor, norms: HeadNorms | None, tables: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, slots: Tensor
) -> Tensor:
    """Normalise q and k per head if there are norms, rotate them, and store k and v.

    Arguments and result as in `kernels.heads.qk_norm_rope_cache`; the result is contiguous. `qkv` may have any strides
    except the last, which must be 1, and the caches must be pages of consecutive slots.
    """
    tokens, total, dim = qkv.shape
    kv_heads = keys.shape[2]
    heads = total - 2 * kv_heads
    cos, sin = tables
    assert dim % 2 == 0
    assert cos.shape == sin.shape == (tokens, 1, dim)
    assert cos.stride() == sin.stride()
    assert qkv.stride(2) == cos.stride(2) == slots.stride(0) == 1
    for cache in (keys, values):
        assert cache.shape[2:] == (kv_heads, dim)
        assert cache.stride(0) == cache.shape[1] * cache.stride(1)
        assert cache.stride(3) == 1
    query = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    block_half = power_of_2(dim // 2)
    block_heads = min(max(_TILE // (2 * block_half), 1), power_of_2(total))
    launch(
        _qk_norm_rope_cache, (tokens, triton.cdiv(total, block_heads)), qkv, qkv if norms is None else norms.query,
        qkv if norms is None else norms.key, cos, sin, slots, query, keys, values, 0.0 if norms is None else norms.eps,
        qkv.stride(0), qkv.stride(1), cos.stride(0), keys.stride(1), keys.stride(2), values.stride(1), values.stride(2),
        HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, BLOCK_HEADS=block_heads, BLOCK_HALF=block_half,
        NORM=norms is not None, num_warps=4,
    )  # fmt: skip
    return query
