"""The gated activations in Triton's interpreter, against PyTorch and float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels import activation as pytorch
from batchgen.kernels.gpu import activation as gpu
from tests.kernels.closeness import DTYPES, assert_as_close

torch.set_num_threads(1)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0, size: float = 3.0) -> Tensor:
    return (size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def exact_gated(gate_up: Tensor, name: str) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    activated = {
        "silu": gate / (1 + torch.exp(-gate)),
        "gelu": 0.5 * gate * torch.erfc(-gate / math.sqrt(2)),
        "gelu_tanh": 0.5 * gate * (1 + torch.tanh(inner)),
        "quick_gelu": gate / (1 + torch.exp(-1.702 * gate)),
        "relu": gate.clamp(min=0),
    }
    same = {"swish": "silu"} | dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh")
    return activated[same.get(name, name)] * up


def check(gate_up: Tensor, name: str) -> None:
    before = gate_up.clone()
    got = gpu.gated(gate_up, name)
    assert got.is_contiguous()
    assert torch.equal(gate_up, before)
    assert_as_close(got, pytorch.gated(gate_up, name), exact_gated(gate_up, name))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", pytorch.ACTIVATIONS)
def test_gated(name: str, dtype: torch.dtype) -> None:
    check(randn(5, 2 * 37, dtype=dtype), name)


@pytest.mark.parametrize("inner", [1, 2, 63, 1000, 1023, 1024, 1025, 2100])
def test_widths(inner: int) -> None:
    check(randn(2, 2 * inner, dtype=torch.float32), "silu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", pytorch.ACTIVATIONS)
def test_large_and_small_gates(name: str, dtype: torch.dtype) -> None:
    """No intermediate overflow: the interpreter's warnings are errors."""
    gate = torch.tensor([0.0, 1e-6, -1e-6, 1e-3, -1e-3, 5.0, -5.0, 12.0, -12.0, 100.0, -100.0, 3e4, -3e4], dtype=dtype)
    up = torch.full_like(gate, 1.5)
    got, plain = gpu.gated(torch.cat((gate, up))[None], name), pytorch.gated(torch.cat((gate, up))[None], name)
    torch.testing.assert_close(got, plain, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert not got.isnan().any()


@pytest.mark.parametrize("name", pytorch.ACTIVATIONS)
def test_not_a_number_stays_not_a_number(name: str) -> None:
    got = gpu.gated(torch.tensor([[1.0, torch.nan, 2.0, 1.0, 1.0, torch.nan]]), name)
    assert got.isnan().tolist() == [[False, True, True]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_gaps(dtype: torch.dtype) -> None:
    check(randn(6, 100, dtype=dtype)[::2, 7:49], "silu")


def test_a_step_without_tokens() -> None:
    assert gpu.gated(torch.zeros(0, 12), "silu").shape == (0, 6)


def test_an_unknown_name() -> None:
    for module in (gpu, pytorch):
        with pytest.raises(KeyError):
            module.gated(torch.zeros(1, 2), "laurel")  # type: ignore[attr-defined]


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 9),
    inner=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(sorted(pytorch.ACTIVATIONS)),
    size=st.sampled_from([0.1, 1.0, 10.0]),
    seed=st.integers(0, 99),
)
def test_any_shape(rows: int, inner: int, dtype: torch.dtype, name: str, size: float, seed: int) -> None:
    check(randn(rows, 2 * inner, dtype=dtype, seed=seed, size=size), name)
