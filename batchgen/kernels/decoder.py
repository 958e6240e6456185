"""A decoder of the Llama family, as the weights of its layers, and what a backend that runs it as a whole offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from batchgen.kernels.heads import HeadNorms
from batchgen.kernels.linear import Embedding, Linear
from batchgen.kernels.lora import LoraPairs, LoraStep
from batchgen.kernels.types import Attention


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """Weights of one layer, all of one dtype."""

    linears: Mapping[str, Linear]
    """The products `qkv`, `o`, `gate_up` and `down`."""
    input_norm: Tensor
    """[H]"""
    post_norm: Tensor
    """[H]"""
    head_norms: HeadNorms | None
    """None where heads are not normalised."""
    window: int | None
    """Positions that a token sees; None: all."""
    lora: Mapping[str, LoraPairs] = field(default_factory=dict)
    """Name of an adapted product -> LoRA pairs of all adapters."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """A decoder: settings of all layers, and its tensors."""

    heads: int
    kv_heads: int
    dim: int
    """Head size D."""
    activation: str
    eps: float
    """Epsilon of all norms."""
    embedding: Embedding
    norm: Tensor
    """[H], of the final norm"""
    inv_freq: Tensor
    """[D / 2], with `rope_scale` as for `rope.rope_tables`"""
    rope_scale: float
    layers: list[DecoderLayer]


class FusedDecoder(Protocol):
    """All layers of a decoder in one call, from the embedding to the final norm."""

    def takes(self, attention: Attention) -> bool:
        """Whether it can compute a step with this attention."""

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        attention: Attention,
        lora: LoraStep | None = None,
        embeds: tuple[Tensor, Tensor] | None = None,
        capture: Mapping[int, Tensor] | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the final norm. Stores keys and values of the step in the attention's pool.

        Args:
            ids: [T] int64.
            positions: [T] int64.
            attention: attention of the step, one that it `takes`.
            lora: tokens by adapter; None where no token has one.
            embeds: tokens [E] int64 that have embeddings [E, H] instead of ids.
            capture: layer -> [T, H] to fill with the states after it; 0: the input of the first layer.
            wanted: [W] int64 tokens whose states are returned, duplicates allowed; None: all. Needs a step without
                adapters whose last layer is not captured.

        Returns:
            [T, H], or [W, H], in the weights' dtype.
        """
