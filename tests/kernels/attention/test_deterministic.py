"""Batch-invariant attention: bitwise equal for every composition of a step, and equal to the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.kernels.attention import torch_attention
from batchgen.kernels.attention.torch_attention import TorchAttention
from batchgen.kernels.cpu.attention import CompiledAttention
from batchgen.kernels.cpu.library import loaded
from batchgen.kernels.types import (
    AttentionArgs,
    AttentionBatch,
    ChunkPages,
    GroupPages,
    KVPool,
    LayerKV,
    PagedAttention,
)
from tests.kernels.oracle import attend_by_token
from tests.kernels.steps import Shape, Step, StepBuilder

SCALE = 0.3
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"window": 70},
    {"softcap": 3.0},
    {"sinks": True},
    {"window": 21, "softcap": 2.0, "sinks": True},
]


@dataclass(frozen=True)
class DeterministicBackend:
    """An attention backend, and lengths of sequences that span several of its blocks."""

    name: str
    make: Callable[[KVPool, AttentionBatch], PagedAttention]
    length: int
    shared: int


BACKENDS = [
    DeterministicBackend("torch", TorchAttention, 300, 150),
    DeterministicBackend("compiled", partial(CompiledAttention, deterministic=True), 700, 450),
]


def with_sinks(options: dict[str, Any], heads: int) -> dict[str, Any]:
    return {**options, "sinks": torch.linspace(-3, 3, heads)} if options.get("sinks") else options


def mixed(shape: Shape) -> Step:
    """Chunks with and without a past, decode rows without a group, in one and in two; more than a block in each."""
    b = StepBuilder(shape)
    size = shape.page_size
    b.chunk(63)
    b.chunk(1, past=200)
    prefix = b.chunk(100)[: 96 // size]
    b.chunk(20, past=len(prefix) * size + 5, prefix=prefix)
    for n in (1, 63, 100, 17):
        b.decode(n)
    low = [b.decode(n, own_start=20 * size) for n in (1, 5, 40)]
    high = [b.decode(n, own_start=12 * size) for n in (3, size)]
    b.group([low[2], high[0], low[0], low[1], high[1]], 0, 12)
    b.group(low, 12 * size, 8)
    return b.build()


def attend(step: Step, tile: int | None = None, **options: Any) -> Tensor:
    attention = TorchAttention(step.pool, step.batch)
    tokens = len(step.query)
    if tile is None:
        return attention.attend(0, step.query, step.key, step.value, AttentionArgs(SCALE, **options))
    parts = []
    for start in range(0, tokens, tile):
        end = min(tokens, start + tile)
        inputs = [torch.cat((x[start:end], torch.full_like(x[:1], torch.nan).repeat(tile - end + start, 1, 1)))
                  for x in (step.query, step.key, step.value)]  # fmt: skip
        parts.append(
            attention.tile(start, end, tile).attend(0, *inputs, AttentionArgs(SCALE, **options))[: end - start]
        )
    return torch.cat(parts)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (20, 1)])
def test_a_mixed_step_equals_the_reference_in_tiles_of_any_size(
    heads: int, kv_heads: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(heads, kv_heads, 16, 24)
    options = with_sinks(options, heads)
    step = mixed(shape)
    keys, values = step.filled()
    expected = attend_by_token(step.batch, step.query, keys, values, AttentionArgs(SCALE, **options))
    got = attend(step, **options)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)
    for tile in (1, 16, 50, 256):
        assert torch.equal(attend(step, tile, **options), got)
    monkeypatch.setattr(torch_attention, "_GATHERED_BYTES", 1)  # items one at a time
    assert torch.equal(attend(step, **options), got)


class Sequences:
    """Three sequences with the same first half, and every way to compute the last token of each."""

    def __init__(self, backend: DeterministicBackend, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(heads)
        self.backend = backend

        def draw(width: int) -> Tensor:
            values = torch.randn(3, backend.length, width, dim, generator=generator)
            values[1:, : backend.shared] = values[0, : backend.shared]
            return values.to(dtype)

        self.query, self.key, self.value = draw(heads), draw(kv_heads), draw(kv_heads)
        self.layer, self.dtype = LayerKV(kv_heads, dim, dim), dtype

    def run(self, page_size: int, members: list[int], last: int, share: int = 0, **options: Any) -> Tensor:
        """Output of each member's last token, [3 or fewer, N, D].

        Args:
            page_size: S.
            members: the sequences of the step, in order.
            last: tokens of each that the step computes as a chunk; 0: the last as a decode row.
            share: pages that decode rows share as a group.
        """
        length = self.backend.length
        pages = -(-length // page_size)
        pool = KVPool.allocate([self.layer], 3 * pages + 1, page_size, self.dtype, torch.device("cpu"))
        tables = {m: np.random.default_rng(page_size).permutation(3 * pages)[m * pages :][:pages] + 1 for m in members}
        shared = next(iter(tables.values()))[:share]
        count = last or 1
        slots, batch = [], AttentionBatch(torch.empty(0, dtype=torch.int64))
        for at, (member, table) in enumerate(tables.items()):
            table[:share] = shared
            own = np.arange(length)
            places = torch.from_numpy(table[own // page_size] * page_size + own % page_size)
            for cache, new in ((pool.keys[0], self.key[member]), (pool.values[0], self.value[member])):
                cache.flatten(0, 1)[places[:-count]] = new[:-count]
            slots.append(places[-count:])
            if last:
                batch.chunks.append(ChunkPages(at * last, last, length, table))
        batch.slot_mapping = torch.cat(slots)
        batch.decode_start = len(members) * last
        if not last:
            batch.decode_own_start = np.full(len(members), share * page_size)
            batch.decode_lens = length - batch.decode_own_start
            batch.decode_pages = np.array([tables[m][share:] for m in members])
            if share:
                batch.groups = [GroupPages(np.arange(len(members)), shared, 0)]
        inputs = [torch.cat([x[m, -count:] for m in members]) for x in (self.query, self.key, self.value)]
        out = self.backend.make(pool, batch).attend(0, *inputs, AttentionArgs(SCALE, **options))
        return out.view(len(members), count, *out.shape[1:])[:, -1]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 8, 16), (32, 1, 40)])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_every_composition_gives_the_same_bits(
    backend: DeterministicBackend, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Alone or with others, as a decode row or the end of a chunk, prefix shared or not, for every page size."""
    if backend.name == "compiled" and not loaded():
        pytest.skip("no C++ compiler here")
    options = with_sinks(options, heads)
    sequences = Sequences(backend, heads, kv_heads, dim, dtype)
    alone = [sequences.run(16, [member], 0, **options)[0] for member in range(3)]
    assert not torch.equal(alone[0], alone[1])
    for page_size in (1, 16, 40):
        for last in (0, 1, 2, 97):
            for members in ([0, 1, 2], [2, 0], [1]):
                got = sequences.run(page_size, members, last, **options)
                assert all(torch.equal(g, alone[m]) for m, g in zip(members, got, strict=True))
        for share in {1, 70 // page_size, backend.shared // page_size}:
            got = sequences.run(page_size, [2, 1, 0], 0, share, **options)
            assert all(torch.equal(g, alone[m]) for m, g in zip([2, 1, 0], got, strict=True))
