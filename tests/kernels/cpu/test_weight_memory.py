"""Memory of packed weights: adjacent, disjoint, and freed with the last weight of a slab."""

from __future__ import annotations

import gc
import resource
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from batchgen.kernels.cpu.library import missing
from batchgen.kernels.cpu.matmul import SLAB, pack, unpack, weight_memory

LINE = 64


def ranges(weights: list[torch.Tensor]) -> list[tuple[int, int]]:
    return sorted((w.data_ptr(), w.data_ptr() + w.nbytes) for w in weights)


def test_weights_are_adjacent_and_aligned_to_cache_lines() -> None:
    sizes = [1, 31, 32, 33, 70_001, 1 << 20]
    weights = [weight_memory(count, torch.bfloat16) for count in sizes * 3]
    assert [w.numel() for w in weights] == sizes * 3
    found = ranges(weights)
    assert all(begin % LINE == 0 for begin, _ in found)
    gaps = [after - end for (_, end), (after, _) in pairwise(found)]
    assert min(gaps) >= 0
    assert sorted(gaps)[-2] < LINE  # all but one, where the slab that earlier tests have used was full


def test_a_large_weight_has_a_separate_allocation() -> None:
    small = weight_memory(5, torch.float32)
    large = weight_memory(SLAB // 8, torch.float32)
    after = weight_memory(5, torch.float32)
    assert large.nbytes == SLAB // 2
    assert large.data_ptr() % LINE == 0
    assert after.data_ptr() - small.data_ptr() == LINE


def test_an_empty_weight() -> None:
    assert weight_memory(0, torch.bfloat16).shape == (0,)


def test_threads_get_separate_memory() -> None:
    def filled(number: int) -> torch.Tensor:
        return weight_memory(1000 + number, torch.int32).fill_(number)

    with ThreadPoolExecutor(8) as pool:
        weights = list(pool.map(filled, range(100)))
    for number, weight in enumerate(weights):
        assert (weight == number).all()


def test_a_slab_is_freed_with_its_last_weight() -> None:
    """Many slabs are allocated, but never more than a few are held at once."""
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(12):
        weights = [weight_memory(SLAB // 8, torch.uint8).fill_(1) for _ in range(8)]
        del weights
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 <= 4 * SLAB


@pytest.mark.skipif(missing() is not None, reason="no compiled kernels here")
def test_packed_weights_use_the_slabs() -> None:
    weights = [torch.randn(50, 70).bfloat16() for _ in range(4)]
    packed = [pack(w) for w in weights]
    found = ranges([p.data for p in packed])
    assert found[-1][0] - found[0][0] < 64 * 1024
    for weight, one in zip(weights, packed, strict=True):
        assert torch.equal(unpack(one), weight)
