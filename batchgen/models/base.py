"""Model interface: tokens of one step in, hidden states and logits out. Independent of requests and sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from batchgen.kernels.layouts import Products
from batchgen.kernels.lora import LoraStep
from batchgen.kernels.mixers.states import States, StateSize
from batchgen.kernels.ops import TORCH_OPS, Ops
from batchgen.kernels.ranks import ALONE, Ranks
from batchgen.kernels.stream import LayerStream, StreamPlan
from batchgen.kernels.types import Attention, LayerKV
from batchgen.kernels.vocab_parallel import WORD
from batchgen.models.lora.config import Adapter
from batchgen.request.fields.hidden_states import CaptureSupport

Bidirectional = Literal["image", "prompt", "text"]

Form = Literal["full", "int8", "integers", "weight-only"]
"""Weights of linear layers in memory. `full`: in the run's dtype. `int8`: rounded to int8 after they are read. The
others keep the numbers of the checkpoint where these fit the products, and are `full` elsewhere. `integers`: multiplied
by inputs rounded to integers, on a CPU. `weight-only`: multiplied by full inputs, by Triton."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers in which linear layers are stored, multiplied and rounded; a job's are chosen by `choose_numbers`."""

    form: Form = "full"
    products: Products = "measured"
    """Products of full weights on a CPU."""

    @property
    def quantization(self) -> str:
        """`none`, `int8` or `stored`, for reports."""
        return {"full": "none", "int8": "int8"}.get(self.form, "stored")

    @property
    def rounding(self) -> str:
        """`quantization` as far as results depend on it: weight-only products are those of dequantised weights."""
        return "none" if self.form == "weight-only" else self.quantization


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and identity of a model, known before its weights are read."""

    name: str
    """`model_type` of its configuration."""
    implementation: str
    """"native" or "transformers"."""
    vocab_size: int
    """Width of the logits, V; may exceed the tokenizer's vocabulary."""
    hidden_size: int
    num_layers: int
    context_length: int
    """Maximum number of positions, including rope scaling."""
    kv_layers: tuple[LayerKV, ...]
    """Key and value shapes of each layer; those of one without attention are empty."""
    dtype: torch.dtype
    device: torch.device
    parameters: int
    state_layers: int | None = None
    """Number of blocks, the last layer whose states can be captured; None if the blocks cannot be found."""
    moe_layers: tuple[int, ...] = ()
    """Blocks, from 0, whose expert choices can be captured."""
    experts_per_token: int = 0
    adapts_head: bool = False
    """Whether an adapter changes the head."""
    plain_adapters: bool = True
    """Whether adapters change linear layers of the decoder alone."""
    tiled_adapters: bool = True
    """Whether all that adapters change are sums to which `Ops.add_lora` adds, so that a step's `LoraTiles` suffice."""
    context_reason: str = ""
    """Why the context ends before that of the configuration or of the user does; empty: it does not."""
    num_heads: int = 1
    """Number of query heads of the first layer."""
    adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters, in the order of their indexes."""
    tower_adapters: tuple[Adapter | None, ...] = ()
    """By index: what an adapter changes of the modules that read images or audio; None: nothing."""
    states: tuple[tuple[StateSize, ...], ...] = ()
    """By layer: its recurrent states. Empty: no layer has any."""
    windows: tuple[int | None, ...] = ()
    """By layer: positions that a token sees, itself included; None: all. Empty: no layer has a window."""
    attention_chunk: int | None = None
    """The window of layers in which a token sees no position before its last multiple either; None: windows slide."""
    unscaled_context: int | None = None
    """Positions up to which a model with two sets of rotary frequencies has the first one, if the context is longer."""
    embedding_size: int | None = None
    """Width of the token embeddings; None if it is `hidden_size`."""
    tied: bool = False
    """Whether the embedding is also the head."""
    cache_dtype: torch.dtype | None = None
    """Dtype of stored keys and values; None: `dtype`."""
    rope_axes: int = 0
    """Rotary positions of a token, one for each axis of an image; 0: a token has its place in the sequence alone."""
    deepstack: int = 0
    """Number of blocks to whose results a feature of an item is added again: each has its own values."""
    bidirectional: Bidirectional | None = None
    """What sees one another: the features of each image, or all tokens of a prompt with images; features of audio never
    do. `text`: all tokens of every prompt, in an encoder. None: every token sees those before it alone."""
    generates: bool = True
    """Whether it has a language head; without one its logits are those of no token."""
    numbers: Numbers = Numbers()
    block_bytes: tuple[int, ...] = ()
    """Bytes of the weights of each block in `dtype` that can be streamed; empty: the blocks cannot be found."""
    stream: StreamPlan | None = None
    """Where the blocks' weights are; None: all are on the device."""
    ranks: Ranks = ALONE
    """The ranks that compute the model together. `kv_layers`, `num_heads` and `parameters` are those of one rank."""

    @property
    def vocab(self) -> slice:
        """The tokens whose logits this rank computes: a part of the vocabulary, in whole words of bitmasks."""
        return self.ranks.part(self.vocab_size, WORD)

    @property
    def kv_dtype(self) -> torch.dtype:
        """Dtype of stored keys and values."""
        return self.dtype if self.cache_dtype is None else self.cache_dtype

    @property
    def attention_layers(self) -> tuple[LayerKV, ...]:
        """The sizes of the layers with attention."""
        return tuple(layer for layer in self.kv_layers if layer.position_size)

    @property
    def state_limits(self) -> CaptureSupport:
        """Hidden states and expert choices that rows may request."""
        return CaptureSupport(self.state_layers, self.hidden_size, bool(self.moe_layers))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that all layers store for one position."""
        return sum(layer.position_size for layer in self.kv_layers) * self.kv_dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of one row, all layers together."""
        return sum(size.nbytes(self.dtype) for sizes in self.states for size in sizes)

    @property
    def embeds_size(self) -> int:
        """Width of the token embeddings."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def features_size(self) -> int:
        """Width of a feature of an item, W: its embedding, and what deepstack adds to the results of blocks."""
        return self.embeds_size * (1 + self.deepstack)


def windows_within(windows: Sequence[int | None], context: int) -> tuple[int | None, ...]:
    """`ModelSpec.windows` of layers with these windows; one of the whole context is none."""
    limits = tuple(None if window is None or window >= context else window for window in windows)
    return limits if any(limits) else ()


@dataclass(slots=True, eq=False)
class CaptureSpec:
    """Hidden states and expert choices to capture in one step. The model fills `states` and `routed`."""

    rows: Tensor
    """[S] int64: flat tokens to capture."""
    tokens: int
    """Number of flat tokens in the step, T."""
    layers: tuple[int, ...] = ()
    """Layers to capture: 0 is the input of the first block, i the output of block i, -1 the state after the final
    norm."""
    experts: bool = False
    """Whether to capture the expert choices."""
    states: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> [S, H] in the model's dtype; filled by the model."""
    routed: Tensor | None = None
    """[S, MoE layers, experts per token] int32; filled by the model if `experts` is set."""

    def store(self, layer: int, states: Tensor) -> None:
        """Copy the captured rows of a layer's states [T, H], which the model may overwrite later."""
        self.states[layer] = states[self.rows]


@dataclass(frozen=True, slots=True)
class TokenEmbeds:
    """Tokens of a step that are given as embeddings instead of ids."""

    rows: Tensor
    """[E] int64: flat token of each embedding."""
    values: Tensor
    """[E, W] float32 embeddings. W is `ModelSpec.embeds_size`, or for features of images
    `ModelSpec.features_size`: what is added to the results of the first blocks follows the embedding."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Tensors of one step, packed without padding."""

    input_ids: Tensor
    """[T] int64 token ids."""
    positions: Tensor
    """[T] int64 positions in their sequences."""
    attention: Attention
    capture: CaptureSpec | None = None
    """Hidden states to capture; None for none."""
    lora: LoraStep | None = None
    """Tokens that use an adapter; None for none."""
    embeds: TokenEmbeds | None = None
    """Tokens given as embeddings; None for none. Their ids are those of placeholders, which are not looked up."""
    rope_positions: Tensor | None = None
    """[A, T] int64 rotary positions of a model with `ModelSpec.rope_axes` A; None: `positions` on all axes."""
    ops: Ops = TORCH_OPS
    """Operations that compute the step."""
    states: States | None = None
    """Recurrent states of the step's rows; None: the model has none."""
    wanted: Tensor | None = None
    """[W] int64: flat tokens whose final states are needed; None for all."""

    def select(self, states: Tensor) -> Tensor:
        """[T, H] -> [W, H]: the states of the wanted tokens."""
        return states if self.wanted is None else states[self.wanted]

    def last_layer_rows(self, layers: int) -> Tensor | None:
        """`wanted` if the last of `layers` layers needs only keys and values of the other tokens, else None.

        It may not if captures or adapters need all tokens.
        """
        captured = self.capture is not None and not {-1, layers}.isdisjoint(self.capture.layers)
        return None if captured or self.lora is not None else self.wanted


class Model(Protocol):
    """Decoder model (protocol)."""

    stream: LayerStream | None
    """What copies blocks to the device in every pass; None: all are there."""

    @property
    def spec(self) -> ModelSpec:
        """Sizes and identity."""

    def hidden(self, inputs: ModelInput) -> Tensor:
        """States after the final norm, [T, H] in the model's dtype, or [W, H] of `wanted`; fills `inputs.capture`.

        The keys and values of all tokens are stored. Kernels may be recorded to run later, so that only other kernels
        may read their results.
        """

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """[R, H] -> [R, V] in the model's dtype.

        `adapters` [R] int64 is each state's adapter, -1 for none, where one of them `adapts_head`.
        """

    def accepts_embeds(self) -> bool:
        """Whether tokens may be given as arbitrary embeddings."""

    def fit_positions(self, longest: int) -> None:
        """Choose the rotary frequencies for a job whose longest row has `longest` tokens; until then, for the context.

        Called between jobs. Without an `unscaled_context` there is nothing to choose.
        """
