"""MoE in Triton's interpreter: routing, sorting and products, against a loop over experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels import moe as pytorch
from batchgen.kernels.chips import GroupedTile
from batchgen.kernels.gpu import moe as kernels
from batchgen.kernels.moe import Experts, Gating, Routing
from tests.kernels.closeness import DTYPES, assert_as_close

TILE = GroupedTile(rows=16, columns=32, inner=64, warps=4, stages=1)
GPT_OSS = Gating("quick_gelu", interleaved=True, limit=0.7, shift=1.0)


def draw_experts(
    experts: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype = torch.float32,
    gating: Gating | None = None,
    *,
    biased: bool = False,
    transposed: bool = False,
    seed: int = 0,
) -> Experts:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        if transposed and len(shape) == 3:
            return draw_plain(shape[0], shape[2], shape[1]).transpose(1, 2)
        return draw_plain(*shape)

    def draw_plain(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    return Experts(
        draw(experts, 2 * inner, hidden),
        draw(experts, hidden, inner),
        draw(experts, 2 * inner) if biased else None,
        draw(experts, hidden) if biased else None,
        gating or Gating(),
    )


def draw_choice(tokens: int, experts: int, chosen: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :chosen]
    return ids, torch.rand(tokens, chosen, generator=generator)


def hold(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, tile: GroupedTile | None = TILE) -> Tensor:
    def double(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.double()

    exact = by_pair(x.double(), ids, weights.double(), experts)
    got = kernels.moe_experts(x, ids, weights, experts, tile)
    assert_as_close(got, pytorch.moe_experts(x, ids, weights, experts), exact)
    return got


def by_pair(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """The reference: one token and one expert at a time, in float64."""
    out = torch.zeros_like(x)
    for token, row in enumerate(ids.tolist()):
        for place, expert in enumerate(row):
            if not 0 <= expert < len(experts.down):
                continue
            both = experts.gate_up[expert].double() @ x[token]
            if experts.gate_up_bias is not None:
                both = both + experts.gate_up_bias[expert].double()
            made = experts.down[expert].double() @ experts.gating(both)
            if experts.down_bias is not None:
                made = made + experts.down_bias[expert].double()
            out[token] += weights[token, place] * made
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "hidden", "inner"),
    [(1, 4, 1, 16, 16), (7, 4, 2, 33, 20), (13, 8, 3, 64, 48), (19, 5, 5, 40, 17), (3, 9, 8, 100, 40)],
)
def test_experts(dtype: torch.dtype, tokens: int, experts: int, chosen: int, hidden: int, inner: int) -> None:
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    hold(x, *draw_choice(tokens, experts, chosen), draw_experts(experts, hidden, inner, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("gating", "biased", "transposed"),
    [
        (Gating("gelu"), False, False),
        (Gating("gelu_pytorch_tanh"), False, True),
        (Gating("relu"), True, False),
        (Gating("silu", limit=0.5), False, False),
        (Gating("silu", interleaved=True), True, False),
        (GPT_OSS, True, True),
        (replace(GPT_OSS, interleaved=False), True, True),
    ],
    ids=lambda value: value.activation if isinstance(value, Gating) else str(value),
)
def test_gatings_and_layouts(dtype: torch.dtype, gating: Gating, biased: bool, transposed: bool) -> None:
    experts = draw_experts(4, 24, 18, dtype, gating, biased=biased, transposed=transposed)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(2)).to(dtype)
    hold(x, *draw_choice(5, 4, 2), experts)


@pytest.mark.parametrize("tokens", [17, 40])
def test_all_on_one_expert(tokens: int) -> None:
    """More than one tile of one expert, and experts without tokens on both sides."""
    ids = torch.full((tokens, 1), 2)
    hold(torch.randn(tokens, 20), ids, torch.rand(tokens, 1), draw_experts(5, 20, 12))


@pytest.mark.parametrize("expert", [0, 4])
def test_one_expert_at_the_edge(expert: int) -> None:
    hold(torch.randn(18, 20), torch.full((18, 1), expert), torch.rand(18, 1), draw_experts(5, 20, 12))


def test_many_experts() -> None:
    hold(torch.randn(5, 16), *draw_choice(5, 64, 8), draw_experts(64, 16, 8))


@pytest.mark.parametrize("chosen", range(1, 9))
def test_experts_per_token(chosen: int) -> None:
    hold(torch.randn(3, 16), *draw_choice(3, 8, chosen), draw_experts(8, 16, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [5, 70])
def test_the_chips_own_tile(dtype: torch.dtype, tokens: int) -> None:
    hold(torch.randn(tokens, 24).to(dtype), *draw_choice(tokens, 2, 2), draw_experts(2, 24, 20, dtype), tile=None)


def test_ids_outside_the_experts_add_nothing() -> None:
    ids, weights = draw_choice(6, 4, 2)
    ids[0, 1], ids[2] = 4, -1
    got = hold(torch.randn(6, 20), ids.int(), weights, draw_experts(4, 20, 12))
    assert got[2].eq(0).all()


def test_rows_of_x_with_gaps_and_weights_in_half_precision() -> None:
    ids, weights = draw_choice(6, 4, 2)
    hold(torch.randn(6, 50)[:, 7:27], ids, weights.bfloat16(), draw_experts(4, 20, 12))
    hold(torch.randn(20, 6).T, ids, weights, draw_experts(4, 20, 12))


def test_same_bits_twice() -> None:
    x, experts = torch.randn(20, 24), draw_experts(4, 24, 20)
    choice = draw_choice(20, 4, 3)
    assert torch.equal(kernels.moe_experts(x, *choice, experts, TILE), kernels.moe_experts(x, *choice, experts, TILE))


def test_a_token_does_not_depend_on_other_tokens() -> None:
    experts, x, (ids, weights) = draw_experts(4, 24, 20), torch.randn(20, 24), draw_choice(20, 4, 2)
    whole = kernels.moe_experts(x, ids, weights, experts, TILE)
    x[3] = torch.nan
    again = kernels.moe_experts(x, ids, weights, experts, TILE)
    assert again[3].isnan().all()
    keep = torch.arange(20) != 3
    assert torch.equal(again[keep], whole[keep])


def test_no_token() -> None:
    got = kernels.moe_experts(torch.randn(0, 24), *draw_choice(0, 4, 2), draw_experts(4, 24, 20), TILE)
    assert got.shape == (0, 24)


@settings(deadline=None, max_examples=12, phases=(Phase.generate,))
@given(
    tokens=st.integers(1, 24),
    experts=st.integers(1, 9),
    chosen=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 40)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_any_choice(
    tokens: int, experts: int, chosen: int, sizes: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, sizes[0], generator=generator).to(dtype)
    choice = draw_choice(tokens, experts, min(chosen, experts), seed)
    hold(x, *choice, draw_experts(experts, *sizes, dtype, seed=seed))


ROUTINGS = [
    (4, Routing(1), False),
    (8, Routing(2), False),
    (60, Routing(4, renormalise=False), False),
    (128, Routing(8), False),
    (64, Routing(6, renormalise=False, scale=1.5), True),
    (16, Routing(6, groups=4, top_groups=2, renormalise=False, scale=16.0), False),
    (24, Routing(3, "sigmoid"), False),
    (256, Routing(8, "sigmoid", 8, 4, "top2", scale=2.5), True),
    (12, Routing(4, "sigmoid", 3, 2, "top2"), True),
    (12, Routing(5, "softmax", 3, 2, "top2"), False),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ROUTINGS, ids=str)
def test_route(case: tuple[int, Routing, bool], dtype: torch.dtype) -> None:
    experts, routing, biased = case
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(5, experts + 3, generator=generator).to(dtype)[:, :experts]
    bias = torch.randn(experts, generator=generator) if biased else None
    ids, weights = kernels.route(logits, routing, bias)
    expected, expected_weights = pytorch.route(logits, routing, bias)
    assert ids.dtype == expected.dtype == torch.int32
    assert torch.equal(ids, expected)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("routing", [Routing(3), Routing(3, "sigmoid"), Routing(3, "sigmoid", 4, 2, "top2")], ids=str)
def test_ties_go_to_the_lower_id(routing: Routing) -> None:
    logits = torch.tensor([[1.0] * 8, [0, 0, 2, 2, 1, 1, 2, 2], [-1, 3, 3, -1, 3, 3, -1, -1]])
    ids, weights = kernels.route(logits, routing)
    expected, expected_weights = pytorch.route(logits, routing)
    assert torch.equal(ids, expected)
    assert ids[0].tolist() == [0, 1, 2]
    torch.testing.assert_close(weights, expected_weights)


@settings(deadline=None, max_examples=15, phases=(Phase.generate,))
@given(
    tokens=st.integers(1, 9),
    chosen=st.integers(1, 4),
    groups=st.sampled_from([(1, 1), (2, 1), (3, 2), (4, 4)]),
    each=st.integers(4, 9),
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    best_two=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_routing(
    tokens: int, chosen: int, groups: tuple[int, int], each: int, scoring: str, best_two: bool, seed: int
) -> None:
    routing = Routing(chosen, scoring, *groups, "top2" if best_two else "max")  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-8, 8, (tokens, groups[0] * each), generator=generator) / 4  # many ties
    ids, weights = kernels.route(logits, routing)
    expected, expected_weights = pytorch.route(logits, routing)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)
    if routing.by_logit(biased=False):  # else sums of scores may be rounded differently
        assert torch.equal(ids, expected)
