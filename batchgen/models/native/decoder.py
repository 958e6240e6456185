"""Native decoder for Llama, Mistral, Qwen2 and Qwen3, with fused weights and packed tokens.

It is independent of sequences, pages and requests: tokens are packed as [T], and the step's `Attention` attends. Shape
letters: T tokens, H hidden size, N heads, K kv heads, D head size, I intermediate size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from batchgen.kernels.backend import fused_decoder
from batchgen.kernels.decoder import DecoderLayer, DecoderWeights, FusedDecoder
from batchgen.kernels.device import device_for
from batchgen.kernels.heads import HeadNorms
from batchgen.kernels.layouts import Move
from batchgen.kernels.linear import Embedding, Linear, Product, repacks
from batchgen.kernels.lora import LoraPairs, scale_products
from batchgen.kernels.ranks import ALONE, Ranks
from batchgen.kernels.rope import inverse_frequencies
from batchgen.kernels.rope_config import RopeConfig
from batchgen.kernels.stream import LayerStream
from batchgen.kernels.types import AttentionArgs, LayerKV, PagedAttention
from batchgen.models.base import ModelInput, ModelSpec, windows_within
from batchgen.models.checkpoint.folder import ModelFolder
from batchgen.models.checkpoint.weights import WeightReader
from batchgen.models.lora.adapters import AdaptedEnds, adapted_ends, adapter_reader, fused_pair
from batchgen.models.lora.config import Adapter
from batchgen.models.native.config import NativeConfig
from batchgen.models.native.own_integers import OwnIntegers, stream_bytes
from batchgen.models.native.ranks import rank_ends, rank_pair
from batchgen.models.native.weights import EMBEDDING, HEAD, FusedTensor, NativeLayout, adapted_parts, native_sites

_LINEARS: Final = ("qkv", "o", "gate_up", "down")
"""Names of the linear layers of a block."""


class NativeModel:
    """`Model` of the native path, created by `load_native`."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        head: Linear,
        rope: RopeConfig,
        ends: AdaptedEnds | None = None,
        integers: OwnIntegers | None = None,
        stream: LayerStream | None = None,
    ) -> None:
        self.spec = spec
        self.stream = stream
        """What copies blocks to the device; None: all are there."""
        self._weights = weights
        self._head = head
        self._rope = rope
        self._ends = ends
        self._integers = integers
        self.stored_products = 0
        """How many of the linear layers, in which projections are fused, are in the numbers of the checkpoint."""
        self._has_factors = any(pairs.has_factors for layer in weights.layers for pairs in layer.lora.values())
        self._fused = self._fused_decoder()

    def _fused_decoder(self) -> FusedDecoder | None:
        """None if there are other ranks: within the layers their products are summed."""
        return fused_decoder(self._weights) if self.spec.ranks.count == 1 else None

    def with_product(self, product: Product) -> NativeModel:
        """The model with its linear layers and head computed by `product`."""
        layers = [
            replace(layer, linears={name: linear.with_product(product) for name, linear in layer.linears.items()})
            for layer in self._weights.layers
        ]
        weights, head = replace(self._weights, layers=layers), self._head.with_product(product)
        return NativeModel(self.spec, weights, head, self._rope, self._ends, stream=self.stream)

    def fit_positions(self, longest: int) -> None:
        """See `Model.fit_positions`."""
        if self.spec.unscaled_context is not None:
            # In place: recorded kernels read it. The fused decoder keeps tables of it.
            self._weights.inv_freq.copy_(inverse_frequencies(self._rope, longest)[0])
            self._fused = self._fused_decoder()

    def quantise(self) -> None:
        """Replace the weights of the linear layers and the head by int8, on a CPU.

        Integers that the checkpoint stores are taken where they fit, others are computed. Layers are converted one at a
        time, so that only one is in memory in both forms.

        Raises:
            ModelError: a file of the checkpoint cannot be read.
        """
        self._fused = None  # it references the weights of all layers
        layers, integers = self._weights.layers, self._integers
        with nullcontext() if integers is None else integers:
            for i in range(len(layers)):
                stored = {} if integers is None else integers.layout.layers[i]
                layers[i] = replace(
                    layers[i],
                    linears={name: self._in_int8(each, stored.get(name)) for name, each in layers[i].linears.items()},
                )
            self._head = self._in_int8(self._head, None if integers is None else integers.layout.head)
        self._fused = self._fused_decoder()

    def _in_int8(self, linear: Linear, stored: FusedTensor | None) -> Linear:
        weight = None if self._integers is None or stored is None else self._integers.read(stored)
        if weight is None:
            return linear.in_int8()
        self.stored_products += 1
        return Linear.from_groups(weight, linear.bias, self.spec.dtype)

    @torch.no_grad()
    def hidden(self, inputs: ModelInput) -> Tensor:
        """See `Model.hidden`."""
        plain = inputs.lora is None or not (self._has_factors or (self._ends is not None and any(self._ends.tables)))
        if plain and self._fused is not None and self._fused.takes(inputs.attention):
            return _hidden_fused(self._fused, inputs, self.spec)
        weights, layers = self._weights, self._weights.layers
        x, ranks = self._embedded(inputs.input_ids), self.spec.ranks  # [T, H]
        if self._ends is not None:
            x = self._ends.embed(inputs.input_ids, x, inputs.lora)
        if inputs.embeds is not None:
            x[inputs.embeds.rows] = inputs.embeds.values.to(x.dtype)
        ops, eps, capture = inputs.ops, weights.eps, inputs.capture
        tables = ops.rope_tables(weights.inv_freq, weights.rope_scale, inputs.positions, x.dtype)  # 2 x [T, 1, D]
        step = _Step(weights, inputs, tables)
        captured = () if capture is None else capture.layers
        if capture is not None and 0 in captured:
            capture.store(0, x)
        # The residual sum and the following norm are one operation, so a block ends with the norm of the next one.
        following = [*(layer.input_norm for layer in layers[1:]), weights.norm]  # L x [H]
        needed = inputs.last_layer_rows(len(layers))
        normed = ops.rms_norm(x, layers[0].input_norm, eps)  # [T, H]
        streamed = layers if self.stream is None else self.stream.over(layers)
        for index, (layer, next_norm) in enumerate(zip(streamed, following, strict=True)):
            attended = step.attend(index, normed)  # [T, N * D]
            if needed is not None and layer is layers[-1]:
                x, attended = x[needed], attended[needed]  # from here on T is W
                if not len(needed):
                    return x  # launch no empty kernels
            delta = ranks.sum(step.project(layer, "o", attended))  # [T, H]
            normed = ops.add_rms_norm(x, delta, layer.post_norm, eps)  # [T, H]
            gate_up = step.project(layer, "gate_up", normed)  # [T, 2I]
            delta = ranks.sum(step.project(layer, "down", ops.gated(gate_up, weights.activation)))  # [T, H]
            normed = ops.add_rms_norm(x, delta, next_norm, eps)  # [T, H]
            if capture is not None and index + 1 in captured:
                capture.store(index + 1, x)
        if capture is not None and -1 in captured:
            capture.store(-1, normed)
        return normed if needed is inputs.wanted else inputs.select(normed)

    def _embedded(self, ids: Tensor) -> Tensor:
        """[T] -> [T, H], of which each rank has the rows of its tokens."""
        ranks, tokens = self.spec.ranks, self.spec.vocab
        if ranks.count == 1:
            return self._weights.embedding(ids)
        held = (ids >= tokens.start) & (ids < tokens.stop)
        if tokens.start == tokens.stop:
            x = torch.zeros(len(ids), self.spec.hidden_size, dtype=self.spec.dtype, device=ids.device)
        else:
            x = self._weights.embedding((ids - tokens.start).where(held, 0)) * held[:, None]
        return ranks.sum(x)

    @torch.no_grad()
    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """See `Model.logits`."""
        out = self._head(hidden)  # [R, V]
        return out if self._ends is None else self._ends.logits(hidden, out, adapters)

    def accepts_embeds(self) -> bool:
        """True: tokens may be given as arbitrary embeddings."""
        return True


def _hidden_fused(decoder: FusedDecoder, inputs: ModelInput, spec: ModelSpec) -> Tensor:
    capture, embeds = inputs.capture, inputs.embeds
    size = (inputs.input_ids.shape[0], spec.hidden_size)
    layers = () if capture is None else tuple(layer for layer in capture.layers if layer >= 0)
    states = {layer: torch.empty(size, dtype=spec.dtype) for layer in layers}  # [T, H] each
    needed = inputs.last_layer_rows(spec.num_layers)
    normed = decoder.hidden(
        inputs.input_ids,
        inputs.positions,
        inputs.attention,
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
    """Inputs shared by all layers of a step."""

    def __init__(self, weights: DecoderWeights, inputs: ModelInput, tables: tuple[Tensor, Tensor]) -> None:
        self._weights = weights
        self._inputs = inputs
        self._tables = tables  # 2 x [T, 1, D]
        self._paged = inputs.attention if isinstance(inputs.attention, PagedAttention) else None

    def project(self, layer: DecoderLayer, name: str, x: Tensor) -> Tensor:
        """A linear layer, [T, I] -> [T, O], including each token's adapter."""
        out = layer.linears[name](x)
        if self._inputs.lora is not None and name in layer.lora:
            if layer.lora[name].has_factors:
                scale_products(out, self._inputs.lora, layer.lora[name])
            self._inputs.ops.add_lora(out, x, self._inputs.lora, layer.lora[name])
        return out

    def attend(self, index: int, x: Tensor) -> Tensor:
        """Project, normalise, rotate, store and attend: [T, H] -> [T, N * D]."""
        layer, dim, inputs, paged = self._weights.layers[index], self._weights.dim, self._inputs, self._paged
        qkv = self.project(layer, "qkv", x).view(x.shape[0], -1, dim)  # [T, N + 2K, D]
        keys, values, slots = self._page(qkv) if paged is None else paged.cache(index)
        query = inputs.ops.qk_norm_rope_cache(qkv, layer.head_norms, self._tables, keys, values, slots)  # [T, N, D]
        args = AttentionArgs(dim**-0.5, layer.window)
        if paged is None:
            out = inputs.attention.attend(index, query, keys[0], values[0], args)
        else:
            out = paged.attend_stored(index, query, args)  # [T, N, D]
        return out.reshape(x.shape[0], -1)  # [T, N * D]

    def _page(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One page for the step's keys and values, [1, T, K, D] each, for attention that is not paged."""
        tokens, _, dim = qkv.shape
        keys, values = (qkv.new_empty(1, tokens, self._weights.kv_heads, dim) for _ in range(2))
        return keys, values, torch.arange(tokens, device=qkv.device)


def native_spec(
    config: NativeConfig,
    layout: NativeLayout,
    dtype: torch.dtype,
    device: torch.device,
    context_length: int,
    adapters: Sequence[Adapter] = (),
    ranks: Ranks = ALONE,
) -> ModelSpec:
    """Spec of a native model, from its configuration; of a rank's part, from its sizes and layout (`rank_layout`)."""
    sites = native_sites(layout)
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
        state_layers=config.num_layers,
        num_heads=config.num_heads,
        adapters=tuple(adapter.name for adapter in adapters),
        tower_adapters=tuple(adapter.towers for adapter in adapters),
        tied=layout.head is None,
        windows=windows_within(config.windows, context_length),
        adapts_head=any(map(sites.changes_head, adapters)),
        plain_adapters=all(map(sites.is_plain, adapters)),
        tiled_adapters=all(map(sites.is_tiled, adapters)),
        unscaled_context=config.contexts.unscaled_of(context_length),
        ranks=ranks,
        block_bytes=stream_bytes(layout, dtype.itemsize),
    )


def _numel(fused: FusedTensor) -> int:
    rows, *columns = fused.shape
    return rows * (columns[0] if columns else 1)


def load_native(
    spec: ModelSpec, config: NativeConfig, layout: NativeLayout, folder: ModelFolder, adapters: Sequence[Adapter] = ()
) -> NativeModel:
    """Read the weights directly into the fused tensors on the device.

    The layout must have been checked against the folder (`check_native_tensors`), and adapters against the layout. Peak
    memory is the weights, plus one matrix if they are repacked for the CPU.
    """
    with WeightReader(folder.tensors) as reader:
        integers = OwnIntegers(folder, layout)
        loader = _Loader(reader, spec, layout, integers)
        embedding = loader.tensor(layout.embedding)
        changes = _load_adapters(loader, layout, adapters, spec.ranks)
        plan, numbers = spec.stream, replace(spec.numbers, products="plain")
        on_host = _Loader(reader, replace(spec, device=torch.device("cpu"), numbers=numbers), layout, integers)
        stream = LayerStream(plan, device_for(spec.device)) if plan is not None and plan.streamed else None
        layers = []
        for i, layer in enumerate(layout.layers):
            move = partial(stream.move, i) if stream is not None and i in stream.plan.streamed else None
            own, lora = loader if move is None else on_host, changes[i] if changes else {}
            layers.append(_load_layer(layer, loader, config.windows[i], config.rms_eps, lora, own, move))
        norm = loader.tensor(layout.norm)
        tied = layout.head is None
        head_weight = embedding if layout.head is None else loader.tensor(layout.head) if spec.adapts_head else None
        head = Linear(embedding, products=spec.numbers.products) if layout.head is None else loader.linear(layout.head)
        ends = None
        if any(not adapter.modules.isdisjoint((EMBEDDING, HEAD)) for adapter in adapters):
            if spec.ranks.count > 1:  # adapters change whole matrices
                table = loader.tensor(layout.whole.embedding)
                head_weight = None if layout.whole.head is None else loader.tensor(layout.whole.head)
            else:
                table = embedding
            both = (EMBEDDING, table), (HEAD, table if head_weight is None else head_weight, None)
            ends = adapted_ends(adapters, *both, tied=layout.head is None)
            ends = None if ends is None else rank_ends(ends, spec.vocab)
    inv_freq, rope_scale = inverse_frequencies(config.rope, spec.context_length)
    weights = DecoderWeights(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        dim=config.head_dim,
        activation=config.activation,
        eps=config.rms_eps,
        embedding=Embedding(embedding, head if tied else None),
        norm=norm,
        inv_freq=inv_freq.to(spec.device),
        rope_scale=rope_scale,
        layers=layers,
    )
    model = NativeModel(spec, weights, head, config.rope, ends, integers, stream)
    model.stored_products = loader.stored_products + on_host.stored_products
    return model


class _Loader:
    """Reader of fused tensors.

    Matrices that are repacked are read into one staging buffer. Separate allocations would leave large holes between
    the remaining weights after they are freed, which the process keeps.
    """

    def __init__(self, reader: WeightReader, spec: ModelSpec, layout: NativeLayout, own: OwnIntegers) -> None:
        self.stored_products = 0
        self._reader = reader
        self._own = own
        self._spec = spec
        self._numbers = spec.numbers
        self._staging: Tensor | None = None
        if repacks(spec.dtype, spec.device, spec.numbers.products):
            matrices = [fused for layer in layout.layers for fused in layer.values()]
            matrices += [] if layout.head is None else [layout.head]
            self._staging = torch.empty(max(map(_numel, matrices), default=0), dtype=spec.dtype)

    @property
    def like(self) -> Tensor:
        """An empty tensor of the model's dtype and device."""
        return torch.empty(0, dtype=self._spec.dtype, device=self._spec.device)

    def tensor(self, fused: FusedTensor) -> Tensor:
        """Read a tensor into new memory."""
        return self._read(fused, torch.empty(fused.shape, dtype=self._spec.dtype, device=self._spec.device))

    def linear(self, weight: FusedTensor, bias: FusedTensor | None = None) -> Linear:
        """Read a linear layer."""
        own_bias = None if bias is None else self.tensor(bias)
        stored = self._stored(weight, own_bias)
        if stored is not None:
            self.stored_products += 1
            return stored
        if self._staging is None:
            return Linear(self.tensor(weight), own_bias, products=self._numbers.products)
        staged = self._read(weight, self._staging[: _numel(weight)].view(weight.shape))
        return Linear(staged, own_bias, products=self._numbers.products)

    def _stored(self, fused: FusedTensor, bias: Tensor | None) -> Linear | None:
        """The linear layer in its stored numbers; None if it is not computed in such."""
        if self._numbers.form == "integers":
            numbers = self._own.read(fused, self._reader, self._staging)
            return None if numbers is None else Linear.from_groups(numbers, bias, self._spec.dtype)
        numbers = self._own.read_weight(fused, self._reader) if self._numbers.form == "weight-only" else None
        return None if numbers is None else Linear.weight_only(numbers.to(self._spec.device), bias, self._spec.dtype)

    def _read(self, fused: FusedTensor, target: Tensor) -> Tensor:
        start = 0
        for part, (name, rows) in enumerate(fused.parts):
            self._reader.read_into(name, target[start : start + rows], fused.index_of(part))
            start += rows
        return target


def _load_layer(
    tensors: Mapping[str, FusedTensor],
    loader: _Loader,
    window: int | None,
    eps: float,
    lora: Mapping[str, LoraPairs],
    own: _Loader,
    move: Move | None,
) -> DecoderLayer:
    """`own` reads the linear layers, which `move` takes to their places if the block is streamed."""
    linears = {}
    for name in _LINEARS:
        linear = own.linear(tensors[name], tensors.get(f"{name}_bias"))
        linears[name] = linear if move is None else linear.moved(move)
    input_norm, post_norm = loader.tensor(tensors["input_norm"]), loader.tensor(tensors["post_norm"])
    head_norms = None
    if "q_norm" in tensors and "k_norm" in tensors:
        head_norms = HeadNorms(loader.tensor(tensors["q_norm"]), loader.tensor(tensors["k_norm"]), eps)
    return DecoderLayer(linears, input_norm, post_norm, head_norms, window, lora)


def _load_adapters(
    loader: _Loader, layout: NativeLayout, adapters: Sequence[Adapter], ranks: Ranks
) -> list[dict[str, LoraPairs]]:
    """For each layer: name of a fused linear layer -> LoRA pairs of all adapters; empty without adapters."""
    if not adapters:
        return []
    with ExitStack() as stack:
        readers = [stack.enter_context(adapter_reader(adapter)) for adapter in adapters]

        def pairs(layer: Mapping[str, FusedTensor], name: str, held: FusedTensor) -> LoraPairs:
            whole, bias = layer[name], layer.get(f"{name}_bias")

            def base() -> tuple[Tensor, Tensor | None]:
                return loader.tensor(whole), None if bias is None else loader.tensor(bias)

            both, parts = zip(adapters, readers, strict=True), adapted_parts(whole)
            made = [fused_pair(adapter, reader, parts, loader.like, base) for adapter, reader in both]
            return LoraPairs([rank_pair(pair, held, whole, ranks) for pair in made])

        both = zip(layout.whole.layers, layout.layers, strict=True)
        layers = [{name: pairs(whole, name, f) for name, f in layer.items() if f.columns} for whole, layer in both]
    return [{name: by_adapter for name, by_adapter in layer.items() if any(by_adapter)} for layer in layers]
