"""Rounding, extreme values and layouts of compiled element-wise operations; `test_ops.py` has their other tests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.activation import ACTIVATIONS
from batchgen.kernels.cpu import ops
from batchgen.kernels.cpu.library import loaded, missing
from batchgen.kernels.cpu.ops import COMPILED_OPS
from batchgen.kernels.ops import TORCH_OPS
from tests.cases import examples
from tests.kernels.cpu.products import randn
from tests.kernels.numbers import Numbers
from tests.kernels.op_arguments import heads

pytestmark = pytest.mark.skipif(not loaded(), reason=str(missing()))

DTYPES = (torch.float32, torch.bfloat16)
dtypes = st.sampled_from(DTYPES)
widths = st.integers(1, 100) | st.integers(500, 1100)
tokens = st.integers(1, 9) | st.just(70)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads share any amount of work."""
    torch.set_num_threads(2)
    monkeypatch.setattr(ops, "_SERIAL", 0)


def assert_rounded_alike(ours: Tensor, plain: Tensor) -> None:
    """Equal except for the order of sums: the last place of float32, and few neighbours in bfloat16."""
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours, plain, rtol=2e-6, atol=2e-6)
        return
    torch.testing.assert_close(ours.float(), plain.float(), rtol=2**-7, atol=1e-6)
    assert (ours != plain).sum() <= 2 + 0.01 * ours.numel()


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


@given(tokens, widths, dtypes)
@examples(40)
def test_norms_round_like_pytorch(count: int, width: int, dtype: torch.dtype) -> None:
    x, delta = randn(count, width, dtype=dtype), randn(count, width, dtype=dtype, seed=2)
    weight = randn(width, dtype=dtype, seed=1)
    assert_rounded_alike(COMPILED_OPS.rms_norm(x, weight, 1e-5), TORCH_OPS.rms_norm(x, weight, 1e-5))
    assert_rounded_alike(*(ops.add_rms_norm(x.clone(), delta, weight, 1e-5) for ops in (COMPILED_OPS, TORCH_OPS)))


@given(
    tokens,
    st.sampled_from([(1, 1, 2), (3, 1, 6), (9, 3, 16), (14, 2, 24), (4, 4, 64), (5, 5, 80), (2, 1, 256), (3, 3, 34)]),
    dtypes,
    st.booleans(),
)
@examples(40)
def test_heads_round_like_pytorch(count: int, shape: tuple[int, int, int], dtype: torch.dtype, normed: bool) -> None:
    made = heads(Numbers(torch.device("cpu"), count), dtype, count, *shape, normed=normed, page=13)
    mine, plain = ({**made, **{name: made[name].clone() for name in ("qkv", "keys", "values")}} for _ in range(2))
    found = [
        (run.qk_norm_rope_cache(**of), of["keys"], of["values"])
        for run, of in ((COMPILED_OPS, mine), (TORCH_OPS, plain))
    ]
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        if normed:
            assert_rounded_alike(ours[~ours.isnan()], theirs[~ours.isnan()])
        else:
            torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=0, atol=1e-6)


def test_tensors_that_are_not_supported_use_pytorch() -> None:
    x, weight = randn(8, 12).t(), randn(8, seed=1)
    torch.testing.assert_close(COMPILED_OPS.rms_norm(x, weight, 1e-5), TORCH_OPS.rms_norm(x, weight, 1e-5))
    half = randn(2, 8, dtype=torch.float16)
    torch.testing.assert_close(COMPILED_OPS.gated(half, "silu"), TORCH_OPS.gated(half, "silu"))
    assert COMPILED_OPS.rms_norm(torch.empty(0, 8), weight, 1e-5).shape == (0, 8)
