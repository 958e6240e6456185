"""One decoder for Llama, Mistral, Qwen2 and Qwen3: plain functions over fused weights and packed tokens.

It knows nothing of sequences, pages or requests: tokens come packed as [T], and attention is what the step's
`Attention` makes of q, k and v. Shape letters: T tokens, H hidden, N heads, K kv heads, D head size, I inner, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.activation import gated
from batchgen.kernels.linear import Linear
from batchgen.kernels.lora import LoraPairs, LoraStep
from batchgen.kernels.ops import Ops
from batchgen.kernels.rope import apply_rope, inverse_frequencies, rope_tables
from batchgen.kernels.types import LayerKV
from batchgen.models.base import ModelInput, ModelSpec
from batchgen.models.folder import ModelFolder
from batchgen.models.lora import adapter_reader, fused_pair
from batchgen.models.lora_config import Adapter
from batchgen.models.native_config import NativeConfig
from batchgen.models.native_weights import FusedTensor, NativeLayout, adapted_parts
from batchgen.models.weights import WeightReader

__all__ = ["NativeModel", "load_native", "native_spec"]


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
    """By the name of a linear layer that an adapter changes."""

    def project(self, name: str, linear: Linear, x: Tensor, step: LoraStep | None, ops: Ops) -> Tensor:
        """[T, I] -> [T, O], each token with its adapter's change."""
        out = linear(x)
        if step is not None and name in self.lora:
            ops.add_lora(out, x, step, self.lora[name])
        return out


class NativeModel:
    """The decoder behind the model seam. Made by `load_native`."""

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

    @property
    def spec(self) -> ModelSpec:
        """Sizes and identity."""
        return self._spec

    @torch.no_grad()
    def hidden(self, inputs: ModelInput) -> Tensor:
        """States after the final norm, [T, H] in the model's dtype."""
        x = F.embedding(inputs.input_ids, self._embedding)  # [T, H]
        if inputs.embeds is not None:
            x[inputs.embeds.rows] = inputs.embeds.values.to(x.dtype)
        tables = rope_tables(self._inv_freq, self._rope_scale, inputs.positions, x.dtype)  # 2 x [T, 1, D]
        eps, lora, ops = self._config.rms_eps, inputs.lora, inputs.ops
        taps = inputs.taps
        tapped = () if taps is None else taps.layers
        if taps is not None and 0 in tapped:
            taps.take(0, x)
        for layer in self._layers:
            attended = _attention(self._config, layer, ops.rms_norm(x, layer.input_norm, eps), tables, inputs)
            x = x.add_(layer.project("o", layer.o, attended, lora, ops))  # [T, H]
            normed = ops.rms_norm(x, layer.post_norm, eps)  # [T, H]
            gate_up = layer.project("gate_up", layer.gate_up, normed, lora, ops)  # [T, 2I]
            x = x.add_(layer.project("down", layer.down, gated(gate_up, self._config.activation), lora, ops))  # [T, H]
            if taps is not None and layer.index + 1 in tapped:
                taps.take(layer.index + 1, x)
        x = ops.rms_norm(x, self._norm, eps)  # [T, H]
        if taps is not None and -1 in tapped:
            taps.take(-1, x)
        return x

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] in the model's dtype."""
        return self._head(hidden)  # [R, V]

    def takes_embeds(self) -> bool:
        """Whether tokens may come as embeddings that are those of no id: always."""
        return True


def _attention(
    config: NativeConfig, layer: _Layer, x: Tensor, tables: tuple[Tensor, Tensor], inputs: ModelInput
) -> Tensor:
    """Project, normalise, rotate, attend: [T, H] -> [T, N * D]."""
    heads, kv_heads, ops = config.num_heads, config.num_kv_heads, inputs.ops
    qkv = layer.project("qkv", layer.qkv, x, inputs.lora, ops).view(x.shape[0], -1, config.head_dim)  # [T, N + 2K, D]
    if layer.q_norm is not None and layer.k_norm is not None:
        q = ops.rms_norm(qkv[:, :heads], layer.q_norm, config.rms_eps)  # [T, N, D]
        k = ops.rms_norm(qkv[:, heads : heads + kv_heads], layer.k_norm, config.rms_eps)  # [T, K, D]
        q, k = apply_rope(q, *tables), apply_rope(k, *tables)  # [T, N, D], [T, K, D]
    else:
        rotated = apply_rope(qkv[:, : heads + kv_heads], *tables)  # [T, N + K, D]
        q, k = rotated[:, :heads], rotated[:, heads:]  # [T, N, D], [T, K, D]
    out = inputs.attention.attend(
        layer.index, q, k, qkv[:, heads + kv_heads :], scale=config.head_dim**-0.5, window=layer.window
    )  # [T, N, D]
    return out.reshape(x.shape[0], -1)  # [T, N * D]


def native_spec(
    config: NativeConfig,
    layout: NativeLayout,
    folder: ModelFolder,
    dtype: torch.dtype,
    device: torch.device,
    context_length: int,
    adapters: Sequence[Adapter] = (),
) -> ModelSpec:
    """What the engine must know, from the configuration alone."""
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
) -> NativeModel:
    """Read the weights, each straight into its place in a fused tensor on the device.

    The layout must have been held against the folder (`check_native_tensors`), and adapters against the layout. Peak
    memory: the weights and, where they are repacked for the CPU, one matrix more.
    """
    with WeightReader(folder.tensors) as reader:

        def load(fused: FusedTensor) -> Tensor:
            target = torch.empty(fused.shape, dtype=spec.dtype, device=spec.device)
            start = 0
            for name, rows in fused.parts:
                reader.read_into(name, target[start : start + rows])
                start += rows
            return target

        embedding = load(layout.embedding)
        changes = _load_adapters(spec, layout, adapters)
        layers = [
            _load_layer(i, config.windows[i], layer, load, changes[i] if changes else {})
            for i, layer in enumerate(layout.layers)
        ]
        norm = load(layout.norm)
        head = Linear(embedding if layout.head is None else load(layout.head))
    return NativeModel(spec, config, embedding, layers, norm, head)


def _load_layer(
    index: int,
    window: int | None,
    tensors: Mapping[str, FusedTensor],
    load: Callable[[FusedTensor], Tensor],
    lora: Mapping[str, LoraPairs],
) -> _Layer:
    def linear(name: str) -> Linear:
        bias = tensors.get(f"{name}_bias")
        return Linear(load(tensors[name]), None if bias is None else load(bias))

    def optional(name: str) -> Tensor | None:
        return load(tensors[name]) if name in tensors else None

    return _Layer(
        index=index,
        window=window,
        qkv=linear("qkv"),
        o=linear("o"),
        gate_up=linear("gate_up"),
        down=linear("down"),
        input_norm=load(tensors["input_norm"]),
        post_norm=load(tensors["post_norm"]),
        q_norm=optional("q_norm"),
        k_norm=optional("k_norm"),
        lora=lora,
    )


def _load_adapters(spec: ModelSpec, layout: NativeLayout, adapters: Sequence[Adapter]) -> list[dict[str, LoraPairs]]:
    """Every adapter's changes by layer and fused layer; nothing at all without adapters."""
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
