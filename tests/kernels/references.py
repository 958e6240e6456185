"""References of kernels: slow and simple, in numpy and PyTorch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.noise import FIRST, GAMMA, SECOND
from batchgen.kernels.quantization import GroupedWeight, quantised

Floats = npt.NDArray[np.float32]


def survivors(
    logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Token ids that may be drawn, most likely first (ties by lowest id), and their (logit - max) / temperature.

    `logits` [V] float32, `temperature` at least 1e-5; `top_k` 0 or less keeps all.
    """
    order = np.lexsort((np.arange(len(logits)), -logits))
    order = order[np.isfinite(logits[order])]
    if top_k > 0:
        order = order[:top_k]
    x = (logits[order] - logits[order[0]]) / np.float32(temperature)
    q = np.exp(x).astype(np.float64)
    before = np.concatenate([[0.0], np.cumsum(q)[:-1]])
    keep = (before < float(np.float32(top_p)) * q.sum()) & (q >= float(np.float32(min_p)))
    keep[0] = True
    return order[keep], x[keep]


def filtered_distribution(
    logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.float64]:
    """Probabilities [V] of the filtered distribution."""
    ids, x = survivors(logits, temperature, top_k, top_p, min_p)
    q = np.exp(x.astype(np.float64))
    result = np.zeros(len(logits))
    result[ids] = q / q.sum()
    return result


def sample_reference(logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float, key: int) -> int:
    """The token that a row with this noise key samples; greedy below a temperature of 1e-5."""
    if temperature < 1e-5:
        return int(np.flatnonzero(logits == logits.max())[0])
    ids, x = survivors(logits, temperature, top_k, top_p, min_p)
    bits = noise_bits_reference(np.full(len(ids), key), ids).astype(np.float32)
    v = np.minimum((bits + np.float32(0.5)) * np.float32(2.0**-53), np.float32(1.0 - 2.0**-24))
    scores = x - np.log(-np.log1p(-v))
    best = ids[scores == scores.max()]
    return int(best.min())


def _finalise_reference(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
    return z ^ (z >> np.uint64(31))


def row_keys_reference(
    seeds: npt.NDArray[np.int64], sample_indexes: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """`row_keys` in numpy's unsigned integers."""
    gamma = np.uint64(GAMMA)
    key = np.zeros(len(seeds), np.uint64)
    for value in (seeds, sample_indexes, positions):
        key = _finalise_reference((key ^ _finalise_reference(value.astype(np.uint64) + gamma)) + gamma)
    return key.astype(np.int64)


def noise_bits_reference(keys: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`noise_bits` in numpy's unsigned integers."""
    counter = keys.astype(np.uint64) + (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA)
    return (_finalise_reference(counter) >> np.uint64(11)).astype(np.int64)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product y [..., O] = x [..., I] W [O, I]^T + b [O], with float32 sums and one rounding to x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)


def grouped_linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """The product y [..., O] = x [..., I] W^T + b, in x's dtype."""
    count, size = weight.numbers.shape[1:]
    padded = F.pad(x.float(), (0, count * size - weight.inner)).view(*x.shape[:-1], count, size)
    numbers, scales = quantised(padded, weight.scheme.most)
    # Integers below 2^31, exact in float64.
    sums = torch.einsum("...gs,ogs->...og", numbers.double(), weight.numbers.double()).float()  # [..., O, G]
    out = (sums * weight.scales * scales[..., None, :]).sum(-1)
    return (out if bias is None else out + bias.float()).to(x.dtype)


def dequantised_linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """The product y [..., O] = x [..., I] W^T + b, with float32 sums and one rounding to x's dtype."""
    return F.linear(x.float(), weight.dense(), None if bias is None else bias.float()).to(x.dtype)
