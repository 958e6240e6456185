"""Counter-based Gumbel noise in Triton, with integers bitwise equal to those of `kernels.noise`.

The conversion of bits to noise is float32 as there, but `log1p` is built from `log` (Kahan: log1p(w) is
w log(u) / (u - 1) with u = 1 + w rounded, which cancels the rounding error), and a device's `log` and division are
within 2 ulp of a CPU's. Noise agrees to about 4e-7 absolutely, so a draw can differ from the CPU's only if the two best
scores are that close: about one draw in a million.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.gpu.launch import launch

GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND = tl.constexpr(0x94D049BB133111EB)
LARGEST_UNIFORM = tl.constexpr(1.0 - 2.0**-24)
_BLOCK = 128


@triton.jit
def _finalise(z):
    """SplitMix64's output function on uint64."""
    z = (z ^ (z >> 30)) * FIRST
    z = (z ^ (z >> 27)) * SECOND
    return z ^ (z >> 31)


@triton.jit
def _absorb(key, value):
    return _finalise((key ^ _finalise(value + GAMMA)) + GAMMA)


@triton.jit
def noise_bits(key, ids):
    """53 uniform bits as uint64, for int32 token ids under a uint64 key."""
    return _finalise(key + (ids.to(tl.uint64) + 1) * GAMMA) >> 11


@triton.jit
def uniform_of(bits):
    """Uniform v in (0, 1), float32, from `noise_bits`."""
    return tl.minimum((bits.to(tl.float32) + 0.5) * 1.1102230246251565e-16, LARGEST_UNIFORM)


@triton.jit
def gumbel_of(v):
    """-log(-log1p(-v)) for v of `uniform_of`."""
    u = 1.0 - v
    gone = u - 1.0  # exact: -v as far as u can represent it
    exponential = tl.where(gone == 0.0, v, v * (tl.log(u) / tl.where(gone == 0.0, 1.0, gone)))
    return -tl.log(exponential)


@triton.jit(do_not_specialize=["rows"])
def _row_keys(p_seeds, p_samples, p_positions, p_keys, rows, s_seeds, s_samples, s_positions, BLOCK: tl.constexpr):
    o_row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    m_row = o_row < rows
    key = tl.zeros([BLOCK], tl.uint64)
    key = _absorb(key, tl.load(p_seeds + o_row * s_seeds, mask=m_row, other=0).to(tl.uint64))
    key = _absorb(key, tl.load(p_samples + o_row * s_samples, mask=m_row, other=0).to(tl.uint64))
    key = _absorb(key, tl.load(p_positions + o_row * s_positions, mask=m_row, other=0).to(tl.uint64))
    tl.store(p_keys + o_row, key.to(tl.int64), mask=m_row)


def row_keys(seeds: Tensor, sample_indexes: Tensor, positions: Tensor) -> Tensor:
    """Noise keys [R] int64 of the rows' next draws, from seed, sample index and output position, each [R] int64.

    One program per 128 rows; 32 bytes moved per row.
    """
    rows = seeds.shape[0]
    keys = torch.empty(rows, dtype=torch.int64, device=seeds.device)
    launch(
        _row_keys, (triton.cdiv(rows, _BLOCK),), seeds, sample_indexes, positions, keys, rows, seeds.stride(0),
        sample_indexes.stride(0), positions.stride(0),
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return keys
