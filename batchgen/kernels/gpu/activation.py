"""Gated activations in one pass over the output of the gate and up projection."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.activation import KINDS
from batchgen.kernels.gpu.common import rounded
from batchgen.kernels.gpu.launch import launch

_SILU = tl.constexpr(0)
_GELU = tl.constexpr(1)
_GELU_TANH = tl.constexpr(2)
_QUICK_GELU = tl.constexpr(3)
_RELU = tl.constexpr(4)
_BLOCK: Final = 1024


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) without overflow."""
    b_small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, b_small, 1.0) / (1.0 + b_small)


@triton.jit
def activated(x, KIND: tl.constexpr):
    """An activation of float32 values; KIND is a value of `KINDS`."""
    if KIND == _SILU:
        return x * _sigmoid(x)
    elif KIND == _GELU:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == _GELU_TANH:
        # (1 + tanh(u)) / 2 = sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
        return x * _sigmoid(x * (1.5957691216057308 + 0.07135481627159600 * x * x))
    elif KIND == _QUICK_GELU:
        return x * _sigmoid(1.702 * x)
    else:
        return tl.where(x < 0, 0.0, x)  # tl.maximum would hide not-a-numbers


@triton.jit
def _gated(p_gate_up, p_out, stride, INNER: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Per row out = round(act(gate)) * up.

    gate_up [T, 2 INNER] = (gate, up) with row stride `stride`, out [T, INNER] contiguous. Grid: (T, blocks of BLOCK
    columns). Float32 inside; rounded to the dtype after the activation, as in PyTorch, and after the product. Bytes
    moved: 3 words per element of the result.
    """
    i_row = tl.program_id(0).to(tl.int64)
    i_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [b]
    m_column = i_column < INNER  # [b]
    p_row = p_gate_up + i_row * stride
    b_gate = tl.load(p_row + i_column, mask=m_column, other=0.0).to(tl.float32)  # [b]
    b_up = tl.load(p_row + INNER + i_column, mask=m_column, other=0.0).to(tl.float32)  # [b]
    b_gate = rounded(activated(b_gate, KIND), p_out.dtype.element_ty).to(tl.float32)  # [b]
    tl.store(p_out + i_row * INNER + i_column, rounded(b_gate * b_up, p_out.dtype.element_ty), mask=m_column)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, rounded after each, for `gate_up` [T, 2I], gate first. Returns a new [T, I].

    Rows may have gaps; the last stride must be 1.

    Raises:
        KeyError: `activation` is not one of `ACTIVATIONS`.
    """
    tokens, both = gate_up.shape
    assert gate_up.stride(1) == 1
    out = torch.empty(tokens, both // 2, dtype=gate_up.dtype, device=gate_up.device)
    launch(
        _gated, (tokens, triton.cdiv(both // 2, _BLOCK)), gate_up, out, gate_up.stride(0),
        INNER=both // 2, KIND=KINDS[activation], BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out
