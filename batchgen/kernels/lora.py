"""LoRA: low-rank updates of a linear layer, with one adapter per row of the step.

out[t] += (x[t] A_a^T) B_a^T for the adapter a of token t, the adapter's scale folded into B. Tokens without an adapter
are not touched; the model does not call this in steps without adapters.

The PyTorch implementation applies one adapter after another. The kernels apply all in one launch or call: a step lists
its tokens by adapter in tiles, once for all layers, and a layer stacks its adapters' matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.device import Device

Int64 = npt.NDArray[np.int64]

OUTPUT_BLOCK: Final = 128
"""Columns of B per entry of `LoraStack.spans`."""
_RANK_BLOCK: Final = 16
"""Multiple that a stacked adapter's rank is padded to, for tensor cores."""
_SHORT_TILE, TALL_TILE = 16, 64
"""Tokens per tile for adapters with few tokens each, and for adapters with many."""


@dataclass(frozen=True, slots=True)
class LoraPair:
    """One adapter's matrices for one linear layer."""

    down: Tensor
    """A [r, I]"""
    up: Tensor
    """B [O, r], scale included"""
    factor: Tensor | None = None
    """[O] by which the layer's own product is multiplied (DoRA), included in `up`; None: 1"""
    shift: Tensor | None = None
    """[O] to add to it then: what the factor takes of the layer's bias, or a bias of the adapter; None: 0"""


@dataclass(frozen=True, slots=True)
class LoraStack:
    """A layer's adapters as two matrices. Ranks count over all adapters, each zero-padded to a multiple of `align`."""

    down: Tensor
    """[ranks, I]"""
    up: Tensor
    """[ranks, O]: B transposed"""
    ranges: Tensor
    """[adapters, 2] int32: first rank and number of padded ranks of each; 0 ranks if it does not change the layer"""
    spans: Tensor
    """[adapters, ceil(O / OUTPUT_BLOCK), 2] int32: ranks [from, to), multiples of `align`, outside of which B is zero
    in a block of outputs; adapters of fused projections are zero in most blocks"""
    width: int
    """Most padded ranks of an adapter."""
    align: int = _RANK_BLOCK


class LoraPairs(Sequence["LoraPair | None"]):
    """A layer's pairs by adapter; None where an adapter does not change the layer.

    On a GPU they are stacked at once, elsewhere on demand; the pairs are views of the latest stack.
    """

    def __init__(self, pairs: Sequence[LoraPair | None]) -> None:
        self._pairs = list(pairs)
        self._stack: LoraStack | None = None
        self.has_factors = any(pair is not None and pair.factor is not None for pair in pairs)
        """Whether `scale_products` has something to do."""
        if any(pair is not None and pair.down.is_cuda for pair in pairs):
            _ = self.stack

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: Any) -> Any:
        return self._pairs[index]

    def __iter__(self) -> Iterator[LoraPair | None]:
        return iter(self._pairs)

    @property
    def stack(self) -> LoraStack:
        """The pairs, at least one, stacked for the GPU kernels."""
        return self.stacked(_RANK_BLOCK)

    def stacked(self, align: int) -> LoraStack:
        """The pairs, at least one, stacked with ranks padded to multiples of `align`."""
        if self._stack is None or self._stack.align != align:
            self._stack, self._pairs = stack_pairs(self._pairs, align)
        return self._stack


def stack_pairs(pairs: Sequence[LoraPair | None], align: int = _RANK_BLOCK) -> tuple[LoraStack, list[LoraPair | None]]:
    """Stack the pairs into two matrices; returns the stack and the pairs as views of it.

    Args:
        pairs: at least one of them not None; of one layer, in one dtype, on one device.
        align: multiple that an adapter's rank is padded to.
    """
    some = next(pair for pair in pairs if pair is not None)
    inputs, outputs, device = some.down.shape[1], some.up.shape[0], some.down.device
    padded = [0 if p is None else -(-p.down.shape[0] // align) * align for p in pairs]
    firsts = np.cumsum([0, *padded])
    down = torch.zeros(int(firsts[-1]), inputs, dtype=some.down.dtype, device=device)
    up = torch.zeros(int(firsts[-1]), outputs, dtype=some.up.dtype, device=device)
    views: list[LoraPair | None] = []
    for pair, first in zip(pairs, firsts.tolist(), strict=False):
        if pair is None:
            views.append(None)
            continue
        rows = slice(first, first + pair.down.shape[0])
        down[rows], up[rows] = pair.down, pair.up.T
        views.append(replace(pair, down=down[rows], up=up[rows].T))
    ranges = np.stack([firsts[:-1], padded], axis=1).astype(np.int32)
    spans = _spans(up, ranges, align).to(device)
    return LoraStack(down, up, torch.from_numpy(ranges).to(device), spans, max(padded), align), views


def _spans(up: Tensor, ranges: npt.NDArray[np.int32], align: int) -> Tensor:
    """Ranges of ranks where B is not zero, by adapter and block of outputs."""
    outputs = up.shape[1]
    blocks = -(-outputs // OUTPUT_BLOCK)
    cells = F.pad(up != 0, (0, blocks * OUTPUT_BLOCK - outputs)).view(-1, align, blocks, OUTPUT_BLOCK)
    used = cells.any(3).any(1).cpu().numpy()  # [ranks / align, blocks]
    spans = np.zeros((len(ranges), blocks, 2), np.int32)
    for adapter, (first, count) in enumerate((ranges // align).tolist()):
        own = used[first : first + count]
        if count:
            spans[adapter, :, 0] = first + own.argmax(0)
            spans[adapter, :, 1] = np.where(own.any(0), first + count - own[::-1].argmax(0), spans[adapter, :, 0])
    spans *= align
    return torch.from_numpy(spans)


@dataclass(frozen=True, slots=True)
class LoraSegment:
    """The tokens of a step that use one adapter."""

    adapter: int
    """Index into a layer's `LoraPairs`."""
    rows: Tensor | None
    """[t] int64, ascending; None: every token of the step"""


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """A step's tokens by adapter, divided into tiles, one per kernel program."""

    order: Tensor
    """[U] int64: the flat tokens that have an adapter, by adapter, ascending within an adapter"""
    tiles: Tensor
    """[M, 3] int64: adapter, first index in `order`, number of tokens (0 for padding tiles)"""
    rows: int
    """Most tokens of a tile; a power of 2, at least 16."""


@dataclass(frozen=True, slots=True)
class LoraStep:
    """Assignment of a step's tokens to adapters."""

    segments: tuple[LoraSegment, ...]
    """Segments; no token is in two of them."""
    tiles: LoraTiles | None = None
    """The same assignment for kernels; None: `tiles_of` makes it."""


def lora_step(adapters: npt.NDArray[np.signedinteger[Any]], device: Device) -> LoraStep | None:
    """A step's tokens by adapter, uploaded in one transfer; None if no token has an adapter.

    Args:
        adapters: [T] each flat token's adapter, -1 for none.
        device: device of the step.
    """
    only = int(adapters[0]) if (adapters == adapters[0]).all() else None
    if only == -1:
        return None
    order, used, counts = _by_adapter(adapters)
    tiles, rows = _cut(used, counts)
    sent, sent_tiles = device.upload(order, tiles)
    all_tiles = LoraTiles(sent, sent_tiles, rows)
    if only is not None and device.torch_device.type == "cpu":  # PyTorch's product needs no gather
        return LoraStep((LoraSegment(only, None),), all_tiles)
    return LoraStep(_segments(used, counts, sent), all_tiles)


def static_tiles(columns: Tensor, tokens: int, adapters: int) -> LoraTiles:
    """Tiles at fixed addresses, enough for any step of up to `tokens` tokens and `adapters` adapters.

    `columns`: [4, W] int64 on the device, W at least `tokens`, where each step's `tile_columns` are written.
    """
    rows = _tile_height(tokens, adapters)
    most = (tokens + min(tokens, adapters) * (rows - 1)) // rows  # the last tile of each adapter may have one token
    return LoraTiles(columns[0, :tokens], columns[1:].view(-1, 3)[:most], rows)


def tile_columns(adapters: npt.NDArray[np.signedinteger[Any]], rows: int, width: int) -> Int64:
    """[4, W = width] a step's order and its tiles [W, 3], both padded with zeros.

    `adapters`: as in `lora_step`, with at least one; `rows`: most tokens of a tile.
    """
    order, used, counts = _by_adapter(adapters)
    (tiles, _), columns = _cut(used, counts, rows), np.zeros((4, width), np.int64)
    columns[0, : len(order)] = order
    columns[1:].reshape(-1, 3)[: len(tiles)] = tiles
    return columns


def _by_adapter(adapters: npt.NDArray[np.signedinteger[Any]]) -> tuple[Int64, list[int], list[int]]:
    """The tokens with an adapter, by adapter and in order; the adapters that they have; the tokens of each."""
    tokens = np.bincount(adapters + 1)  # counts: no adapter, adapter 0, ...
    used = np.flatnonzero(tokens[1:]).tolist()
    return np.argsort(adapters, kind="stable")[tokens[0] :], used, tokens[1:][used].tolist()


def _segments(adapters: list[int], counts: list[int], order: Tensor) -> tuple[LoraSegment, ...]:
    parts = torch.split(order, counts)
    return tuple(LoraSegment(adapter, part) for adapter, part in zip(adapters, parts, strict=True))


def _tile_height(tokens: int, adapters: int) -> int:
    """Most tokens of a tile where adapters have so many tokens together."""
    return TALL_TILE if tokens >= TALL_TILE * adapters else _SHORT_TILE


def _cut(adapters: list[int], counts: list[int], height: int | None = None) -> tuple[Int64, int]:
    """Tiles [M, 3] of adjacent segments, and the most tokens of a tile: `height`, or what suits them."""
    rows = height or _tile_height(sum(counts), len(counts))
    sizes = np.asarray(counts, np.int64)
    each = -(-sizes // rows)  # tiles of each segment
    segment = np.repeat(np.arange(len(counts)), each)
    number = np.arange(len(segment)) - np.repeat(np.cumsum(each) - each, each)  # within its segment
    first = (np.cumsum(sizes) - sizes)[segment] + number * rows
    tokens = np.minimum(sizes[segment] - number * rows, rows)
    return np.stack([np.asarray(adapters, np.int64)[segment], first, tokens], axis=1), rows


def tiles_of(step: LoraStep, tokens: int, device: torch.device) -> LoraTiles:
    """The step's tiles; made from its segments if it has none."""
    if step.tiles is not None:
        return step.tiles
    rows = [torch.arange(tokens, device=device) if s.rows is None else s.rows for s in step.segments]
    tiles, height = _cut([s.adapter for s in step.segments], [len(r) for r in rows])
    return LoraTiles(torch.cat(rows), torch.from_numpy(tiles).to(device), height)


def scale_products(out: Tensor, step: LoraStep, pairs: LoraPairs) -> None:
    """Multiply each token's product [T, O] by the factor of its adapter, in place, before `add_lora`."""
    for segment in step.segments:
        pair: LoraPair | None = pairs[segment.adapter]
        if pair is None or pair.factor is None:
            continue
        rows = slice(None) if segment.rows is None else segment.rows
        scaled = out[rows] * pair.factor
        out[rows] = scaled if pair.shift is None else scaled + pair.shift


def add_lora(out: Tensor, x: Tensor, step: LoraStep, pairs: LoraPairs) -> None:
    """Add each token's LoRA update to `out`, in place.

    Args:
        out: [T, O], the layer's product with `x`; may be a view with gaps between its rows.
        x: [T, I], in the pairs' dtype.
        step: which tokens use which adapter.
        pairs: of the layer, by adapter.
    """
    for segment in step.segments:
        pair: LoraPair | None = pairs[segment.adapter]
        if pair is None:
            continue
        if segment.rows is None:
            out += F.linear(F.linear(x, pair.down), pair.up)  # [T, O]
        else:
            out.index_add_(0, segment.rows, F.linear(F.linear(x[segment.rows], pair.down), pair.up))
