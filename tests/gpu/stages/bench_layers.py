"""Grouped products: adapters compared with the layer's product, experts with one dense product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F

from tests.gpu.lab import Lab
from tests.gpu.registry import bench
from tests.gpu.report import Figure, figure
from tests.gpu.stages.parity_layers import lora_of, pairs_of
from tests.gpu.under_test import kernel

DTYPE = torch.bfloat16
WIDE = DTYPE.itemsize
RANK = 16


@bench(
    "add_lora",
    [
        {"rows": 256, "adapters": adapters, "inputs": width, "outputs": outputs}
        for width, outputs in ((1024, 4096), (4096, 6144))
        for adapters in (1, 8, 64)
    ],
    [{"rows": 3, "adapters": 2, "inputs": 24, "outputs": 20}],
)
def add_lora(lab: Lab, *, rows: int, adapters: int, inputs: int, outputs: int) -> Iterator[Figure]:
    """Bytes: x, the adapters in use, and the layer's output, read and written."""
    step, pairs = lora_of(lab, rows, adapters), pairs_of(lab, adapters, RANK, inputs, outputs, DTYPE)
    x, weight = lab.randn(rows, inputs, dtype=DTYPE), lab.randn(outputs, inputs, dtype=DTYPE)
    out = F.linear(x, weight)
    operation = kernel("add_lora")
    timing = lab.time(lambda: operation(out, x, step, pairs))
    base = lab.time(lambda: F.linear(x, weight)).p50
    shape = {"rows": rows, "adapters": adapters, "rank": RANK, "inputs": inputs, "outputs": outputs}
    size = WIDE * (rows * inputs + min(rows, adapters) * RANK * (inputs + outputs) + 2 * rows * outputs)
    yield replace(figure(lab, "add_lora", "all adapters", shape, timing, bytes=size), against={"base product": base})


@bench(
    "route",
    [{"rows": 256, "experts": 128, "chosen": 8}],
    [{"rows": 2, "experts": 8, "chosen": 2}],
)
def route(lab: Lab, *, rows: int, experts: int, chosen: int) -> Iterator[Figure]:
    from batchgen.kernels.moe import Routing

    logits, routing, operation = lab.randn(rows, experts, dtype=DTYPE), Routing(chosen), kernel("route")
    timing = lab.time(lambda: operation(logits, routing))
    size = rows * (WIDE * experts + 8 * chosen)
    yield figure(lab, "route", "choice", {"rows": rows, "experts": experts, "chosen": chosen}, timing, bytes=size)


@bench(
    "moe_experts",
    [
        {"rows": rows, "experts": experts, "chosen": chosen, "hidden": 2048, "inner": inner}
        for rows in (256, 4096)
        for experts, chosen, inner in ((128, 8, 768), (8, 2, 7168))
    ],
    [{"rows": 2, "experts": 4, "chosen": 2, "hidden": 24, "inner": 20}],
)
def moe_experts(lab: Lab, *, rows: int, experts: int, chosen: int, hidden: int, inner: int) -> Iterator[Figure]:
    """Compared with one dense product of as many operations."""
    from batchgen.kernels.moe import Experts

    up, down = lab.randn(experts, 2 * inner, hidden, dtype=DTYPE), lab.randn(experts, hidden, inner, dtype=DTYPE)
    x, share = lab.randn(rows, hidden, dtype=DTYPE), lab.rand(rows, chosen)
    ids, operation = lab.distinct(experts, rows, chosen).int(), kernel("moe_experts")
    timing = lab.time(lambda: operation(x, ids, share, Experts(up, down)))
    used = len(ids.unique())
    size = WIDE * (used * 3 * inner * hidden + rows * (2 * hidden + chosen * 2 * inner))
    operations = 2 * rows * chosen * 3 * inner * hidden
    dense, wide = lab.randn(rows * chosen, hidden, dtype=DTYPE), lab.randn(3 * inner, hidden, dtype=DTYPE)
    peer = lab.time(lambda: F.linear(dense, wide)).p50
    shape = {"rows": rows, "experts": experts, "chosen": chosen, "hidden": hidden, "inner": inner}
    made = figure(lab, "moe_experts", "grouped products", shape, timing, bytes=size, flops=operations)
    yield replace(made, against={"one dense product": peer})
