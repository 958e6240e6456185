"""Steps on which attention kernels are compared with the reference: heads, head sizes, pages, kinds of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from batchgen.kernels.chips import AttentionTile
from batchgen.kernels.gpu.attention import TritonAttention
from batchgen.kernels.gpu.deterministic_attention import DeterministicTritonAttention
from batchgen.kernels.types import AttentionArgs, PagedAttention
from tests.kernels.closeness import assert_as_close
from tests.kernels.oracle import attend_by_token
from tests.kernels.steps import Shape, Step, StepBuilder, group_of_one, group_of_some, one_row, one_token, only_rows

__all__ = [
    *("GROUPS", "KERNELS", "LATENTS", "OPTIONS", "SCALE", "SPLITTING", "TILES", "AttentionCase", "Tiles", "attend"),
    *("attention_of", "built", "check", "deterministic_of", "mixed", "small_step", "tree", "with_sinks"),
]

SCALE = 0.3
BF16, F16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Tiles:
    """Small tiles for every dtype, so that few tokens fill them; replaces a chip's tuning."""

    keys: int = 16
    split_keys: int = 1 << 20
    split_keys_large: int = 1 << 20
    items_per_sm: int = 8
    items_per_sm_large: int = 8

    def attention_tile(self, kind: str, head_dim: int, dtype: torch.dtype) -> AttentionTile:
        return AttentionTile(64 if kind.endswith("prefill") else 16, self.keys, 4, 1)


TILES: Any = Tiles()
SPLITTING: Any = Tiles(split_keys=16, split_keys_large=32)
MakeAttention = Callable[..., PagedAttention]


def attention_of(step: Step, tuning: Any = TILES, multiprocessors: int = 64) -> TritonAttention:
    """The Triton attention of a step."""
    return TritonAttention(step.pool, step.batch, tuning, multiprocessors)


def deterministic_of(step: Step, tuning: Any = TILES) -> PagedAttention:
    """The deterministic Triton attention of a step."""
    return DeterministicTritonAttention(step.pool, step.batch, tuning)


KERNELS: dict[str, MakeAttention] = {"triton": attention_of, "deterministic": deterministic_of}


def attend(attention: PagedAttention, step: Step, *, stored: bool = False, **options: Any) -> Tensor:
    """A layer's attention over a step; `stored`: without storing the step's keys and values before."""
    if stored:
        return attention.attend_stored(0, step.query, AttentionArgs(SCALE, **options))
    return attention.attend(0, step.query, step.key, step.value, AttentionArgs(SCALE, **options))


def check(attention: PagedAttention, step: Step, **options: Any) -> None:
    """Compare a step with the reference; in low precision allow twice the error of plain operations."""
    keys, values = step.filled()
    args = AttentionArgs(SCALE, **options)
    exact, plain = (attend_by_token(step.batch, step.query, keys, values, args, x) for x in (torch.float64, keys.dtype))
    assert_as_close(attend(attention, step, **options), plain, exact)


def built(fill: Callable[[StepBuilder], object], seed: int = 0, **shape: Any) -> Step:
    """A step of two query heads and one key head, unless `shape` says otherwise."""
    b = StepBuilder(Shape(**{"heads": 2, "kv_heads": 1, **shape}), seed=seed)
    fill(b)
    return b.build()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"window": 40},
    {"softcap": 3.0},
    {"sinks": True},
    {"window": 21, "softcap": 2.0, "sinks": True},
]


def with_sinks(options: dict[str, Any], heads: int) -> dict[str, Any]:
    return {**options, "sinks": torch.linspace(-3, 3, heads)} if options.get("sinks") else options


def mixed(b: StepBuilder) -> None:
    """Chunks with and without a past, decode rows without a group, in one and in two."""
    for q_len, past in ((35, 0), (1, 50), (19, 20)):
        b.chunk(q_len, past=past)
    size = b.shape.page_size
    b.decode(1)
    b.decode(40)
    low = [b.decode(n, own_start=4 * size) for n in (1, 5)]
    high = [b.decode(n, own_start=2 * size) for n in (3, size)]
    b.group([low[1], high[0], low[0], high[1]], 0, 2)
    b.group(low, 2 * size, 2)


def small_step(b: StepBuilder) -> None:
    """A chunk with a past, a single row, a group of two."""
    b.chunk(11, past=9)
    b.decode(20)
    b.group([b.decode(n, own_start=b.shape.page_size) for n in (2, 9)], 0, 1)


def _chunk_and_row(b: StepBuilder) -> None:
    b.chunk(50, past=70)
    b.decode(130)


def _only_chunk(b: StepBuilder) -> None:
    b.chunk(70, past=63)


def _group_of_many(b: StepBuilder) -> None:
    rows = [b.decode(1 + n % 3, own_start=32) for n in range(18)]
    b.group(rows[::-1], 0, 2)


def tree(b: StepBuilder) -> None:
    """Three levels: all rows, two branches, four leaves of different sizes."""
    rows = [b.decode(1 + i % 4, own_start=64) for i in range(9)]
    b.group(rows, 0, 1)
    b.group(rows[:5], 16, 2)
    b.group(rows[5:], 16, 2)
    for leaf in (rows[:1], rows[1:5], rows[5:8], rows[8:]):
        b.group(leaf, 48, 1)


@dataclass(frozen=True)
class AttentionCase:
    """A step with the layer's options and the tile's number of keys."""

    fill: Callable[[StepBuilder], object]
    shape: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    keys: int = 16


def _heads(*pairs: tuple[int, int]) -> list[AttentionCase]:
    return [AttentionCase(small_step, {"heads": heads, "kv_heads": kv_heads}) for heads, kv_heads in pairs]


def _head_sizes(dtype: torch.dtype, *pairs: tuple[int, int]) -> list[AttentionCase]:
    return [AttentionCase(small_step, {"key_dim": key, "value_dim": value, "dtype": dtype}) for key, value in pairs]


_KINDS = (_only_chunk, one_token, only_rows, one_row, group_of_one, group_of_some, _group_of_many, tree)

GROUPS: dict[str, list[AttentionCase]] = {
    "options": [
        *(AttentionCase(mixed, {"heads": 3}, options) for options in OPTIONS),
        AttentionCase(mixed, {"heads": 4, "kv_heads": 2}, OPTIONS[-1]),
    ],
    "low precision": [
        AttentionCase(mixed, {"heads": 3, "dtype": (F16, BF16)[i % 2]}, options)
        for i, options in enumerate((OPTIONS[0], OPTIONS[2], OPTIONS[-1], OPTIONS[-1]))
    ],
    "heads": _heads((1, 1), (9, 3), (14, 2), (71, 1)),
    "head sizes": [
        *_head_sizes(torch.float32, (80, 80), (192, 128), (24, 40), (7, 5)),
        *_head_sizes(F16, (96, 96), (256, 256), (40, 24)),
    ],
    "page sizes": [
        AttentionCase(small_step, {"page_size": size}, {"window": window})
        for size, window in ((1, 17), (5, None), (8, 17), (16, None), (32, 17), (64, None))
    ],
    "pages and tiles": [
        AttentionCase(_chunk_and_row, {"page_size": size}, keys=keys) for size, keys in ((5, 64), (32, 16), (64, 32))
    ],
    "kinds": [AttentionCase(fill, {}, {"window": (None, 20)[i % 2]}) for i, fill in enumerate(_KINDS)],
}
"""Cases by what they vary."""

LATENTS: list[AttentionCase] = [
    *(
        AttentionCase(small_step, {"heads": heads, "key_dim": key, "value_dim": value, "dtype": dtype, "latent": True})
        for heads, key, value, dtype in (
            *((5, 24, 16, torch.float32), (24, 40, 32, BF16), (71, 24, 20, F16)),
            (2, 288, 256, BF16),
        )
    ),
    *(
        AttentionCase(mixed, {"key_dim": 24, "value_dim": 16, "latent": True}, options)
        for options in (OPTIONS[0], OPTIONS[-1])
    ),
]
"""Values are the first numbers of the keys, which alone are stored."""
