"""Operations in Triton's interpreter at sizes, layouts and dtypes that differ from a model's usual ones."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from batchgen.kernels import counts, merge
from batchgen.kernels import moe as plain_moe
from batchgen.kernels import top as plain_top
from batchgen.kernels.counts import CountLists
from batchgen.kernels.device import HOST
from batchgen.kernels.gpu import counts as gpu_counts
from batchgen.kernels.gpu import heads as gpu_heads
from batchgen.kernels.gpu import logprobs as gpu_logprobs
from batchgen.kernels.gpu import lora as gpu_lora
from batchgen.kernels.gpu import merge as gpu_merge
from batchgen.kernels.gpu import moe as gpu_moe
from batchgen.kernels.gpu import row_scan, top
from batchgen.kernels.lora import LoraPairs, LoraTiles, lora_step, tiles_of
from tests.kernels.closeness import DTYPES
from tests.kernels.gpu import op_arguments as make
from tests.kernels.gpu.numbers import Numbers
from tests.kernels.penalised import listed, lists_of

CPU = torch.device("cpu")
NONE = torch.empty(0, dtype=torch.int64)
NUMBERS = Numbers(CPU)


@pytest.fixture(autouse=True)
def seeded() -> None:
    NUMBERS.seed(0)


@pytest.fixture
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks per row, and few groups."""
    monkeypatch.setattr(row_scan, "BLOCK", 64)
    monkeypatch.setattr(top, "GROUPS", {4: 8, 16: 4})


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


# Shapes and dtypes that differ from a model's usual ones.


def test_a_cache_of_another_dtype_than_the_projection() -> None:
    arguments = make.heads(NUMBERS, torch.bfloat16, 5, 4, 2, 8)
    caches = {name: arguments[name].float() for name in ("keys", "values")}
    same = gpu_heads.qk_norm_rope_cache(*arguments.values())
    assert torch.equal(gpu_heads.qk_norm_rope_cache(*(arguments | caches).values()), same)
    for name, cache in caches.items():
        torch.testing.assert_close(cache.bfloat16(), arguments[name], rtol=1e-2, atol=1e-2, equal_nan=True)


def test_caches_may_be_interleaved_with_other_layers() -> None:
    arguments = make.heads(NUMBERS, torch.float32, 5, 3, 1, 8, page=4)
    pages = len(arguments["keys"])
    wide = torch.full((pages, 4, 3, 16), 7.0)
    views = {"keys": wide[:, :, 1:2, :8], "values": wide[:, :, 2:3, 4:12]}
    apart = gpu_heads.qk_norm_rope_cache(*arguments.values())
    assert torch.equal(gpu_heads.qk_norm_rope_cache(*(arguments | views).values()), apart)
    written = torch.zeros(pages * 4, dtype=torch.bool)
    written[arguments["slots"]] = True
    for name, view in views.items():
        assert torch.equal(view.flatten(0, 1)[written], arguments[name].flatten(0, 1)[written])
        assert bool((view.flatten(0, 1)[~written] == 7.0).all())
    assert bool((wide[:, :, 0] == 7.0).all())


def test_tokens_that_share_a_slot_store_one_of_them() -> None:
    arguments = make.heads(NUMBERS, torch.float32, 5, 2, 1, 4)
    expected = gpu_heads.qk_norm_rope_cache(*arguments.values())
    arguments["slots"] = torch.tensor([0, 0, 5, 0, 9])
    assert torch.equal(gpu_heads.qk_norm_rope_cache(*arguments.values()), expected)
    assert any(torch.equal(arguments["values"][0, 0], arguments["qkv"][i, 3:]) for i in (0, 1, 3))


@pytest.mark.usefixtures("small_rows")
@pytest.mark.parametrize(("vocab", "dtype"), [(40, torch.float32), (400, torch.float32), (90, torch.float64)])
def test_sizes_and_dtypes_without_a_kernel_use_pytorch(vocab: int, dtype: torch.dtype) -> None:
    logits = NUMBERS.logits(2, vocab).to(dtype) + 1e-12 * torch.arange(vocab, dtype=dtype)
    for got, expected in zip(top.largest(logits, 17), plain_top.largest(logits, 17), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("vocab", "k"), [(5000, 1), (5000, 20), (9000, 100), (20_000, 1000)])
@pytest.mark.parametrize("kind", ["model", "ties"])
def test_the_largest_at_real_sizes(vocab: int, k: int, kind: str) -> None:
    logits = NUMBERS.logits(1, vocab, torch.bfloat16, kind)
    for got, expected in zip(top.largest(logits, k), plain_top.largest(logits, k), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("k", [1, 8, 9, 32, 100, 129, 1024])
def test_groups_are_used_only_if_they_save_work(k: int) -> None:
    for vocab in (1024, 4096, 8192, 16_384, 151_936, 262_144, 500_000):
        assert top.serves(vocab, k)
        group = top.group_size(vocab, k)
        assert not group or -(-vocab // group) > k
    assert top.group_size(151_936, k)
    assert not top.serves(1 << 22, k)
    assert not top.serves(151_936, 1025)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [5, 70])
def test_experts_by_the_chip_s_own_tile(dtype: torch.dtype, tokens: int) -> None:
    arguments = make.experts(NUMBERS, dtype, tokens, 2, 2, 24, 20)
    expected = plain_moe.moe_experts(**arguments).float()
    bound = 2 * torch.finfo(dtype).eps * float(expected.abs().max())
    assert float((gpu_moe.moe_experts(**arguments).float() - expected).abs().max()) <= max(bound, 1e-5)


def test_same_bits_twice() -> None:
    arguments = make.lora(NUMBERS, torch.float32, 4, 2, 16, 700, 24)
    first, second = (arguments | {"out": arguments["out"].clone()} for _ in range(2))
    for copy in (first, second):
        gpu_lora.add_lora(*copy.values())
    assert torch.equal(first["out"], second["out"])
    layer = make.experts(NUMBERS, torch.float32, 20, 4, 3, 24, 20)
    assert torch.equal(gpu_moe.moe_experts(**layer), gpu_moe.moe_experts(**layer))


def test_rows_without_an_adapter_keep_their_bits() -> None:
    pairs = LoraPairs([*make.lora_pairs(NUMBERS, 1, 4, 20, 30, torch.float32), None])
    step = lora_step(torch.tensor([-1, 0, 1, 1, -1, 0]).numpy(), HOST)
    assert step is not None
    out = NUMBERS.randn(6, 30)
    before = out.clone()
    gpu_lora.add_lora(out, NUMBERS.randn(6, 20), step, pairs)
    assert torch.equal(out[[0, 2, 3, 4]], before[[0, 2, 3, 4]])
    assert not torch.equal(out[[1, 5]], before[[1, 5]])


def test_tiles_that_pad_the_list_of_adapters_do_nothing() -> None:
    arguments = make.lora(NUMBERS, torch.float32, 5, 2, 7, 12, 10)
    expected = arguments["out"].clone()
    gpu_lora.add_lora(expected, *list(arguments.values())[1:])
    made = tiles_of(arguments["step"], 5, CPU)
    tiles = torch.cat([made.tiles, torch.zeros(3, 3, dtype=torch.int64)])
    padded = replace(
        arguments["step"], tiles=LoraTiles(torch.cat([made.order, made.order.new_zeros(2)]), tiles, made.rows)
    )
    gpu_lora.add_lora(*(arguments | {"step": padded}).values())
    assert torch.equal(arguments["out"], expected)


def test_merged_parts_may_have_another_dtype() -> None:
    (out_a, out_b), (lse_a, lse_b) = NUMBERS.randn(2, 3, 2, 8), NUMBERS.randn(2, 3, 2)
    got = [module.merge_parts(out_a, lse_a, out_b, lse_b, dtype=torch.bfloat16)[0] for module in (merge, gpu_merge)]
    torch.testing.assert_close(got[1], got[0])


def test_rows_too_long_for_registers_use_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "MOST_GROUPS", 8)
    logits = NUMBERS.logits(1, 9000)
    for got, expected in zip(top.largest(logits, 3), plain_top.largest(logits, 3), strict=True):
        assert torch.equal(got, expected)


def test_a_row_s_results_depend_only_on_the_row() -> None:
    logits = NUMBERS.logits(5, 400)
    whole = gpu_logprobs.argmax_lse(logits)
    for row in range(5):
        alone = gpu_logprobs.argmax_lse(logits[row : row + 1])
        assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(alone, whole, strict=True))
