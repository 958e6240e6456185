"""Operations in Triton's interpreter on special values: empty steps, not-a-numbers, infinities, extremes, ties."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from batchgen.kernels import activation, counts, logprobs, merge
from batchgen.kernels import bitmask as plain_bitmask
from batchgen.kernels import moe as plain_moe
from batchgen.kernels import top as plain_top
from batchgen.kernels.gpu import activation as gpu_activation
from batchgen.kernels.gpu import bitmask as gpu_bitmask
from batchgen.kernels.gpu import counts as gpu_counts
from batchgen.kernels.gpu import heads as gpu_heads
from batchgen.kernels.gpu import logprobs as gpu_logprobs
from batchgen.kernels.gpu import matmul as gpu_matmul
from batchgen.kernels.gpu import merge as gpu_merge
from batchgen.kernels.gpu import moe as gpu_moe
from batchgen.kernels.gpu import norm as gpu_norm
from batchgen.kernels.gpu import rope as gpu_rope
from batchgen.kernels.gpu import row_scan, top
from batchgen.kernels.gpu import shaping as gpu_shaping
from batchgen.kernels.moe import Routing
from batchgen.kernels.sampling import greedy, nan_rows
from tests.kernels.closeness import DTYPES
from tests.kernels.gpu import op_arguments as make
from tests.kernels.gpu.numbers import Numbers
from tests.kernels.penalised import lists_of

CPU = torch.device("cpu")
NONE = torch.empty(0, dtype=torch.int64)
NUMBERS = Numbers(CPU)
ACTIVATIONS = sorted(activation.ACTIVATIONS)


@pytest.fixture(autouse=True)
def seeded() -> None:
    NUMBERS.seed(0)


@pytest.fixture
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks per row, and few groups."""
    monkeypatch.setattr(row_scan, "BLOCK", 64)
    monkeypatch.setattr(top, "GROUPS", {4: 8, 16: 4})


def empty_step() -> dict[str, tuple[Callable[[], Any], Any]]:
    """Name -> (call without rows, shape of the result)."""
    x, weight, logits = torch.zeros(0, 8), torch.ones(8), torch.empty(0, 100)
    part, lse = torch.empty(0, 2, 8), torch.empty(0, 2)
    layer = make.experts(NUMBERS, torch.float32, 1, 4, 2, 8, 6)["experts"]
    pool = torch.zeros(2, 1, 4, 1, 4)
    table = torch.zeros(0, 1, 4)
    return {
        "rms_norm": (lambda: gpu_norm.rms_norm(x, weight, 1e-6), (0, 8)),
        "add_rms_norm": (lambda: gpu_norm.add_rms_norm(x, x, weight, 1e-6), (0, 8)),
        "gated": (lambda: gpu_activation.gated(torch.zeros(0, 12), "silu"), (0, 6)),
        "rope_tables": (lambda: gpu_rope.rope_tables(torch.ones(4), 1.0, NONE, torch.float32)[1], (0, 1, 8)),
        "qk_norm_rope_cache": (
            lambda: gpu_heads.qk_norm_rope_cache(torch.zeros(0, 4, 4), None, (table, table), *pool, NONE),
            (0, 2, 4),
        ),
        "linear": (lambda: gpu_matmul.linear(torch.zeros(2, 0, 5, 40), torch.zeros(24, 40)), (2, 0, 5, 24)),
        "argmax_lse": (lambda: gpu_logprobs.argmax_lse(logits)[2], (0,)),
        "token_logprobs": (lambda: gpu_logprobs.token_logprobs(logits, NONE), (0,)),
        "gather_logprobs": (lambda: gpu_logprobs.gather_logprobs(logits, NONE, 3).top, (0, 3)),
        "largest": (lambda: top.largest(logits, 5)[1], (0, 5)),
        "drew_masked": (lambda: gpu_shaping.drew_masked(torch.zeros(1, 3), NONE, NONE), (0,)),
        "merge_parts": (lambda: gpu_merge.merge_parts(part, lse, part, lse)[0], (0, 2, 8)),
        "moe_experts": (lambda: gpu_moe.moe_experts(x, NONE.view(0, 2), torch.zeros(0, 2), layer), (0, 8)),
    }


def test_a_step_without_rows_gives_an_empty_result() -> None:
    for name, (call, shape) in empty_step().items():
        assert call().shape == shape, name


def test_no_pairs_change_nothing() -> None:
    logits, lists = NUMBERS.logits(2, 40), lists_of([[1, 2]])
    before, used = logits.clone(), lists.used.clone()
    gpu_logprobs.mask_tokens(logits, NONE, NONE)
    gpu_shaping.keep_only(logits, NONE, NONE, NONE)
    gpu_shaping.add_bias(logits, NONE, NONE, torch.empty(0))
    gpu_bitmask.apply_bitmask(logits, torch.empty(0, 2, dtype=torch.int32), NONE)
    gpu_counts.count_tokens(lists, NONE, NONE, torch.tensor([4]), 3)
    assert torch.equal(logits, before)
    assert torch.equal(lists.used, used)


# Not-a-numbers and infinities stay where they are.


def test_not_a_numbers_stay_in_their_row() -> None:
    x = NUMBERS.randn(70, 40)
    x[2, 3], x[66, 0] = torch.nan, torch.nan
    for got in (gpu_matmul.linear(x, NUMBERS.randn(24, 40)), gpu_norm.rms_norm(x, torch.ones(40), 1e-6)):
        assert got.isnan().any(-1).nonzero().flatten().tolist() == [2, 66]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_not_a_number_stays_in_its_column(name: str) -> None:
    got = gpu_activation.gated(torch.tensor([[1.0, torch.nan, 2.0, 1.0, 1.0, torch.nan]]), name)
    assert got.isnan().tolist() == [[False, True, True]]


def test_a_token_does_not_depend_on_other_tokens_of_its_experts() -> None:
    arguments = make.experts(NUMBERS, torch.float32, 20, 4, 2, 24, 20)
    whole = gpu_moe.moe_experts(**arguments)
    arguments["x"][3] = torch.nan
    again = gpu_moe.moe_experts(**arguments)
    assert again[3].isnan().all()
    keep = torch.arange(20) != 3
    assert torch.equal(again[keep], whole[keep])


# The interpreter's numpy warns about intended operations: exp of a row with an infinity, log of no mass.
@pytest.mark.filterwarnings("ignore:(overflow|divide by zero|invalid value) encountered:RuntimeWarning")
@pytest.mark.usefixtures("small_rows")
@pytest.mark.parametrize("vocab", [4, 100, 200])
@pytest.mark.parametrize("others", [1.0, -torch.inf, 1000.0])
def test_rows_that_cannot_be_sampled(vocab: int, others: float) -> None:
    logits = torch.full((7, vocab), others)
    logits[1, -1] = torch.nan
    logits[2, 0], logits[2, 3] = torch.inf, torch.nan
    logits[3, 2] = torch.inf
    logits[4] = -torch.inf
    logits[5, 1] = -torch.nan
    ids, largest, lse, bad = gpu_logprobs.argmax_lse(logits)
    _, expected_largest, expected_lse, expected_bad = logprobs.argmax_lse(logits)
    assert torch.equal(bad, expected_bad)
    assert torch.equal(bad, nan_rows(logits))
    assert bool(((ids >= 0) & (ids < vocab)).all())
    assert torch.equal(ids[~bad], greedy(logits)[~bad])
    assert torch.equal(largest.nan_to_num(7, 8, 9), expected_largest.nan_to_num(7, 8, 9))
    for got in (lse, gpu_logprobs.log_normalizers(logits)):
        torch.testing.assert_close(got, expected_lse, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.usefixtures("small_rows")
@pytest.mark.parametrize("what", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("vocab", [9, 130])
def test_the_largest_of_a_row_with_a_nan_are_in_range(vocab: int, what: float) -> None:
    logits = NUMBERS.logits(3, vocab)
    logits[1, [2, vocab - 1]] = what
    values, ids = top.largest(logits, 7)
    assert bool(((ids[1] >= 0) & (ids[1] < vocab)).all())
    assert len(set(ids[1].tolist())) == 7
    expected_values, expected_ids = plain_top.largest(logits[[0, 2]], 7)
    assert torch.equal(ids[[0, 2]], expected_ids)
    assert torch.equal(values[[0, 2]], expected_values)


def test_merging_not_a_numbers_does_not_spread_them() -> None:
    (out_a, out_b), (lse_a, lse_b) = NUMBERS.randn(2, 3, 2, 8), NUMBERS.randn(2, 3, 2)
    clean = gpu_merge.merge_parts(out_a, lse_a, out_b, lse_b)
    lse_a[1] = math.nan
    for module in (merge, gpu_merge):
        out, lse = module.merge_parts(out_a, lse_a, out_b, lse_b)
        assert bool(out[1].isnan().all())
        assert bool(lse[1].isnan().all())
        torch.testing.assert_close(out[[0, 2]], clean[0][[0, 2]], rtol=1e-5, atol=1e-6)


def test_merging_empty_parts_gives_zeros() -> None:
    empty, poison = torch.full((2, 3), -math.inf), torch.full((2, 3, 8), math.nan)
    for sinks in (None, torch.zeros(3)):
        for module in (merge, gpu_merge):
            out, lse = module.merge_parts(poison, empty, poison, empty, sinks=sinks)
            assert bool((out == 0).all())
            assert bool((lse == -math.inf).all())


# Extreme numbers.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_and_small_gates_do_not_overflow(dtype: torch.dtype) -> None:
    """The interpreter's warnings are errors."""
    gate = torch.tensor([0.0, 1e-6, -1e-6, 1e-3, -1e-3, 5.0, -5.0, 12.0, -12.0, 100.0, -100.0, 3e4, -3e4], dtype=dtype)
    both = torch.cat((gate, torch.full_like(gate, 1.5)))[None]
    for name in ACTIVATIONS:
        got = gpu_activation.gated(both, name)
        torch.testing.assert_close(
            got, activation.gated(both, name), rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6
        )
        assert not got.isnan().any()


def test_an_unknown_activation_is_an_error() -> None:
    for module in (gpu_activation, activation):
        with pytest.raises(KeyError):
            module.gated(torch.zeros(1, 2), "laurel")


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.usefixtures("small_rows")
def test_normalizers_of_logits_of_any_size() -> None:
    rows = [NUMBERS.logits(1, 500)[0] * size for size in (0.0, 1e-3, 100.0, 1e4, 1e37)]
    masked, large = torch.full((500,), -torch.inf), torch.full((500,), -torch.inf)
    masked[150:160], large[3] = -1000.0, 3e38
    logits = torch.stack([*(row.nan_to_num(0.0) for row in rows), masked, large])
    got, exact = gpu_logprobs.log_normalizers(logits), logits.double().logsumexp(-1)
    torch.testing.assert_close(got.double(), exact, rtol=3e-7, atol=3e-6)


def test_many_tokens_keep_the_accuracy() -> None:
    logits = NUMBERS.logits(1, 151_936, torch.bfloat16)
    exact = logits.double().logsumexp(-1)
    assert float((gpu_logprobs.log_normalizers(logits) - exact).abs()) < 1e-6 * float(exact)


@pytest.mark.parametrize("apart", [80.0, 1000.0, 1e6])
def test_merging_parts_far_apart(apart: float) -> None:
    out_a, out_b = torch.ones(1, 1, 4), torch.full((1, 1, 4), 2.0)
    for module in (merge, gpu_merge):
        out, lse = module.merge_parts(out_a, torch.tensor([[-apart]]), out_b, torch.tensor([[apart]]))
        torch.testing.assert_close(out, out_b, rtol=1e-6, atol=0)
        assert float(lse) == pytest.approx(apart)


# The interpreter's numpy warns about the quotient, which is then clamped to the largest float.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("factor", [1e-45, 1e-38, 0.3, 2.0])
def test_no_penalty_makes_a_row_unusable(factor: float) -> None:
    """A repetition penalty alone gives PyTorch's bits."""
    logits = torch.tensor([[3.0, -3.0, 0.0, -torch.inf, 1.0, 3e38]])
    expected, lists, row = logits.clone(), lists_of([[0, 1, 2, 3, 5]]), torch.tensor([0])
    for module, values in ((gpu_counts, logits), (counts, expected)):
        columns = torch.full((1,), factor), torch.zeros(1), torch.zeros(1)
        module.penalise(values, row, row + 1, lists, counts.Penalties(*columns), 5)
    assert torch.equal(logits, expected)
    assert torch.isfinite(logits).tolist() == [[True, True, True, False, True, True]]


# Ties, and one value in all places.


@pytest.mark.usefixtures("small_rows")
@pytest.mark.parametrize("value", [0.0, 0.25, -0.0, -torch.inf, 3e38])
def test_rows_of_one_value_give_the_first_ids(value: float) -> None:
    logits = torch.full((1, 150), value)
    assert torch.equal(top.largest(logits, 10)[1], plain_top.largest(logits, 10)[1])
    if value > -torch.inf:
        assert gpu_logprobs.argmax_lse(logits)[0].tolist() == [0]


@pytest.mark.usefixtures("small_rows")
@pytest.mark.parametrize("order", [1, -1])
def test_the_largest_of_sorted_rows(order: int) -> None:
    logits = (order * torch.arange(200.0))[None]
    assert torch.equal(top.largest(logits, 13)[1], plain_top.largest(logits, 13)[1])


@pytest.mark.parametrize("routing", [Routing(3), Routing(3, "sigmoid"), Routing(3, "sigmoid", 4, 2, "top2")], ids=str)
def test_experts_that_tie_are_chosen_by_the_lower_id(routing: Routing) -> None:
    drawn = NUMBERS.randint(-8, 8, 40, 8) / 4
    logits = torch.cat([torch.tensor([[1.0] * 8, [0, 0, 2, 2, 1, 1, 2, 2], [-1, 3, 3, -1, 3, 3, -1, -1]]), drawn])
    ids, weights = gpu_moe.route(logits, routing)
    expected, expected_weights = plain_moe.route(logits, routing)
    assert ids[0].tolist() == [0, 1, 2]
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)
    same = slice(None) if routing.by_logit(biased=False) else slice(3)  # else sums of scores may be rounded differently
    assert torch.equal(ids[same], expected[same])


@pytest.mark.parametrize("word", [0, -1])
def test_masks_of_all_or_no_tokens(word: int) -> None:
    logits = NUMBERS.logits(2, 40)
    before = logits.clone()
    gpu_bitmask.apply_bitmask(logits, torch.full((2, 2), word, dtype=torch.int32))
    assert torch.equal(logits, before if word else torch.full_like(before, -torch.inf))


def test_masks_may_be_wider_and_have_gaps() -> None:
    logits, wide = NUMBERS.logits(3, 150), NUMBERS.randint(-(1 << 31), 1 << 31, 6, 7).int()[::2]
    expected = logits.clone()
    gpu_bitmask.apply_bitmask(logits, wide)
    plain_bitmask.apply_bitmask(expected, wide[:, :5].contiguous())
    assert torch.equal(logits, expected)
