"""Processing of the fused q, k, v projection: normalise q and k, rotate them, store k and v in the paged cache."""

from __future__ import annotations

from torch import Tensor

from batchgen.kernels.norm import rms_norm
from batchgen.kernels.pooled import store
from batchgen.kernels.rope import apply_rope

__all__ = ["qk_norm_rope_cache"]


def qk_norm_rope_cache(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Normalise q and k per head if there are weights for it, rotate them, and store k and v.

    Args:
        qkv: [T, N + 2K, D], q first, then k, then v.
        heads: N.
        kv_heads: K.
        q_norm: [D], or None if heads are not normalised.
        k_norm: [D], or None as `q_norm`.
        eps: of the norm.
        cos: [T, 1, D] of `rope_tables`.
        sin: [T, 1, D] of `rope_tables`.
        keys: [P, S, K, D], written in place.
        values: [P, S, K, D], written in place.
        slot_mapping: [T] int64, page * S + offset; equal slots keep any one of their tokens.

    Returns:
        The queries [T, N, D], perhaps a view. Rounded to the dtype after the norm, after the product with the sines and
        after the sum.
    """
    if q_norm is not None and k_norm is not None:
        query = apply_rope(rms_norm(qkv[:, :heads], q_norm, eps), cos, sin)  # [T, N, D]
        key = apply_rope(rms_norm(qkv[:, heads : heads + kv_heads], k_norm, eps), cos, sin)  # [T, K, D]
    else:
        rotated = apply_rope(qkv[:, : heads + kv_heads], cos, sin)  # [T, N + K, D]
        query, key = rotated[:, :heads], rotated[:, heads:]  # [T, N, D], [T, K, D]
    store(keys, key, slot_mapping)
    store(values, qkv[:, heads + kv_heads :], slot_mapping)
    return query
