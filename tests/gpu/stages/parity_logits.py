"""Operations on logits: normalisers, logprobs, top k, penalties, biases and masks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from batchgen.kernels.bitmask import bitmask_width
from batchgen.kernels.counts import CountLists, Penalties
from tests.gpu.compare import judge, judge_equal
from tests.gpu.lab import Lab
from tests.gpu.registry import Labelled, Shape, parity
from tests.gpu.stages.parity_sampling import logits_of
from tests.gpu.under_test import kernel, reference
from tests.gpu.ways import three_ways

VOCABULARIES: list[Shape] = [
    {"rows": 256, "vocab": 151936},
    {"rows": 64, "vocab": 128256},
    {"rows": 1, "vocab": 32000},
    {"rows": 77, "vocab": 257},
]
TOY: list[Shape] = [{"rows": 3, "vocab": 150}]
FLOAT32 = (torch.float32,)


@parity("log_normalizers", VOCABULARIES, TOY)
def log_normalizers(lab: Lab, dtype: torch.dtype, *, rows: int, vocab: int) -> Iterator[Labelled]:
    logits = logits_of(lab, rows, vocab).to(dtype)
    ways = three_ways("log_normalizers", logits)
    got, plain = ways.got, ways.plain
    yield "lse", judge(got, plain, logits.double().logsumexp(-1), torch.float32)


@parity("argmax_lse", VOCABULARIES, TOY)
def argmax_lse(lab: Lab, dtype: torch.dtype, *, rows: int, vocab: int) -> Iterator[Labelled]:
    """The first row has a NaN, the second +inf, the third only -inf, if there are three rows."""
    logits = logits_of(lab, rows, vocab).to(dtype)
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype, device=lab.device)
    if rows >= 3:
        logits[0, vocab // 3], logits[1, vocab - 1], logits[2] = bad
    ways = three_ways("argmax_lse", logits)
    got, want = ways.got, ways.plain
    good = ~want[3]
    yield "bad rows", judge_equal(got[3], want[3])
    yield "ids", judge_equal(got[0][good], want[0][good])
    yield "ids in range", judge_equal((got[0] >= 0) & (got[0] < vocab), torch.ones_like(want[3]))
    yield "largest", judge_equal(got[1][good], want[1][good])
    if bool(good.any()):
        yield "lse", judge(got[2][good], want[2][good], logits[good].double().logsumexp(-1), torch.float32)


@parity("token_logprobs", VOCABULARIES, TOY)
def token_logprobs(lab: Lab, dtype: torch.dtype, *, rows: int, vocab: int) -> Iterator[Labelled]:
    logits, tokens = logits_of(lab, rows, vocab).to(dtype), lab.randint(0, vocab, rows)
    truth = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    ways = three_ways("token_logprobs", logits, tokens)
    got, plain = ways.got, ways.plain
    yield "alone", judge(got, plain, truth, torch.float32)
    normalizers = logits.double().logsumexp(-1).float()
    ways = three_ways("token_logprobs", logits, tokens, normalizers)
    got, plain = ways.got, ways.plain
    yield "with normalisers", judge(got, plain, truth, torch.float32)


@parity(
    "top_logprobs",
    [{**shape, "k": k} for shape in VOCABULARIES for k in (1, 20)],
    [{**shape, "k": 5} for shape in TOY],
)
def top_logprobs(lab: Lab, dtype: torch.dtype, *, rows: int, vocab: int, k: int) -> Iterator[Labelled]:
    logits = logits_of(lab, rows, vocab).to(dtype)
    truth = logits.double().log_softmax(-1)
    ways = three_ways("top_logprobs", logits, k)
    got, plain = ways.got, ways.plain
    yield "ids", judge_equal(got[0], plain[0])
    yield "logprobs", judge(got[1], plain[1], truth.gather(-1, plain[0]), torch.float32)


@parity(
    "gather_logprobs",
    [{**shape, "k": 20} for shape in VOCABULARIES],
    [{**shape, "k": k} for shape in TOY for k in (0, 3)],
)
def gather_logprobs(lab: Lab, dtype: torch.dtype, *, rows: int, vocab: int, k: int) -> Iterator[Labelled]:
    logits, tokens = logits_of(lab, rows, vocab).to(dtype), lab.randint(0, vocab, rows)
    truth = logits.double().log_softmax(-1)
    ways = three_ways("gather_logprobs", logits, tokens, k)
    got, plain = ways.got, ways.plain
    yield "lse", judge(got.normalizers, plain.normalizers, logits.double().logsumexp(-1), torch.float32)
    yield "targets", judge(got.targets, plain.targets, truth.gather(-1, tokens[:, None])[:, 0], torch.float32)
    yield "ids", judge_equal(got.top_ids, plain.top_ids)
    if k:
        yield "logprobs", judge(got.top, plain.top, truth.gather(-1, plain.top_ids), torch.float32)


@parity(
    "largest",
    [{**shape, "k": k} for shape in VOCABULARIES for k in (1, 50, 200)],
    [{**shape, "k": 7} for shape in TOY],
)
def largest(lab: Lab, dtype: torch.dtype, *, rows: int, vocab: int, k: int) -> Iterator[Labelled]:
    """Ties, frequent in low precision, are ordered by increasing id."""
    logits = logits_of(lab, rows, vocab).to(dtype)
    ways = three_ways("largest", logits, k)
    got, want = ways.got, ways.plain
    yield "values", judge_equal(got[0], want[0])
    yield "ids", judge_equal(got[1], want[1])


def pairs_of(lab: Lab, rows: int, vocab: int, per_row: int) -> tuple[Tensor, Tensor]:
    """([rows * per_row] row numbers, ids): distinct pairs in random order."""
    ids = lab.distinct(vocab, rows, min(per_row, vocab)).flatten()
    order = lab.rand(len(ids)).argsort()
    return (torch.arange(len(ids), device=lab.device) // min(per_row, vocab))[order], ids[order]


def lists_of(lab: Lab, rows: int, vocab: int, tokens: int) -> CountLists:
    """Slots 1 to `rows` with up to `tokens` distinct tokens each, the first with none; slot 0 is unused."""
    most = min(tokens, vocab)
    lists = CountLists.empty(rows + 1, max(1024, most + 1), lab.device)
    lists.ids[1:, :most] = lab.distinct(vocab, rows, most).int()
    lists.counts[1:, :most] = lab.randint(0, 5, rows, most).float()
    lists.used[1:] = lab.randint(0, most + 1, rows).int()
    lists.used[1:2] = 0
    return lists


@parity("count_tokens", [{**shape, "tokens": 1500} for shape in VOCABULARIES], [{**TOY[0], "tokens": 9}], FLOAT32)
def count_tokens(lab: Lab, dtype: torch.dtype, *, rows: int, vocab: int, tokens: int) -> Iterator[Labelled]:
    """Every third sequence samples the first token of its list, the others any token; the last row has no sequence."""
    lists, drawn = lists_of(lab, rows, vocab, tokens), lab.randint(0, vocab, rows)
    drawn[::3] = lists.ids[1::3, 0].long()
    slots, order = torch.arange(rows, device=lab.device) + 1, lab.rand(rows).argsort()
    slots[-1] = 0
    own = [lists.grown(*lists.ids.shape) for _ in range(2)]
    for call, copy in zip((kernel("count_tokens"), reference("count_tokens")), own, strict=True):
        call(copy, slots[order], order, drawn, min(tokens, vocab) + 1)
    for name in ("used", "ids", "counts"):
        yield name, judge_equal(getattr(own[0], name)[1:], getattr(own[1], name)[1:])


@parity("penalise", [{**shape, "tokens": 300} for shape in VOCABULARIES], [{**TOY[0], "tokens": 9}], FLOAT32)
def penalise(lab: Lab, dtype: torch.dtype, *, rows: int, vocab: int, tokens: int) -> Iterator[Labelled]:
    logits, lists, order = logits_of(lab, rows, vocab), lists_of(lab, rows, vocab, tokens), lab.rand(rows).argsort()
    columns = 0.2 + 2 * lab.rand(rows), lab.randn(rows), lab.randn(rows)
    ways = three_ways("penalise", logits, order, order + 1, lists, Penalties(*columns), min(tokens, vocab))
    yield "logits", judge(*ways.args(0), dtype)


@parity("add_bias", [{**shape, "pairs": 300} for shape in VOCABULARIES], [{**TOY[0], "pairs": 9}], FLOAT32)
def add_bias(lab: Lab, dtype: torch.dtype, *, rows: int, vocab: int, pairs: int) -> Iterator[Labelled]:
    logits, (index, ids) = logits_of(lab, rows, vocab), pairs_of(lab, rows, vocab, pairs)
    index, ids = (
        torch.cat((index, index[:3])),
        torch.cat((ids, ids[:3])),
    )  # some pairs occur twice: their biases are added
    ways = three_ways("add_bias", logits, index, ids, lab.randn(len(ids)))
    yield "logits", judge(*ways.args(0), dtype)


@parity("keep_only", [{**shape, "pairs": 40} for shape in VOCABULARIES], [{**TOY[0], "pairs": 4}], FLOAT32)
def keep_only(lab: Lab, dtype: torch.dtype, *, rows: int, vocab: int, pairs: int) -> Iterator[Labelled]:
    logits, (index, ids) = logits_of(lab, rows, vocab), pairs_of(lab, rows, vocab, pairs)
    whole = torch.arange(0, rows, 2, device=lab.device)
    chosen = index % 2 == 0
    ways = three_ways("keep_only", logits, whole, index[chosen], ids[chosen])
    yield "logits", judge_equal(ways.got_args[0], ways.plain_args[0])


@parity("mask_tokens", [{**shape, "pairs": 40} for shape in VOCABULARIES], [{**TOY[0], "pairs": 4}], FLOAT32)
def mask_tokens(lab: Lab, dtype: torch.dtype, *, rows: int, vocab: int, pairs: int) -> Iterator[Labelled]:
    logits, (index, ids) = logits_of(lab, rows, vocab), pairs_of(lab, rows, vocab, pairs)
    ways = three_ways("mask_tokens", logits, index, ids)
    yield "logits", judge_equal(ways.got_args[0], ways.plain_args[0])


@parity("drew_masked", VOCABULARIES, TOY)
def drew_masked(lab: Lab, dtype: torch.dtype, *, rows: int, vocab: int) -> Iterator[Labelled]:
    logits, tokens = logits_of(lab, rows, vocab).to(dtype), lab.randint(0, vocab, rows)
    logits[torch.arange(0, rows, 2, device=lab.device), tokens[::2]] = -torch.inf
    ways = three_ways("drew_masked", logits, lab.rand(rows).argsort()[: -(-2 * rows // 3)], tokens)
    got, want = ways.got, ways.plain
    yield "rows", judge_equal(got, want)


@parity("apply_bitmask", VOCABULARIES, TOY)
def apply_bitmask(lab: Lab, dtype: torch.dtype, *, rows: int, vocab: int) -> Iterator[Labelled]:
    logits = logits_of(lab, rows, vocab).to(dtype)
    masks = lab.randint(-(1 << 31), 1 << 31, rows, bitmask_width(vocab)).int()
    ways = three_ways("apply_bitmask", logits, masks)
    yield "all rows", judge_equal(ways.got_args[0], ways.plain_args[0])
    some = lab.rand(rows).argsort()[: -(-rows // 2)]
    ways = three_ways("apply_bitmask", logits, masks[: len(some)], some)
    yield "some rows", judge_equal(ways.got_args[0], ways.plain_args[0])
