"""Arguments of the operations of `Ops` and of other launchers, and exact results where PyTorch's are not exact.

A maker takes a source of numbers, the dtype and sizes, and returns name -> argument in the order of the parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from batchgen.kernels.counts import CountLists, Penalties
from batchgen.kernels.device import device_for
from batchgen.kernels.heads import HeadNorms
from batchgen.kernels.lora import LoraPair, LoraPairs, LoraStep, lora_step
from batchgen.kernels.merge import PartLists
from batchgen.kernels.mixers.states import Run, RunBatch, chunk_batches, decode_batch
from batchgen.kernels.moe import Experts, Gating, Routing
from batchgen.kernels.noise import row_keys as keys_of
from batchgen.kernels.rope import rope_tables
from batchgen.kernels.sampling import SamplingColumns
from batchgen.kernels.shaping import bitmask_width
from batchgen.kernels.types import KVPool
from tests.kernels.numbers import Numbers, laid_out

Arguments = dict[str, Any]
EPS = 1e-6


# Norms, activations, rotary embeddings.


def _rows(n: Numbers, dtype: torch.dtype, rows: int, width: int, layout: str, scale: float) -> Tensor:
    if layout == "heads":  # the query heads of a fused projection
        return n.randn(rows, 7, width, dtype=dtype, scale=scale)[:, 2:5]
    return laid_out(n.randn(rows, width, dtype=dtype, scale=scale), layout)


def norm(
    n: Numbers, dtype: torch.dtype, rows: int, width: int, layout: str = "packed", scale: float = 3.0, eps: float = EPS
) -> Arguments:
    return {"x": _rows(n, dtype, rows, width, layout, scale), "weight": n.randn(width, dtype=dtype), "eps": eps}


def add_norm(n: Numbers, dtype: torch.dtype, rows: int, width: int, layout: str = "packed") -> Arguments:
    x, delta = (_rows(n, dtype, rows, width, layout, scale) for scale in (4.0, 1.0))
    return {"x": x, "delta": delta, "weight": n.randn(width, dtype=dtype), "eps": EPS}


def gated(
    n: Numbers, dtype: torch.dtype, rows: int, width: int, activation: str = "silu", layout: str = "packed"
) -> Arguments:
    return {"gate_up": _rows(n, dtype, rows, 2 * width, layout, 3.0), "activation": activation}


def heads(
    n: Numbers, dtype: torch.dtype, rows: int, heads: int, kv_heads: int, dim: int, normed: int = 1, page: int = 16,
    gaps: int = 0,
) -> Arguments:  # fmt: skip
    """Caches of not-a-numbers, in which the step's slots are written; `gaps`: a projection between other columns."""
    dim += dim % 2
    heads = max(1, heads // kv_heads) * kv_heads
    qkv = n.randn(rows, heads + 2 * kv_heads + 2 * gaps, dim, dtype=dtype)[:, gaps : heads + 2 * kv_heads + gaps]
    norms = HeadNorms(n.randn(dim, dtype=dtype), n.randn(dim, dtype=dtype), EPS) if normed else None
    pages = rows // page + 3
    cos, sin = rope_tables(n.rand(dim // 2), 1.1, n.randint(0, 5000, rows), dtype)
    nan = torch.full((2, pages, page, kv_heads, dim), torch.nan, dtype=dtype, device=n.device)
    return {
        **{"qkv": qkv, "norms": norms, "tables": (cos, sin), "keys": nan[0].clone(), "values": nan[1].clone()},
        "slots": n.permutation(pages * page)[:rows],
    }


def rope(n: Numbers, dtype: torch.dtype, rows: int, dim: int) -> Arguments:
    inverse = 1.0 / 500000.0 ** (torch.arange(0, dim, 2, device=n.device) / dim)
    return {"inv_freq": inverse, "scale": 1.25, "positions": n.randint(0, 131072, rows), "dtype": dtype}


def linear(n: Numbers, dtype: torch.dtype, rows: int, inputs: int, outputs: int, layout: str = "packed") -> Arguments:
    x, weight = n.randn(rows, inputs, dtype=dtype), n.randn(outputs, inputs, dtype=dtype)
    return {"x": laid_out(x, layout), "weight": laid_out(weight, layout), "bias": n.randn(outputs, dtype=dtype)}


# Logits.


def logits(
    n: Numbers, dtype: torch.dtype, rows: int, vocab: int, layout: str = "packed", kind: str = "model"
) -> Arguments:
    return {"logits": laid_out(n.logits(rows, vocab, dtype, kind), layout)}


def token_logprobs(n: Numbers, dtype: torch.dtype, rows: int, vocab: int, known: int = 0, **how: str) -> Arguments:
    made = logits(n, dtype, rows, vocab, **how)
    normalizers = made["logits"].double().logsumexp(-1).float() if known else None
    return {**made, "tokens": n.randint(0, vocab, rows), "normalizers": normalizers}


def top(n: Numbers, dtype: torch.dtype, rows: int, vocab: int, k: int, **how: str) -> Arguments:
    return {**logits(n, dtype, rows, vocab, **how), "k": min(k, vocab)}


def gather(n: Numbers, dtype: torch.dtype, rows: int, vocab: int, k: int, **how: str) -> Arguments:
    return {**logits(n, dtype, rows, vocab, **how), "targets": n.randint(0, vocab, rows), "k": min(k, vocab)}


def _pairs(n: Numbers, rows: int, vocab: int, pairs: int) -> tuple[Tensor, Tensor]:
    """(row numbers, ids): `pairs` distinct pairs a row in random order."""
    each = min(pairs, vocab)
    ids = n.distinct(vocab, rows, each).flatten()
    order = n.permutation(len(ids))
    return torch.arange(rows, device=n.device).repeat_interleave(each)[order], ids[order]


def bias(n: Numbers, dtype: torch.dtype, rows: int, vocab: int, pairs: int, **how: str) -> Arguments:
    """Some pairs occur twice: their biases are added."""
    index, ids = (torch.cat((x, x[:3])) for x in _pairs(n, rows, vocab, pairs))
    return {**logits(n, dtype, rows, vocab, **how), "rows": index, "ids": ids, "values": n.randn(len(ids))}


def keep(n: Numbers, dtype: torch.dtype, rows: int, vocab: int, pairs: int, **how: str) -> Arguments:
    """Every second row keeps only its pairs, one of which is listed twice."""
    index, ids = _pairs(n, rows, vocab, pairs)
    chosen = index % 2 == 0
    index, ids = (torch.cat((x[chosen], x[chosen][:1])) for x in (index, ids))
    whole = torch.arange(0, rows, 2, device=n.device)
    return {**logits(n, dtype, rows, vocab, **how), "whole": whole, "rows": index, "ids": ids}


def mask(n: Numbers, dtype: torch.dtype, rows: int, vocab: int, pairs: int, **how: str) -> Arguments:
    """Row numbers and ids are columns of one tensor."""
    both = torch.stack(_pairs(n, rows, vocab, pairs), 1)
    return {**logits(n, dtype, rows, vocab, **how), "rows": both[:, 0], "ids": both[:, 1]}


def masked_draws(n: Numbers, dtype: torch.dtype, rows: int, vocab: int, **how: str) -> Arguments:
    made, tokens = logits(n, dtype, rows, vocab, **how), n.randint(0, vocab, rows)
    made["logits"][torch.arange(0, rows, 2, device=n.device), tokens[::2]] = -torch.inf
    return {**made, "rows": n.permutation(rows)[: -(-2 * rows // 3)], "tokens": tokens}


def bitmask(n: Numbers, dtype: torch.dtype, rows: int, vocab: int, some: int = 0, **how: str) -> Arguments:
    """`some`: masks of half of the rows. Bits beyond the vocabulary are random, too."""
    made, width = logits(n, dtype, rows, vocab, **how), bitmask_width(vocab)
    chosen = n.permutation(rows)[: -(-rows // 2)] if some else None
    masks = n.randint(-(1 << 31), 1 << 31, rows if chosen is None else len(chosen), width).int()
    return {**made, "masks": masks, "rows": chosen}


def count_lists(n: Numbers, rows: int, vocab: int, tokens: int) -> CountLists:
    """Slots 1 to `rows` with up to `tokens` distinct tokens each, the first with none; slot 0 is unused."""
    most = min(tokens, vocab)
    lists = CountLists.empty(rows + 1, max(64, most + 1), n.device)
    lists.ids[1:, :most] = n.distinct(vocab, rows, most).int()
    lists.counts[1:, :most] = n.randint(0, 5, rows, most).float()
    lists.used[1:] = n.randint(0, most + 1, rows).int()
    lists.used[1:2] = 0
    return lists


def count(n: Numbers, dtype: torch.dtype, rows: int, vocab: int, tokens: int) -> Arguments:
    """Every third sequence samples the first token of its list, the others any token; the last has no slot."""
    lists, drawn = count_lists(n, rows, vocab, tokens), n.randint(0, vocab, rows)
    drawn[::3] = lists.ids[1::3, 0].long()
    slots, order = torch.arange(rows, device=n.device) + 1, n.permutation(rows)
    slots[-1:] = 0
    return {"lists": lists, "slots": slots[order], "rows": order, "tokens": drawn, "width": min(tokens, vocab) + 1}


def penalise(n: Numbers, dtype: torch.dtype, rows: int, vocab: int, tokens: int, **how: str) -> Arguments:
    order = n.permutation(rows)
    slots = order + 1
    slots[-1:] = 0 if rows > 1 else slots[-1:]
    penalties = Penalties(0.2 + 2 * n.rand(rows), n.randn(rows), n.randn(rows))
    made = {**logits(n, dtype, rows, vocab, **how), "rows": order, "slots": slots}
    return {**made, "lists": count_lists(n, rows, vocab, tokens), "penalties": penalties, "width": min(tokens, vocab)}


def row_keys(n: Numbers, dtype: torch.dtype, rows: int) -> Arguments:
    """Columns of one table, with the largest seeds."""
    table = torch.stack(
        (n.randint(-(1 << 62), 1 << 62, rows) * 2, n.randint(0, 8, rows), n.randint(0, 1 << 20, rows)), 1
    )
    table[:1, 0] = (1 << 63) - 1
    return dict(zip(("seeds", "samples", "positions"), table.unbind(1), strict=True))


def bad_rows(n: Numbers, dtype: torch.dtype, rows: int, vocab: int, **how: str) -> Arguments:
    """Rows with a not-a-number of either sign, with +inf, and with only -inf, as far as there are rows."""
    logits = n.logits(rows, vocab, dtype)
    places = ((0, vocab // 3, torch.nan), (1, vocab - 1, torch.inf), (3, 0, -torch.nan), (4, vocab - 1, torch.nan))
    logits[2] = -torch.inf
    for row, place, value in places[: 2 if rows < 6 else None]:
        logits[row, place] = value
    return {"logits": logits}


# Drawing, and the cache.

MIXES = tuple(itertools.product((0.0, 0.3, 1.0, 4.0), (-1, 1, 7, 500), (1.0, 0.9, 1e-9), (0.0, 0.1)))


def sample(n: Numbers, dtype: torch.dtype, vocab: int, drawn: int = 0) -> Arguments:
    """A mix of parameters, for one sample per row, or several of `drawn` rows."""
    mixes = MIXES[:: 7 if vocab > 100 else 3]
    columns = SamplingColumns.of(*zip(*mixes, strict=True), device_for(n.device))
    keys = keys_of(*(n.randint(0, 1000, len(mixes)) for _ in range(3)))
    rows = n.randint(0, drawn, len(mixes)) if drawn else None
    logits = n.randn(drawn or len(mixes), vocab, dtype=dtype, scale=2.0)
    return {"logits": logits, "columns": columns.with_keys(keys), "sample_rows": rows}


def filtered(n: Numbers, dtype: torch.dtype, vocab: int) -> Arguments:
    mixes = MIXES[::5]
    names = ("temperature", "top_k", "top_p", "min_p")
    columns = {name: torch.tensor(values) for name, values in zip(names, zip(*mixes, strict=True), strict=True)}
    logits = n.randn(len(mixes), vocab, scale=2.0)
    return {"logits": logits, **columns, "drawn": logits.argmax(-1)}


def copies(n: Numbers, dtype: torch.dtype, page_size: int, count: int) -> Arguments:
    """`count` whole pages of two layers of different shapes, copied to other pages."""
    caches = [[n.randn(90, page_size, *shape, dtype=dtype) for shape in ((2, 4), (1, 9))] for _ in range(2)]
    pages = n.permutation(90)
    sources = pages[count:][n.randint(0, 90 - count, count)]
    table = torch.stack((sources, pages[:count], torch.full((count,), page_size)), 1)
    return {"pool": KVPool(*caches, page_size), "copies": table}


# Recurrent states.


def state_runs(n: Numbers, lengths: Sequence[int]) -> tuple[int, int, list[RunBatch]]:
    """Tokens, slots and batches of a step: a chunk of each length, cut in two where it can be, a token that is computed
    again, two decode rows, and one of padding.
    """
    chunks, flat, slot = [], 0, 1
    for number, length in enumerate(lengths):
        middle = flat + length // 2
        before = [] if length < 2 else [Run(flat, middle, 0 if number % 2 else slot, slot + 1)]
        source = slot + 1 if before else 0
        chunks.append([*before, Run(middle if before else flat, flat + length, source, slot + 2)])
        flat, slot = flat + length, slot + 3
    chunks.append([Run(flat, flat + 1, slot, None)])
    device = device_for(n.device)
    decode = decode_batch(flat + 1, torch.tensor([[slot, slot, 0], [slot + 1, slot + 2, 0]], device=n.device))
    return flat + 4, slot + 3, [*chunk_batches(chunks, device), decode]


def conv_runs(n: Numbers, dtype: torch.dtype, lengths: Sequence[int], channels: int, width: int) -> Arguments:
    tokens, slots, batches = state_runs(n, lengths)
    states = n.randn(slots, width, channels, dtype=dtype)
    states[:1].zero_()
    return {
        "x": n.randn(tokens, channels, dtype=dtype),
        "weight": n.randn(channels, width, dtype=dtype),
        "bias": n.randn(channels, dtype=dtype) if width % 2 else None,
        "states": states,
        "batches": batches,
        "activation": "silu" if channels % 2 else None,
    }


def linear_attention_runs(
    n: Numbers,
    dtype: torch.dtype,
    lengths: Sequence[int],
    groups: int,
    heads: int,
    key: int,
    value: int,
    delta: int,
    channels: int,
) -> Arguments:
    """`delta`: whether there is a delta rule; `channels`: whether each channel of a key decays by itself."""
    tokens, slots, batches = state_runs(n, lengths)
    keys = n.randn(2, tokens, groups, key, dtype=torch.float32)
    query, unit = keys / keys.norm(dim=-1, keepdim=True)
    states = n.randn(slots, heads, key, value, dtype=torch.float32)
    states[:1].zero_()
    return {
        "query": query * key**-0.5,
        "key": unit,
        "value": n.randn(tokens, heads, value, dtype=dtype),
        "decay": -n.randn(tokens, heads, *[key] * channels, dtype=torch.float32).abs(),
        "beta": n.randn(tokens, heads, dtype=torch.float32).sigmoid() if delta else None,
        "states": states,
        "batches": batches,
    }


def scan_runs(n: Numbers, dtype: torch.dtype, lengths: Sequence[int], channels: int, size: int) -> Arguments:
    tokens, slots, batches = state_runs(n, lengths)
    states = n.randn(slots, channels, size, dtype=torch.float32)
    states[:1].zero_()
    return {
        "x": n.randn(tokens, channels, dtype=dtype),
        "dt": n.randn(tokens, channels, dtype=torch.float32).abs(),
        "a": -n.randn(channels, size, dtype=torch.float32).abs(),
        "b": n.randn(tokens, size, dtype=dtype),
        "c": n.randn(tokens, size, dtype=dtype),
        "states": states,
        "batches": batches,
    }


# Adapters, experts, merges.


def lora_pairs(n: Numbers, adapters: int, rank: int, inputs: int, outputs: int, dtype: torch.dtype) -> LoraPairs:
    """Adapters of ranks around `rank`; the last of more than two does not change the layer."""
    ranks = [max(1, rank - i % 3) for i in range(adapters)]
    return pairs_of(n, [*ranks[:-1], 0] if adapters > 2 else ranks, inputs, outputs, dtype)


def pairs_of(n: Numbers, ranks: Sequence[int], inputs: int, outputs: int, dtype: torch.dtype) -> LoraPairs:
    """Adapters of these ranks; one of rank 0 does not change the layer."""

    def drawn(rank: int) -> LoraPair:
        return LoraPair(n.randn(rank, inputs, dtype=dtype, scale=inputs**-0.5), n.randn(outputs, rank, dtype=dtype))

    return LoraPairs([drawn(rank) if rank else None for rank in ranks])


def lora_step_for(n: Numbers, rows: int, adapters: int) -> LoraStep:
    """A step of `rows` tokens with one of the adapters each, every fifth with none, the first with adapter 0."""
    chosen = n.randint(0, adapters, rows)
    chosen[n.permutation(rows)[: rows // 5]] = -1
    chosen[0] = 0
    step = lora_step(chosen.cpu().numpy(), device_for(n.device))
    assert step is not None
    return step


def lora(
    n: Numbers, dtype: torch.dtype, rows: int, adapters: int, rank: int, inputs: int, outputs: int,
    layout: str = "packed",
) -> Arguments:  # fmt: skip
    out, x = (laid_out(n.randn(rows, width, dtype=dtype), layout) for width in (outputs, inputs))
    pairs = lora_pairs(n, adapters, rank, inputs, outputs, dtype)
    return {"out": out, "x": x, "step": lora_step_for(n, rows, adapters), "pairs": pairs}


ROUTINGS = {
    "mixtral": Routing(2),
    "qwen3": Routing(8),
    "qwen2": Routing(4, renormalise=False),
    "deepseek_v2": Routing(6, groups=8, top_groups=3, renormalise=False, scale=16.0),
    "deepseek_v3": Routing(8, "sigmoid", 8, 4, "top2", scale=2.5),
    "one": Routing(1),
    "biased softmax": Routing(6, renormalise=False, scale=1.5),
    "sigmoid": Routing(3, "sigmoid"),
    "three groups": Routing(4, "sigmoid", 3, 2, "top2"),
    "best two": Routing(5, "softmax", 3, 2, "top2"),
}
"""Rules of model families, and others."""
_BIASED = ("deepseek_v3", "biased softmax", "three groups")
_TIE = 1e-6
"""Score difference below which two experts may swap; rounding changes scores by about 1e-7."""


def route(n: Numbers, dtype: torch.dtype, rows: int, experts: int, rules: str) -> Arguments:
    """Rows between other columns, without near ties; a bias affects only the choice."""
    routing, logits = ROUTINGS[rules], n.randn(rows, experts, dtype=dtype)
    bias = 0.1 * n.randn(experts) if rules in _BIASED else None
    logits = laid_out(logits[_without_ties(logits, routing, bias)], "padded")
    return {"logits": logits, "routing": routing, "bias": bias}


def _without_ties(logits: Tensor, routing: Routing, bias: Tensor | None) -> Tensor:
    """[T] bool: tokens without near ties of scores, between experts and between groups."""
    if routing.by_logit(bias is not None):
        return torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    scores = logits.double().sigmoid() if routing.scoring == "sigmoid" else logits.double().softmax(-1)
    choice = scores if bias is None else scores + bias.double()
    ranked = choice.view(len(choice), routing.groups, -1).sort(-1, descending=True).values
    groups = ranked[..., : 2 if routing.group_score == "top2" else 1].sum(-1)
    gaps = [values.sort(-1).values.diff(dim=-1) for values in (choice, groups)]
    return (torch.cat(gaps, -1) > _TIE).all(-1)


GATINGS = {
    **{name: Gating(name) for name in ("silu", "gelu", "gelu_pytorch_tanh", "relu")},
    "limited": Gating(limit=0.5),
    "gpt_oss": Gating("quick_gelu", interleaved=True, limit=0.7, shift=1.0),
    "halves": Gating("quick_gelu", limit=0.7, shift=1.0),
}


def experts(
    n: Numbers, dtype: torch.dtype, rows: int, experts: int, chosen: int, hidden: int, inner: int,
    gating: str = "silu", biased: int = 0, transposed: int = 0, spread: int = 1,
) -> Arguments:  # fmt: skip
    """`spread` 0: all tokens on one expert in the middle. The first of more than two tokens has an unknown expert."""

    def weights(outputs: int, inputs: int) -> Tensor:
        shape = (experts, inputs, outputs) if transposed else (experts, outputs, inputs)
        drawn = n.randn(*shape, dtype=dtype, scale=inputs**-0.5)
        return drawn.transpose(1, 2) if transposed else drawn

    chosen = min(chosen, experts) if spread else 1
    ids = n.distinct(experts, rows, chosen) if spread else torch.full((rows, 1), experts // 2, device=n.device)
    if rows > 2:
        ids[0, 0] = -1
    biases = [n.randn(experts, width, dtype=dtype) if biased else None for width in (2 * inner, hidden)]
    layer = Experts(weights(2 * inner, hidden), weights(hidden, inner), biases[0], biases[1], GATINGS[gating])
    return {"x": n.randn(rows, hidden, dtype=dtype), "ids": ids, "weights": n.rand(rows, chosen), "experts": layer}


def _lse(n: Numbers, parts: int, rows: int, heads: int) -> Tensor:
    """[parts, rows, heads] float32, with large and small differences, a fifth of them -inf."""
    lse = n.randn(parts, rows, heads) * 8 * n.rand(rows, 1)
    return lse.masked_fill_(n.rand(parts, rows, heads) < 0.2, -torch.inf)


def merge_parts(n: Numbers, dtype: torch.dtype, rows: int, heads: int, dim: int, sinks: int) -> Arguments:
    """A part in `dtype`, as of a library, with one in float32; for some tokens one part or both are empty."""
    lse = _lse(n, 2, rows, heads)
    first, second = n.randn(rows, heads + 2, dim, dtype=dtype)[:, :heads], n.randn(rows, heads, dim)
    first[lse[0].isneginf()], second[lse[1].isneginf()] = torch.nan, torch.nan
    made = {"out_a": first, "lse_a": lse[0].T.contiguous().T, "out_b": second, "lse_b": lse[1]}
    return {**made, "dtype": dtype, "sinks": n.randn(heads, scale=3.0) if sinks else None}


def merge_lists(n: Numbers, dtype: torch.dtype, rows: int, heads: int, dim: int, most: int, sinks: int) -> Arguments:
    """Lists of 0 to `most` parts in random order, written to every token but the last."""
    counts = n.randint(0, most + 1, rows).int()
    counts[0] = most
    starts = (counts.cumsum(0) - counts).int()
    total = int(counts.sum())
    part_lse, tokens = _lse(n, 1, total, heads)[0], n.permutation(rows).int()
    part_out = n.randn(total, heads, dim).masked_fill_(part_lse.isneginf()[..., None], torch.nan)
    tokens[tokens == rows - 1] = -1 if rows > 1 else 0
    out = torch.full((rows, heads, dim), 7.0, dtype=dtype, device=n.device)
    lists = PartLists(n.permutation(total).int(), tokens, starts, counts)
    made = {"part_out": part_out, "part_lse": part_lse, "lists": lists, "out": out}
    made |= {"lse": torch.full((rows, heads), 7.0, device=n.device)}
    return {**made, "sinks": n.randn(heads, scale=3.0) if sinks else None}
