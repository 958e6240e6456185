"""The coding of teacher values: ids are exact, logprobs are within the bound that the page of exports states."""

from __future__ import annotations

import math

import numpy as np

from batchgen.data.out.distillation import pack, unpack
from tests.cases import each


@each("id_bits", [1, 7, 8, 15, 16, 17, 18, 19, 20])
def test_pairs_are_within_half_a_step(id_bits: int) -> None:
    rng = np.random.default_rng(id_bits)
    step = 32 / (2 ** (32 - id_bits) - 2)
    for shape in ((1, 1), (7, 3), (63, 100)):
        ids = rng.integers(0, 2**id_bits, shape)
        logprobs = -rng.exponential(6, shape).clip(0, 32).astype(np.float32)
        pairs = pack(ids, logprobs, id_bits)
        assert pairs.dtype == np.uint32, "four bytes a pair"
        found_ids, found = unpack(pairs, id_bits)
        np.testing.assert_array_equal(found_ids, ids)
        rounded = 32 * 2.0**-24  # of a float32
        assert np.abs(found.astype(np.float64) - logprobs).max() <= step / 2 + rounded
        assert (np.diff(unpack(pack(ids[0], -np.sort(-logprobs[0]), id_bits), id_bits)[1]) <= 0).all(), "order is kept"


def test_logprobs_at_the_ends() -> None:
    """Of masked tokens, of tokens that are certain (also if rounding made them more), and below the least one."""
    logprobs = np.array([-np.inf, 0.0, 1e-7, -32.0, -32.1, -1e9], np.float32)
    _, found = unpack(pack(np.arange(6), logprobs, 18), 18)
    np.testing.assert_allclose(found, [-math.inf, 0, 0, -32, -32, -32], rtol=1e-6)
