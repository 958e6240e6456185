"""Native decoder for Llama, Mistral, Qwen2 and Qwen3, with fused weights and packed tokens.

It is independent of sequences, pages and requests: tokens are packed as [T], and the step's `Attention` attends. Shape
letters: T tokens, H hidden size, N heads, K kv heads, D head size, I intermediate size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.cpu.attention import CompiledAttention
from batchgen.kernels.cpu.decoder import CompiledDecoder, DecoderLayer, DecoderShape
from batchgen.kernels.linear import Linear, Product, Products, repacks
from batchgen.kernels.lora import LoraPairs, LoraStep
from batchgen.kernels.ops import Ops
from batchgen.kernels.rope import inverse_frequencies
from batchgen.kernels.types import LayerKV, PagedAttention
from batchgen.models.base import ModelInput, ModelSpec
from batchgen.models.folder import ModelFolder
from batchgen.models.lora import adapter_reader, fused_pair
from batchgen.models.lora_config import Adapter
from batchgen.models.native_config import NativeConfig
from batchgen.models.native_weights import FusedTensor, NativeLayout, adapted_parts
from batchgen.models.weights import WeightReader

__all__ = ["NativeModel", "load_native", "native_spec"]


_LINEARS: Final = ("qkv", "o", "gate_up", "down")
"""Names of the linear layers of a block."""


@dataclass(frozen=True, slots=True)
class _Layer:
    index: int
    window: int | None
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    input_norm: Tensor  # [H]
    post_norm: Tensor  # [H]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    lora: Mapping[str, LoraPairs] = field(default_factory=dict)
    """Name of an adapted linear layer -> LoRA pairs of all adapters."""

    def in_int8(self) -> _Layer:
        """The layer with int8 weights."""
        return replace(self, **{name: getattr(self, name).in_int8() for name in _LINEARS})

    def project(self, name: str, linear: Linear, x: Tensor, step: LoraStep | None, ops: Ops) -> Tensor:
        """[T, I] -> [T, O], including each token's adapter."""
        out = linear(x)
        if step is not None and name in self.lora:
            ops.add_lora(out, x, step, self.lora[name])
        return out


class NativeModel:
    """`Model` of the native path, created by `load_native`."""

    def __init__(
        self,
        spec: ModelSpec,
        config: NativeConfig,
        embedding: Tensor,
        layers: list[_Layer],
        norm: Tensor,
        head: Linear,
    ) -> None:
        self._spec = spec
        self._config = config
        self._embedding = embedding  # [V, H]
        self._layers = layers
        self._norm = norm  # [H]
        self._head = head
        inv_freq, self._rope_scale = inverse_frequencies(config.rope, spec.context_length)
        self._inv_freq = inv_freq.to(spec.device)  # [D/2]
        self._compiled = self._compiled_decoder()

    @property
    def spec(self) -> ModelSpec:
        """Sizes and identity."""
        return self._spec

    def with_product(self, product: Product) -> NativeModel:
        """The model with its linear layers and head computed by `product`."""
        layers = [
            replace(layer, **{name: getattr(layer, name).with_product(product) for name in _LINEARS})
            for layer in self._layers
        ]
        head = self._head.with_product(product)
        return NativeModel(self._spec, self._config, self._embedding, layers, self._norm, head)

    def quantise(self) -> None:
        """Replace the weights of the linear layers and the head by int8, on a CPU.

        Layers are converted one at a time, so that only one is in memory in both forms.
        """
        self._compiled = None  # it references the weights of all layers
        for i in range(len(self._layers)):
            self._layers[i] = self._layers[i].in_int8()
        self._head = self._head.in_int8()
        self._compiled = self._compiled_decoder()

    @torch.no_grad()
    def hidden(self, inputs: ModelInput) -> Tensor:
        """See `Model.hidden`."""
        if self._compiled is not None and isinstance(inputs.attention, CompiledAttention):
            return _hidden_compiled(self._compiled, inputs, inputs.attention, self._spec)
        x = F.embedding(inputs.input_ids, self._embedding)  # [T, H]
        if inputs.embeds is not None:
            x[inputs.embeds.rows] = inputs.embeds.values.to(x.dtype)
        ops, eps, lora, capture = inputs.ops, self._config.rms_eps, inputs.lora, inputs.capture
        tables = ops.rope_tables(self._inv_freq, self._rope_scale, inputs.positions, x.dtype)  # 2 x [T, 1, D]
        step = _Step(self._config, inputs, tables)
        captured = () if capture is None else capture.layers
        if capture is not None and 0 in captured:
            capture.store(0, x)
        # The residual sum and the following norm are one operation, so a block ends with the norm of the next one.
        following = [*(layer.input_norm for layer in self._layers[1:]), self._norm]  # L x [H]
        needed = inputs.last_layer_rows(len(self._layers))
        normed = ops.rms_norm(x, self._layers[0].input_norm, eps)  # [T, H]
        for layer, next_norm in zip(self._layers, following, strict=True):
            attended = step.attend(layer, normed)  # [T, N * D]
            if needed is not None and layer is self._layers[-1]:
                x, attended = x[needed], attended[needed]  # from here on T is W
                if not len(needed):
                    return x  # launch no empty kernels
            delta = layer.project("o", layer.o, attended, lora, ops)  # [T, H]
            normed = ops.add_rms_norm(x, delta, layer.post_norm, eps)  # [T, H]
            gate_up = layer.project("gate_up", layer.gate_up, normed, lora, ops)  # [T, 2I]
            delta = layer.project("down", layer.down, ops.gated(gate_up, self._config.activation), lora, ops)  # [T, H]
            normed = ops.add_rms_norm(x, delta, next_norm, eps)  # [T, H]
            if capture is not None and layer.index + 1 in captured:
                capture.store(layer.index + 1, x)
        if capture is not None and -1 in captured:
            capture.store(-1, normed)
        return normed if needed is inputs.wanted else inputs.select(normed)

    def _compiled_decoder(self) -> CompiledDecoder | None:
        """Decoder that runs all layers in one call; None unless compiled CPU kernels compute every layer."""
        layers = []
        for layer in self._layers:
            qkv, o, gate_up, down = (getattr(layer, name).compiled for name in _LINEARS)
            if qkv is None or o is None or gate_up is None or down is None:
                return None
            norms = (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
            layers.append(DecoderLayer(qkv, o, gate_up, down, *norms, layer.window, layer.lora))
        config = self._config
        shape = DecoderShape(config.num_heads, config.num_kv_heads, config.head_dim, config.activation, config.rms_eps)
        return CompiledDecoder(shape, layers, self._embedding, self._norm, self._inv_freq, self._rope_scale)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] in the model's dtype."""
        return self._head(hidden)  # [R, V]

    def accepts_embeds(self) -> bool:
        """True: tokens may be given as arbitrary embeddings."""
        return True


def _hidden_compiled(
    decoder: CompiledDecoder, inputs: ModelInput, attention: CompiledAttention, spec: ModelSpec
) -> Tensor:
    capture, embeds = inputs.capture, inputs.embeds
    size = (inputs.input_ids.shape[0], spec.hidden_size)
    layers = () if capture is None else tuple(layer for layer in capture.layers if layer >= 0)
    states = {layer: torch.empty(size, dtype=spec.dtype) for layer in layers}  # [T, H] each
    needed = inputs.last_layer_rows(spec.num_layers)
    normed = decoder.hidden(
        inputs.input_ids,
        inputs.positions,
        attention,
        lora=inputs.lora,
        embeds=None if embeds is None else (embeds.rows, embeds.values),
        capture=states,
        wanted=needed,
    )  # [T, H] or [W, H]
    if capture is not None:
        for layer in capture.layers:
            capture.store(layer, normed if layer == -1 else states[layer])
    return normed if needed is inputs.wanted else inputs.select(normed)


class _Step:
    """Attention inputs shared by all layers of a step."""

    def __init__(self, config: NativeConfig, inputs: ModelInput, tables: tuple[Tensor, Tensor]) -> None:
        self._config = config
        self._inputs = inputs
        self._tables = tables  # 2 x [T, 1, D]
        self._paged = inputs.attention if isinstance(inputs.attention, PagedAttention) else None

    def attend(self, layer: _Layer, x: Tensor) -> Tensor:
        """Project, normalise, rotate, store and attend: [T, H] -> [T, N * D]."""
        config, inputs, paged = self._config, self._inputs, self._paged
        qkv = layer.project("qkv", layer.qkv, x, inputs.lora, inputs.ops).view(x.shape[0], -1, config.head_dim)
        keys, values, slots = self._page(qkv) if paged is None else paged.cache(layer.index)
        query = inputs.ops.qk_norm_rope_cache(
            qkv,  # [T, N + 2K, D]
            config.num_heads,
            config.num_kv_heads,
            layer.q_norm,
            layer.k_norm,
            config.rms_eps,
            *self._tables,
            keys,
            values,
            slots,
        )  # [T, N, D]
        scale, window = config.head_dim**-0.5, layer.window
        if paged is None:
            out = inputs.attention.attend(layer.index, query, keys[0], values[0], scale=scale, window=window)
        else:
            out = paged.attend_stored(layer.index, query, scale=scale, window=window)  # [T, N, D]
        return out.reshape(x.shape[0], -1)  # [T, N * D]

    def _page(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One page for the step's keys and values, [1, T, K, D] each, for attention that is not paged."""
        tokens, kv_heads = qkv.shape[0], self._config.num_kv_heads
        keys, values = (qkv.new_empty(1, tokens, kv_heads, self._config.head_dim) for _ in range(2))
        return keys, values, torch.arange(tokens, device=qkv.device)


def native_spec(
    config: NativeConfig,
    layout: NativeLayout,
    folder: ModelFolder,
    dtype: torch.dtype,
    device: torch.device,
    context_length: int,
    adapters: Sequence[Adapter] = (),
) -> ModelSpec:
    """Spec of a native model, from its configuration."""
    kv = LayerKV(config.num_kv_heads, config.head_dim, config.head_dim)
    return ModelSpec(
        name=config.model_type,
        implementation="native",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        context_length=context_length,
        kv_layers=(kv,) * config.num_layers,
        dtype=dtype,
        device=device,
        parameters=sum(_numel(fused) for fused in layout),
        digest=folder.digest,
        state_layers=config.num_layers,
        num_heads=config.num_heads,
        adapters={adapter.name: adapter.digest for adapter in adapters},
    )


def _numel(fused: FusedTensor) -> int:
    rows, *columns = fused.shape
    return rows * (columns[0] if columns else 1)


def load_native(
    spec: ModelSpec,
    config: NativeConfig,
    layout: NativeLayout,
    folder: ModelFolder,
    adapters: Sequence[Adapter] = (),
    products: Products = "measured",
) -> NativeModel:
    """Read the weights directly into the fused tensors on the device.

    The layout must have been checked against the folder (`check_native_tensors`), and adapters against the layout. Peak
    memory is the weights, plus one matrix if they are repacked for the CPU.
    """
    with WeightReader(folder.tensors) as reader:
        loader = _Loader(reader, spec, layout, products)
        embedding = loader.tensor(layout.embedding)
        changes = _load_adapters(spec, layout, adapters)
        layers = [
            _load_layer(i, config.windows[i], layer, loader, changes[i] if changes else {})
            for i, layer in enumerate(layout.layers)
        ]
        norm = loader.tensor(layout.norm)
        head = Linear(embedding, products=products) if layout.head is None else loader.linear(layout.head)
    return NativeModel(spec, config, embedding, layers, norm, head)


class _Loader:
    """Reader of fused tensors.

    Matrices that are repacked are read into one staging buffer. Separate allocations would leave large holes between
    the remaining weights after they are freed, which the process keeps.
    """

    def __init__(self, reader: WeightReader, spec: ModelSpec, layout: NativeLayout, products: Products) -> None:
        self._reader = reader
        self._spec = spec
        self._products = products
        self._staging: Tensor | None = None
        if repacks(spec.dtype, spec.device, products):
            matrices = [fused for layer in layout.layers for fused in layer.values()]
            matrices += [] if layout.head is None else [layout.head]
            self._staging = torch.empty(max(map(_numel, matrices), default=0), dtype=spec.dtype)

    def tensor(self, fused: FusedTensor) -> Tensor:
        """Read a tensor into new memory."""
        return self._read(fused, torch.empty(fused.shape, dtype=self._spec.dtype, device=self._spec.device))

    def linear(self, weight: FusedTensor, bias: FusedTensor | None = None) -> Linear:
        """Read a linear layer."""
        own_bias = None if bias is None else self.tensor(bias)
        if self._staging is None:
            return Linear(self.tensor(weight), own_bias, products=self._products)
        staged = self._read(weight, self._staging[: _numel(weight)].view(weight.shape))
        return Linear(staged, own_bias, products=self._products)

    def _read(self, fused: FusedTensor, target: Tensor) -> Tensor:
        start = 0
        for name, rows in fused.parts:
            self._reader.read_into(name, target[start : start + rows])
            start += rows
        return target


def _load_layer(
    index: int,
    window: int | None,
    tensors: Mapping[str, FusedTensor],
    loader: _Loader,
    lora: Mapping[str, LoraPairs],
) -> _Layer:
    def linear(name: str) -> Linear:
        return loader.linear(tensors[name], tensors.get(f"{name}_bias"))

    def optional(name: str) -> Tensor | None:
        return loader.tensor(tensors[name]) if name in tensors else None

    return _Layer(
        index=index,
        window=window,
        qkv=linear("qkv"),
        o=linear("o"),
        gate_up=linear("gate_up"),
        down=linear("down"),
        input_norm=loader.tensor(tensors["input_norm"]),
        post_norm=loader.tensor(tensors["post_norm"]),
        q_norm=optional("q_norm"),
        k_norm=optional("k_norm"),
        lora=lora,
    )


def _load_adapters(spec: ModelSpec, layout: NativeLayout, adapters: Sequence[Adapter]) -> list[dict[str, LoraPairs]]:
    """For each layer: name of a fused linear layer -> LoRA pairs of all adapters; empty without adapters."""
    if not adapters:
        return []
    with ExitStack() as stack:
        readers = [stack.enter_context(adapter_reader(adapter)) for adapter in adapters]

        def pairs(fused: FusedTensor) -> LoraPairs:
            parts = adapted_parts(fused)
            both = zip(adapters, readers, strict=True)
            return LoraPairs([fused_pair(adapter, reader, parts, spec.dtype, spec.device) for adapter, reader in both])

        layers = [{name: pairs(fused) for name, fused in layer.items() if fused.columns} for layer in layout.layers]
    return [{name: found for name, found in layer.items() if any(found)} for layer in layers]
