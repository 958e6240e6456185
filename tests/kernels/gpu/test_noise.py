"""The noise of a token on a GPU: the bits are those of the CPU, the values within rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels import noise
from batchgen.kernels.gpu.launch import launch
from batchgen.kernels.gpu.noise import gumbel_of, noise_bits, uniform_of

EXTREME = [0, 1, -1, 2**63 - 1, -(2**63), 2**62, 0x1E3779B97F4A7C15, -7046029254386353131]


@triton.jit
def _noise(p_keys, p_ids, p_bits, p_noise, count, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    inside = offsets < count
    key = tl.load(p_keys + tl.program_id(0)).to(tl.uint64)
    ids = tl.load(p_ids + offsets, mask=inside, other=0)
    bits = noise_bits(key, ids)
    at = tl.program_id(0) * count + offsets
    tl.store(p_bits + at, bits.to(tl.int64), mask=inside)
    tl.store(p_noise + at, gumbel_of(uniform_of(bits)), mask=inside)


def drawn(keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    shape = (keys.shape[0], ids.shape[0])
    bits, values = torch.empty(shape, dtype=torch.int64), torch.full(shape, torch.nan)
    launch(_noise, (shape[0],), keys, ids.int(), bits, values, shape[1], BLOCK=triton.next_power_of_2(shape[1]))
    return bits, values


@pytest.mark.parametrize("key", EXTREME)
def test_bits_equal_the_cpu(key: int) -> None:
    ids = torch.cat([torch.arange(300), torch.tensor([4095, 4096, 151_935, 262_143, 2**31 - 1])])
    bits, values = drawn(torch.tensor([key]), ids)
    assert torch.equal(bits, noise.noise_bits(torch.tensor([[key]]), ids[None]))
    torch.testing.assert_close(values, noise.gumbel_at(torch.tensor([key]), ids[None]), atol=4e-7, rtol=2e-7)


@triton.jit
def _transform(p_bits, p_noise, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(p_noise + offsets, gumbel_of(uniform_of(tl.load(p_bits + offsets).to(tl.uint64))))


def test_extreme_bits_give_finite_noise() -> None:
    bits = torch.tensor([0, 1, 2, 2**24, 2**29, 2**30 - 1, 2**52, 2**53 - 1])
    values = torch.full((8,), torch.nan)
    launch(_transform, (1,), bits, values, BLOCK=8)
    exact = -np.log(-np.log1p(-np.minimum((bits.numpy() + 0.5) * 2.0**-53, 1 - 2.0**-24)))
    np.testing.assert_allclose(values.numpy(), exact, rtol=3e-7, atol=3e-7)
