"""Operations in Triton's interpreter on special values, sizes, layouts and dtypes, unlike those of usual models.

`test_ops` has the cases that are judged like any other, among them empty steps and ties.
"""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
import torch

from batchgen.kernels import counts, merge
from batchgen.kernels.activation import ACTIVATIONS
from batchgen.kernels.counts import CountLists
from batchgen.kernels.device import HOST
from batchgen.kernels.gpu import counts as gpu_counts
from batchgen.kernels.gpu import merge as gpu_merge
from batchgen.kernels.gpu import row_scan, top
from batchgen.kernels.lora import LoraPairs, LoraTiles, lora_step, tiles_of
from batchgen.kernels.moe import Routing
from batchgen.kernels.sampling import greedy, nan_rows
from tests.gpu.under_test import kernel, reference
from tests.kernels import op_arguments as make
from tests.kernels.closeness import DTYPES
from tests.kernels.numbers import Numbers
from tests.kernels.penalised import listed, lists_of

CPU = torch.device("cpu")
NUMBERS = Numbers(CPU)


@pytest.fixture(autouse=True)
def seeded() -> None:
    NUMBERS.seed(0)


@pytest.fixture
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks per row, and few groups."""
    monkeypatch.setattr(row_scan, "BLOCK", 64)
    monkeypatch.setattr(top, "GROUPS", {4: 8, 16: 4})


# Not-a-numbers and infinities stay where they are.


def test_not_a_numbers_stay_in_their_row() -> None:
    x = NUMBERS.randn(70, 40)
    x[2, 3], x[66, 0] = torch.nan, torch.nan
    weight = NUMBERS.randn(24, 40)
    for got in (kernel("linear")(x, weight), kernel("rms_norm")(x, torch.ones(40), 1e-6)):
        assert got.isnan().any(-1).nonzero().flatten().tolist() == [2, 66]
    for name in ACTIVATIONS:
        gated = kernel("gated")(torch.tensor([[1.0, torch.nan, 2.0, 1.0, 1.0, torch.nan]]), name)
        assert gated.isnan().tolist() == [[False, True, True]], name


def test_a_token_does_not_depend_on_other_tokens_of_its_experts() -> None:
    arguments = make.experts(NUMBERS, torch.float32, 20, 4, 2, 24, 20)
    whole = kernel("moe_experts")(**arguments)
    arguments["x"][3] = torch.nan
    again = kernel("moe_experts")(**arguments)
    assert again[3].isnan().all()
    keep = torch.arange(20) != 3
    assert torch.equal(again[keep], whole[keep])


# The interpreter's numpy warns about intended operations: exp of a row with an infinity, log of no mass.
@pytest.mark.filterwarnings("ignore:(overflow|divide by zero|invalid value) encountered:RuntimeWarning")
@pytest.mark.usefixtures("small_rows")
@pytest.mark.parametrize(("vocab", "others"), [(4, 1.0), (100, -torch.inf), (200, 1.0), (200, -torch.inf), (200, 1e3)])
def test_rows_that_cannot_be_sampled(vocab: int, others: float) -> None:
    logits = torch.full((7, vocab), others)
    logits[1, -1] = torch.nan
    logits[2, 0], logits[2, 3] = torch.inf, torch.nan
    logits[3, 2] = torch.inf
    logits[4] = -torch.inf
    logits[5, 1] = -torch.nan
    ids, largest, lse, bad = kernel("argmax_lse")(logits)
    _, expected_largest, expected_lse, expected_bad = reference("argmax_lse")(logits)
    assert torch.equal(bad, expected_bad)
    assert torch.equal(bad, nan_rows(logits))
    assert bool(((ids >= 0) & (ids < vocab)).all())
    assert torch.equal(ids[~bad], greedy(logits)[~bad])
    assert torch.equal(largest.nan_to_num(7, 8, 9), expected_largest.nan_to_num(7, 8, 9))
    for got in (lse, kernel("log_normalizers")(logits)):
        torch.testing.assert_close(got, expected_lse, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.usefixtures("small_rows")
@pytest.mark.parametrize("what", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("vocab", [9, 130])
def test_the_largest_of_a_row_with_a_nan_are_in_range(vocab: int, what: float) -> None:
    logits = NUMBERS.logits(3, vocab)
    logits[1, [2, vocab - 1]] = what
    values, ids = kernel("largest")(logits, 7)
    assert bool(((ids[1] >= 0) & (ids[1] < vocab)).all())
    assert len(set(ids[1].tolist())) == 7
    expected_values, expected_ids = reference("largest")(logits[[0, 2]], 7)
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


# Extreme numbers.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_and_small_gates_do_not_overflow(dtype: torch.dtype) -> None:
    """The interpreter's warnings are errors."""
    gate = torch.tensor([0.0, 1e-6, -1e-6, 1e-3, -1e-3, 5.0, -5.0, 12.0, -12.0, 100.0, -100.0, 3e4, -3e4], dtype=dtype)
    both = torch.cat((gate, torch.full_like(gate, 1.5)))[None]
    for name in ACTIVATIONS:
        got, plain = kernel("gated")(both, name), reference("gated")(both, name)
        torch.testing.assert_close(got, plain, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
        assert not got.isnan().any()


def test_an_unknown_activation_is_an_error() -> None:
    with pytest.raises(KeyError):
        kernel("gated")(torch.zeros(1, 2), "laurel")


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.usefixtures("small_rows")
def test_normalizers_of_logits_of_any_size() -> None:
    rows = [NUMBERS.logits(1, 500)[0] * size for size in (0.0, 1e-3, 100.0, 1e4, 1e37)]
    masked, large = torch.full((500,), -torch.inf), torch.full((500,), -torch.inf)
    masked[150:160], large[3] = -1000.0, 3e38
    logits = torch.stack([*(row.nan_to_num(0.0) for row in rows), masked, large])
    got, exact = kernel("log_normalizers")(logits), logits.double().logsumexp(-1)
    torch.testing.assert_close(got.double(), exact, rtol=3e-7, atol=3e-6)


def test_many_tokens_keep_the_accuracy() -> None:
    logits = NUMBERS.logits(1, 151_936, torch.bfloat16)
    exact = logits.double().logsumexp(-1)
    assert float((kernel("log_normalizers")(logits) - exact).abs()) < 1e-6 * float(exact)


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


@pytest.mark.parametrize("routing", [Routing(3), Routing(3, "sigmoid"), Routing(3, "sigmoid", 4, 2, "top2")], ids=str)
def test_experts_that_tie_are_chosen_by_the_lower_id(routing: Routing) -> None:
    drawn = NUMBERS.randint(-8, 8, 40, 8) / 4
    logits = torch.cat([torch.tensor([[1.0] * 8, [0, 0, 2, 2, 1, 1, 2, 2], [-1, 3, 3, -1, 3, 3, -1, -1]]), drawn])
    ids, weights = kernel("route")(logits, routing)
    expected, expected_weights = reference("route")(logits, routing)
    assert ids[0].tolist() == [0, 1, 2]
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)
    same = slice(None) if routing.by_logit(biased=False) else slice(3)  # else sums of scores may be rounded differently
    assert torch.equal(ids[same], expected[same])


@pytest.mark.parametrize("word", [0, -1])
def test_masks_of_all_or_no_tokens(word: int) -> None:
    logits = NUMBERS.logits(2, 40)
    before = logits.clone()
    kernel("apply_bitmask")(logits, torch.full((2, 2), word, dtype=torch.int32))
    assert torch.equal(logits, before if word else torch.full_like(before, -torch.inf))


def test_masks_may_be_wider_and_have_gaps() -> None:
    logits, wide = NUMBERS.logits(3, 150), NUMBERS.randint(-(1 << 31), 1 << 31, 6, 7).int()[::2]
    expected = logits.clone()
    kernel("apply_bitmask")(logits, wide)
    reference("apply_bitmask")(expected, wide[:, :5].contiguous())
    assert torch.equal(logits, expected)


# Lists of counts, over several steps.


@pytest.mark.parametrize(("vocab", "longest"), [(1, 1), (30, 40), (5000, 2500)])
def test_counts_over_several_steps(vocab: int, longest: int) -> None:
    """Lists of zero, one and several blocks, with rows without a slot, which may all have the same slot number."""
    rng = Random(vocab)
    outputs = [[rng.randrange(vocab) for _ in range(rng.randint(0, longest))] for _ in range(10)]
    lists = lists_of(outputs[:5], outputs[5:])
    both = [lists.grown(8, lists.ids.shape[1] + 16) for _ in range(2)]
    for _ in range(12):
        slots = [*rng.sample(range(1, 8), 6), 0, -1, 0]
        tokens = torch.tensor([rng.randrange(vocab) for _ in range(11)])
        tokens[::2] = lists.ids[rng.randint(1, 5), 0]  # a token that is often listed
        rows = rng.sample(range(11), len(slots))
        for module, own in zip((gpu_counts, counts), both, strict=True):
            module.count_tokens(own, torch.tensor(slots), torch.tensor(rows), tokens, own.ids.shape[1])
    assert [listed(both[0], slot) for slot in range(8)] == [listed(both[1], slot) for slot in range(8)]
    assert listed(both[0], 0) == {}
    assert any(max(listed(both[0], slot).values(), default=0) > 1 for slot in range(8))


def test_a_full_list_is_never_overrun() -> None:
    lists = lists_of([[1, 2], [3, 4]])
    full = CountLists(lists.ids[:, :2].contiguous(), lists.counts[:, :2].contiguous(), lists.used)
    gpu_counts.count_tokens(full, torch.tensor([1]), torch.tensor([0]), torch.tensor([9]), 2)
    assert [listed(full, slot) for slot in (1, 2)] == [{1: 1, 2: 1}, {3: 1, 4: 1}]


# Other caches, sizes, tiles and dtypes.


def test_a_cache_of_another_dtype_than_the_projection() -> None:
    arguments = make.heads(NUMBERS, torch.bfloat16, 5, 4, 2, 8)
    caches = {name: arguments[name].float() for name in ("keys", "values")}
    same = kernel("qk_norm_rope_cache")(*arguments.values())
    assert torch.equal(kernel("qk_norm_rope_cache")(*(arguments | caches).values()), same)
    for name, cache in caches.items():
        torch.testing.assert_close(cache.bfloat16(), arguments[name], rtol=1e-2, atol=1e-2, equal_nan=True)


def test_caches_may_be_interleaved_with_other_layers() -> None:
    arguments = make.heads(NUMBERS, torch.float32, 5, 3, 1, 8, page=4)
    pages = len(arguments["keys"])
    wide = torch.full((pages, 4, 3, 16), 7.0)
    views = {"keys": wide[:, :, 1:2, :8], "values": wide[:, :, 2:3, 4:12]}
    apart = kernel("qk_norm_rope_cache")(*arguments.values())
    assert torch.equal(kernel("qk_norm_rope_cache")(*(arguments | views).values()), apart)
    written = torch.zeros(pages * 4, dtype=torch.bool)
    written[arguments["slots"]] = True
    for name, view in views.items():
        assert torch.equal(view.flatten(0, 1)[written], arguments[name].flatten(0, 1)[written])
        assert bool((view.flatten(0, 1)[~written] == 7.0).all())
    assert bool((wide[:, :, 0] == 7.0).all())


def test_tokens_that_share_a_slot_store_one_of_them() -> None:
    arguments = make.heads(NUMBERS, torch.float32, 5, 2, 1, 4)
    expected = kernel("qk_norm_rope_cache")(*arguments.values())
    arguments["slots"] = torch.tensor([0, 0, 5, 0, 9])
    assert torch.equal(kernel("qk_norm_rope_cache")(*arguments.values()), expected)
    assert any(torch.equal(arguments["values"][0, 0], arguments["qkv"][i, 3:]) for i in (0, 1, 3))


@pytest.mark.parametrize(
    ("vocab", "k", "dtype", "most_groups"),
    [(40, 17, torch.float32, 0), (400, 17, torch.float32, 0), (90, 17, torch.float64, 0), (9000, 3, torch.float32, 8)],
)
def test_rows_without_a_kernel_use_pytorch(
    vocab: int, k: int, dtype: torch.dtype, most_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many of few tokens, float64, and rows too long for registers."""
    if most_groups:
        monkeypatch.setattr(top, "MOST_GROUPS", most_groups)
    else:
        monkeypatch.setattr(top, "GROUPS", {4: 8, 16: 4})
    logits = NUMBERS.logits(2, vocab).to(dtype) + 1e-12 * torch.arange(vocab, dtype=dtype)
    for got, expected in zip(kernel("largest")(logits, k), reference("largest")(logits, k), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("vocab", "k", "kind"), [(5000, 1, "ties"), (5000, 20, "model"), (9000, 100, "ties"), (20_000, 1000, "model")]
)
def test_the_largest_at_real_sizes(vocab: int, k: int, kind: str) -> None:
    logits = NUMBERS.logits(1, vocab, torch.bfloat16, kind)
    for got, expected in zip(kernel("largest")(logits, k), reference("largest")(logits, k), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("tokens", "dtype"), list(zip((5, 70, 70), DTYPES, strict=True)))
def test_experts_by_the_chip_s_own_tile(tokens: int, dtype: torch.dtype) -> None:
    arguments = make.experts(NUMBERS, dtype, tokens, 2, 2, 24, 20)
    expected = reference("moe_experts")(**arguments).float()
    bound = 2 * torch.finfo(dtype).eps * float(expected.abs().max())
    assert float((kernel("moe_experts")(**arguments).float() - expected).abs().max()) <= max(bound, 1e-5)


def test_rows_without_an_adapter_keep_their_bits() -> None:
    pairs = LoraPairs([*make.lora_pairs(NUMBERS, 1, 4, 20, 30, torch.float32), None])
    step = lora_step(torch.tensor([-1, 0, 1, 1, -1, 0]).numpy(), HOST)
    out = NUMBERS.randn(6, 30)
    before = out.clone()
    kernel("add_lora")(out, NUMBERS.randn(6, 20), step, pairs)
    assert torch.equal(out[[0, 2, 3, 4]], before[[0, 2, 3, 4]])
    assert not torch.equal(out[[1, 5]], before[[1, 5]])


def test_tiles_that_pad_the_list_of_adapters_do_nothing() -> None:
    arguments = make.lora(NUMBERS, torch.float32, 5, 2, 7, 12, 10)
    expected = arguments["out"].clone()
    kernel("add_lora")(expected, *list(arguments.values())[1:])
    made = tiles_of(arguments["step"], 5, CPU)
    tiles = torch.cat([made.tiles, torch.zeros(3, 3, dtype=torch.int64)])
    order = torch.cat([made.order, made.order.new_zeros(2)])
    padded = replace(arguments["step"], tiles=LoraTiles(order, tiles, made.rows))
    kernel("add_lora")(*(arguments | {"step": padded}).values())
    assert torch.equal(arguments["out"], expected)
