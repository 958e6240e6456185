"""Counter-based Gumbel noise: a draw depends only on (row seed, sample index, output position, token id).

SplitMix64 (Steele, Lea, Flood 2014) in 64-bit wrap-around integers, bitwise equal in torch and the kernels.

    finalise(z): z ^= z >>> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >>> 27; z *= 0x94D049BB133111EB; z ^= z >>> 31
    absorb(key, x) = finalise((key ^ finalise(x + GAMMA)) + GAMMA)
    key  = absorb(absorb(absorb(0, seed), sample), position)
    bits = finalise(key + (token + 1) * GAMMA) >>> 11            53 bits
    v = (float32(bits) + 0.5) * 2^-53, at most 1 - 2^-24
    gumbel = -log(-log1p(-v))                                    float32, between -2.9 and 37.4

Large values, which win the argmax, come from small `v`, where float32 keeps every bit: the noise resolves
probabilities down to 2^-53, not only 2^-24.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
"""With `GAMMA` and `FIRST`, the numbers of SplitMix64."""
_LARGEST_UNIFORM = 1.0 - 2.0**-24
_CHUNK = 1 << 18
"""Values drawn at once: their integers (2 x 2 MiB) stay in the cache of a CPU."""


def _signed(value: int) -> int:
    """The int64 with a given 64-bit pattern."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _finalise_(z: Tensor) -> Tensor:
    """SplitMix64's output function on int64, in place. torch's right shift is arithmetic: its upper bits are masked."""
    scratch = torch.empty_like(z)
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        torch.bitwise_right_shift(z, shift, out=scratch)
        z.bitwise_xor_(scratch.bitwise_and_(_MASK64 >> shift)).mul_(_signed(factor))
    return z


def _absorb(key: Tensor, value: Tensor) -> Tensor:
    return _finalise_((key ^ _finalise_(value + _signed(GAMMA))).add_(_signed(GAMMA)))


def row_keys(seeds: Tensor, sample_indexes: Tensor, positions: Tensor) -> Tensor:
    """Noise keys [R] int64 of the rows' next draws, from seed, sample index and output position, each [R] int64."""
    return _absorb(_absorb(_absorb(torch.zeros_like(seeds), seeds), sample_indexes), positions)


def noise_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """53 uniform bits as int64 for `token_ids` int64 under `keys` int64, of shapes that broadcast."""
    return _finalise_(keys + (token_ids + 1) * _signed(GAMMA)).bitwise_right_shift_(11).bitwise_and_(_MASK64 >> 11)


def gumbel(keys: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise [R, vocab] float32 for every token id under `keys` [R] int64."""
    return gumbel_at(keys, torch.arange(vocab, device=keys.device)[None])


def gumbel_at(keys: Tensor, token_ids: Tensor) -> Tensor:
    """The same noise for candidates only: [R, M] float32 for `token_ids` [R or 1, M] int64 under `keys` [R] int64."""
    rows, width = keys.shape[0], token_ids.shape[1]
    noise = torch.empty(rows, width, dtype=torch.float32, device=keys.device)
    step = max(1, (_CHUNK if keys.device.type == "cpu" else 64 * _CHUNK) // max(1, width))
    for begin in range(0, rows, step):
        chunk = slice(begin, begin + step)
        ids = token_ids if token_ids.shape[0] == 1 else token_ids[chunk]
        part = noise[chunk].copy_(noise_bits(keys[chunk, None], ids))
        part.add_(0.5).mul_(2.0**-53).clamp_(max=_LARGEST_UNIFORM)
        part.neg_().log1p_().neg_().log_().neg_()
    return noise
