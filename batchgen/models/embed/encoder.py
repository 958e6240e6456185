"""Encoders of transformers: every token of a row sees all of it, and a step computes whole rows, packed.

The library's own modules compute everything but attention, which is registered as `batchgen_rows` and attends within
each row. There is no cache: a row is computed in one step.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchgen.errors import ModelError
from batchgen.kernels.stream import LayerStream
from batchgen.models.base import ModelInput, ModelSpec
from batchgen.models.checkpoint.folder import ModelFolder
from batchgen.models.checkpoint.stored_tensors import check_unread
from batchgen.models.checkpoint.weights import LazyWeight, WeightReader
from batchgen.models.library.layers.fused_projections import stack_projections
from batchgen.models.library.load import TOLERANCE, library_model
from batchgen.models.library.meta import meta_model
from batchgen.models.library.model import silence_library
from batchgen.models.library.text import without_modules

ROWS_NAME: Final = "batchgen_rows"
_SLOT: Final = "batchgen_rows_slot"
_PROJECTIONS: Final = (("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("q_proj", "k_proj", "v_proj"))
"""Names of sibling projections in blocks of encoders."""
_PROBE: Final = (7, 5)
"""Tokens of the rows by which a loaded model is compared with the library."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention within each row: [1, N, T, D], [1, K, T, D], [1, K, T, D] -> [1, T, N, D]."""
    lengths = getattr(module, _SLOT)[0]
    grouped = query.shape[1] != key.shape[1]
    parts = zip(*(torch.split(x, lengths, dim=2) for x in (query, key, value)), strict=True)
    rows = []
    for q, k, v in parts:
        seen = None
        if sliding_window is not None and q.shape[2] > sliding_window:
            at = torch.arange(q.shape[2], device=q.device)
            seen = (at[:, None] - at).abs() < sliding_window  # [L, L]
        rows.append(F.scaled_dot_product_attention(q, k, v, seen, scale=scaling, enable_gqa=grouped))
    return torch.cat(rows, dim=2).transpose(1, 2), None


def _encoder_class(config: Any) -> Any:
    """The library's class without a head and without a pooler."""
    from transformers import AttentionInterface, AutoModel  # the library is slow to import

    AttentionInterface.register(ROWS_NAME, _attend)
    cls = AutoModel._model_mapping[type(config)]
    cls = cls[0] if isinstance(cls, tuple) else cls
    return without_modules(cls, ["pooler"]) if "add_pooling_layer" in inspect.signature(cls).parameters else cls


def _first_position(model: Any) -> int:
    """Number of a row's first position in the table of positions: behind the padding id in models after RoBERTa."""
    embeddings: Any = getattr(model, "embeddings", None)
    return int(embeddings.padding_idx) + 1 if hasattr(embeddings, "create_position_ids_from_input_ids") else 0


def encoder_spec(config: Any, dtype: torch.dtype, device: torch.device, context: int) -> ModelSpec:
    """Spec of an encoder, without reading weights.

    Raises:
        ModelError: its attention cannot be replaced.
    """
    with silence_library():
        model = meta_model(config, _encoder_class(config))
    if not model._can_set_attn_implementation():
        raise _unsupported(config, "its attention in transformers does not go through the attention interface")
    layers, positions = int(config.num_hidden_layers), getattr(config, "max_position_embeddings", context)
    return ModelSpec(
        name=str(config.model_type),
        implementation="transformers",
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        num_layers=layers,
        context_length=min(context, positions - _first_position(model)),
        kv_layers=(),
        dtype=dtype,
        device=device,
        parameters=sum(p.numel() for p in model.parameters()),
        state_layers=layers,
        num_heads=int(config.num_attention_heads),
        bidirectional="text",
        generates=False,
    )


def _unsupported(config: Any, reason: str) -> ModelError:
    return ModelError(f"The architecture {config.model_type} is not supported: {reason}. Use another model.")


def load_encoder(config: Any, spec: ModelSpec, folder: ModelFolder) -> EncoderModel:
    """Read the weights, install the attention, and compare the states with the library's own.

    Raises:
        ModelError: weights are missing or not read, or the states differ from the library's.
    """
    with silence_library(), torch.no_grad(), WeightReader(folder.tensors) as reader:
        # On a CPU products alone are computed in a short dtype: the sums between them cost little, and round most.
        dtype = torch.float32 if spec.device.type == "cpu" else spec.dtype
        weights = {name: LazyWeight(name, reader, dtype) for name in folder.tensors}
        model, info = library_model(_encoder_class(config), config, replace(spec, dtype=dtype), folder, weights)
        base, inner = f"{model.base_model_prefix}.", dict(model.named_children())
        unread = info.get("unexpected_keys") or ()
        left = [name for name in unread if name.removeprefix(base).partition(".")[0] in inner]  # others are of heads
        check_unread(folder, left, spec.num_layers)
        model = model.eval().to(spec.device)
        ids = [3 + torch.arange(n, device=spec.device) * 7919 % (spec.vocab_size - 3) for n in _PROBE]
        expected = torch.cat([model(input_ids=row[None]).last_hidden_state[0] for row in ids]).float()
        model.set_attn_implementation(ROWS_NAME)
        model.apply(lambda module: module.to(spec.dtype) if isinstance(module, nn.Linear) else module)
        stack_projections(model, spec.numbers.products, _PROJECTIONS, rounds=True)
        made = EncoderModel(model, spec)
        at = torch.cat([torch.arange(n, device=spec.device) for n in _PROBE])
        got = made.states(torch.cat(ids), at).float()
        worst = float(((got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)).max())
        if not worst <= TOLERANCE[spec.dtype]:
            raise _unsupported(config, f"with batchgen's attention its states differ by {worst:.1%}")
        return made


class EncoderModel:
    """`Model` of an encoder: it fills the states of the last layer, and its logits say nothing."""

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        self.spec = spec
        self.stream: LayerStream | None = None
        self.separator: int | None = None
        """Id of the token from which on tokens of a row have the second type; None: all have the first."""
        self._model, self._first, self._lengths = model, _first_position(model), list[list[int]]([[]])
        self._takes = inspect.signature(model.forward).parameters.keys()
        for module in model.modules():
            setattr(module, _SLOT, self._lengths)

    def states(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[T, H] states of whole rows, given their ids and positions [T] int64."""
        begins = torch.ones_like(positions, dtype=torch.bool)
        begins[1:] = positions[1:] != positions[:-1] + 1
        starts = begins.nonzero()[:, 0]
        bounds = [*starts.tolist(), len(ids)]
        self._lengths[0] = [end - start for start, end in pairwise(bounds)]
        more: dict[str, Tensor] = {}
        if "position_ids" in self._takes:
            more["position_ids"] = (positions + self._first)[None]
        if "token_type_ids" in self._takes:
            more["token_type_ids"] = self._types(ids, starts, begins)[None]
        states: Tensor = self._model(input_ids=ids[None], **more).last_hidden_state[0]
        return states

    def _types(self, ids: Tensor, starts: Tensor, begins: Tensor) -> Tensor:
        """[T] 1 for the tokens of a row behind its first separator, else 0."""
        if self.separator is None:
            return torch.zeros_like(ids)
        ends = (ids == self.separator).long()
        before = ends.cumsum(0) - ends
        return (before > before[starts][begins.cumsum(0) - 1]).long()

    @torch.no_grad()
    def hidden(self, inputs: ModelInput) -> Tensor:
        """See `Model.hidden`."""
        states = self.states(inputs.input_ids, inputs.positions)
        if inputs.capture is not None:
            for layer in inputs.capture.layers:
                inputs.capture.store(layer, states)
        return inputs.select(states)

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """[R, 1] zeros, so that the token that ends a row is drawn, which is discarded."""
        return hidden.new_zeros(len(hidden), 1)

    def accepts_embeds(self) -> bool:
        """False: a row is its ids."""
        return False

    def fit_positions(self, longest: int) -> None:
        """Nothing is chosen."""
