"""LoRA weights on the device, in the form that both model paths use: pairs of linear layers, and the two ends.

The native path fuses sibling projections, so an adapter's changes of q, k and v become one pair: the A matrices are
concatenated, and B is block-diagonal. The ends of a model are its embedding and its head, which adapters may change,
replace, or replace rows of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.lora import LoraPair, LoraStep
from batchgen.kernels.moe import ExpertPairs
from batchgen.models.checkpoint.safetensors_header import TensorInfo
from batchgen.models.checkpoint.weights import WeightReader
from batchgen.models.lora.config import Adapter
from batchgen.models.lora.fit import ExpertSizes

Base = Callable[[], tuple[Tensor, Tensor | None]]
"""Gives a layer's weight [O, I] and bias [O]."""


def adapter_reader(adapter: Adapter) -> WeightReader:
    """Weight reader of an adapter, with the tensor names that `read_tensor` uses."""
    tensors: dict[str, TensorInfo] = {}
    for module, layer in adapter.layers.items():
        tensors |= {f"{module}.down": layer.down, f"{module}.up": layer.up}
        if layer.magnitude is not None:
            tensors[f"{module}.magnitude"] = layer.magnitude
        if layer.bias is not None:
            tensors[f"{module}.bias"] = layer.bias
    for module, saved in adapter.saved.items():
        tensors |= {f"{module}.saved.{name}": info for name, info in saved.items()}
    tensors |= {f"{module}.tokens": rows.values for module, rows in adapter.tokens.items()}
    for module, parts in adapter.experts.items():
        for i, part in enumerate(parts):
            tensors |= {f"{module}.{i}.down": part.down, f"{module}.{i}.up": part.up}
    return WeightReader(tensors)


def read_tensor(reader: WeightReader, name: str, info: TensorInfo) -> Tensor:
    """A tensor of an adapter, as float32 on the CPU."""
    tensor = torch.empty(info.shape)
    reader.read_into(name, tensor)
    return tensor


def fused_pair(
    adapter: Adapter, reader: WeightReader, parts: Sequence[tuple[str, int]], like: Tensor, base: Base | None = None
) -> LoraPair | None:
    """LoRA pair of projections that are fused along their outputs; None if the adapter changes none of them.

    Args:
        adapter: the adapter.
        reader: reader of its matrices.
        parts: (module, outputs) of the fused projections, in order.
        like: tensor of the result's dtype and device.
        base: gives the layer's own weight [O, I] and bias [O] or None, which DoRA needs.
    """
    total, at = sum(rows for _, rows in parts), 0
    downs: list[Tensor] = []
    ups: list[Tensor] = []
    magnitudes: list[tuple[int, Tensor]] = []
    added: Tensor | None = None
    for module, rows in parts:
        layer = adapter.layers.get(module)
        if layer is not None:
            up = read_tensor(reader, f"{module}.up", layer.up) * layer.scale
            placed = torch.zeros(total, up.shape[1])
            placed[at : at + rows] = up
            downs.append(read_tensor(reader, f"{module}.down", layer.down))
            ups.append(placed)
            if layer.magnitude is not None:
                magnitudes.append((at, read_tensor(reader, f"{module}.magnitude", layer.magnitude)))
            if layer.bias is not None:
                added = torch.zeros(total) if added is None else added
                added[at : at + rows] = read_tensor(reader, f"{module}.bias", layer.bias) * layer.scale
        at += rows
    if not downs:
        return None
    down, up, factor, shift = torch.cat(downs), torch.cat(ups, 1), None, None
    if magnitudes and base is not None:
        weight, bias = base()
        norms = (weight.float().cpu() + up @ down).norm(dim=1)
        factor = torch.ones(total)
        for start, magnitude in magnitudes:
            end = start + len(magnitude)
            factor[start:end] = magnitude / norms[start:end]
        up, shift = up * factor[:, None], None if bias is None else (bias.float().cpu() * (1 - factor)).to(like)
        factor = factor.to(like)
    elif added is not None:
        factor, shift = torch.ones(total).to(like), added.to(like)
    return LoraPair(down.to(like), up.to(like), factor, shift)


@dataclass(frozen=True, slots=True)
class TableChange:
    """Change of one adapter to an embedding."""

    weight: Tensor | None
    """[V, H] in place of the model's."""
    pair: LoraPair | None
    """With A [r, V]."""
    rows: TokenTable | None

    def apply(self, ids: Tensor, out: Tensor, factor: Any = 1.0) -> Tensor:
        """The embeddings [t, H] of ids [t], given the model's own; `factor` is what the model multiplies them by."""
        if self.weight is not None:
            out = F.embedding(ids, self.weight).mul(factor)
        if self.rows is not None:
            places = self.rows.places[ids]
            out = torch.where(places[:, None] >= 0, self.rows.values[places.clamp(min=0)] * factor, out)
        if self.pair is None:
            return out
        out = out if self.pair.factor is None else out * self.pair.factor
        return out + F.linear(F.embedding(ids, self.pair.down.T), self.pair.up).mul(factor)


@dataclass(frozen=True, slots=True)
class HeadChange:
    """Change of one adapter to a head."""

    weight: Tensor | None
    """[V, H] in place of the model's."""
    bias: Tensor | None
    """[V], with `weight`."""
    pair: LoraPair | None
    rows: TokenTable | None

    def part(self, tokens: slice) -> HeadChange:
        """The change of the logits of some tokens."""
        pair, rows = self.pair, self.rows
        weight, bias = (None if each is None else each[tokens] for each in (self.weight, self.bias))
        if pair is not None:
            factor, shift = (None if each is None else each[tokens] for each in (pair.factor, pair.shift))
            pair = LoraPair(pair.down, pair.up[tokens], factor, shift)
        if rows is not None:
            held = (rows.ids >= tokens.start) & (rows.ids < tokens.stop)
            rows = TokenTable(rows.ids[held] - tokens.start, rows.values[held], rows.places)
        return HeadChange(weight, bias, pair, rows)

    def apply(self, hidden: Tensor, out: Tensor) -> Tensor:
        """The logits [r, V] of states [r, H], given the model's own."""
        if self.weight is not None:
            out = F.linear(hidden, self.weight, self.bias)
        if self.pair is not None:
            if self.pair.factor is not None:
                out = out * self.pair.factor
                out = out if self.pair.shift is None else out + self.pair.shift
            out = out + F.linear(F.linear(hidden, self.pair.down), self.pair.up)
        if self.rows is not None:
            out = out.index_copy(-1, self.rows.ids, F.linear(hidden, self.rows.values))
        return out


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Rows of an embedding or a head that an adapter replaces."""

    ids: Tensor
    """[n] int64."""
    values: Tensor
    """[n, H]."""
    places: Tensor
    """[V] int64: place in `values` of each token, -1 for none."""


@dataclass(frozen=True, slots=True)
class AdaptedEnds:
    """Changes of adapters to a model's embedding and head; None where one changes nothing."""

    tables: tuple[TableChange | None, ...]
    heads: tuple[HeadChange | None, ...]

    def embed(self, ids: Tensor, out: Tensor, step: LoraStep | None, factor: Any = 1.0) -> Tensor:
        """The embeddings [T, H] of a step, given the model's own, which may be changed."""
        for segment in () if step is None else step.segments:
            change = self.tables[segment.adapter]
            if change is not None:
                rows = slice(None) if segment.rows is None else segment.rows
                out[rows] = change.apply(ids[rows], out[rows], factor)
        return out

    def logits(self, hidden: Tensor, out: Tensor, adapters: Tensor | None) -> Tensor:
        """The logits [R, V] of states [R, H], given the model's own; `adapters` [R]: -1 for none."""
        for index, change in enumerate(self.heads):
            if change is not None and adapters is not None:
                rows = adapters.eq(index).nonzero()[:, 0]
                out[rows] = change.apply(hidden[rows], out[rows])
        return out

    @property
    def adapts_head(self) -> bool:
        """Whether an adapter changes the head."""
        return any(self.heads)


def adapted_ends(
    adapters: Sequence[Adapter], table: tuple[str, Tensor], head: tuple[str, Tensor, Tensor | None], *, tied: bool
) -> AdaptedEnds | None:
    """Changes of adapters to the ends; None if there are none.

    Args:
        adapters: the adapters, which fit the model.
        table: name and weight [V, H] of the embedding.
        head: name, weight [V, H] and bias [V] of the head.
        tied: whether the head is the embedding: replaced rows are those of both.
    """
    tables: list[TableChange | None] = []
    heads: list[HeadChange | None] = []
    for adapter in adapters:
        with adapter_reader(adapter) as reader:
            tables.append(_table_change(adapter, reader, *table))
            heads.append(_head_change(adapter, reader, head, table[0] if tied else head[0]))
    return AdaptedEnds(tuple(tables), tuple(heads)) if any(tables) or any(heads) else None


def _table_change(adapter: Adapter, reader: WeightReader, name: str, weight: Tensor) -> TableChange | None:
    replaced = _replaced(adapter, reader, name, "weight", weight)
    layer, rows = adapter.layers.get(name), _token_table(adapter, reader, name, weight)
    own = weight if replaced is None else replaced
    pair = None
    if layer is not None:  # its outputs are the columns of the embedding
        pair = fused_pair(adapter, reader, [(name, weight.shape[1])], weight, lambda: (own.T, None))
    return None if replaced is None and pair is None and rows is None else TableChange(replaced, pair, rows)


def _head_change(
    adapter: Adapter, reader: WeightReader, head: tuple[str, Tensor, Tensor | None], tied: str
) -> HeadChange | None:
    name, weight, bias = head
    replaced = _replaced(adapter, reader, name, "weight", weight)
    own_bias = bias if bias is None else _replaced(adapter, reader, name, "bias", bias)
    base = (weight if replaced is None else replaced, bias if own_bias is None else own_bias)
    pair = fused_pair(adapter, reader, [(name, weight.shape[0])], weight, lambda: base)
    rows = _token_table(adapter, reader, name if name in adapter.tokens else tied, weight)
    if replaced is None and own_bias is not None:
        replaced = weight
    return None if replaced is None and pair is None and rows is None else HeadChange(replaced, base[1], pair, rows)


def _replaced(adapter: Adapter, reader: WeightReader, module: str, parameter: str, like: Tensor) -> Tensor | None:
    """A parameter that replaces the model's; None if there is none, or it is the same."""
    info = adapter.saved.get(module, {}).get(parameter)
    if info is None:
        return None
    saved = read_tensor(reader, f"{module}.saved.{parameter}", info).to(like)
    return None if torch.equal(saved, like) else saved


def _token_table(adapter: Adapter, reader: WeightReader, module: str, like: Tensor) -> TokenTable | None:
    rows = adapter.tokens.get(module)
    if rows is None:
        return None
    ids, values = torch.tensor(rows.ids), read_tensor(reader, f"{module}.tokens", rows.values)
    places = torch.full((like.shape[0],), -1, dtype=torch.int64)
    places[ids] = torch.arange(len(ids))
    return TokenTable(ids.to(like.device), values.to(like), places.to(like.device))


def expert_pairs(adapter: Adapter, reader: WeightReader, module: str, sizes: ExpertSizes, like: Tensor) -> ExpertPairs:
    """Pairs of an adapter for a layer's experts, which it must fit."""
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {"gate_up_proj": [], "down_proj": []}
    outputs = {"gate_up_proj": 2 * sizes.inner, "down_proj": sizes.hidden}
    for i, part in enumerate(adapter.experts[module]):
        place = sizes.place(part)
        assert place is not None
        name, start = place
        down = read_tensor(reader, f"{module}.{i}.down", part.down)
        up = read_tensor(reader, f"{module}.{i}.up", part.up)
        if part.expert is None:
            rank = len(down) // sizes.count
            up = up * adapter.scale_of(module, name, rank)
            pairs[name].append((down.view(sizes.count, rank, -1), up.view(-1, rank, sizes.count).permute(2, 0, 1)))
        else:
            all_down = torch.zeros(sizes.count, *down.shape)
            all_up = torch.zeros(sizes.count, outputs[name], len(down))
            all_down[part.expert], all_up[part.expert, start : start + len(up)] = down, up * part.scale
            pairs[name].append((all_down, all_up))
    made = [
        (torch.cat([down for down, _ in each], 1).to(like), torch.cat([up for _, up in each], 2).to(like))
        if each
        else None
        for each in pairs.values()
    ]
    return ExpertPairs(*made)
