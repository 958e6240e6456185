"""Compiled norms, activations and heads against the PyTorch versions: odd sizes, every tail, one thread and two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.activation import ACTIVATIONS
from batchgen.kernels.cpu import ops
from batchgen.kernels.cpu.library import loaded, missing
from batchgen.kernels.cpu.ops import COMPILED_OPS
from batchgen.kernels.heads import HeadNorms
from batchgen.kernels.ops import TORCH_OPS
from tests.kernels.closeness import assert_as_close

pytestmark = pytest.mark.skipif(not loaded(), reason=str(missing()))

DTYPES = (torch.float32, torch.bfloat16)
dtypes = st.sampled_from(DTYPES)
widths = st.integers(1, 100) | st.integers(500, 1100)
tokens = st.integers(1, 9) | st.just(70)


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Number of threads; all of them share any amount of work."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(ops, "_SERIAL", 0)
    yield request.param
    torch.set_num_threads(before)


def randn(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(tokens, widths, dtypes, st.booleans())
@settings(max_examples=40, deadline=None)
def test_norms(count: int, width: int, dtype: torch.dtype, summed: bool) -> None:
    x, delta = randn(1, count, width, dtype=dtype), randn(2, count, width, dtype=dtype)
    weight = randn(3, width, dtype=dtype)
    exact = x.double() + delta.double() if summed else x.double()
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    if summed:
        one, other = x.clone(), x.clone()
        ours = COMPILED_OPS.add_rms_norm(one, delta, weight, 1e-5)
        plain = TORCH_OPS.add_rms_norm(other, delta, weight, 1e-5)
        assert torch.equal(one, other)
    else:
        ours, plain = COMPILED_OPS.rms_norm(x, weight, 1e-5), TORCH_OPS.rms_norm(x, weight, 1e-5)
    assert_as_close(ours, plain, exact)
    assert_rounded_alike(ours, plain)


def assert_rounded_alike(ours: Tensor, plain: Tensor) -> None:
    """Equal except for the order of sums: the last place of float32, and few neighbours in bfloat16."""
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours, plain, rtol=2e-6, atol=2e-6)
        return
    torch.testing.assert_close(ours.float(), plain.float(), rtol=2**-7, atol=1e-6)
    assert (ours != plain).sum() <= 2 + 0.01 * ours.numel()


@given(tokens, widths, dtypes, st.sampled_from(sorted(ACTIVATIONS)))
@settings(max_examples=60, deadline=None)
def test_gated(count: int, inner: int, dtype: torch.dtype, activation: str) -> None:
    gate_up = 4 * randn(inner, count, 2 * inner, dtype=dtype)
    before = gate_up.clone()
    ours = COMPILED_OPS.gated(gate_up, activation)
    assert torch.equal(gate_up, before)
    assert ours.shape == (count, inner)
    gate, up = gate_up.double().chunk(2, -1)
    assert_as_close(ours, TORCH_OPS.gated(gate_up, activation), ACTIVATIONS[activation](gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_extreme_gates(dtype: torch.dtype, activation: str) -> None:
    far = torch.tensor(
        [0.0, -0.0, 30, -30, 90, -90, 1e4, -1e4, 1e30, -1e30, torch.nan, 5e-5, -5e-5, 9, -9], dtype=dtype
    )
    gate_up = torch.cat((far, torch.ones_like(far)))[None]
    ours, plain = COMPILED_OPS.gated(gate_up, activation), TORCH_OPS.gated(gate_up, activation)
    torch.testing.assert_close(ours, plain, equal_nan=True, atol=2e-6, rtol=2e-6 if dtype == torch.float32 else 2**-7)


def test_silu_of_every_bfloat16() -> None:
    """The fast approximation rounds like the exact function except for a few neighbours, and keeps NaN."""
    gate = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    ours = COMPILED_OPS.gated(torch.cat((gate, torch.ones_like(gate)))[None], "silu")[0]
    exact = (gate.double() * gate.double().sigmoid()).bfloat16()
    finite = gate.isfinite()
    assert torch.equal(ours[~gate.isinf()].isnan(), gate[~gate.isinf()].isnan())
    torch.testing.assert_close(ours[finite], exact[finite], rtol=2**-7, atol=1e-35)
    normal = finite & (exact.abs() > 1e-35)
    assert normal.sum() > 30_000
    assert (ours != exact)[normal].sum() <= 20


def test_an_unknown_activation() -> None:
    with pytest.raises(KeyError):
        COMPILED_OPS.gated(torch.zeros(1, 4), "softsign")


@given(
    tokens,
    st.sampled_from([(1, 1, 2), (3, 1, 6), (9, 3, 16), (14, 2, 24), (4, 4, 64), (5, 5, 80), (2, 1, 256), (3, 3, 34)]),
    dtypes,
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_heads(count: int, shape: tuple[int, int, int], dtype: torch.dtype, normed: bool) -> None:
    heads, kv_heads, dim = shape
    qkv = randn(dim, count, heads + 2 * kv_heads, dim, dtype=dtype)
    norms = HeadNorms(randn(1, dim, dtype=dtype), randn(2, dim, dtype=dtype), 1e-6) if normed else None
    positions = torch.randint(0, 5000, (count,), generator=torch.Generator().manual_seed(count))
    tables = TORCH_OPS.rope_tables(randn(3, dim // 2, dtype=torch.float32).abs(), 1.1, positions, dtype)
    slots = torch.randperm(6 * 13, generator=torch.Generator().manual_seed(dim))[:count]
    found = []
    for module in (COMPILED_OPS, TORCH_OPS):
        pool = [torch.full((6, 13, kv_heads, dim), torch.nan, dtype=dtype) for _ in range(2)]
        query = module.qk_norm_rope_cache(qkv.clone(), norms, tables, *pool, slots)
        assert query.shape == (count, heads, dim)
        found.append((query, *pool))
    for ours, plain in zip(*found, strict=True):
        assert torch.equal(ours.isnan(), plain.isnan())
        stored = ~plain.isnan()
        if normed:
            assert_rounded_alike(ours[stored], plain[stored])
        else:
            torch.testing.assert_close(ours, plain, equal_nan=True, rtol=0, atol=1e-6)


def test_tensors_that_are_not_supported_use_pytorch() -> None:
    x, weight = randn(1, 8, 12, dtype=torch.float32).t(), randn(2, 8, dtype=torch.float32)
    torch.testing.assert_close(COMPILED_OPS.rms_norm(x, weight, 1e-5), TORCH_OPS.rms_norm(x, weight, 1e-5))
    half = randn(3, 2, 8, dtype=torch.float16)
    torch.testing.assert_close(COMPILED_OPS.gated(half, "silu"), TORCH_OPS.gated(half, "silu"))
    assert COMPILED_OPS.rms_norm(torch.empty(0, 8), weight, 1e-5).shape == (0, 8)
