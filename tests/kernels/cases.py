"""The registry of operations under test: inputs of each operation of `Ops`, and how its results are judged.

To add a case of an operation, add sizes to its table. To add an operation, write a builder of its arguments:

    @case("rms_norm", (5, 63), (129, 13), exact=wide("rms_norm"))
    def rms_norm(draw: Draw, dtype: torch.dtype, rows: int, width: int) -> Arguments:
        return draw(rows, width, dtype=dtype), draw(width, dtype=dtype), 1e-6

`test_ops.py` runs every case in every dtype on every backend of `BACKENDS` that replaces the operation. Builders get
the same random numbers at each call. Sizes are odd and small, as Triton's kernels run in its interpreter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.activation import ACTIVATIONS
from batchgen.kernels.bitmask import bitmask_width
from batchgen.kernels.counts import CountLists, Penalties
from batchgen.kernels.device import HOST
from batchgen.kernels.heads import HeadNorms
from batchgen.kernels.lora import LoraPair, LoraPairs, lora_step
from batchgen.kernels.moe import Experts, Gating, Routing
from batchgen.kernels.noise import row_keys as keys_of
from batchgen.kernels.ops import TORCH_OPS
from batchgen.kernels.sampling import SamplingColumns
from batchgen.kernels.types import KVPool
from tests.kernels.closeness import DTYPES
from tests.kernels.logit_rows import drawn, strided, tied

__all__ = ["CASES", "Case", "flat", "widened"]

Arguments = tuple[Any, ...]
FLOAT32: Final = (torch.float32,)


class Draw:
    """Seeded random tensors."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> Tensor:
        return (size * torch.randn(shape, generator=self.generator)).to(dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def some(self, count: int, most: int) -> Tensor:
        """`count` distinct numbers below `most`."""
        return torch.randperm(most, generator=self.generator)[:count]


@dataclass(frozen=True)
class Case:
    """One call of an operation."""

    op: str
    sizes: tuple[Any, ...]
    build: Callable[..., Arguments]
    dtypes: tuple[torch.dtype, ...]
    exact: Callable[..., Any] | None
    """The result in float64; its floating-point errors may be twice PyTorch's. None: the result is PyTorch's."""
    rtol: float
    """Without `exact`: most relative (and, times the largest value, absolute) difference from PyTorch's result."""
    changed: float
    """The same for arguments that the operation changes; in low precision one rounding if it is not 0."""
    scratch: tuple[int, ...]
    """Arguments whose contents after the call do not matter."""

    def arguments(self, dtype: torch.dtype) -> Arguments:
        """New arguments, the same at every call."""
        return self.build(Draw(), dtype, *self.sizes)

    def __str__(self) -> str:
        return "-".join([self.op, *map(str, self.sizes)])


CASES: list[Case] = []


def case(
    op: str,
    *sizes: tuple[Any, ...],
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    exact: Callable[..., Any] | None = None,
    rtol: float = 0.0,
    changed: float = 0.0,
    scratch: tuple[int, ...] = (),
) -> Callable[[Callable[..., Arguments]], Callable[..., Arguments]]:
    """Register a builder of arguments with several sizes; the parameters are those of `Case`."""

    def register(build: Callable[..., Arguments]) -> Callable[..., Arguments]:
        CASES.extend(Case(op, given, build, dtypes, exact, rtol, changed, scratch) for given in sizes)
        return build

    return register


def flat(value: Any) -> Iterator[Tensor]:
    """The tensors of a value, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, KVPool):
        yield from (*value.keys, *value.values)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from flat(one)
    elif isinstance(value, LoraPairs):
        yield from flat(list(value))
    elif is_dataclass(value):
        for field in fields(value):
            yield from flat(getattr(value, field.name))


def widened(value: Any) -> Any:
    """The value with floating-point tensors in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, LoraPairs):
        return LoraPairs([widened(pair) for pair in value])
    if isinstance(value, tuple):
        return tuple(map(widened, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: widened(getattr(value, f.name)) for f in fields(value)})
    return value


def wide(op: str) -> Callable[..., Any]:
    """PyTorch's operation in float64."""
    return lambda *arguments: getattr(TORCH_OPS, op)(*widened(arguments))


def log_softmax(logits: Tensor, ids: Tensor) -> Tensor:
    """In float64, at ids [R, k]."""
    return logits.double().log_softmax(-1).gather(1, ids)


NORMS = ((5, 1), (5, 63), (2, 1000), (129, 13))


@case("rms_norm", *NORMS, exact=wide("rms_norm"))
def rms_norm(draw: Draw, dtype: torch.dtype, rows: int, width: int) -> Arguments:
    return draw(rows, width, dtype=dtype), draw(width, dtype=dtype), 1e-6


def exact_sum(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    return TORCH_OPS.rms_norm((x + delta).double(), weight.double(), eps)


@case("add_rms_norm", *NORMS, exact=exact_sum)
def add_rms_norm(draw: Draw, dtype: torch.dtype, rows: int, width: int) -> Arguments:
    return draw(rows, width, dtype=dtype), draw(rows, width, dtype=dtype, size=0.1), draw(width, dtype=dtype), 1e-6


@case("gated", *((name, 37) for name in ACTIVATIONS), ("silu", 1), ("silu", 1025), exact=wide("gated"))
def gated(draw: Draw, dtype: torch.dtype, name: str, inner: int) -> Arguments:
    return draw(5, 2 * inner, dtype=dtype, size=3.0), name


@case("rope_tables", (1, 2), (7, 34), (33, 64), rtol=1e-6)
def rope_tables(draw: Draw, dtype: torch.dtype, tokens: int, dim: int) -> Arguments:
    return 1 / 10000 ** (torch.arange(0, dim, 2) / dim), 1.25, draw.integers(0, 5000, tokens), dtype


HEADS = ((1, 1, 2), (3, 1, 6), (9, 3, 16), (14, 2, 24), (5, 5, 80), (3, 3, 34))


@case(
    "qk_norm_rope_cache",
    *((*heads, normed) for heads in HEADS for normed in (False, True)),
    exact=wide("qk_norm_rope_cache"),
    changed=1e-5,
    scratch=(0,),
)
def qk_norm_rope_cache(draw: Draw, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, normed: bool) -> Arguments:
    norms = HeadNorms(draw(dim, dtype=dtype), draw(dim, dtype=dtype), 1e-6) if normed else None
    angles = draw(7, 1, dim // 2)
    cos, sin = angles.cos().repeat(1, 1, 2).to(dtype), torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    pool = (torch.full((6, 13, kv_heads, dim), torch.nan, dtype=dtype) for _ in range(2))
    return draw(7, heads + 2 * kv_heads, dim, dtype=dtype), norms, (cos, sin), *pool, draw.some(7, 6 * 13)


@case("add_lora", (1, 16, 16, (4,)), (5, 33, 7, (8, 3)), (19, 100, 130, (1, 64, 0, 5)), exact=None, changed=1e-5)
def add_lora(
    draw: Draw, dtype: torch.dtype, tokens: int, inputs: int, outputs: int, ranks: tuple[int, ...]
) -> Arguments:
    def pair(rank: int) -> LoraPair | None:
        down, up = draw(rank, inputs, size=inputs**-0.5), draw(outputs, rank)
        return LoraPair(down.to(dtype), up.to(dtype)) if rank else None

    pairs = LoraPairs([pair(rank) for rank in ranks])
    adapters = np.array([0, *draw.integers(-1, len(ranks), tokens - 1).tolist()])
    # Views with gaps between their rows.
    out, x = draw(tokens, outputs + 5, dtype=dtype), draw(tokens, inputs + 3, dtype=dtype)
    return out[:, 2 : 2 + outputs], x[:, 1 : 1 + inputs], lora_step(adapters, HOST), pairs


ROUTINGS = (
    (9, 8, Routing(2)),
    (5, 6, Routing(3, renormalise=False)),
    (7, 16, Routing(5, "sigmoid", 4, 2, "top2", scale=2.5)),
)


@case("route", *ROUTINGS, rtol=1e-6)
def route(draw: Draw, dtype: torch.dtype, tokens: int, experts: int, routing: Routing) -> Arguments:
    bias = draw(experts, size=0.2) if routing.scoring == "sigmoid" else None
    return draw(tokens, experts, dtype=dtype), routing, bias


@case("moe_experts", (1, 4, 8, 6, False), (9, 5, 24, 20, True), dtypes=FLOAT32, rtol=1e-5)
def moe_experts(
    draw: Draw, dtype: torch.dtype, tokens: int, count: int, hidden: int, inner: int, biased: bool
) -> Arguments:
    biases = (draw(count, 2 * inner), draw(count, hidden)) if biased else (None, None)
    gating = Gating("quick_gelu", interleaved=True, limit=7.0, shift=1.0) if biased else Gating()
    experts = Experts(draw(count, 2 * inner, hidden), draw(count, hidden, inner), *biases, gating)
    ids = draw(tokens, count).argsort(1)[:, :2]
    return draw(tokens, hidden), ids, draw(tokens, 2).abs(), experts


def lists_of(draw: Draw, rows: int, vocab: int) -> CountLists:
    """Lists of slots 1 to `rows`, of 0 to `vocab` tokens, some of them with a count of 0."""
    lists = CountLists.empty(rows + 1, vocab + 1, torch.device("cpu"))
    for slot in range(1, rows + 1):
        used = int(draw.integers(0, vocab + 1, 1))
        lists.ids[slot, :used] = draw.some(used, vocab).int()
        lists.counts[slot, :used] = draw.integers(0, 4, used).float()
        lists.used[slot] = used
    return lists


@case("count_tokens", (1, 1), (5, 40), (7, 300), dtypes=FLOAT32)
def count_tokens(draw: Draw, dtype: torch.dtype, rows: int, vocab: int) -> Arguments:
    slots = draw.some(rows, rows) + 1
    return lists_of(draw, rows, vocab), slots, draw.some(rows, rows), draw.integers(0, vocab, rows), vocab + 1


@case("penalise", *itertools.product((1, 4), (1, 63, 700), ("packed", "padded")), dtypes=FLOAT32, changed=3e-7)
def penalise(draw: Draw, dtype: torch.dtype, rows: int, vocab: int, kind: str) -> Arguments:
    slots = draw.some(rows, rows) + 1
    slots[-1] = -(rows % 2)  # no slot
    penalties = Penalties(draw(rows).abs() + 0.5, draw(rows), draw(rows))
    return (
        strided(drawn(rows, vocab), kind),
        draw.some(rows, rows),
        slots,
        lists_of(draw, rows, vocab),
        penalties,
        vocab,
    )


@case("add_bias", *itertools.product((0, 1, 30), ("packed", "padded", "transposed")), dtypes=FLOAT32, changed=1e-6)
def add_bias(draw: Draw, dtype: torch.dtype, pairs: int, kind: str) -> Arguments:
    values = draw.integers(-8, 8, pairs) / 4  # repeated pairs are added in any order
    return strided(drawn(3, 17), kind), draw.integers(0, 3, pairs), draw.integers(0, 17, pairs), values


@case("keep_only", *itertools.product((5, 63, 3000), (0, 8), ("packed", "padded", "transposed")))
def keep_only(draw: Draw, dtype: torch.dtype, vocab: int, pairs: int, kind: str) -> Arguments:
    places = draw.some(pairs, 2 * vocab)
    whole = torch.tensor([3, 0])
    return strided(drawn(4, vocab, dtype), kind), whole, whole[places // vocab], places % vocab


@case("drew_masked", (1,), (6,), (200,))
def drew_masked(draw: Draw, dtype: torch.dtype, count: int) -> Arguments:
    logits, rows = drawn(count, 33, dtype), draw.some(count, count)
    logits[rows[::3]] = -torch.inf
    return logits, rows, draw.integers(0, 33, count)


LOGITS = ((1, 1), (3, 2), (2, 63), (5, 100), (1, 5000))


@case("mask_tokens", *LOGITS)
def mask_tokens(draw: Draw, dtype: torch.dtype, rows: int, vocab: int) -> Arguments:
    return drawn(rows, vocab, dtype), draw.integers(0, rows, 3), draw.integers(0, vocab, 3)


@case("log_normalizers", *LOGITS, exact=lambda logits: logits.double().logsumexp(-1))
@case("argmax_lse", *LOGITS, rtol=1e-6)
@case("nan_rows", *LOGITS)
def logits_only(draw: Draw, dtype: torch.dtype, rows: int, vocab: int) -> Arguments:
    return (drawn(rows, vocab, dtype),)


@case("argmax_lse", (6, 2), (6, 300), rtol=1e-6)
def equal_logits(draw: Draw, dtype: torch.dtype, rows: int, vocab: int) -> Arguments:
    logits = tied(rows, vocab, dtype)
    logits[0] = 0.25
    logits[:, 0] = 0.0
    return (logits,)


@case("nan_rows", (305, 0), (305, 5), (305, 304))
def unusable_rows(draw: Draw, dtype: torch.dtype, vocab: int, place: int) -> Arguments:
    logits = draw(7, vocab, dtype=dtype)
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf, -torch.nan)):
        logits[row, place] = value
    logits[4] = -torch.inf
    logits[5], logits[5, place] = -torch.inf, torch.nan
    return (logits,)


@case("token_logprobs", *LOGITS, exact=lambda logits, tokens: log_softmax(logits, tokens[:, None])[:, 0])
def token_logprobs(draw: Draw, dtype: torch.dtype, rows: int, vocab: int) -> Arguments:
    return draw(rows, vocab, dtype=dtype), draw.integers(0, vocab, rows)


@case("top_logprobs", *((*size, k) for size in LOGITS for k in (1, 20) if k <= size[1]), rtol=1e-6)
def top_logprobs(draw: Draw, dtype: torch.dtype, rows: int, vocab: int, k: int) -> Arguments:
    return draw(rows, vocab, dtype=dtype, size=3.0), k


@case("gather_logprobs", *((*size, k) for size in LOGITS for k in (0, 1, 20) if k <= size[1]), rtol=1e-6)
def gather_logprobs(draw: Draw, dtype: torch.dtype, rows: int, vocab: int, k: int) -> Arguments:
    return draw(rows, vocab, dtype=dtype, size=3.0), draw.integers(0, vocab, rows), k


@case("apply_bitmask", *itertools.product((1, 31, 33, 1000), (None, (4, 0, 2)), ("packed", "every second")))
def apply_bitmask(draw: Draw, dtype: torch.dtype, vocab: int, rows: tuple[int, ...] | None, kind: str) -> Arguments:
    """About a third of the bits are set, also past the vocabulary."""
    count = 5 if rows is None else len(rows)
    bits = draw.integers(0, 3, count, bitmask_width(vocab), 32) == 0
    words = (bits.long() << torch.arange(32)).sum(-1)
    masks = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return strided(drawn(5, vocab, dtype), kind), masks, None if rows is None else torch.tensor(rows)


@case("row_keys", (1,), (200,), dtypes=FLOAT32)
def row_keys(draw: Draw, dtype: torch.dtype, rows: int) -> Arguments:
    return tuple(draw.integers(-(2**63), 2**63 - 1, rows) for _ in range(3))


GRID = tuple(itertools.product((0.0, 0.3, 1.0, 4.0), (-1, 1, 7, 500), (1.0, 0.9, 1e-9), (0.0, 0.1)))


@case("sample", (1, None), (63, None), (300, None), (300, 5))
def sample(draw: Draw, dtype: torch.dtype, vocab: int, samples: int | None) -> Arguments:
    """A mix of parameters, for one sample per row or several of few rows."""
    mixes = GRID[:: 7 if vocab > 100 else 3]
    columns = SamplingColumns.of(*zip(*mixes, strict=True))  # type: ignore[arg-type]
    keys = keys_of(*(draw.integers(0, 1000, len(mixes)) for _ in range(3)))
    rows = None if samples is None else draw.integers(0, samples, len(mixes))
    return draw(samples or len(mixes), vocab, dtype=dtype, size=2.0), columns.with_keys(keys), rows


@case("filtered_scores", (1,), (63,), (300,), dtypes=FLOAT32, rtol=1e-6)
def filtered_scores(draw: Draw, dtype: torch.dtype, vocab: int) -> Arguments:
    mixes = GRID[::5]
    temperature, top_k, top_p, min_p = (torch.tensor(values) for values in zip(*mixes, strict=True))
    logits = draw(len(mixes), vocab, size=2.0)
    return logits, temperature, top_k, top_p.float(), min_p.float(), logits.argmax(-1)


@case("copy_pages", (1, 0), (3, 1), (16, 70))
def copy_pages(draw: Draw, dtype: torch.dtype, page_size: int, copies: int) -> Arguments:
    shapes = ((2, 4), (1, 9))
    caches = [[draw(90, page_size, *shape, dtype=dtype) for shape in shapes] for _ in range(2)]
    pages = draw.some(90, 90)
    sources = pages[copies:][draw.integers(0, 90 - copies, copies)]
    table = torch.stack((sources, pages[:copies], torch.full((copies,), page_size)), 1)
    return KVPool(*caches, page_size), table
