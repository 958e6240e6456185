"""Operations on logits of which ranks have parts, against those on whole logits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from batchgen.kernels.counts import CountLists, Penalties
from batchgen.kernels.cpu.library import loaded
from batchgen.kernels.cpu.ops import COMPILED_OPS
from batchgen.kernels.invariant import INVARIANT_OPS
from batchgen.kernels.logprobs import GatheredLogprobs
from batchgen.kernels.noise import row_keys
from batchgen.kernels.ops import TORCH_OPS, Ops
from batchgen.kernels.ranks import Ranks
from batchgen.kernels.sampling import SampleResult, SamplingColumns
from batchgen.kernels.shaping import bitmask_width
from batchgen.kernels.vocab_parallel import vocab_parallel_ops
from tests.kernels.logit_rows import MORE_KINDS, logits_of
from tests.kernels.numbers import Numbers
from tests.kernels.thread_ranks import in_ranks

COUNTS = (1, 2, 3, 4)
VOCABULARIES = (1, 31, 33, 64, 97, 130, 1003)
SHAPES = [(1, 130), *itertools.product(COUNTS[1:], VOCABULARIES)]
ROWS = 13
Call = Callable[[Ops, Tensor], Any]


def run_split(call: Call, logits: Tensor, count: int, ops: Ops = TORCH_OPS) -> list[tuple[Any, Tensor]]:
    """On each rank, the result of a call on its columns, and the columns afterwards."""
    size = logits.shape[1]

    def body(ranks: Ranks) -> tuple[Any, Tensor]:
        own = logits[:, ranks.part(size, 32)].clone()
        return call(vocab_parallel_ops(ops, ranks, size), own), own

    return in_ranks(count, body)


def parts(result: Any) -> list[Tensor]:
    """The tensors of an operation's result."""
    match result:
        case Tensor():
            return [result]
        case GatheredLogprobs():
            return [result.normalizers, result.targets, result.top_ids, result.top]
        case tuple():
            return list(result)
    return []


def check(
    call: Call, logits: Tensor, count: int, ops: Ops = TORCH_OPS, *, whole: bool = True, exact: bool = True
) -> None:
    """Results are those of whole logits, and so are the columns afterwards.

    `whole`: all ranks have the same result, else each its columns; `exact`: changed logits are equal to the bit.
    """
    before = logits.clone()
    expected = call(TORCH_OPS, before)
    found = run_split(call, logits, count, ops)
    after = torch.cat([own for _, own in found], -1)
    torch.testing.assert_close(after, before, rtol=0 if exact else 1e-6, atol=0, equal_nan=True)
    results = [parts(result) for result, _ in found]
    if not whole:
        results = [[torch.cat(same, -1) for same in zip(*results, strict=True)]]
    for result in results:
        for mine, plain in zip(result, parts(expected), strict=True):
            assert mine.dtype == plain.dtype
            torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-5, equal_nan=True)
    for result in results[1:]:
        for mine, first in zip(result, results[0], strict=True):
            assert torch.equal(mine.nan_to_num(7.0), first.nan_to_num(7.0)), "ranks differ"


def spoiled(logits: Tensor) -> Tensor:
    """Rows that cannot be sampled between others."""
    logits = logits.clone()
    logits[1] = -torch.inf
    logits[3, -1] = torch.nan
    logits[5, 0] = torch.inf
    logits[7, :-1] = -torch.inf
    return logits


def pairs(n: Numbers, vocab: int, count: int) -> tuple[Tensor, Tensor]:
    """Distinct (row, token) pairs."""
    flat = n.permutation(ROWS * vocab)[:count]
    return flat // vocab, flat % vocab


@pytest.mark.parametrize(("count", "vocab"), SHAPES)
def test_logits_are_read_and_written_by_token(count: int, vocab: int) -> None:
    n = Numbers(torch.device("cpu"), vocab)
    logits = spoiled(logits_of("normal", ROWS, vocab))
    some = pairs(n, vocab, 1), pairs(n, vocab, 40), (torch.empty(0, dtype=torch.int64),) * 2
    for rows, ids in some:
        values = n.randn(len(rows))
        check(lambda ops, own, r=rows, i=ids: ops.logits_at(own, r, i), logits, count)
        check(lambda ops, own, r=rows, i=ids: ops.logits_at(own, r, i), logits.bfloat16(), count)
        check(lambda ops, own, r=rows, i=ids, v=values: ops.set_logits(own, r, i, v), logits, count)
        check(lambda ops, own, r=rows, i=ids: ops.mask_tokens(own, r, i), logits, count)
        check(lambda ops, own, r=rows, i=ids, v=values: ops.add_bias(own, r, i, v), logits, count)
        twice = (torch.cat((rows, rows)), torch.cat((ids, ids)))
        check(lambda ops, own, p=twice, v=values: ops.add_bias(own, *p, torch.cat((v, -v / 3))), logits, count)
        check(lambda ops, own, p=twice: ops.mask_tokens(own, *p), logits, count)
        whole = torch.cat((rows, torch.tensor([0, 7]))).unique()
        check(lambda ops, own, w=whole, p=twice: ops.keep_only(own, w, *p), logits, count)
    everyone, columns = torch.arange(ROWS)[:, None], n.randint(0, vocab, ROWS * 3).view(ROWS, 3)
    check(lambda ops, own: ops.logits_at(own, everyone, columns), logits, count)
    check(lambda ops, own: torch.tensor(ops.vocab_size(own)), logits, count)


@pytest.mark.parametrize(("count", "vocab"), SHAPES)
def test_masks(count: int, vocab: int) -> None:
    n = Numbers(torch.device("cpu"), vocab)
    logits = logits_of("normal", ROWS, vocab)
    words = n.randint(-(2**31), 2**31 - 1, ROWS * bitmask_width(vocab)).int().view(ROWS, -1)
    rows = n.permutation(ROWS)[:5]
    check(lambda ops, own: ops.apply_bitmask(own, words), logits, count)
    check(lambda ops, own: ops.apply_bitmask(own, words[:5], rows), logits, count)
    masked = torch.where(n.rand(ROWS, vocab) < 0.5, -torch.inf, logits)
    tokens = n.randint(0, vocab, ROWS)
    check(lambda ops, own: ops.drew_masked(own, rows, tokens), masked, count)


@pytest.mark.field("repetition_penalty", "frequency_penalty", "presence_penalty")
@pytest.mark.parametrize(("count", "vocab"), SHAPES)
def test_penalties(count: int, vocab: int) -> None:
    n = Numbers(torch.device("cpu"), vocab)
    logits = spoiled(logits_of("normal", ROWS, vocab))
    lists = CountLists.empty(9, min(vocab, 20) + 3, torch.device("cpu"))
    for slot in range(1, 9):
        ids = n.permutation(vocab)[: int(n.randint(0, 20, 1))]
        lists.ids[slot, : len(ids)], lists.used[slot] = ids.int(), len(ids)
        lists.counts[slot, : len(ids)] = n.randint(0, 4, len(ids)).float()
    rows, slots = n.permutation(ROWS)[:6], torch.tensor([3, 0, 8, -1, 1, 5])
    penalties = Penalties(*(torch.rand(6) * scale + 0.1 for scale in (2, 1, 1)))
    width = max(1, int(lists.used[slots.clamp(min=0)].max()))
    check(lambda ops, own: ops.penalise(own, rows, slots, lists, penalties, width), logits, count)


OPS = [pytest.param(ops, id=name) for name, ops in (("torch", TORCH_OPS), ("invariant", INVARIANT_OPS))]
if loaded():
    OPS.append(pytest.param(COMPILED_OPS, id="compiled"))


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize(("count", "vocab"), SHAPES)
def test_logprobs(count: int, vocab: int, ops: Ops) -> None:
    n = Numbers(torch.device("cpu"), vocab)
    tokens = n.randint(0, vocab, ROWS)
    for kind in ("bfloat16", "ties", "masked"):
        logits = logits_of(kind, ROWS, vocab)
        check(lambda ops, own: ops.token_logprobs(own, tokens), spoiled(logits), count, ops)
        check(lambda ops, own: ops.log_normalizers(own), spoiled(logits), count, ops)
        check(lambda ops, own: ops.nan_rows(own), spoiled(logits), count, ops)
        check(lambda ops, own: ops.argmax_lse(own), logits, count, ops)
        some = torch.where(torch.arange(ROWS)[:, None] == 4, -torch.inf, logits)
        for k in {1, min(vocab, 2), min(vocab, 40), vocab}:
            check(lambda ops, own, k=k: ops.top_logprobs(own, k), some, count, ops)
            check(lambda ops, own, k=k: ops.gather_logprobs(own, tokens, k), some, count, ops)
        check(lambda ops, own: ops.gather_logprobs(own, tokens, 0), logits.bfloat16(), count, ops)


GRID = [
    *itertools.product(
        [0.0, 1e-5, 0.3, 1.0, 4.0], [-1, 0, 1, 2, 7, 40, 500, 1 << 30], [1.0, 0.95, 0.5, 1e-9], [0.0, 0.1, 1.0]
    )
]


def columns_of(params: list[Any], *, grouped: bool = True) -> SamplingColumns:
    """The columns with keys; `grouped`: by their filters, else as in a graph, with those of all parameters."""
    rows = len(params)
    keys = row_keys(torch.full((rows,), 5), torch.zeros(rows, dtype=torch.int64), torch.arange(rows))
    columns = SamplingColumns.of(*zip(*params, strict=True)).with_keys(keys)  # type: ignore[arg-type]
    return columns if grouped else replace(columns, draws=columns_of(GRID).draws, greedy_rows=None)


def sampled(ops: Ops, logits: Tensor, columns: SamplingColumns, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    result = cast("SampleResult", ops.sample(logits, columns, rows))
    of_rows = logits if rows is None else logits[rows]
    return result.tokens, ops.nan_rows(of_rows) if result.bad is None else result.bad


@pytest.mark.field("temperature", "top_k", "top_p", "min_p", "seed")
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", MORE_KINDS)
def test_every_mix_of_parameters_draws_the_same_tokens(kind: str, count: int) -> None:
    for vocab in (1, 33, 130, 1003):
        params = GRID if vocab == 130 else GRID[::7]
        logits, columns = logits_of(kind, len(params), vocab), columns_of(params)
        check(lambda ops, own, c=columns: sampled(ops, own, c), logits, count)
        expected, mixed = sampled(TORCH_OPS, logits, columns), columns_of(params, grouped=count == 1)
        for result, _ in run_split(lambda ops, own, c=mixed: sampled(ops, own, c), logits, count):
            for mine, plain in zip(result, expected, strict=True):
                assert torch.equal(mine, plain)


@pytest.mark.parametrize("count", COUNTS)
def test_rows_of_equal_parameters_draw_the_same_tokens(count: int) -> None:
    for kind, params in itertools.product(("bfloat16", "ties"), GRID[::7]):
        logits, columns = logits_of(kind, ROWS, 97), columns_of([params] * ROWS)
        columns = replace(columns, keys=None) if columns.all_greedy else columns
        check(lambda ops, own, c=columns: sampled(ops, own, c), logits, count)


@pytest.mark.field("top_k")
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("most", [7, 500, 1 << 30])
def test_rows_that_all_have_top_k_or_are_greedy(count: int, most: int) -> None:
    params = [row for row in GRID if 0 < row[1] <= most or row[0] < 1e-5]
    for kind, vocab in itertools.product(("bfloat16", "ties", "masked"), (33, 130, 1003)):
        logits, columns = logits_of(kind, len(params), vocab), columns_of(params)
        check(lambda ops, own, c=columns: sampled(ops, own, c), logits, count)


@pytest.mark.parametrize("count", COUNTS)
def test_draws_share_rows_of_logits(count: int) -> None:
    params = GRID[::11]
    rows = Numbers(torch.device("cpu"), 3).randint(0, ROWS, len(params))
    for dtype in (torch.float32, torch.bfloat16):
        logits = logits_of("normal", ROWS, 130).to(dtype)
        check(lambda ops, own: sampled(ops, own, columns_of(params), rows), logits, count)


@pytest.mark.parametrize(("count", "vocab"), SHAPES)
def test_rows_that_cannot_be_sampled_are_found_on_all_ranks(count: int, vocab: int) -> None:
    logits = spoiled(logits_of("normal", ROWS, vocab))
    for params in ([GRID[0]] * ROWS, GRID[1::29][:ROWS], [(1.0, 5, 0.9, 0.1)] * ROWS):
        for grouped in (True, count == 1):
            columns = columns_of(params, grouped=grouped)
            tokens, bad = sampled(TORCH_OPS, logits, columns_of(params))
            found = [result for result, _ in run_split(lambda ops, own, c=columns: sampled(ops, own, c), logits, count)]
            for mine, mine_bad in found:
                assert torch.equal(mine_bad, bad)
                assert torch.equal(mine, found[0][0])
                assert torch.equal(mine[~bad], tokens[~bad])
                assert bool(((mine >= 0) & (mine < vocab)).all())


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", MORE_KINDS)
def test_scores_are_those_of_whole_logits(kind: str, count: int) -> None:
    for vocab in (1, 33, 130, 1003):
        params = GRID if vocab == 130 else GRID[::7]
        logits, columns = logits_of(kind, len(params), vocab), columns_of(params)
        drawn = TORCH_OPS.sample(logits, columns).tokens
        filters = columns.temperature, columns.top_k, columns.top_p, columns.min_p, drawn
        check(lambda ops, own, f=filters: ops.filtered_scores(own, *f), logits, count, whole=False)


@pytest.mark.field("custom_logit_processor")
@pytest.mark.parametrize(("count", "vocab"), SHAPES)
def test_rows_are_replaced_by_what_the_first_rank_made_of_them(count: int, vocab: int) -> None:
    rows = torch.tensor([7, 2, 9])
    logits = logits_of("normal", ROWS, vocab)

    def doubled(some: Tensor) -> Tensor:
        some[:, vocab // 2] = torch.inf
        return some.mul_(2)

    check(lambda ops, own: ops.replace_rows(own, rows, doubled), logits, count)
    check(lambda ops, own: ops.replace_rows(own, rows, lambda some: None), logits, count)
    seen: list[Tensor] = []
    run_split(lambda ops, own: ops.replace_rows(own, rows, lambda some: seen.append(some)), logits, count)
    assert len(seen) == 1
    assert torch.equal(seen[0], logits[rows])
