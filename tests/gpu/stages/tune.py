"""Times candidate tiles of the attention kernels on this device; the best ones are a fragment for `chips.toml`.

decode   rows of 1,024 positions each
prefill  a chunk, plus rows under one shared prefix, which use the same tiles
split    4 rows of 32k positions: the size of the parts that long contexts are split into
prefix   the number of saved reads from which a separate pass over a shared prefix is faster: grouped against flat
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch

from batchgen.kernels.chips import AttentionTile, ChipTuning, chip_tuning
from tests.gpu.device import Gpu
from tests.gpu.stages.attention_steps import decode_step, grouped_step, heads_shape, prefill_step
from tests.gpu.stages.bench_attention import attend_time
from tests.gpu.under_test import triton_attention
from tests.kernels.steps import Step

DTYPE = torch.bfloat16
PAGE = 16

# Keys and values are loaded after their page numbers, so only every second stage prefetches further: 3, 5, 7.
DECODE_TILES = [
    AttentionTile(16, keys, warps, stages)
    for keys, warps, stages in (
        *((32, 2, 3), (32, 4, 5), (64, 4, 3), (64, 4, 5)),
        *((64, 4, 7), (128, 4, 3), (128, 4, 5), (128, 8, 5)),
    )
]
PREFILL_TILES = [
    AttentionTile(*tile)
    for tile in (
        *((64, 32, 4, 5), (64, 64, 4, 2), (64, 64, 4, 5), (64, 64, 8, 3), (64, 128, 4, 2)),
        *((128, 32, 8, 5), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 5), (128, 64, 4, 2), (128, 128, 8, 2)),
    )
]
SPLITS = (128, 256, 512, 1024)
GROUP_ROWS = (2, 3, 4, 6, 8, 12, 16, 32)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes and candidates to time."""

    dims: tuple[int, ...] = (64, 128, 256)
    heads: int = 32
    kv_heads: int = 8
    rows: int = 256
    context: int = 1024
    chunk: int = 4096
    shared_pages: int = 125
    long_rows: int = 4
    long_context: int = 32768
    threshold_pages: int = 16
    decode: tuple[AttentionTile, ...] = tuple(DECODE_TILES)
    prefill: tuple[AttentionTile, ...] = tuple(PREFILL_TILES)
    splits: tuple[int, ...] = SPLITS
    group_rows: tuple[int, ...] = GROUP_ROWS


TOY = Sizes(
    dims=(64,),
    heads=4,
    kv_heads=2,
    rows=2,
    context=20,
    chunk=9,
    shared_pages=1,
    long_rows=1,
    long_context=50,
    threshold_pages=1,
    decode=tuple(DECODE_TILES[:2]),
    prefill=tuple(PREFILL_TILES[:2]),
    splits=(16, 32),
    group_rows=(2, 3),
)


def tune(gpu: Gpu, source: str, stop_reason: Callable[[], str]) -> dict[str, Any]:
    """Time all candidates.

    Args:
        gpu: the device.
        source: description of the measurement, for the fragment.
        stop_reason: returns why no more candidates should be timed, or "".

    Returns:
        `fragment` for chips.toml, and all times as `measured`, in microseconds.
    """
    return _Tuner(gpu, TOY if gpu.toy else Sizes(), stop_reason).run(source)


class _Tuner:
    def __init__(self, gpu: Gpu, sizes: Sizes, stop_reason: Callable[[], str]) -> None:
        self._gpu = gpu
        self._sizes = sizes
        self._stop_reason = stop_reason
        self._tuning = chip_tuning(gpu.device)
        self._measured: list[dict[str, Any]] = []

    def run(self, source: str) -> dict[str, Any]:
        kinds: dict[str, dict[int, AttentionTile]] = {"decode": {}, "prefill": {}}
        for dim in self._sizes.dims:
            gpu, sizes, shape = self._gpu, self._sizes, self._shape(dim)
            decode = [decode_step(gpu, shape, sizes.rows, sizes.context, sizes.context)]
            kinds["decode"][dim] = self._best_tile("decode", dim, sizes.decode, decode)
            prefill = [
                prefill_step(gpu, shape, [(sizes.chunk, 0)]),
                grouped_step(gpu, shape, sizes.rows, [(1, sizes.shared_pages)], 1),
            ]
            kinds["prefill"][dim] = self._best_tile("prefill", dim, sizes.prefill, prefill)
            for kind, tiles in kinds.items():
                self._tuning = _with_tile(self._tuning, kind, dim, tiles[dim])
        numbers = {"split_keys": self._split(), "prefix_pass_tokens": self._threshold()}
        return {"fragment": _fragment(self._chip(), source, numbers, kinds), "measured": self._measured}

    def _chip(self) -> str:
        if self._gpu.device.type != "cuda":
            return "toy"
        major, minor = torch.cuda.get_device_capability(self._gpu.device)
        return f"sm_{major}{minor}"

    def _best_tile(self, kind: str, dim: int, tiles: Iterable[AttentionTile], steps: list[Step]) -> AttentionTile:
        """The fastest tile; the current one if none could be timed."""
        times = {}
        for tile in tiles:
            tuning = _with_tile(self._tuning, kind, dim, tile)
            times[tile] = self._total(steps, tuning)
            self._measured.append({"kind": kind, "dim": dim, **asdict(tile), "us": times[tile]})
        return _fastest(times) or self._tuning.attention_tile(kind, dim, DTYPE)

    def _split(self) -> int:
        longest = self._sizes.long_context
        step = decode_step(self._gpu, self._shape(128), self._sizes.long_rows, longest, longest)
        times = {}
        for split in self._sizes.splits:
            times[split] = self._total([step], replace(self._tuning, split_keys=split))
            self._measured.append({"kind": "split", "split_keys": split, "us": times[split]})
        return _fastest(times) or self._tuning.split_keys

    def _threshold(self) -> int:
        """(rows - 1) x shared positions of the smallest group that is faster in a separate pass, as are all larger."""
        shared = self._sizes.threshold_pages * PAGE
        least = 0
        for rows in self._sizes.group_rows:
            grouped = grouped_step(self._gpu, self._shape(128), rows, [(1, self._sizes.threshold_pages)], 1)
            flat = decode_step(self._gpu, self._shape(128), rows, shared + 1, shared + 1)
            us, flat_us = (self._total([step], self._tuning) for step in (grouped, flat))
            self._measured.append({"kind": "prefix", "rows": rows, "shared": shared, "us": us, "flat_us": flat_us})
            if us is None or flat_us is None or us > flat_us:
                least = 0
            elif not least:
                least = (rows - 1) * shared
        return least or self._tuning.prefix_pass_tokens

    def _shape(self, dim: int) -> Any:
        return heads_shape(self._sizes.heads, self._sizes.kv_heads, dim, PAGE, DTYPE)

    def _total(self, steps: list[Step], tuning: ChipTuning) -> float | None:
        """Microseconds of all steps; None if the tiles do not fit the device, or time is up."""
        if self._stop_reason():
            return None
        try:
            return sum(attend_time(self._gpu, triton_attention(step, tuning), step).p50 for step in steps)
        except Exception as error:
            # Triton's error for too much shared memory or too many registers; its module differs by release.
            if "OutOfResources" not in type(error).__name__:
                raise
            return None


Choice = TypeVar("Choice")


def _fastest(times: Mapping[Choice, float | None]) -> Choice | None:
    timed = {choice: time for choice, time in times.items() if time is not None}
    return min(timed, key=timed.__getitem__) if timed else None


def _with_tile(tuning: ChipTuning, kind: str, dim: int, tile: AttentionTile) -> ChipTuning:
    return replace(tuning, attention={**tuning.attention, kind: {**tuning.attention[kind], dim: tile}})


def _fragment(
    chip: str, source: str, numbers: Mapping[str, int], kinds: Mapping[str, Mapping[int, AttentionTile]]
) -> str:
    """An entry of `chips.toml`, with only the tuned values."""
    lines = [f"[{chip}]", f"source = {json.dumps(source)}", *(f"{name} = {value}" for name, value in numbers.items())]
    for kind, tiles in kinds.items():
        lines += ["", f"[{chip}.attention.{kind}]"]
        for dim, tile in tiles.items():
            fields = ", ".join(f"{name} = {value}" for name, value in asdict(tile).items())
            lines.append(f"{dim} = {{ {fields} }}")
    return "\n".join(lines) + "\n"
