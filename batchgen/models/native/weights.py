"""Tensors of a native checkpoint and how they are fused, without importing torch.

q, k and v are fused into one matrix [(N + 2K) D, H]; gate and up into one [2I, H], gate first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from batchgen.errors import ModelError
from batchgen.models.checkpoint.folder import ModelFolder, placed
from batchgen.models.checkpoint.quant_format import FULL_DTYPES
from batchgen.models.checkpoint.stored_tensors import check_unread, stored_wrongly
from batchgen.models.checkpoint.text_part import TextTensors, find_text_tensors, has_scores
from batchgen.models.lora.fit import Sites
from batchgen.models.native.config import NativeConfig, is_headless


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """A tensor made of checkpoint tensors stacked along dimension 0."""

    parts: tuple[tuple[str, int], ...]
    """(name in the checkpoint, rows) of each part, in order."""
    columns: tuple[int, ...]
    """Columns of the matrix; empty for a vector."""
    index: tuple[tuple[slice, ...], ...] = ()
    """Which part of each of these tensors it is made of, a slice for each axis; empty: of all of them."""

    def part(self, rows: Sequence[slice], columns: slice | None = None) -> FusedTensor:
        """The tensor of some rows of each part, and of some columns."""
        index = tuple((each,) if columns is None else (each, columns) for each in rows)
        parts = tuple((name, each.stop - each.start) for (name, _), each in zip(self.parts, rows, strict=True))
        return FusedTensor(parts, self.columns if columns is None else (columns.stop - columns.start,), index)

    def inputs(self, columns: slice) -> FusedTensor:
        """The tensor of some columns."""
        return self.part([slice(0, rows) for _, rows in self.parts], columns)

    def index_of(self, part: int) -> tuple[slice, ...]:
        """What the tensor is made of, of a part."""
        return self.index[part] if self.index else ()

    @property
    def first_column(self) -> int:
        """Of the stored tensors, where its columns begin."""
        return self.index[0][1].start if self.index and len(self.index[0]) > 1 else 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the fused tensor."""
        return (sum(rows for _, rows in self.parts), *self.columns)


@dataclass(frozen=True, slots=True)
class NativeLayout:
    """All fused tensors of a decoder."""

    embedding: FusedTensor
    norm: FusedTensor
    head: FusedTensor | None
    """None if the embedding is also the head."""
    layers: tuple[Mapping[str, FusedTensor], ...]
    """For each layer: fused name -> tensor."""
    stored: TextTensors
    """Where the tensors are in the checkpoint."""
    uncut: NativeLayout | None = None
    """The layout of the whole decoder, if this is that of a rank."""

    @property
    def whole(self) -> NativeLayout:
        """The layout of the whole decoder."""
        return self if self.uncut is None else self.uncut

    def __iter__(self) -> Iterator[FusedTensor]:
        yield from (self.embedding, self.norm)
        if self.head is not None:
            yield self.head
        for layer in self.layers:
            yield from layer.values()


def native_layout(config: NativeConfig, folder: ModelFolder) -> NativeLayout:
    """Layout that `config` needs, with the names that `folder` uses (`model.`, `model.language_model.`, none, ...).

    As in transformers, a stored `lm_head.weight` is used even if the configuration ties it: a tied checkpoint that
    stores both tensors either stores equal values or was untied by training.
    """
    stored = find_text_tensors(folder.tensors, folder.config)
    prefix, hidden = stored.decoder, (config.hidden_size,)
    embedding, head = f"{prefix}embed_tokens.weight", f"{stored.head}lm_head.weight"
    one = (config.tied or is_headless(folder.config)) and not (embedding in folder.tensors and head in folder.tensors)
    if one and head in folder.tensors:
        embedding = head
    return NativeLayout(
        embedding=FusedTensor(((embedding, config.vocab_size),), hidden),
        norm=FusedTensor(((f"{prefix}norm.weight", config.hidden_size),), ()),
        head=None if one else FusedTensor(((head, config.vocab_size),), hidden),
        layers=tuple(_layer(config, f"{prefix}layers.{i}.") for i in range(config.num_layers)),
        stored=stored,
    )


def _layer(config: NativeConfig, prefix: str) -> dict[str, FusedTensor]:
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv = (("q_proj", config.q_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size))
    linears: dict[str, tuple[str, tuple[tuple[str, int], ...], int, bool]] = {
        "qkv": ("self_attn", qkv, hidden, config.qkv_bias),
        "o": ("self_attn", (("o_proj", hidden),), config.q_size, config.o_bias),
        "gate_up": ("mlp", (("gate_proj", inner), ("up_proj", inner)), hidden, config.mlp_bias),
        "down": ("mlp", (("down_proj", hidden),), inner, config.mlp_bias),
    }
    layer: dict[str, FusedTensor] = {}
    for name, (block, parts, columns, bias) in linears.items():
        weights = tuple((f"{prefix}{block}.{part}.weight", rows) for part, rows in parts)
        layer[name] = FusedTensor(weights, (columns,))
        if bias:
            biases = tuple((f"{prefix}{block}.{part}.bias", rows) for part, rows in parts)
            layer[f"{name}_bias"] = FusedTensor(biases, ())
    norms = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
    layer |= {key: FusedTensor(((f"{prefix}{name}.weight", hidden),), ()) for key, name in norms.items()}
    if config.qk_norm:
        for key in ("q_norm", "k_norm"):
            layer[key] = FusedTensor(((f"{prefix}self_attn.{key}.weight", config.head_dim),), ())
    return layer


def adapted_parts(fused: FusedTensor) -> list[tuple[str, int]]:
    """(module name in adapters, outputs) of each part of a fused weight; names always begin with `model.layers.`."""
    parts = ((name.partition("layers.")[2].removesuffix(".weight"), rows) for name, rows in fused.parts)
    return [(f"model.layers.{module}", rows) for module, rows in parts]


EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
"""Names in adapters."""


def native_sites(layout: NativeLayout) -> Sites:
    """Modules of a native decoder that adapters may change."""
    layout = layout.whole
    linears = {
        module: (fused.columns[0], rows)
        for layer in layout.layers
        for fused in layer.values()
        if fused.columns
        for module, rows in adapted_parts(fused)
    }
    tokens, features = layout.embedding.shape
    linears[HEAD] = (features, tokens)
    shapes = {name: {"weight": (tokens, features)} for name in (EMBEDDING, HEAD)}
    return Sites(linears, {EMBEDDING: (tokens, features)}, HEAD, layout.head is None, shapes)


def check_native_tensors(layout: NativeLayout, folder: ModelFolder) -> None:
    """Check the headers against the layout: every tensor is stored with the right shape, and there are no others.

    Raises:
        ModelError: the message names the first tensor that is missing, misshapen, not floating point or unexpected.
    """
    needed: dict[str, tuple[int, ...]] = {}
    for fused in layout:
        needed |= {name: (rows, *fused.columns) for name, rows in fused.parts}
    missing = [name for name in needed if name not in folder.tensors]
    if missing:
        raise ModelError(
            f"{folder.path} lacks {len(missing)} of the {len(needed)} tensors that config.json calls for, "
            f"{missing[0]} first{placed(missing[0], folder.absent)}. Copy the folder again, or check that "
            "config.json belongs to these weights."
        )
    for name, shape in needed.items():
        info = folder.tensors[name]
        if info.shape != shape:
            raise ModelError(
                f"{name} has shape {list(info.shape)} where config.json calls for {list(shape)}. "
                "Check that config.json belongs to these weights."
            )
        if info.dtype not in FULL_DTYPES:
            raise stored_wrongly(name, info.dtype)
    read = [name for name in folder.tensors if name not in needed and layout.stored.is_read(name)]
    others = [name for name in read if not (has_scores(folder.config) and name.startswith("score."))]
    check_unread(folder, [name for name in others if name not in folder.spare], len(layout.layers))
