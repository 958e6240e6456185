"""All layers of a decoder of the Llama family in one call of `src/decoder.cpp`.

The oracle is the same operations one by one (`models.native`): they are the same compiled functions, or are rounded at
the same points.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from ctypes import Array, Structure, addressof, byref, c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.cpu.attention import CompiledAttention
from batchgen.kernels.cpu.background import DECODE, recording
from batchgen.kernels.cpu.library import DTYPES, address, library
from batchgen.kernels.cpu.lora import StackCall, StepRoom, stack_call
from batchgen.kernels.cpu.matmul import METHODS, MatmulCall
from batchgen.kernels.cpu.ops import ACTIVATION_CODES
from batchgen.kernels.layouts import Compiled
from batchgen.kernels.lora import LoraPairs, LoraStep, tiles_of
from batchgen.kernels.rope import rope_tables

__all__ = ["CompiledDecoder", "DecoderLayer", "DecoderShape"]


_PRODUCTS: Final = ("qkv", "o", "gate_up", "down")
_LAID: Final = 64
"""Numbers of tokens whose layout is remembered."""


class _Layer(Structure):
    """`DecoderLayer` of decoder.h."""

    _fields_ = (
        ("qkv", MatmulCall),
        ("o", MatmulCall),
        ("gate_up", MatmulCall),
        ("down", MatmulCall),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        *((f"{name}_lora", c_void_p) for name in _PRODUCTS),
    )


class _Decoder(Structure):
    """`Decoder` of decoder.h."""

    _fields_ = (
        ("layers", c_void_p),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("activation", c_int64),
        ("dtype", c_int64),
        ("eps", c_double),
    )


class _Step(Structure):
    """`DecoderStep` of decoder.h."""

    _fields_ = (
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("attention", c_void_p),
        ("lora", c_void_p),
        ("taps", c_void_p),
        ("x", c_void_p),
        ("normed", c_void_p),
        ("product_in", c_void_p),
        ("qkv", c_void_p),
        ("attended", c_void_p),
        ("delta", c_void_p),
        ("gate_up", c_void_p),
        ("activated", c_void_p),
        ("scratch", c_void_p),
        ("wanted", c_void_p),
        ("wanted_x", c_void_p),
        ("tokens", c_int64),
        ("num_wanted", c_int64),
        ("wide", c_int64),
    )


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights, all of one dtype."""

    qkv: Compiled
    o: Compiled
    gate_up: Compiled
    down: Compiled
    input_norm: Tensor
    """[H]"""
    post_norm: Tensor
    """[H]"""
    q_norm: Tensor | None
    """[D], None where heads are not normalised"""
    k_norm: Tensor | None
    """[D], as `q_norm`"""
    window: int | None
    """positions that a token sees; None: all"""
    lora: Mapping[str, LoraPairs] = field(default_factory=dict)
    """changes of products by the names above, in the weights' dtype"""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What all layers have in common."""

    heads: int
    kv_heads: int
    dim: int
    """D"""
    activation: str
    """one of `ACTIVATION_CODES`"""
    eps: float
    """of all norms"""


class CompiledDecoder:
    """A stack of layers with its embedding and final norm, ready to run."""

    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[DecoderLayer],
        embedding: Tensor,
        norm: Tensor,
        inv_freq: Tensor,
        rope_scale: float,
    ) -> None:
        """`embedding` [V, H] and `norm` [H] are contiguous; `inv_freq` and `rope_scale` as for `rope_tables`."""
        hidden, inner = embedding.shape[1], layers[0].down.packed.inner
        self._shape = shape
        self._windows = [layer.window for layer in layers]
        self._kept = (list(layers), embedding, norm)
        self._embedding = embedding
        self._scratch = max(
            product.packed.scratch for layer in layers for product in (layer.qkv, layer.o, layer.gate_up, layer.down)
        )
        self._wide = _wide(layers)
        into = 2 if self._wide else 1  # numbers of the dtype that one going into a product takes
        qkv, attended = layers[0].qkv.packed.outer, shape.heads * shape.dim
        widths = (hidden, qkv, attended, hidden, 2 * inner, into * inner, into * hidden)
        stacks = [{name: stack_call(pairs) for name, pairs in layer.lora.items()} for layer in layers]
        self._layers = (_Layer * len(layers))(*map(_layer, layers, stacks))
        self._adapted = stacks  # which have to live as long
        self._lora = StepRoom(max((stack.width for layer in stacks for stack in layer.values()), default=0))
        self._decoder = _Decoder(
            addressof(self._layers),
            embedding.data_ptr(),
            norm.data_ptr(),
            len(layers),
            hidden,
            inner,
            shape.heads,
            shape.kv_heads,
            shape.dim,
            ACTIVATION_CODES[shape.activation],
            DTYPES[embedding.dtype],
            shape.eps,
        )
        self._rope = _RopeRows(inv_freq, rope_scale, embedding.dtype)
        self._room = _Room(widths, shape, embedding.dtype)
        self._taps = self._tap_addresses({})

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        attention: CompiledAttention,
        *,
        lora: LoraStep | None = None,
        embeds: tuple[Tensor, Tensor] | None = None,
        taps: Mapping[int, Tensor] | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """The states after the final norm. Keys and values of the step are stored in the attention's pool.

        Can be recorded, without adapters and embeddings.

        Args:
            ids: [T] int64.
            positions: [T] int64.
            attention: the step's.
            lora: tokens by adapter; None where no token has one.
            embeds: tokens [E] int64 that are embeddings [E, H] in place of ids.
            taps: layer -> [T, H] to fill with the states after it; 0: as the first layer is fed.
            wanted: [W] int64 tokens whose states are asked for, some perhaps several times, where none has an adapter
                and the last layer is not tapped; None: all.

        Returns:
            [T, H], or [W, H], in the weights' dtype.
        """
        noted = recording()
        tokens, threads = ids.shape[0], torch.get_num_threads() if noted is None else noted.threads
        rows, hidden = tokens if wanted is None else len(wanted), self._embedding.shape[1]
        normed = self._embedding.new_empty(rows, hidden)
        wanted_x = None if wanted is None else self._embedding.new_empty(rows, hidden)
        if not tokens:
            return normed
        room = self._room.of(max(tokens, rows), threads * self._scratch)
        if embeds is not None:
            room.x[:tokens] = F.embedding(ids, self._embedding)
            room.x[embeds[0]] = embeds[1].to(room.x.dtype)
        arguments = attention.stack(
            room.query,
            room.attended,
            scale=self._shape.dim**-0.5,
            windows=self._windows,
            wanted=None if wanted is None else wanted.numpy(),
        )  # which has to live until the call is over
        tapped = self._taps if not taps else self._tap_addresses(taps)
        cos, sin = self._rope.upto(int(positions.max()))
        slots = attention.cache(0)[2]
        assert ids.is_contiguous()
        assert positions.is_contiguous()
        assert slots.is_contiguous()
        # What is noted down is run when the next step, of as many tokens, may have been noted down.
        step = room.step if noted is None else _Step.from_buffer_copy(room.step)
        step.tokens = tokens
        step.ids = None if embeds is not None else ids.data_ptr()
        step.positions, step.slots = positions.data_ptr(), slots.data_ptr()
        step.cos, step.sin = cos.data_ptr(), sin.data_ptr()
        step.attention, step.taps = addressof(arguments.struct), addressof(tapped)
        step.normed = normed.data_ptr()
        assert wanted is None or (lora is None and len(self._windows) not in (taps or {}))
        assert wanted is None or wanted.is_contiguous()
        step.wanted, step.wanted_x, step.num_wanted = address(wanted), address(wanted_x), -1 if wanted is None else rows
        adapted = None if lora is None else self._lora.call(tiles_of(lora, tokens, ids.device))
        step.lora = None if adapted is None else addressof(adapted.struct)
        step.wide = self._wide and adapted is None  # adapters read what the products do
        if noted is None:
            library().bg_decode(byref(self._decoder), byref(step), c_int(threads))
            return normed
        assert adapted is None
        assert embeds is None
        kept = (self, room, arguments, tapped, taps, ids, positions, slots, cos, sin, wanted, wanted_x, normed)
        noted.add(DECODE, self._decoder, step, *kept)
        return normed

    def _tap_addresses(self, taps: Mapping[int, Tensor]) -> Array[Any]:
        """[L + 1] where the states before the first layer and after each go, or nowhere."""
        places = range(len(self._windows) + 1)
        return (c_void_p * len(places))(*(address(taps.get(layer)) for layer in places))


def _layer(layer: DecoderLayer, stacks: Mapping[str, StackCall]) -> _Layer:
    return _Layer(
        *(_product(product) for product in (layer.qkv, layer.o, layer.gate_up, layer.down)),
        layer.input_norm.data_ptr(),
        layer.post_norm.data_ptr(),
        address(layer.q_norm),
        address(layer.k_norm),
        *(addressof(stacks[name].struct) if name in stacks else None for name in _PRODUCTS),
    )


def _wide(layers: Sequence[DecoderLayer]) -> bool:
    """Whether products take float32 numbers, so that norms and activations are best left wide."""
    products = [product for layer in layers for product in (layer.qkv, layer.gate_up, layer.down)]
    widened, bfp = (METHODS[torch.bfloat16, name] for name in ("widened", "bfp"))
    return all(
        product.code == bfp or (product.code == widened and product.packed.inner % 2 == 0) for product in products
    )


def _product(product: Compiled) -> MatmulCall:
    packed = product.packed
    return MatmulCall(
        weight=packed.data.data_ptr(),
        bias=address(product.wide_bias),
        inner=packed.inner,
        outer=packed.outer,
        method=product.code,
    )


class _RopeRows:
    """Cosines and sines by position, made once: those of `rope_tables`."""

    def __init__(self, inv_freq: Tensor, scale: float, dtype: torch.dtype) -> None:
        self._inv_freq, self._scale, self._dtype = inv_freq, scale, dtype
        self._tables = self._made(256)

    def upto(self, position: int) -> tuple[Tensor, Tensor]:
        """Tables [n, D] of cosines and of sines, with n above `position`."""
        if position >= len(self._tables[0]):
            self._tables = self._made(1 << position.bit_length())
        return self._tables

    def _made(self, count: int) -> tuple[Tensor, Tensor]:
        cos, sin = rope_tables(self._inv_freq, self._scale, torch.arange(count), self._dtype)
        return cos[:, 0].contiguous(), sin[:, 0].contiguous()


@dataclass(frozen=True, slots=True)
class _Laid:
    """Memory laid out for one number of tokens."""

    x: Tensor
    """[T, H]"""
    query: Tensor
    """[T, N, D], a part of each token's projection"""
    attended: Tensor
    """[T, N, D]"""
    step: _Step
    """with the addresses of all that stays"""
    scratch: Tensor
    """which one of them is in"""


class _Room(threading.local):
    """Memory that every step of a Python thread uses again, as much as the largest so far has taken."""

    def __init__(self, widths: Sequence[int], shape: DecoderShape, dtype: torch.dtype) -> None:
        """`widths`: numbers per token of x, qkv, attended, delta, gate_up, activated and what goes into products."""
        self._widths = widths
        self._shape = shape
        self._memory = torch.empty(0, dtype=dtype)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._laid: dict[int, _Laid] = {}

    def of(self, tokens: int, scratch: int) -> _Laid:
        """Room for a step of so many tokens, and bytes for the products."""
        sizes = [-(-tokens * width // 32) * 32 for width in self._widths]  # each from a new cache line
        if self._memory.numel() < sum(sizes) or self._scratch.numel() < scratch + 64:
            with torch.inference_mode(False):  # steps inside and outside of it write here
                self._memory = torch.empty(max(sum(sizes), self._memory.numel()), dtype=self._memory.dtype)
                self._scratch = torch.empty(max(scratch + 64, self._scratch.numel()), dtype=torch.uint8)
            self._laid.clear()
        if tokens not in self._laid:
            if len(self._laid) >= _LAID:
                self._laid.clear()
            self._laid[tokens] = self._lay(tokens, sizes)
        return self._laid[tokens]

    def _lay(self, tokens: int, sizes: list[int]) -> _Laid:
        parts = torch.split(self._memory[: sum(sizes)], sizes)
        x, qkv, attended, *others = (
            part[: tokens * width].view(tokens, width) for part, width in zip(parts, self._widths, strict=True)
        )
        step = _Step(
            x=x.data_ptr(),
            qkv=qkv.data_ptr(),
            attended=attended.data_ptr(),
            scratch=-(-self._scratch.data_ptr() // 64) * 64,
        )
        step.delta, step.gate_up, step.activated, step.product_in = (part.data_ptr() for part in others)
        dim, heads = self._shape.dim, self._shape.heads
        return _Laid(x, qkv.view(tokens, -1, dim)[:, :heads], attended.view(tokens, -1, dim), step, self._scratch)
