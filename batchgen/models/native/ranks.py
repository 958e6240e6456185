"""What each rank of a native decoder holds, and of its adapters.

q, k, v, gate and up are cut by their outputs, in whole heads; o and down by their inputs, and their products are
summed over the ranks; the embedding and the head by tokens. Norms are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from batchgen.errors import UsageError
from batchgen.kernels.lora import LoraPair
from batchgen.kernels.ranks import Ranks
from batchgen.kernels.vocab_parallel import WORD
from batchgen.models.lora.adapters import AdaptedEnds
from batchgen.models.native.config import NativeConfig
from batchgen.models.native.weights import FusedTensor, NativeLayout

_GROUP = 128
"""Inputs that quantisers give a scale: a cut within a group would lose it."""


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Rows of the parts of fused tensors that a rank holds, and inputs of the products that are summed."""

    rows: Mapping[str, tuple[slice, ...]]
    inputs: Mapping[str, slice]


def _cuts(config: NativeConfig, ranks: Ranks) -> _Cuts:
    dim, inner = config.head_dim, config.intermediate_size
    heads, kv_heads = ranks.heads(config.num_heads, config.num_kv_heads)
    q, kv = (slice(part.start * dim, part.stop * dim) for part in (heads, kv_heads))
    unit = gcd(inner, _GROUP)
    while inner // unit < ranks.count:
        unit //= 2
    mlp = ranks.part(inner, max(1, unit))
    return _Cuts({"qkv": (q, kv, kv), "gate_up": (mlp, mlp)}, {"o": q, "down": mlp})


def rank_layout(config: NativeConfig, layout: NativeLayout, ranks: Ranks) -> tuple[NativeConfig, NativeLayout]:
    """The sizes and the layout of one rank's part of a decoder.

    Raises:
        UsageError: there are more ranks than query heads.
    """
    if ranks.count == 1:
        return config, layout
    if ranks.count > config.num_heads:
        raise UsageError(
            f"`--tensor-parallel` {ranks.count}: the model has {config.num_heads} query heads, of which each process "
            f"takes one or more; use at most {config.num_heads}"
        )
    cuts, tokens = _cuts(config, ranks), ranks.part(config.vocab_size, WORD)
    heads, kv_heads = ranks.heads(config.num_heads, config.num_kv_heads)

    def cut(name: str, fused: FusedTensor) -> FusedTensor:
        of = name.removesuffix("_bias")
        if of in cuts.rows:
            return fused.part(cuts.rows[of])
        return fused.inputs(cuts.inputs[name]) if name in cuts.inputs else fused

    # A bias of a product that is summed is added once.
    once = [f"{name}_bias" for name in cuts.inputs] if ranks.rank else []
    layers = [{name: cut(name, fused) for name, fused in layer.items() if name not in once} for layer in layout.layers]
    local = replace(
        layout,
        embedding=layout.embedding.part([tokens]),
        head=None if layout.head is None else layout.head.part([tokens]),
        layers=tuple(layers),
        uncut=layout,
    )
    mlp = cuts.inputs["down"]
    sizes = {"num_heads": heads.stop - heads.start, "num_kv_heads": kv_heads.stop - kv_heads.start}
    return replace(config, **sizes, intermediate_size=mlp.stop - mlp.start), local


def rank_pair(pair: LoraPair | None, fused: FusedTensor, whole: FusedTensor, ranks: Ranks) -> LoraPair | None:
    """A rank's part of an adapter's matrices for a fused product, of which it holds `fused` of `whole`."""
    if pair is None or fused is whole:
        return pair
    if fused.columns != whole.columns:
        columns = fused.index[0][1]
        shift = pair.shift if ranks.rank == 0 else None  # added once
        return replace(pair, down=pair.down[:, columns].contiguous(), shift=shift)
    held, start = [], 0
    for (_, count), (rows,) in zip(whole.parts, fused.index, strict=True):
        held.append(torch.arange(start + rows.start, start + rows.stop, device=pair.up.device))
        start += count
    places = torch.cat(held)

    def of(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[places]

    return LoraPair(pair.down, pair.up[places], of(pair.factor), of(pair.shift))


def rank_ends(ends: AdaptedEnds, tokens: slice) -> AdaptedEnds:
    """Changes of adapters to the ends of a model, for the logits of `tokens`; those of the embedding stay whole."""
    return replace(ends, heads=tuple(None if head is None else head.part(tokens) for head in ends.heads))
