"""Cosine and sine tables of a step's positions in one launch, as `kernels.rope`."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.gpu.common import power_of_2, rounded
from batchgen.kernels.gpu.launch import launch

_TILE: Final = 512
"""Angles per tile."""


@triton.jit(do_not_specialize=["tokens"])
def _rope_tables(
    p_inv_freq, p_positions, p_cos, p_sin, tokens, scale,
    HALF: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Per token cos = (c, c) and sin = (-s, s), with c, s = scale * cos, sin(position * inv_freq).

    inv_freq [HALF] float32, positions [T] int64, tables [T, 2 HALF]. Grid: one program per BLOCK_TOKENS tokens. Angles
    in float32, as checkpoints assume, reduced exactly at any size. Bytes moved: the tables once out.
    """
    i_token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)  # [t]
    i_half = tl.arange(0, BLOCK_HALF)  # [h]
    m_token, m_half = i_token < tokens, i_half < HALF
    m_tile = m_token[:, None] & m_half[None, :]  # [t, h]
    b_position = tl.load(p_positions + i_token, mask=m_token, other=0).to(tl.float32)  # [t]
    b_inv_freq = tl.load(p_inv_freq + i_half, mask=m_half, other=0.0)  # [h]
    b_angle = b_position[:, None] * b_inv_freq[None, :]  # [t, h]
    b_cos = rounded(tl.cos(b_angle) * scale, p_cos.dtype.element_ty)  # [t, h]
    b_sin = tl.sin(b_angle) * scale  # [t, h]
    o_tile = i_token[:, None] * (2 * HALF) + i_half[None, :]  # [t, h]
    tl.store(p_cos + o_tile, b_cos, mask=m_tile)
    tl.store(p_cos + o_tile + HALF, b_cos, mask=m_tile)
    tl.store(p_sin + o_tile, rounded(-b_sin, p_sin.dtype.element_ty), mask=m_tile)
    tl.store(p_sin + o_tile + HALF, rounded(b_sin, p_sin.dtype.element_ty), mask=m_tile)


def rope_tables(inv_freq: Tensor, scale: float, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `kernels.rope.rope_tables`."""
    assert inv_freq.dtype == torch.float32
    assert inv_freq.is_contiguous()
    assert positions.is_contiguous()
    tokens, half = positions.shape[0], inv_freq.shape[0]
    cos, sin = (torch.empty(tokens, 1, 2 * half, dtype=dtype, device=positions.device) for _ in range(2))
    block_half = power_of_2(half)
    block_tokens = max(1, _TILE // block_half)
    launch(
        _rope_tables, (triton.cdiv(tokens, block_tokens),), inv_freq, positions, cos, sin, tokens, scale,
        HALF=half, BLOCK_TOKENS=block_tokens, BLOCK_HALF=block_half, num_warps=4,
    )  # fmt: skip
    return cos, sin
