"""Compiled decoder of the Llama family: all layers of a step in one call of `src/decoder.cpp`.

The reference is the same operations called one by one by the native decoder: they are the same compiled functions, or
round at the same points.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from ctypes import Array, Structure, addressof, byref, c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from batchgen.kernels.activation import KINDS
from batchgen.kernels.cpu.attention import CompiledAttention
from batchgen.kernels.cpu.command_buffer import DECODE, current_buffer
from batchgen.kernels.cpu.library import DTYPES, address, library
from batchgen.kernels.cpu.lora import LoraWorkspace, StackCall, stack_call
from batchgen.kernels.cpu.matmul import METHODS, MatmulCall
from batchgen.kernels.cpu.structs import fields
from batchgen.kernels.decoder import DecoderLayer, DecoderWeights
from batchgen.kernels.layouts import Compiled
from batchgen.kernels.lora import LoraStep, tiles_of
from batchgen.kernels.rope import rope_tables
from batchgen.kernels.types import Attention, AttentionArgs

_PRODUCTS: Final = ("qkv", "o", "gate_up", "down")
_LAYOUTS: Final = 64
"""Most workspace layouts that are cached, one per number of tokens."""


class _Layer(Structure):
    """`DecoderLayer` of decoder.h."""

    _fields_ = (
        *fields(MatmulCall, "qkv o gate_up down"),
        *fields(c_void_p, "input_norm post_norm q_norm k_norm"),
        *((f"{name}_lora", c_void_p) for name in _PRODUCTS),
    )


class _Decoder(Structure):
    """`Decoder` of decoder.h."""

    _fields_ = (
        *fields(c_void_p, "layers embedding final_norm"),
        *fields(c_int64, "num_layers hidden inner heads kv_heads dim activation dtype packed_embedding"),
        ("eps", c_double),
    )


class _Step(Structure):
    """`DecoderStep` of decoder.h."""

    _fields_ = (
        *fields(c_void_p, "ids positions slots cos sin attention lora capture x normed product_in qkv attended"),
        *fields(c_void_p, "delta gate_up activated scratch wanted wanted_x"),
        *fields(c_int64, "tokens num_wanted wide"),
    )


def compiled_decoder(weights: DecoderWeights) -> CompiledDecoder | None:
    """A decoder that runs all layers in one call; None unless compiled kernels compute every product."""
    layers = []
    for layer in weights.layers:
        products = {name: linear.compiled for name, linear in layer.linears.items()}
        layers.append({name: product for name, product in products.items() if product is not None})
    if any(len(layer) < len(_PRODUCTS) for layer in layers):
        return None
    return CompiledDecoder(weights, layers)


class CompiledDecoder:
    """Decoder layers with embedding and final norm, as C arguments (the `FusedDecoder` protocol)."""

    def __init__(self, weights: DecoderWeights, products: Sequence[Mapping[str, Compiled]]) -> None:
        """`products`: the compiled linear layers of each layer; see `compiled_decoder`."""
        layers, embedding = weights.layers, weights.embedding
        hidden, inner = embedding.width, products[0]["down"].packed.inner
        self._args = AttentionArgs(weights.dim**-0.5)
        self._windows = [layer.window for layer in layers]
        self._kept = (list(layers), list(products), embedding, weights.norm)
        self._embedding = embedding
        self._hidden = hidden
        self._scratch = max(product.packed.scratch for layer in products for product in layer.values())
        self._wide = _wide(products)
        into = 2 if self._wide else 1  # a product's input in float32 takes the memory of two bfloat16 numbers
        qkv, attended = products[0]["qkv"].packed.outer, weights.heads * weights.dim
        widths = (hidden, qkv, attended, hidden, 2 * inner, into * inner, into * hidden)
        stacks = [{name: stack_call(pairs) for name, pairs in layer.lora.items()} for layer in layers]
        self._layers = (_Layer * len(layers))(*map(_layer, layers, products, stacks))
        self._stacks = stacks  # kept alive, as the layers point to them
        self._lora = LoraWorkspace(max((stack.width for layer in stacks for stack in layer.values()), default=0))
        self._decoder = _Decoder(
            addressof(self._layers), embedding.data.data_ptr(), weights.norm.data_ptr(), len(layers), hidden, inner,
            weights.heads, weights.kv_heads, weights.dim, KINDS[weights.activation], DTYPES[embedding.dtype],
            embedding.packed, weights.eps,
        )  # fmt: skip
        self._rope = _RopeRows(weights.inv_freq, weights.rope_scale, embedding.dtype)
        self._workspace = _Workspace(widths, weights.heads, weights.dim, embedding.dtype)
        self._no_capture = self._capture_addresses({})

    def takes(self, attention: Attention) -> bool:
        """See `FusedDecoder.takes`."""
        return isinstance(attention, CompiledAttention)

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
        """See `FusedDecoder.hidden`. Can be recorded in a command buffer, without adapters and embeddings."""
        assert isinstance(attention, CompiledAttention)
        buffer = current_buffer()
        tokens, threads = ids.shape[0], torch.get_num_threads() if buffer is None else buffer.threads
        rows, hidden = tokens if wanted is None else len(wanted), self._hidden
        normed = torch.empty(rows, hidden, dtype=self._embedding.dtype)
        wanted_x = None if wanted is None else torch.empty_like(normed)
        if not tokens:
            return normed
        memory = self._workspace.layout(max(tokens, rows), threads * self._scratch)
        if embeds is not None:
            memory.x[:tokens] = self._embedding(ids)
            memory.x[embeds[0]] = embeds[1].to(memory.x.dtype)
        arguments = attention.stack(
            memory.query, memory.attended, self._args, self._windows, None if wanted is None else wanted.numpy()
        )  # must live until the call has finished
        captured = self._no_capture if not capture else self._capture_addresses(capture)
        cos, sin = self._rope.upto(int(positions.max()))
        slots = attention.cache(0)[2]
        assert ids.is_contiguous()
        assert positions.is_contiguous()
        assert slots.is_contiguous()
        # A recorded step runs when the next one, of as many tokens, may have been recorded.
        step = memory.step if buffer is None else _Step.from_buffer_copy(memory.step)
        step.tokens = tokens
        step.ids = None if embeds is not None else ids.data_ptr()
        step.positions, step.slots = positions.data_ptr(), slots.data_ptr()
        step.cos, step.sin = cos.data_ptr(), sin.data_ptr()
        step.attention, step.capture = addressof(arguments.struct), addressof(captured)
        step.normed = normed.data_ptr()
        assert wanted is None or (lora is None and len(self._windows) not in (capture or {}))
        assert wanted is None or wanted.is_contiguous()
        step.wanted, step.wanted_x, step.num_wanted = address(wanted), address(wanted_x), -1 if wanted is None else rows
        adapters = None if lora is None else self._lora.call(tiles_of(lora, tokens, ids.device))
        step.lora = None if adapters is None else addressof(adapters.struct)
        step.wide = self._wide and adapters is None  # adapters read the products' inputs in their dtype
        if buffer is None:
            library().bg_decode(byref(self._decoder), byref(step), c_int(threads))
            return normed
        assert adapters is None
        assert embeds is None
        kept = (self, memory, arguments, captured, capture, ids, positions, slots, cos, sin, wanted, wanted_x, normed)
        buffer.add(DECODE, self._decoder, step, *kept)
        return normed

    def _capture_addresses(self, capture: Mapping[int, Tensor]) -> Array[Any]:
        """[L + 1] addresses that receive the input of the first layer and the output of each layer, or null."""
        layers = range(len(self._windows) + 1)
        return (c_void_p * len(layers))(*(address(capture.get(layer)) for layer in layers))


def _layer(layer: DecoderLayer, products: Mapping[str, Compiled], stacks: Mapping[str, StackCall]) -> _Layer:
    norms = layer.head_norms
    return _Layer(
        *(_product(products[name]) for name in _PRODUCTS),
        layer.input_norm.data_ptr(),
        layer.post_norm.data_ptr(),
        None if norms is None else norms.query.data_ptr(),
        None if norms is None else norms.key.data_ptr(),
        *(addressof(stacks[name].struct) if name in stacks else None for name in _PRODUCTS),
    )


def _wide(layers: Sequence[Mapping[str, Compiled]]) -> bool:
    """Whether all products accept float32 inputs, so that norms and activations need not be rounded to memory."""
    products = [product for layer in layers for name, product in layer.items() if name != "o"]
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
        group=packed.group,
    )


class _RopeRows:
    """Cache of the cosines and sines of `rope_tables` by position."""

    def __init__(self, inv_freq: Tensor, scale: float, dtype: torch.dtype) -> None:
        self._inv_freq, self._scale, self._dtype = inv_freq, scale, dtype
        self._tables = self._tables_for(256)

    def upto(self, position: int) -> tuple[Tensor, Tensor]:
        """Tables [n, D] of cosines and of sines, with n above `position`."""
        if position >= len(self._tables[0]):
            self._tables = self._tables_for(1 << position.bit_length())
        return self._tables

    def _tables_for(self, count: int) -> tuple[Tensor, Tensor]:
        cos, sin = rope_tables(self._inv_freq, self._scale, torch.arange(count), self._dtype)
        return cos[:, 0].contiguous(), sin[:, 0].contiguous()


@dataclass(frozen=True, slots=True)
class _Layout:
    """Workspace tensors for one number of tokens."""

    x: Tensor
    """[T, H]"""
    query: Tensor
    """[T, N, D], a view of each token's qkv projection."""
    attended: Tensor
    """[T, N, D]"""
    step: _Step
    """Arguments with the addresses of the workspace."""
    scratch: Tensor
    """Owner of the memory at `step.scratch`."""


class _Workspace(threading.local):
    """Memory reused by every step of a Python thread; it grows to the largest step so far."""

    def __init__(self, widths: Sequence[int], heads: int, dim: int, dtype: torch.dtype) -> None:
        """`widths`: elements per token of x, qkv, attended, delta, gate_up, activated and product_in."""
        self._widths = widths
        self._heads, self._dim = heads, dim
        self._memory = torch.empty(0, dtype=dtype)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._layouts: dict[int, _Layout] = {}

    def layout(self, tokens: int, scratch: int) -> _Layout:
        """Workspace for a step of `tokens` tokens, and `scratch` bytes for the products."""
        sizes = [-(-tokens * width // 32) * 32 for width in self._widths]  # each aligned to a cache line
        if self._memory.numel() < sum(sizes) or self._scratch.numel() < scratch + 64:
            with torch.inference_mode(False):  # written to both inside and outside inference mode
                self._memory = torch.empty(max(sum(sizes), self._memory.numel()), dtype=self._memory.dtype)
                self._scratch = torch.empty(max(scratch + 64, self._scratch.numel()), dtype=torch.uint8)
            self._layouts.clear()
        if tokens not in self._layouts:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            self._layouts[tokens] = self._make(tokens, sizes)
        return self._layouts[tokens]

    def _make(self, tokens: int, sizes: list[int]) -> _Layout:
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
        dim, heads = self._dim, self._heads
        return _Layout(x, qkv.view(tokens, -1, dim)[:, :heads], attended.view(tokens, -1, dim), step, self._scratch)
