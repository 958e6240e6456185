"""Microbenchmarks of norms, activations, the cache write, adapters, experts, sampling, logprobs and logits processing.

Arguments are those of the parity checks. Operations on logits are compared with the lm_head's product for models of
1,024, 2,048 and 4,096 (`PRODUCTS`), which every step computes; adapters with the layer's product, experts with one
dense product. Logits are in the model's dtype where they are read, and float32 where they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from tests.gpu.device import Gpu
from tests.gpu.registry import Shape, case
from tests.gpu.report import Figure, figure
from tests.gpu.stages.parity_sampling import MODES, keys_of
from tests.gpu.under_test import kernel
from tests.kernels.op_cases import OPERATIONS

DTYPE = torch.bfloat16
PRODUCTS = (1024, 2048, 4096)
TOY_PRODUCTS = (32,)
MAKERS = {operation.name: operation.make for operation in OPERATIONS}

Arguments = Mapping[str, Any]


def lm_head_times(gpu: Gpu, rows: int, vocab: int) -> dict[str, float]:
    """Microseconds of the products that give [rows, vocab] logits, by model width; measured once per shape."""
    kept = gpu.kept.get(("lm_head", rows, vocab))
    if kept is None:
        widths = TOY_PRODUCTS if gpu.toy else PRODUCTS
        kept = gpu.kept["lm_head", rows, vocab] = {
            f"lm_head {width}": product_time(gpu, rows, width, vocab) for width in widths
        }
    return dict(kept)


def product_time(gpu: Gpu, rows: int, inputs: int, outputs: int) -> float:
    """Microseconds of one dense product."""
    x, weight = gpu.randn(rows, inputs, dtype=DTYPE), gpu.randn(outputs, inputs, dtype=DTYPE)
    return gpu.time(lambda: F.linear(x, weight)).p50


def _against_lm_head(gpu: Gpu, a: Arguments) -> dict[str, float]:
    return lm_head_times(gpu, *a["logits"].shape)


def _against_layer(gpu: Gpu, a: Arguments) -> dict[str, float]:
    return {"base product": product_time(gpu, len(a["x"]), a["x"].shape[1], a["out"].shape[1])}


def _against_dense(gpu: Gpu, a: Arguments) -> dict[str, float]:
    hidden, inner = a["experts"].down.shape[1:]
    return {"one dense product": product_time(gpu, a["ids"].numel(), hidden, 3 * inner)}


def _lora_bytes(a: Arguments) -> int:
    """x, the adapters in use, and the layer's output, read and written."""
    stack = a["pairs"].stack
    used = {segment.adapter for segment in a["step"].segments}
    ranks = sum(int(stack.ranges[adapter, 1]) for adapter in used)
    return int(a["x"].nbytes + 2 * a["out"].nbytes + DTYPE.itemsize * ranks * (stack.down.shape[1] + stack.up.shape[1]))


def _experts_bytes(a: Arguments) -> int:
    layer, ids = a["experts"], a["ids"]
    weights = (layer.gate_up[0].numel() + layer.down[0].numel()) * len(ids[ids >= 0].unique())
    return int(2 * a["x"].nbytes + DTYPE.itemsize * (weights + ids.numel() * 2 * layer.down.shape[2]))


@dataclass(frozen=True, slots=True)
class OpBench:
    """A microbenchmark of one operation."""

    op: str
    what: str
    bytes: Callable[[Arguments], int]
    """Bytes moved, from the arguments."""
    sizes: Sequence[Shape]
    toy: Shape
    flops: Callable[[Arguments], int] = lambda a: 0
    against: Callable[[Gpu, Arguments], dict[str, float]] = lambda gpu, a: {}
    dtype: torch.dtype = DTYPE

    def run(self, gpu: Gpu, **sizes: Any) -> Iterator[Figure]:
        """Time the operation at one size."""
        a = MAKERS[self.op](gpu, self.dtype, **sizes)
        operation = kernel(self.op)
        timing = gpu.time(lambda: operation(*a.values()))
        made = figure(gpu, self.op, self.what, sizes, timing, bytes=self.bytes(a), flops=self.flops(a))
        yield replace(made, against=self.against(gpu, a))


WIDTHS: list[Shape] = [{"rows": rows, "width": width} for rows in (256, 8192) for width in (1024, 2048, 4096)]
GATED: list[Shape] = [{"rows": rows, "width": width} for rows in (256, 8192) for width in (3072, 8192, 14336)]
HEADS: list[Shape] = [
    {"rows": rows, "heads": heads, "kv_heads": 8, "dim": 128, "normed": normed}
    for rows in (256, 8192)
    for heads, normed in ((16, 1), (32, 0))
]
LORA: list[Shape] = [
    {"rows": 256, "adapters": adapters, "rank": 16, "inputs": inputs, "outputs": outputs}
    for inputs, outputs in ((1024, 4096), (4096, 6144))
    for adapters in (1, 8, 64)
]
EXPERTS: list[Shape] = [
    {"rows": rows, "experts": experts, "chosen": chosen, "hidden": 2048, "inner": inner}
    for rows in (256, 4096)
    for experts, chosen, inner in ((128, 8, 768), (8, 2, 7168))
]
LOGITS: list[Shape] = [{"rows": 256, "vocab": vocab} for vocab in (151936, 128256)]
TOY_WIDTH, TOY_LOGITS = {"rows": 2, "width": 32}, {"rows": 2, "vocab": 150}


def _of_logits(op: str, what: str, bytes: Callable[[Arguments], int], dtype: torch.dtype, **more: int) -> OpBench:
    sizes, toy = [{**one, **more} for one in LOGITS], {**TOY_LOGITS, **more}
    return OpBench(op, what, bytes, sizes, toy, against=_against_lm_head, dtype=dtype)


BENCHES = (
    OpBench("rms_norm", "norm", lambda a: 2 * a["x"].nbytes + a["weight"].nbytes, WIDTHS, TOY_WIDTH),
    OpBench("add_rms_norm", "residual and norm", lambda a: 4 * a["x"].nbytes + a["weight"].nbytes, WIDTHS, TOY_WIDTH),
    OpBench("gated", "silu(gate) * up", lambda a: a["gate_up"].nbytes * 3 // 2, GATED, TOY_WIDTH),
    OpBench(
        "qk_norm_rope_cache",
        "norm, rope, cache write",
        lambda a: 2 * a["qkv"].nbytes + 2 * a["tables"][0].nbytes + a["slots"].nbytes,
        HEADS,
        {"rows": 2, "heads": 2, "kv_heads": 1, "dim": 16, "normed": 1},
    ),
    OpBench(
        "add_lora",
        "all adapters",
        _lora_bytes,
        LORA,
        {"rows": 3, "adapters": 2, "rank": 16, "inputs": 24, "outputs": 20},
        against=_against_layer,
    ),
    OpBench(
        "route",
        "choice",
        lambda a: a["logits"].nbytes + 8 * len(a["logits"]) * a["routing"].experts_per_token,
        [{"rows": 256, "experts": 128, "rules": "qwen3"}],
        {"rows": 2, "experts": 8, "rules": "mixtral"},
    ),
    OpBench(
        "moe_experts",
        "grouped products",
        _experts_bytes,
        EXPERTS,
        {"rows": 2, "experts": 4, "chosen": 2, "hidden": 24, "inner": 20},
        flops=lambda a: 6 * a["ids"].numel() * a["experts"].down[0].numel(),
        against=_against_dense,
    ),
    _of_logits("argmax_lse", "largest, lse", lambda a: a["logits"].nbytes, DTYPE),
    _of_logits("token_logprobs", "a token's", lambda a: a["logits"].nbytes, DTYPE),
    _of_logits("top_logprobs", "the largest", lambda a: a["logits"].nbytes, DTYPE, k=20),
    # 32 bytes, the smallest memory transaction, are read and written per logit.
    _of_logits("penalise", "three penalties", lambda a: 72 * int(a["lists"].used.sum()), torch.float32, tokens=300),
    # Half of all tokens are masked; bytes written are whole cache lines, which are all of them.
    _of_logits("apply_bitmask", "every row", lambda a: a["logits"].nbytes + a["masks"].nbytes, torch.float32),
    OpBench(
        "count_tokens",
        "the next tokens",
        lambda a: 4 * int(a["lists"].used.sum()),
        [{**one, "tokens": 300} for one in LOGITS],
        {**TOY_LOGITS, "tokens": 300},
        against=lambda gpu, a: lm_head_times(gpu, len(a["rows"]), 150 if gpu.toy else LOGITS[0]["vocab"]),
    ),
)

for _bench in BENCHES:
    case("bench", _bench.op, _bench.sizes, [_bench.toy], name=_bench.op)(_bench.run)


@case("bench", "sample", LOGITS, [TOY_LOGITS])
def sample(gpu: Gpu, *, rows: int, vocab: int) -> Iterator[Figure]:
    logits, against = gpu.logits(rows, vocab, DTYPE), lm_head_times(gpu, rows, vocab)
    operation = kernel("sample")
    for name, mode in MODES.items():
        columns = mode.columns(rows, gpu.device).with_keys(keys_of(rows).to(gpu.device))
        timing = gpu.time(lambda columns=columns: operation(logits, columns))
        made = figure(gpu, "sample", name, {"rows": rows, "vocab": vocab}, timing, bytes=logits.nbytes)
        yield replace(made, against=against)
