"""Attention over the paged pool: the Triton backend and, as stage `flash`, vllm-flash-attn, on the same steps.

Each step checks the stored keys and values and the result. All positions of the pool that no query may read are NaN,
and so is every buffer before it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from batchgen.kernels.types import AttentionArgs, LayerKV
from tests.gpu.compare import Verdict, judge, judge_equal, poisoned
from tests.gpu.device import Gpu
from tests.gpu.registry import DTYPES, LOW, Labelled, Shape, case
from tests.gpu.stages.attention_steps import decode_step, grouped_step, heads_shape, mixed_step, prefill_step
from tests.gpu.under_test import flash_library
from tests.kernels.oracle import attend_by_token
from tests.kernels.steps import Shape as HeadsShape
from tests.kernels.steps import Step

HEAD_SIZES = (64, 80, 96, 128, 192, 256)
GROUP_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16)
"""Numbers of query heads per key head."""

MakeStep = Callable[..., Step]


def _decode(gpu: Gpu, dtype: torch.dtype, *, rows: int, longest: int, shortest: int = 1, **heads: int) -> Step:
    return decode_step(gpu, _shape(dtype, **heads), rows, shortest, longest)


def _prefill(gpu: Gpu, dtype: torch.dtype, *, new: int, past: int = 0, chunks: int = 1, **heads: int) -> Step:
    """Chunks of decreasing size, the first without earlier positions."""
    sizes = [(max(1, new // (i + 1)), past if i else 0) for i in range(chunks)]
    return prefill_step(gpu, _shape(dtype, **heads), sizes)


def _grouped(
    gpu: Gpu,
    dtype: torch.dtype,
    *,
    rows: int,
    pages: int,
    groups: int = 1,
    levels: int = 1,
    own: int = 40,
    **heads: int,
) -> Step:
    """A prefix tree: one root, then `groups` times as many nodes per level, each of `pages` pages."""
    tree = [(groups**level, pages) for level in range(levels)]
    return grouped_step(gpu, _shape(dtype, **heads), rows, tree, own)


def _mixed(
    gpu: Gpu, dtype: torch.dtype, *, rows: int, longest: int, new: int, past: int, pages: int, **heads: int
) -> Step:
    chunks = [(new, 0), (new // 3 + 1, past), (1, past + 3)]
    return mixed_step(gpu, _shape(dtype, **heads), chunks, rows, longest, [(1, pages), (2, pages)])


def _shape(
    dtype: torch.dtype, *, heads: int = 8, kv_heads: int = 2, dim: int = 64, page: int = 16, latent: int = 0,
    value_dim: int = 0,
) -> HeadsShape:  # fmt: skip
    return heads_shape(heads, kv_heads, dim, page, dtype, latent or value_dim, latent=latent > 0)


_QWEN = {"heads": 16, "kv_heads": 8, "dim": 128}
_LLAMA = {"heads": 32, "kv_heads": 8, "dim": 128}
_MIX = {"rows": 24, "longest": 300, "new": 150, "past": 96, "pages": 5}
_TOY_MIX = {"rows": 3, "longest": 18, "new": 5, "past": 16, "pages": 1}

STEPS: tuple[tuple[str, MakeStep, Sequence[Shape], Sequence[Shape]], ...] = (
    (
        "decode",
        _decode,
        [
            {"rows": 256, "longest": 1024, **_QWEN},
            {"rows": 256, "longest": 1024, **_LLAMA},
            {"rows": 1, "longest": 1, "dim": 64},
            {"rows": 5, "longest": 257, "dim": 128, "page": 1},
            {"rows": 33, "longest": 600, "dim": 128, "page": 64},
            {"rows": 33, "longest": 600, "dim": 128, "page": 128},
            {"rows": 4, "longest": 32768, "shortest": 30000, **_LLAMA},
            {"rows": 1, "longest": 32000, "shortest": 32000, **_QWEN},
        ],
        [{"rows": 2, "longest": 40, "heads": 4, "dim": 16}],
    ),
    (
        "prefill",
        _prefill,
        [
            {"new": 1024, **_QWEN},
            {"new": 1000, "past": 333, "chunks": 3, **_LLAMA},
            {"new": 17, "past": 8000, "chunks": 2, **_QWEN},
        ],
        [{"new": 20, "past": 7, "chunks": 2, "heads": 4, "dim": 16}],
    ),
    (
        "prefix",
        _grouped,
        [
            {"rows": 256, "pages": 125, **_QWEN},
            {"rows": 1024, "pages": 125, **_QWEN},
            {"rows": 256, "pages": 125, **_LLAMA},
            {"rows": 96, "pages": 9, "groups": 5, "levels": 3, **_QWEN},
            {"rows": 200, "pages": 3, "groups": 16, "levels": 2, **_LLAMA},
            {"rows": 64, "pages": 2, "groups": 2, "levels": 5, "page": 32, "dim": 64},
        ],
        [{"rows": 4, "pages": 1, "groups": 2, "levels": 2, "own": 9, "heads": 4, "dim": 16}],
    ),
    ("mixed", _mixed, [{**_MIX, **_LLAMA}, {**_MIX, **_QWEN, "page": 64}], [{**_TOY_MIX, "heads": 4, "dim": 16}]),
    (
        "head_size",
        _mixed,
        [{**_MIX, "dim": dim} for dim in HEAD_SIZES] + [{**_MIX, "heads": 16, "dim": 192, "value_dim": 128}],
        [{**_TOY_MIX, "heads": 4, "dim": 24}],
    ),
    (
        "grouped_heads",
        _mixed,
        [{**_MIX, "heads": 2 * size, "kv_heads": 2, "dim": 64} for size in GROUP_SIZES] + [{**_MIX, "kv_heads": 1}],
        [{**_TOY_MIX, "heads": 3, "kv_heads": 1, "dim": 16}],
    ),
    (
        "latent",
        _mixed,
        [{**_MIX, "heads": heads, "kv_heads": 1, "dim": 576, "latent": 512} for heads in (16, 20, 128)],
        [{**_TOY_MIX, "heads": 5, "kv_heads": 1, "dim": 24, "latent": 16}],
    ),
    (
        "scoring",
        _mixed,
        [
            {**_MIX, "window": 128},
            {**_MIX, **_LLAMA, "window": 100},
            {**_MIX, "softcap": 30, "dim": 128},
            {**_MIX, "sinks": 1},
            {**_MIX, "window": 128, "softcap": 50, "sinks": 1, "dim": 256},
            {**_MIX, "window": 1},
        ],
        [{**_TOY_MIX, "heads": 4, "dim": 16, "window": 6, "softcap": 20, "sinks": 1}],
    ),
)


def _case(backend: str, make: MakeStep) -> Callable[..., Iterator[Labelled]]:
    def run(
        gpu: Gpu, dtype: torch.dtype, *, window: int = 0, softcap: int = 0, sinks: int = 0, **sizes: int
    ) -> Iterator[Labelled]:
        step = make(gpu, dtype, **sizes)
        args = AttentionArgs(
            scale=step.query.shape[-1] ** -0.5,
            window=window or None,
            softcap=float(softcap) or None,
            sinks=gpu.randn(step.query.shape[1]) if sinks else None,
        )
        return attention_verdicts(gpu, backend, step, args, dtype)

    return run


def attention_verdicts(
    gpu: Gpu, backend: str, step: Step, args: AttentionArgs, dtype: torch.dtype
) -> Iterator[Labelled]:
    """Compare what a backend stores and returns for `step` with plain attention over the same pool."""
    attention = gpu.attention(backend, step)
    keys, values = step.filled()
    truth, plain = (
        attend_by_token(step.batch, step.query, keys, values, args, compute) for compute in (torch.float64, dtype)
    )
    with poisoned(allow_sync=backend == "flash"):
        got = attention.attend(0, step.query, step.key, step.value, args)
    slots = step.batch.slot_mapping
    yield "stored keys", judge_equal(step.pool.keys[0].flatten(0, 1)[slots], step.key)
    yield "stored values", judge_equal(step.pool.values[0].flatten(0, 1)[slots], step.value)
    yield "attention", judge(got, plain, truth, dtype)


for _name, _make, _shapes, _toy in STEPS:
    case("parity", "attention", _shapes, _toy, DTYPES, name=_name)(_case("triton", _make))
    if _name != "latent":  # not for flash
        case("flash", "flash", _shapes, _toy, LOW, name=f"flash_{_name}")(_case("flash", _make))


@case("flash", "flash", [{"heads": 32, "kv_heads": 8, "dim": 128}], [{"heads": 4, "kv_heads": 2, "dim": 16}], LOW)
def flash_self_test(gpu: Gpu, dtype: torch.dtype, *, heads: int, kv_heads: int, dim: int) -> Iterator[Labelled]:
    """The self-test of the library that a run makes at its start."""
    library = flash_library(gpu.flash_path, gpu.toy)
    from batchgen.kernels.flash.check import check_library
    from batchgen.kernels.flash.library import FlashUnavailable

    try:
        accepted = check_library(library, LayerKV(kv_heads, dim, dim), heads, dtype, 16, gpu.device)
    except FlashUnavailable as error:
        yield "trial", Verdict(False, float("inf"), 0.0, 0.0, str(error))
    else:
        yield "trial", Verdict(True, 0.0, 0.0, 0.0, str(accepted))
