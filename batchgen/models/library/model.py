"""Unmodified causal language models of transformers that run with batchgen's attention.

transformers looks up attention functions in a registry. batchgen's is registered once as `batchgen` and gets the step's
`Attention` as a keyword that forwards pass down, or from a slot of the model if its forwards drop keywords. No mask is
built, and the library's cache is not used.

The model's own forward computes the logits, with its decoder replaced, so that soft caps and scales are applied.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from batchgen.errors import ModelError
from batchgen.kernels.stream import LayerStream
from batchgen.kernels.types import Attention, AttentionArgs
from batchgen.models.base import ModelInput, ModelSpec, TokenEmbeds
from batchgen.models.library.latent import absorbed_projection
from batchgen.models.library.layers.experts import ExpertsSlot
from batchgen.models.library.layers.sparse import NO_MASK
from batchgen.models.library.load_test import cache_keyword
from batchgen.models.library.lora import LoraSlot
from batchgen.models.library.module_discovery import ModelHooks, find_hooks
from batchgen.models.library.probe import ProbeAttention
from batchgen.models.library.recurrence import install_recurrence, number_layers, recurrence
from batchgen.models.library.rope import LibraryRope
from batchgen.models.library.text import decoder_name, feature_blocks, text_decoder

ATTENTION_NAME: Final = "batchgen"
_KEYWORD: Final = "batchgen_attention"
_SLOT: Final = "batchgen_slot"
_IGNORED_ARGUMENTS: Final = frozenset((
    "dropout", "is_causal", "position_ids", "use_cache", "cache_position", "return_dict", "logits_to_keep",
    "output_attentions", "output_hidden_states", "output_router_logits", "layer_idx", "cu_seq_lens_q",
    "cu_seq_lens_k", "max_length_q", "max_length_k", "training", "deterministic",
))  # fmt: skip
"""Attention arguments that have no effect on packed causal tokens in inference."""


_CAUSAL_FULL_LAYERS: Final = frozenset(("gemma4_text", "gemma4_unified_text"))
"""Types of text decoders whose features see one another in layers with a window alone."""


class KeywordDropped(Exception):
    """The model's forwards do not pass keywords down to attention."""


class AttentionSlot:
    """The step's `Attention` for the attention modules of one model that keywords do not reach."""

    __slots__ = ("attention",)

    def __init__(self) -> None:
        self.attention: Attention | None = None


def register_attention() -> None:
    """Register batchgen's attention with the library; repeated calls have no effect."""
    from transformers import AttentionInterface  # transformers takes seconds to import

    AttentionInterface.register(ATTENTION_NAME, _attend)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention with the library's signature: [1, N, T, D], [1, K, T, D], [1, K, T, Dv] -> [1, T, N, Dv]."""
    attention = others.pop(_KEYWORD, None)
    if attention is None:
        slot = getattr(module, _SLOT, None)
        attention = None if slot is None else slot.attention
    if attention is None:
        raise KeywordDropped
    if attention_mask is not None and attention_mask is not NO_MASK:
        raise ModelError(f"{type(module).__name__} passes its own mask to attention, which is not supported.")
    config = getattr(module, "config", None)
    if getattr(config, "is_decoder", True) is False and getattr(module, "is_causal", True) is False:
        raise ModelError(f"{type(module).__name__} sees later tokens too, as an encoder does, which is not supported.")
    unsupported = [name for name, argument in others.items() if argument is not None and name not in _IGNORED_ARGUMENTS]
    if unsupported:
        raise ModelError(f"{type(module).__name__} passes {unsupported[0]} to attention, which is not supported.")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelError(f"{type(module).__name__} has no layer index, so it cannot have a cache.")
    absorbed = absorbed_projection(module)
    heads, size = (key.shape[1], key.shape[-1]) if absorbed is None else (absorbed.heads, absorbed.key_dim)
    groups = getattr(module, "num_key_value_groups", None)
    if groups is not None and (heads * groups, size) != (query.shape[1], query.shape[-1]):
        raise ModelError(
            f"{type(module).__name__} has {query.shape[1]} query heads of size {query.shape[-1]} for {heads} "
            f"key heads of size {size}, {groups} per key head, which do not fit. Check config.json."
        )
    q = query[0].transpose(0, 1)  # [T, N, D]
    chunk = _attention_chunk(module, layer)
    kind = getattr(config, "model_type", None)
    out = attention.attend(
        layer,
        q if absorbed is None else absorbed.fold_query(q),
        key[0].transpose(0, 1),  # [T, K, D]
        value[0].transpose(0, 1),  # [T, K, Dv]
        AttentionArgs(
            scale=size**-0.5 if scaling is None else float(scaling),
            window=chunk or sliding_window or None,
            restarts=chunk is not None,
            softcap=softcap or None,
            sinks=s_aux,
            latent=absorbed is not None,
            runs=bool(sliding_window) or kind not in _CAUSAL_FULL_LAYERS,
        ),
    )  # [T, N, Dv]
    if absorbed is not None:
        out = absorbed.expand_result(out)
    return out.contiguous()[None], None


def _attention_chunk(module: nn.Module, layer: int) -> int | None:
    """Positions at whose multiples a layer's attention begins again; None: it does not."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    return config.attention_chunk_size if config and kinds and kinds[layer] == "chunked_attention" else None


class _Numbered:
    """A step's `Attention` whose layers are the calls of a forward in order, whatever the modules' numbers are."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self._calls = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        """See `Attention.attend`."""
        self._calls += 1
        return self._attention.attend(self._calls - 1, query, key, value, args)


class _Positions:
    """Replacement for the library's cache: it stores nothing, and says of each token how many came before its step.

    Some modules count positions from the shape of a step and the length of the cache, whatever `position_ids` are.
    """

    def __init__(self, positions: Tensor) -> None:
        self._before = positions - torch.arange(len(positions), device=positions.device)  # [T]

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """[T], which is added to the tokens' numbers in the step."""
        return self._before

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The step's own keys and values: earlier ones are in the pages."""
        return key, value


class _DecoderOutput:
    """Output of `_IdentityDecoder`: the states, by name or as the first item; every other attribute is None."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _IdentityDecoder(nn.Module):
    """Replacement of a decoder that returns the states passed to it as embeddings; its attributes are the decoder's."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self._replaced = (replaced,)  # not a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._replaced[0], name)

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _DecoderOutput:
        """The states; all other arguments are ignored."""
        return _DecoderOutput(inputs_embeds)

    @property
    def decoder(self) -> nn.Module:
        """The module itself, for heads that access `model.decoder`."""
        return self


class HookedModel:
    """A transformers model that uses batchgen's attention: packed tokens in, states and logits out.

    The step's `Attention` is passed as a keyword, or through a slot if `use_slot` is set. Adapted modules read the
    step's segments from `lora`, expert layers the step's operations from `experts`.
    """

    def __init__(self, model: Any, *, use_slot: bool) -> None:
        name = decoder_name(model)
        assert name is not None
        self._decoder: Any = text_decoder(model)
        self._decoder_name = name
        self._head: Any = _head_only(model, name)
        self.hooks = ModelHooks(())
        """Modules whose states and choices can be captured; set by `find_hooks`."""
        self._slot = AttentionSlot() if use_slot else None
        self._cache_name = cache_keyword(self._decoder)
        self._feature_blocks = feature_blocks(model.config)
        self.counts_by_cache = False
        """Whether forwards get the positions through a cache too; for decoders that count by its length."""
        self.attends_again = False
        """Whether a module attends several times in a forward, as in loops over blocks: each call is a layer."""
        self.lora = LoraSlot()
        self.experts = ExpertsSlot()
        number_layers(self._decoder)
        install_recurrence(self._decoder)
        self.rope: LibraryRope | None = None
        """Frequencies that depend on the longest row."""
        for module in model.modules() if use_slot else ():
            if hasattr(module, "layer_idx"):
                setattr(module, _SLOT, self._slot)

    def find_hooks(self, inputs: ModelInput) -> None:
        """Find the modules that can be captured, by one forward over `inputs`."""
        run = partial(self._forward, inputs, output_hidden_states=True)
        self.hooks = find_hooks(self._decoder, run, len(inputs.input_ids))

    def hidden(self, inputs: ModelInput) -> Tensor:
        """States after the final norm, [T, H]; fills `inputs.capture`."""
        capture = inputs.capture
        with nullcontext() if capture is None else self.hooks.captured(capture):
            states: Tensor = self._forward(inputs).last_hidden_state[0]  # [T, H]
        if capture is not None and -1 in capture.layers:
            capture.store(-1, states)
        return states

    def _forward(self, inputs: ModelInput, **options: bool) -> Any:
        """Run the decoder; returns the library's output."""
        attention = _Numbered(inputs.attention) if self.attends_again else inputs.attention
        keyword: dict[str, Any] = {} if self._slot is not None else {_KEYWORD: attention}
        # [1, T], or [A, 1, T] on several axes
        at = inputs.positions[None] if inputs.rope_positions is None else inputs.rope_positions[:, None]
        if self.counts_by_cache and self._cache_name is not None:
            keyword[self._cache_name] = _Positions(inputs.positions)
        if self._slot is not None:
            self._slot.attention = attention
        try:
            with (
                self.lora.step_context(inputs.lora, len(inputs.input_ids), inputs.ops),
                self.experts.step_context(inputs.ops),
                recurrence(inputs.states, inputs.ops),
            ):
                return self._decoder(**self._tokens(inputs), position_ids=at, use_cache=False, **options, **keyword)
        finally:
            if self._slot is not None:
                self._slot.attention = None

    def _tokens(self, inputs: ModelInput) -> dict[str, Any]:
        """The step's tokens as ids [1, T], or as embeddings [1, T, E] if some are given as embeddings.

        With them goes what some decoders read in addition: vectors of each block that they look up by ids, and
        the parts of features that they add to the results of their first blocks.
        """
        embeds, ids = inputs.embeds, inputs.input_ids[None]
        if embeds is None:
            return {"input_ids": ids}
        embedding, ids = self._decoder.get_input_embeddings(), ids.clone()
        ids[0, embeds.rows] = getattr(embedding, "padding_idx", None) or 0  # the vocabulary may lack theirs
        looked_up = embedding(ids)  # [1, T, E]
        values = embeds.values.to(looked_up.dtype)
        size = looked_up.shape[2]
        looked_up[0, embeds.rows] = values[:, :size]
        arguments: dict[str, Any] = {"inputs_embeds": looked_up}
        if self.reads_ids_by_block:
            arguments["per_layer_inputs"] = self._decoder.get_per_layer_inputs(ids)
        if values.shape[1] > size:
            mask = torch.zeros_like(ids, dtype=torch.bool)
            mask[0, embeds.rows] = True
            order = embeds.rows.argsort()  # the decoder takes them in the order of their tokens
            levels = torch.split(values[order, size:], size, dim=1)
            if self._feature_blocks:
                arguments["vision_mask"] = mask[..., None]
                arguments["deepstack_features"] = dict(zip(self._feature_blocks, levels, strict=True))
            else:
                arguments["visual_pos_masks"], arguments["deepstack_visual_embeds"] = mask, list(levels)
        return arguments

    @property
    def reads_ids_by_block(self) -> bool:
        """Whether blocks look up further vectors by the ids, which an embedding does not replace."""
        config = self._decoder.config
        return hasattr(self._decoder, "get_per_layer_inputs") and bool(config.hidden_size_per_layer_input)

    def renew_head(self, model: Any) -> None:
        """Take over a changed head of the model."""
        self._head = _head_only(model, self._decoder_name)

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """[R, H] -> [R, V] in the model's dtype."""
        self.lora.head = adapters
        out: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]  # [R, V]
        self.lora.head = None
        return out


class TransformersModel:
    """`Model` of the transformers path, created by `load_transformers`."""

    def __init__(self, model: HookedModel, spec: ModelSpec) -> None:
        self.stream: LayerStream | None = None
        self._model = model
        self.spec = spec

    @property
    def library_experts(self) -> list[str]:
        """Expert layers that the library computes in groups, whose sizes depend on the batch."""
        return self._model.experts.library_layers

    @torch.no_grad()
    def hidden(self, inputs: ModelInput) -> Tensor:
        """See `Model.hidden`."""
        return inputs.select(self._model.hidden(inputs))

    @torch.no_grad()
    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """See `Model.logits`."""
        return self._model.logits(hidden, adapters)

    def fit_positions(self, longest: int) -> None:
        """See `Model.fit_positions`."""
        if self._model.rope is not None:
            self._model.rope.fit(longest)

    @torch.no_grad()
    def accepts_embeds(self) -> bool:
        """Whether tokens may be given as arbitrary embeddings; some architectures read the ids a second time."""
        spec = self.spec
        if self._model.reads_ids_by_block:
            return False
        at = torch.arange(2, device=spec.device)
        values = torch.full((2, spec.embeds_size), 0.01, device=spec.device)
        try:
            probe = ProbeAttention()
            states = probe.states.on(spec.device, len(at))
            self._model.hidden(ModelInput(at, at, probe, embeds=TokenEmbeds(at, values), states=states))
        except Exception:  # a forward that needs the ids may raise anything
            return False
        return True


def _head_only(model: Any, decoder: str) -> Any:
    """A copy of the model that shares every parameter, with its decoder replaced by `_IdentityDecoder`."""
    head = copy.copy(model)
    head._modules = dict(model._modules)
    head._modules[decoder] = _IdentityDecoder(getattr(model, decoder))
    return head


@contextmanager
def silence_library() -> Iterator[None]:
    """Silence the library's warnings and progress bars; relevant problems are raised as errors."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
