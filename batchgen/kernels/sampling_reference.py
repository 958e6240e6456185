"""Reference of `sampling` in numpy: row by row, with full sorts, slow and simple."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batchgen.kernels.noise import noise_bits_reference

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
