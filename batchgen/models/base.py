"""The model seam: tokens of one step in, hidden states and logits out. Knows nothing of requests or sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from batchgen.kernels import torch_ops
from batchgen.kernels.lora import LoraStep
from batchgen.kernels.ops import Ops
from batchgen.kernels.types import Attention, LayerKV
from batchgen.params import StateLimits

__all__ = ["Model", "ModelInput", "ModelSpec", "Taps", "TokenEmbeds"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the engine must know of a model before it runs."""

    name: str
    """`model_type` of its configuration."""
    implementation: str
    """"native" or "transformers"."""
    vocab_size: int
    """Width of the logits, V (may exceed the tokenizer's)."""
    hidden_size: int
    num_layers: int
    context_length: int
    """`max_position_embeddings`, rope scaling included."""
    kv_layers: tuple[LayerKV, ...]
    dtype: torch.dtype
    device: torch.device
    parameters: int
    digest: str
    """sha256 over configuration, weight files' names, sizes and headers, and samples of the weights: enters the run's
    fingerprint."""
    state_layers: int | None = None
    """The last layer whose states can be tapped, the number of blocks; None where they cannot be found."""
    moe_layers: tuple[int, ...] = ()
    """Blocks, from 0, whose choices of experts can be tapped."""
    experts_per_token: int = 0
    num_heads: int = 1
    """Query heads of a layer, of the first where they differ."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters, in the order of their indexes: name -> digest."""
    embedding_size: int | None = None
    """Width of the token embeddings where it is not `hidden_size`."""

    @property
    def state_limits(self) -> StateLimits:
        """What rows may ask for of states and experts."""
        return StateLimits(self.state_layers, self.hidden_size, bool(self.moe_layers))

    @property
    def embeds_size(self) -> int:
        """Numbers that a token's embedding has."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size


@dataclass(slots=True, eq=False)
class Taps:
    """Inner values of one step that are wanted beside its output. The model fills `states` and `routed`."""

    rows: Tensor
    """[S] int64: flat tokens to keep"""
    tokens: int
    """Flat tokens of the step, T."""
    layers: tuple[int, ...] = ()
    """0: the embeddings as the first block is fed with them, i: the output of block i, -1: after the final norm."""
    experts: bool = False
    states: dict[int, Tensor] = field(default_factory=dict)
    """Filled by the model: layer -> [S, H] in the model's dtype."""
    routed: Tensor | None = None
    """Filled by the model where `experts` is set: [S, MoE layers, experts per token] int32."""

    def take(self, layer: int, states: Tensor) -> None:
        """Keep the wanted rows of a layer's states [T, H]: a copy, since models may go on in place."""
        self.states[layer] = states[self.rows]


@dataclass(frozen=True, slots=True)
class TokenEmbeds:
    """Tokens of a step that come as embeddings in place of ids."""

    rows: Tensor
    """[E] int64: which flat tokens"""
    values: Tensor
    """[E, H] float32"""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Tensors of one step, packed without padding."""

    input_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64"""
    attention: Attention
    taps: Taps | None = None
    """None costs nothing."""
    lora: LoraStep | None = None
    """Tokens that go through an adapter; None where none does"""
    embeds: TokenEmbeds | None = None
    """Tokens whose id means nothing; None where there are none"""
    ops: Ops = torch_ops
    """The operations to build the step from."""
    wanted: Tensor | None = None
    """[W] int64: flat tokens whose states after the final norm are asked for; None: all"""

    def pick(self, states: Tensor) -> Tensor:
        """[T, H] -> [W, H]: the wanted tokens' of states that are all tokens'."""
        return states if self.wanted is None else states[self.wanted]

    def early(self, layers: int) -> Tensor | None:
        """`wanted` where, of the last of so many layers, unwanted tokens need their keys and values alone."""
        tapped = self.taps is not None and not {-1, layers}.isdisjoint(self.taps.layers)
        return None if tapped or self.lora is not None else self.wanted


class Model(Protocol):
    """A decoder behind the seam."""

    @property
    def spec(self) -> ModelSpec:
        """Sizes and identity."""
        ...

    def hidden(self, inputs: ModelInput) -> Tensor:
        """States after the final norm, [T, H] in the model's dtype, or [W, H] of `wanted`; fills `inputs.taps`.

        The keys and values of all tokens are stored, whoever is wanted.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] in the model's dtype."""
        ...

    def takes_embeds(self) -> bool:
        """Whether tokens may come as embeddings that are those of no id."""
        ...

    def recordable(self) -> bool:
        """Whether compiled kernels alone make `hidden` and `logits`, so that these can be noted down to run later
        (`kernels.cpu.background`), with the attention of such kernels, and without taps, adapters and embeddings.
        """
        ...
