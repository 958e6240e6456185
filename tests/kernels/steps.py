"""Random steps for attention tests: a pool, a batch over it, and the step's queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.types import Attention, AttentionArgs, AttentionBatch, ChunkPages, GroupPages, KVPool, LayerKV
from tests.kernels.oracle import attend_by_token, visible_slots


@dataclass
class Shape:
    heads: int = 9
    kv_heads: int = 3
    key_dim: int = 16
    value_dim: int = 16
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    latent: bool = False
    """Whether values are the first numbers of the keys."""


@dataclass
class Step:
    """A step and its pool: positions that a query may see are filled, all others are not-a-numbers."""

    pool: KVPool
    batch: AttentionBatch
    query: Tensor
    key: Tensor
    value: Tensor

    def filled(self) -> tuple[Tensor, Tensor]:
        """The pool's keys and values after the step's own are stored."""
        keys = self.pool.keys[0].clone()
        if self.pool.latent:
            keys.flatten(0, 1)[self.batch.slot_mapping] = self.key
            return keys, keys[..., : self.value.shape[2]]
        values = self.pool.values[0].clone()
        keys.flatten(0, 1)[self.batch.slot_mapping] = self.key
        values.flatten(0, 1)[self.batch.slot_mapping] = self.value
        return keys, values


def free_behind(step: Step, window: int) -> None:
    """Let the layers free the pages that no token sees within its window: they hold not-a-numbers then."""
    size = step.pool.page_size
    seen = [slots[max(0, position - window + 1) :] for position, slots in visible_slots(step.batch, size)]
    freed = np.setdiff1d(np.arange(step.pool.num_pages), torch.cat(seen).numpy() // size)
    assert len(np.intersect1d(freed, np.concatenate([chunk.pages for chunk in step.batch.chunks])))
    for cache in (step.pool.keys[0], step.pool.values[0]):
        cache[torch.from_numpy(freed)] = torch.nan
    step.batch.windowed = True


@dataclass
class StepBuilder:
    """Adds chunks, decode rows and groups; pages are assigned in random order."""

    shape: Shape
    num_pages: int = 1024
    seed: int = 0
    chunks: list[tuple[int, int, list[int]]] = field(default_factory=list)
    rows: list[tuple[int, int, list[int]]] = field(default_factory=list)
    groups: list[tuple[list[int], int, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.free = (torch.randperm(self.num_pages - 1, generator=self.generator) + 1).tolist()
        self.filled: set[int] = set()

    def pages(self, positions: int) -> list[int]:
        count = -(-positions // self.shape.page_size)
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count, "not enough pages"
        return taken

    def chunk(self, q_len: int, past: int = 0, prefix: list[int] | None = None) -> list[int]:
        """Add a chunk of `q_len` tokens after `past` positions, which begin with the full pages `prefix`."""
        prefix = prefix or []
        own = self.pages(past + q_len - len(prefix) * self.shape.page_size)
        self.chunks.append((q_len, past + q_len, prefix + own))
        self._fill(prefix + own, past)
        return prefix + own

    def decode(self, own_len: int, own_start: int = 0) -> int:
        """Add a decode row whose own pages hold `own_len` positions from `own_start` on; returns its index."""
        own = self.pages(own_len)
        self.rows.append((own_len, own_start, own))
        self._fill(own, own_len - 1)
        return len(self.rows) - 1

    def group(self, rows: list[int], start: int, pages: int) -> None:
        own = self.pages(pages * self.shape.page_size)
        self.groups.append((rows, start, own))
        self._fill(own, pages * self.shape.page_size)

    def _fill(self, pages: list[int], positions: int) -> None:
        self.filled.update(self._slot(pages, p) for p in range(positions))

    def _slot(self, pages: list[int], position: int) -> int:
        return pages[position // self.shape.page_size] * self.shape.page_size + position % self.shape.page_size

    def build(self) -> Step:
        size = self.shape.page_size
        slots = [self._slot(p, x) for q_len, kv_len, p in self.chunks for x in range(kv_len - q_len, kv_len)]
        chunks, start = [], 0
        for q_len, kv_len, pages in self.chunks:
            chunks.append(ChunkPages(start, q_len, kv_len, np.array(pages)))
            start += q_len
        slots += [self._slot(pages, own_len - 1) for own_len, _, pages in self.rows]
        batch = AttentionBatch(torch.tensor(slots, dtype=torch.int64), chunks, decode_start=start)
        if self.rows:
            longest = max(own_len for own_len, _, _ in self.rows)
            table = np.zeros((len(self.rows), -(-longest // size)), np.int64)
            for i, (_, _, pages) in enumerate(self.rows):
                table[i, : len(pages)] = pages
            batch.decode_pages = table
            batch.decode_lens = np.array([r[0] for r in self.rows])
            batch.decode_own_start = np.array([r[1] for r in self.rows])
            batch.max_decode_len = longest
            batch.groups = [GroupPages(np.array(r), np.array(p), s) for r, s, p in self.groups]
        return Step(self._pool(), batch, *self._tensors(len(slots)))

    def _pool(self) -> KVPool:
        shape = self.shape
        layer = LayerKV(shape.kv_heads, shape.key_dim, shape.value_dim, shape.latent)
        pool = KVPool.allocate([layer], self.num_pages, shape.page_size, shape.dtype, torch.device("cpu"))
        filled = torch.tensor(sorted(self.filled), dtype=torch.int64)
        for cache in pool.caches:
            cache.fill_(torch.nan)
            flat = cache.flatten(0, 1)
            flat[filled] = self._randn(len(filled), *flat.shape[1:]).to(shape.dtype)
        return pool

    def _tensors(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        s = self.shape
        query = 2 * self._randn(tokens, s.heads, s.key_dim)
        key = self._randn(tokens, s.kv_heads, s.key_dim)
        value = key[..., : s.value_dim] if s.latent else self._randn(tokens, s.kv_heads, s.value_dim)
        return query.to(s.dtype), key.to(s.dtype), value.to(s.dtype)

    def _randn(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator)


def one_token(b: StepBuilder) -> None:
    b.chunk(1)


def only_rows(b: StepBuilder) -> None:
    for n in (1, 16, 17, 100, 5):
        b.decode(n)


def one_row(b: StepBuilder) -> None:
    b.decode(1)


def group_of_one(b: StepBuilder) -> None:
    b.group([b.decode(9, own_start=48)], 0, 3)


def group_of_some(b: StepBuilder) -> None:
    rows = [b.decode(n, own_start=32) for n in (4, 30, 1)]
    b.decode(50)
    b.group([rows[2], rows[0], rows[1]], 0, 2)


def check_layers_of_different_shapes(make: Callable[[KVPool, AttentionBatch], Attention]) -> None:
    """One step's attention supports layers of different sizes, with and without windows."""
    layers = [LayerKV(2, 16, 16), LayerKV(1, 8, 24)]
    pool = KVPool.allocate(layers, 8, 16, torch.float32, torch.device("cpu"))
    batch = AttentionBatch(torch.arange(16, 40), [ChunkPages(0, 24, 24, np.array([1, 2]))], decode_start=24)
    attention = make(pool, batch)
    for index, layer in enumerate(layers):
        query = torch.randn(24, 4, layer.key_dim)
        key, value = torch.randn(24, layer.kv_heads, layer.key_dim), torch.randn(24, layer.kv_heads, layer.value_dim)
        for window in (None, 4):
            got = attention.attend(index, query, key, value, AttentionArgs(0.3, window=window))
            keys, values = pool.keys[index], pool.values[index]
            expected = attend_by_token(batch, query, keys, values, AttentionArgs(0.3, window=window))
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


def any_step(chunks: list[tuple[int, int, int]], rows: list[tuple[int, int]], shape: Shape, seed: int) -> Step:
    """Chunks with no prefix or one of three nested ones, and rows in zero, one or two nested groups."""
    page_size = shape.page_size
    b = StepBuilder(shape, num_pages=2048, seed=seed)
    prefixes = [b.pages(n * page_size) for n in (0, 2, 3)]
    prefixes += [prefixes[1] + b.pages(2 * page_size)]
    for q_len, past, prefix in chunks:
        b.chunk(q_len, past=past + len(prefixes[prefix]) * page_size, prefix=prefixes[prefix])
    members: list[list[int]] = [[], [], []]
    for own_len, depth in rows:
        members[depth].append(b.decode(own_len, own_start=depth * 2 * page_size))
    if members[1] + members[2]:
        b.group(members[2] + members[1], 0, 2)
    if members[2]:
        b.group(members[2], 2 * page_size, 2)
    return b.build()


def any_batch(
    chunks: list[tuple[int, int, int]], rows: list[tuple[int, int]], page_size: int, seed: int
) -> AttentionBatch:
    """The batch of `any_step`."""
    return any_step(chunks, rows, Shape(4, 2, 8, 8, page_size), seed).batch


def expected_slots(batch: AttentionBatch, page_size: int, window: int | None) -> list[list[int]]:
    """By token: the pool slots that it sees."""
    return [
        sorted(slots[0 if window is None else max(0, position - window + 1) :].tolist())
        for position, slots in visible_slots(batch, page_size)
    ]
