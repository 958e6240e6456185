"""Grouped products: adapters of a linear layer, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from batchgen.kernels.device import device_for
from batchgen.kernels.lora import LoraPair, LoraPairs, LoraStep, lora_step
from batchgen.kernels.moe import Routing
from tests.gpu.compare import judge, judge_equal, poisoned
from tests.gpu.lab import Lab
from tests.gpu.registry import DTYPES, Labelled, parity
from tests.gpu.under_test import kernel, reference
from tests.gpu.ways import three_ways

TIE = 1e-6
"""Score difference below which two experts may swap; rounding changes scores by about 1e-7."""


def lora_of(lab: Lab, rows: int, adapters: int, without: int = 0) -> LoraStep:
    """A step of `rows` tokens, each with one of the adapters, `without` of them with none."""
    chosen = lab.randint(0, adapters, rows)
    chosen[lab.rand(rows).argsort()[:without]] = -1
    step = lora_step(chosen.cpu().numpy(), device_for(lab.device))
    assert step is not None
    return step


def pairs_of(lab: Lab, adapters: int, rank: int, inputs: int, outputs: int, dtype: torch.dtype) -> LoraPairs:
    """Adapters of ranks around `rank`; the last of more than two does not adapt the layer."""
    ranks = [max(1, rank - i % 3) for i in range(adapters)]
    pairs: list[LoraPair | None] = [
        LoraPair(lab.randn(r, inputs, dtype=dtype) * inputs**-0.5, lab.randn(outputs, r, dtype=dtype)) for r in ranks
    ]
    if adapters > 2:
        pairs[-1] = None
    return LoraPairs(pairs)


@parity(
    "add_lora",
    [{"rows": 256, "adapters": adapters, "rank": 16, "inputs": 1024, "outputs": 4096} for adapters in (1, 8, 64)]
    + [
        {"rows": 2048, "adapters": 3, "rank": 64, "inputs": 4096, "outputs": 1024},
        {"rows": 7, "adapters": 2, "rank": 5, "inputs": 576, "outputs": 321},
    ],
    [{"rows": 5, "adapters": 3, "rank": 4, "inputs": 24, "outputs": 20}],
)
def add_lora(
    lab: Lab, dtype: torch.dtype, *, rows: int, adapters: int, rank: int, inputs: int, outputs: int
) -> Iterator[Labelled]:
    step, pairs = lora_of(lab, rows, adapters, rows // 5), pairs_of(lab, adapters, rank, inputs, outputs, dtype)
    x, before = lab.randn(rows, inputs, dtype=dtype), lab.randn(rows, outputs, dtype=dtype)
    doubled = LoraPairs([p and LoraPair(p.down.double(), p.up.double()) for p in pairs])
    got, plain, truth = before.clone(), before.clone(), before.double()
    with poisoned():
        kernel("add_lora")(got, x, step, pairs)
    reference("add_lora")(plain, x, step, pairs)
    reference("add_lora")(truth, x.double(), step, doubled)
    yield "changed", judge(got, plain, truth, dtype)


@parity(
    "route",
    [{"rows": 256, "experts": experts, "kind": kind} for kind, experts in enumerate((8, 128, 60, 160, 256))]
    + [{"rows": 1, "experts": 128, "kind": 1}, {"rows": 4099, "experts": 256, "kind": 4}],
    [{"rows": 3, "experts": 8, "kind": 0}, {"rows": 3, "experts": 16, "kind": 4}],
)
def route(lab: Lab, dtype: torch.dtype, *, rows: int, experts: int, kind: int) -> Iterator[Labelled]:
    """Routing of five model families, including groups of experts and a bias that affects only the choice."""
    routing = (
        Routing(2),
        Routing(8),
        Routing(4, renormalise=False),
        Routing(6, groups=8, top_groups=3, renormalise=False, scale=16.0),
        Routing(4 if lab.toy else 8, "sigmoid", 8, 4, "top2", scale=2.5),
    )[kind]
    logits = lab.randn(rows, experts, dtype=dtype)
    bias = 0.1 * lab.randn(experts) if kind == 4 else None
    logits = logits[_without_ties(logits, routing, bias)]
    ways = three_ways("route", logits, routing, bias)
    yield "ids", judge_equal(ways.got[0], ways.plain[0])
    scores = logits.double().softmax(-1) if routing.scoring == "softmax" else logits.double().sigmoid()
    truth = scores.gather(-1, ways.plain[0].long())
    if routing.renormalise:
        truth = truth / truth.sum(-1, keepdim=True)
    yield "weights", judge(ways.got[1], ways.plain[1], truth * routing.scale, torch.float32)


def _without_ties(logits: Tensor, routing: Routing, bias: Tensor | None) -> Tensor:
    """[T] bool: tokens without near ties of scores, between experts and between groups."""
    if routing.by_logit(bias is not None):
        return torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    scores = logits.double().sigmoid() if routing.scoring == "sigmoid" else logits.double().softmax(-1)
    choice = scores if bias is None else scores + bias.double()
    ranked = choice.view(len(choice), routing.groups, -1).sort(-1, descending=True).values
    groups = ranked[..., : 2 if routing.group_score == "top2" else 1].sum(-1)
    gaps = [values.sort(-1).values.diff(dim=-1) for values in (choice, groups)]
    return (torch.cat(gaps, -1) > TIE).all(-1)


@parity(
    "moe_experts",
    [
        {"rows": 256, "experts": 128, "chosen": 8, "hidden": 2048, "inner": 768},
        {"rows": 1, "experts": 8, "chosen": 2, "hidden": 1024, "inner": 1792},
        {"rows": 1000, "experts": 8, "chosen": 2, "hidden": 1024, "inner": 1792},
        {"rows": 33, "experts": 32, "chosen": 4, "hidden": 720, "inner": 360, "odd": 1},
    ],
    [
        {"rows": 3, "experts": 4, "chosen": 2, "hidden": 24, "inner": 20},
        {"rows": 3, "experts": 4, "chosen": 2, "hidden": 24, "inner": 20, "odd": 1},
    ],
    DTYPES,
)
def moe_experts(
    lab: Lab, dtype: torch.dtype, *, rows: int, experts: int, chosen: int, hidden: int, inner: int, odd: int = 0
) -> Iterator[Labelled]:
    """`odd`: transposed weights with interleaved gate and up, biases, limits."""
    from batchgen.kernels.moe import Experts, Gating

    def weights(outputs: int, inputs: int, numbers: torch.dtype) -> Tensor:
        shape = (experts, inputs, outputs) if odd else (experts, outputs, inputs)
        drawn = (lab.randn(*shape) * inputs**-0.5).to(numbers)
        return drawn.transpose(1, 2) if odd else drawn

    up, down = weights(2 * inner, hidden, dtype), weights(hidden, inner, dtype)
    bias = lab.randn(experts, 2 * inner, dtype=dtype) if odd else None
    last = lab.randn(experts, hidden, dtype=dtype) if odd else None
    gating = Gating("quick_gelu", interleaved=True, limit=7.0, shift=1.0) if odd else Gating()
    x, share = lab.randn(rows, hidden, dtype=dtype), lab.rand(rows, chosen)
    ids = lab.distinct(experts, rows, chosen).int()
    with poisoned():
        got = kernel("moe_experts")(x, ids, share, Experts(up, down, bias, last, gating))
    plain = reference("moe_experts")(x, ids, share, Experts(up, down, bias, last, gating))
    wide = Experts(up.double(), down.double(), _wide(bias), _wide(last), gating)
    truth = reference("moe_experts")(x.double(), ids, share, wide)
    yield "values", judge(got, plain, truth, dtype)


def _wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()
