"""Processing of the fused q, k, v projection: normalise q and k, rotate them, store k and v in the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from batchgen.kernels.norm import rms_norm
from batchgen.kernels.pooled import store
from batchgen.kernels.rope import apply_rope


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """Norms of query and key heads."""

    query: Tensor
    """[D]"""
    key: Tensor
    """[D]"""
    eps: float


def qk_norm_rope_cache(
    qkv: Tensor, norms: HeadNorms | None, tables: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, slots: Tensor
) -> Tensor:
    """Normalise q and k per head if there are norms, rotate them, and store k and v.

    Args:
        qkv: [T, N + 2K, D], q first, then k, then v.
        norms: of the heads; None if they are not normalised.
        tables: [T, 1, D] each, of `rope_tables`.
        keys: [P, S, K, D], written in place.
        values: [P, S, K, D], written in place.
        slots: [T] int64, page * S + offset; equal slots keep any one of their tokens.

    Returns:
        The queries [T, N, D], perhaps a view. Rounded to the dtype after the norm, after the product with the sines and
        after the sum.
    """
    kv_heads = keys.shape[2]
    heads = qkv.shape[1] - 2 * kv_heads
    if norms is not None:
        query = apply_rope(rms_norm(qkv[:, :heads], norms.query, norms.eps), *tables)  # [T, N, D]
        key = apply_rope(rms_norm(qkv[:, heads : heads + kv_heads], norms.key, norms.eps), *tables)  # [T, K, D]
    else:
        rotated = apply_rope(qkv[:, : heads + kv_heads], *tables)  # [T, N + K, D]
        query, key = rotated[:, :heads], rotated[:, heads:]  # [T, N, D], [T, K, D]
    store(keys, key, slots)
    store(values, qkv[:, heads + kv_heads :], slots)
    return query
