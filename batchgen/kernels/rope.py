"""Rotary position embeddings: the inverse frequencies of every scaling rule, and the rotation.

A pair (x_i, x_{i + D/2}) at position p rotates by the angle p * f_i. The scaling rules differ in f and in one factor on
cos and sin: Su et al. 2021 (default), Chen et al. 2023 (linear), Peng et al. 2023 (yarn), Ding et al. 2024 (longrope),
Llama 3.1 (llama3).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from batchgen.kernels.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, longest: int) -> tuple[Tensor, float]:
    """Inverse frequencies and the factor on cos and sin.

    Args:
        rope: the scaling rule.
        longest: most positions of any row. `longrope` chooses its long factors by it, and `dynamic` its base past
            `max_positions`: once for all rows, so that a row does not depend on the length of others.

    Returns:
        [D/2] float32 on the CPU, and the factor.
    """
    base = _default(rope)
    match rope.kind:
        case "default":
            return base, 1.0
        case "dynamic":
            return _dynamic(rope, longest), 1.0
        case "linear":
            return base / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, base), 1.0
        case "yarn":
            return _yarn(rope), _yarn_scale(rope)
        case "longrope":
            return _longrope(rope, longest), _longrope_scale(rope)


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim  # [D/2]


def _default(rope: RopeConfig) -> Tensor:
    powers: Tensor = rope.theta ** _exponents(rope.dim)
    return 1.0 / powers  # [D/2]


def _dynamic(rope: RopeConfig, longest: int) -> Tensor:
    """The default rule up to `max_positions`; past it, with a base that grows with the length (bloc97, emozilla)."""
    if longest <= rope.max_positions:
        return _default(rope)
    grown = (rope.factor * longest / rope.max_positions) - (rope.factor - 1)
    powers: Tensor = (rope.theta * grown ** (rope.dim / (rope.dim - 2))) ** _exponents(rope.dim)
    return 1.0 / powers  # [D/2]


def _llama3(rope: RopeConfig, base: Tensor) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend those in between."""
    wavelength = 2 * math.pi / base  # [D/2]
    scaled = torch.where(wavelength > rope.original_positions / rope.low_freq_factor, base / rope.factor, base)
    span = rope.high_freq_factor - rope.low_freq_factor
    blend = (rope.original_positions / wavelength - rope.low_freq_factor) / span
    blended = (1 - blend) * scaled / rope.factor + blend * scaled
    between = (wavelength >= rope.original_positions / rope.high_freq_factor) & (
        wavelength <= rope.original_positions / rope.low_freq_factor
    )
    return torch.where(between, blended, scaled)  # [D/2]


def _yarn(rope: RopeConfig) -> Tensor:
    """Interpolate slow frequencies, keep fast ones, ramp between the two correction bounds."""
    powers: Tensor = rope.theta ** _exponents(rope.dim)
    low, high = (_correction(rope, rotations) for rotations in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # avoid a division by zero
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)  # [D/2]
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep  # [D/2]


def _correction(rope: RopeConfig, rotations: float) -> float:
    """Dimension that rotates `rotations` times over the original context."""
    turns = rope.original_positions / (rotations * 2 * math.pi)
    return (rope.dim * math.log(turns)) / (2 * math.log(rope.theta))


def _yarn_scale(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope(rope: RopeConfig, longest: int) -> Tensor:
    factors = rope.long_factor if longest > rope.original_positions else rope.short_factor
    powers: Tensor = rope.theta ** _exponents(rope.dim)
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)  # [D/2]


def _longrope_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_positions))


def rope_tables(inv_freq: Tensor, scale: float, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of a step's positions, shared by all layers.

    Args:
        inv_freq: [D/2] float32.
        scale: factor on cos and sin.
        positions: [T] int64.
        dtype: the model's; angles are float32.

    Returns:
        cos [T, 1, D] = (cos, cos) and sin [T, 1, D] = (-sin, sin), ready for `apply_rope`.
    """
    angles = positions[:, None].float() * inv_freq  # [T, D/2]
    cos = (angles.cos() * scale).to(dtype)  # [T, D/2]
    sin = (angles.sin() * scale).to(dtype)  # [T, D/2]
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [T, N, D] by the tables [T, 1, D] of `rope_tables`. Returns a new contiguous [T, N, D]."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), -1)  # [T, N, D] = (x2, x1)
    return swapped.mul_(sin).addcmul_(x, cos)  # [T, N, D] = (x1 cos - x2 sin, x2 cos + x1 sin)
