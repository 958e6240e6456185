"""The rotary tables in Triton's interpreter, against PyTorch and float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels import rope as pytorch
from batchgen.kernels.gpu import rope as gpu
from tests.kernels.closeness import DTYPES, assert_as_close

torch.set_num_threads(1)


def check(inv_freq: Tensor, scale: float, positions: Tensor, dtype: torch.dtype) -> None:
    got, plain = (module.rope_tables(inv_freq, scale, positions, dtype) for module in (gpu, pytorch))  # type: ignore[attr-defined]
    angles = (positions[:, None].float() * inv_freq).double()  # float32 products, as checkpoints assume
    cos, sin = scale * angles.cos(), scale * angles.sin()
    exact = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
    for ours, theirs, truth in zip(got, plain, exact, strict=True):
        assert ours.stride()[0] == ours.shape[-1]
        assert_as_close(ours, theirs, truth)


def frequencies(half: int, theta: float = 10_000.0) -> Tensor:
    return theta ** (-torch.arange(half, dtype=torch.float32) / half)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("half", [1, 3, 32, 40, 64, 128])
def test_tables(half: int, dtype: torch.dtype) -> None:
    check(frequencies(half), 1.0, torch.tensor([0, 1, 7, 4096, 131_071]), dtype)


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 100])
def test_tiles_of_many_tokens(tokens: int) -> None:
    check(frequencies(64, 1e6), 1.2, torch.randint(0, 10_000_000, (tokens,)), torch.float32)


def test_a_step_without_tokens() -> None:
    cos, sin = gpu.rope_tables(frequencies(4), 1.0, torch.zeros(0, dtype=torch.int64), torch.float32)
    assert cos.shape == sin.shape == (0, 1, 8)


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(1, 40),
    half=st.integers(1, 70),
    scale=st.floats(0.5, 2),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_any_shape(tokens: int, half: int, scale: float, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 200_000, (tokens,), generator=generator)
    check(torch.rand(half, generator=generator), scale, positions, dtype)
