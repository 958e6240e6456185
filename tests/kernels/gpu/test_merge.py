from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels import merge as pytorch
from batchgen.kernels.gpu import merge as gpu
from batchgen.kernels.merge import PartLists
from tests.kernels.closeness import DTYPES, assert_as_close


def parts(count: int, heads: int, dim: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Values and log-sum-exps, one in five of which is -inf with values that must be ignored."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(count, heads, dim, generator=generator)
    lse = 4 * torch.randn(count, heads, generator=generator)
    empty = torch.rand(count, heads, generator=generator) < 0.2
    lse[empty] = -math.inf
    out[empty] = math.nan
    return out.to(dtype), lse


def exact_merge(values: list[Tensor], lse: list[Tensor], sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The reference in float64: sum of exp(lse) out over sum of exp(lse)."""
    total, weight = torch.zeros(values[0].shape, dtype=torch.float64), torch.zeros(lse[0].shape, dtype=torch.float64)
    for v, s in zip(values, lse, strict=True):
        w = s.double().exp()
        total += torch.where(w[..., None] > 0, v.double() * w[..., None], 0.0)
        weight += w
    denominator = weight if sinks is None else weight + sinks.double().exp()
    out = torch.where(denominator[..., None] > 0, total / denominator.clamp_min(1e-300)[..., None], 0.0)
    return out, weight.log()


def check_parts(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], sinks: Tensor | None = None) -> None:
    exact, exact_lse = exact_merge([a[0], b[0]], [a[1], b[1]], sinks)
    plain, plain_lse = pytorch.merge_parts(*a, *b, sinks=sinks)
    got, lse = gpu.merge_parts(*a, *b, sinks=sinks)
    assert_as_close(got, plain, exact)
    for found in (lse, plain_lse):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (3, 80), (16, 128), (9, 64), (5, 7), (2, 256)])
def test_two_parts(heads: int, dim: int, dtype: torch.dtype) -> None:
    check_parts(parts(5, heads, dim, 0, dtype), parts(5, heads, dim, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_join_the_denominator(dtype: torch.dtype) -> None:
    check_parts(parts(5, 6, 16, 0, dtype), parts(5, 6, 16, 1), torch.linspace(-20, 20, 6).to(dtype))


def test_the_result_may_have_another_dtype() -> None:
    a, b = parts(3, 2, 8, 0), parts(3, 2, 8, 1)
    for module in (pytorch, gpu):
        assert module.merge_parts(*a, *b, dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_log_sum_exps_by_head_and_strided_values() -> None:
    """As the flash kernels return them: [N, T], and slices of a larger tensor."""
    (out_a, lse_a), (out_b, lse_b) = parts(7, 4, 16, 0), parts(7, 4, 16, 1)
    expected = gpu.merge_parts(out_a, lse_a, out_b, lse_b)
    wide = torch.cat([out_a, out_b], 1)
    turned = [x.T.contiguous().T for x in (lse_a, lse_b)]
    got = gpu.merge_parts(wide[:, :4], turned[0], wide[:, 4:], turned[1])
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_empty_parts_give_zeros() -> None:
    empty = torch.full((2, 3), -math.inf)
    poison = torch.full((2, 3, 8), math.nan)
    for sinks in (None, torch.zeros(3)):
        for module in (pytorch, gpu):
            out, lse = module.merge_parts(poison, empty, poison, empty, sinks=sinks)
            assert bool((out == 0).all())
            assert bool((lse == -math.inf).all())


def test_an_empty_part_does_not_change_the_other() -> None:
    out, lse = parts(4, 3, 8, 0)
    lse = lse.clamp_min(-9)
    out = out.nan_to_num()
    got, got_lse = gpu.merge_parts(out, lse, torch.full_like(out, math.nan), torch.full_like(lse, -math.inf))
    torch.testing.assert_close(got, out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got_lse, lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("apart", [80.0, 1000.0, 1e6])
def test_parts_far_apart(apart: float) -> None:
    out_a, out_b = torch.ones(1, 1, 4), torch.full((1, 1, 4), 2.0)
    for module in (pytorch, gpu):
        out, lse = module.merge_parts(out_a, torch.tensor([[-apart]]), out_b, torch.tensor([[apart]]))
        torch.testing.assert_close(out, out_b, rtol=1e-6, atol=0)
        assert float(lse) == pytest.approx(apart)


def test_not_a_numbers_of_a_token_do_not_spread() -> None:
    (out_a, lse_a), (out_b, lse_b) = parts(3, 2, 8, 0), parts(3, 2, 8, 1)
    clean = gpu.merge_parts(out_a, lse_a, out_b, lse_b)
    lse_a[1] = math.nan
    for module in (pytorch, gpu):
        out, lse = module.merge_parts(out_a, lse_a, out_b, lse_b)
        assert bool(out[1].isnan().all())
        assert bool(lse[1].isnan().all())
        torch.testing.assert_close(out[[0, 2]], clean[0][[0, 2]], rtol=1e-5, atol=1e-6)


def test_no_tokens() -> None:
    out, lse = gpu.merge_parts(torch.empty(0, 2, 8), torch.empty(0, 2), torch.empty(0, 2, 8), torch.empty(0, 2))
    assert (out.shape, lse.shape) == ((0, 2, 8), (0, 2))


def check_lists(counts: list[int], heads: int, dim: int, seed: int, dtype: torch.dtype, with_sinks: bool) -> None:
    """Tokens in random order, one of them -1; parts in random order; unwritten rows of the output."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(counts)
    part_out, part_lse = parts(total, heads, dim, seed)
    order = torch.randperm(total, generator=generator).int()
    tokens = torch.randperm(len(counts) + 3, generator=generator)[: len(counts)].int()
    if len(counts) > 2:
        tokens[1] = -1
    starts = torch.tensor([sum(counts[:i]) for i in range(len(counts))], dtype=torch.int32)
    sinks = torch.linspace(-3, 3, heads) if with_sinks else None
    sizes = torch.tensor(counts, dtype=torch.int32)
    results = []
    for module in (pytorch, gpu):
        out = torch.full((len(counts) + 3, heads, dim), 7.0, dtype=dtype)
        lse = torch.full((len(counts) + 3, heads), 7.0)
        module.merge_lists(part_out, part_lse, PartLists(order, tokens, starts, sizes), out, lse, sinks)
        results.append((out, lse))
    (plain, plain_lse), (got, got_lse) = results
    exact, exact_lse = torch.full_like(plain, 7.0, dtype=torch.float64), torch.full_like(plain_lse, 7.0).double()
    for token, start, count in zip(tokens.tolist(), starts.tolist(), counts, strict=True):
        chosen = order[start : start + count].long().tolist()
        if token >= 0:
            nothing = [torch.zeros(heads, dim)], [torch.full((heads,), -math.inf)]
            values, sums = ([part_out[i] for i in chosen], [part_lse[i] for i in chosen]) if chosen else nothing
            exact[token], exact_lse[token] = exact_merge(values, sums, sinks)
    assert_as_close(got, plain, exact)
    torch.testing.assert_close(got_lse.double(), exact_lse, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(plain_lse.double(), exact_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("counts", "heads", "dim"), [([1, 3, 2], 4, 16), ([0, 5, 0, 1], 9, 80), ([12], 40, 128)])
def test_lists_of_parts(counts: list[int], heads: int, dim: int, with_sinks: bool, dtype: torch.dtype) -> None:
    check_lists(counts, heads, dim, 0, dtype, with_sinks)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.integers(1, 17),
    st.integers(1, 70),
    st.integers(0, 1 << 20),
    st.booleans(),
)
def test_any_lists(counts: list[int], heads: int, dim: int, seed: int, with_sinks: bool) -> None:
    check_lists(counts, heads, dim, seed, torch.float32, with_sinks)
