"""Library models on the meta device: what their layers do with batchgen's attention, from forwards without weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from batchgen.errors import ModelError, first_line, library_errors
from batchgen.kernels.mixers.states import StateSize
from batchgen.kernels.types import LayerKV
from batchgen.models.base import ModelInput
from batchgen.models.library.latent import store_latents
from batchgen.models.library.layers.sparse import see_every_key
from batchgen.models.library.model import (
    ATTENTION_NAME,
    HookedModel,
    KeywordDropped,
    register_attention,
    silence_library,
)
from batchgen.models.library.module_discovery import ModelHooks
from batchgen.models.library.probe import LayerUse, ProbeAttention
from batchgen.models.library.recurrence import is_mixer
from batchgen.models.library.rope import freeze_rope
from batchgen.models.library.text import (
    causal_part,
    decoder_config,
    library_class,
    skipped_blocks,
    text_decoder,
    unread_modules,
    without_modules,
)

_TOKENS: Final = 4
_OWN_ATTENTION: Final = "its attention in transformers does not go through the attention interface"
_ATTENTION: Final = (
    "", "full_attention", "sliding_attention", "chunked_attention", "attention", "indexed_attention",
    "minimax_m3_sparse", "hybrid",
)  # fmt: skip
"""Types of layers whose attention is known."""
_STATELESS: Final = ("mlp", "moe")
"""Types of layers with neither attention nor states."""


def text_class(config: Any) -> Any:
    """The library's class of a configuration, without the modules that text does not run.

    Raises:
        ModelError: the library cannot build it, or it cannot run with batchgen's attention.
    """
    cls = library_class(config)
    if not config.sub_configs:
        if not cls._can_set_attn_implementation():
            raise _unsupported(config, _OWN_ATTENTION)
        return cls
    with silence_library():
        model = meta_model(config, cls)
        part = causal_part(model)
        use_our_attention(part)

        def run() -> None:
            hooked, inputs, _ = _run_empty(part)
            with torch.no_grad():
                hooked.logits(hooked.hidden(replace(inputs, attention=ProbeAttention())))

        return without_modules(cls, unread_modules(model, run))


def meta_model(config: Any, cls: Any) -> Any:
    """The library's model of a configuration on the meta device, without weights.

    Raises:
        ModelError: the library cannot build it.
    """
    with library_errors(f"transformers cannot build this {config.model_type} model"), torch.device("meta"):
        # Grouped expert products support only bfloat16 on this device; shapes are the same in any dtype.
        model = cls._from_config(copy.deepcopy(config), dtype=torch.bfloat16)
    freeze_rope(model)  # which would read positions
    return model.eval()


def use_our_attention(model: Any) -> int | None:
    """Let the text decoder of a causal part attend through batchgen's attention; returns `see_every_key` of it."""
    register_attention()
    decoder = text_decoder(model)
    if decoder is None:
        raise _unsupported(model.config, "it has no separate decoder")
    part = model if decoder.config is model.config else decoder
    if part._can_set_attn_implementation():
        part.set_attn_implementation(ATTENTION_NAME)
    if part.config._attn_implementation != ATTENTION_NAME:
        raise _unsupported(model.config, _OWN_ATTENTION)
    for module in (model, decoder):
        # Some forwards search every batch for padding, which would wait for the device. Some classes check assignments.
        vars(module.config)["pad_token_id"] = None
    return see_every_key(decoder)


def _run_empty(model: Any) -> tuple[HookedModel, ModelInput, ProbeAttention]:
    """Run a model on the meta device; returns it with what it was run on."""
    probe = ProbeAttention()
    inputs = probe_chunk(torch.zeros(_TOKENS, dtype=torch.int64, device="meta"), 0, _TOKENS, probe)
    try:
        return hook_model(model, inputs, probe), inputs, probe
    except NotImplementedError:
        # The forward reads values, such as the number of tokens per expert. Run it on uninitialised CPU tensors, whose
        # pages are never written and need no memory.
        probe = ProbeAttention()
        inputs = probe_chunk(torch.zeros(_TOKENS, dtype=torch.int64), 0, _TOKENS, probe)
        return hook_model(model.to_empty(device="cpu"), inputs, probe), inputs, probe


def probe_layers(model: Any, context: int) -> tuple[list[LayerUse], tuple[tuple[StateSize, ...], ...], ModelHooks]:
    """Record how each layer attends and keeps states, and find the modules to capture, by forwards without weights.

    Raises:
        ModelError: a layer computes what batchgen does not know.
    """
    hooked, inputs, probe = _run_empty(model)
    sizes = probe.states.sizes
    if any(0 in size.shape for layer in sizes.values() for size in layer):
        raise _unsupported(model.config, "a recurrent layer has a state of size 0")
    uses = _check_layers(text_decoder(model), context, probe)
    states = tuple(tuple(sizes.get(layer, ())) for layer in range(len(uses))) if sizes else ()
    return uses, states, find_model_hooks(hooked, inputs)


def find_model_hooks(hooked: HookedModel, inputs: ModelInput) -> ModelHooks:
    """Find the modules to capture by a forward over `inputs`."""
    with torch.no_grad():
        hooked.find_hooks(replace(inputs, attention=ProbeAttention()))
    return hooked.hooks


def hook_model(model: Any, inputs: ModelInput, probe: ProbeAttention) -> HookedModel:
    """Wrap the model, with attention passed by keyword or by slot, whichever works; runs `inputs` on `probe` once."""
    for use_slot in (False, True):
        hooked = HookedModel(model, use_slot=use_slot)
        probe.calls.clear()
        try:
            with torch.no_grad():
                hooked.hidden(inputs)
            layers = [layer for layer, _ in probe.calls]
            hooked.attends_again = len(set(layers)) < len(layers)
            return hooked
        except KeywordDropped:
            continue
        except (ModelError, NotImplementedError):
            raise
        except Exception as error:  # such a forward may raise anything
            if inputs.input_ids.is_meta and "meta tensors" in str(error):  # it reads values
                raise NotImplementedError(str(error)) from None
            raise _unsupported(model.config, f"it cannot run on packed tokens ({first_line(error)})") from error
    raise _unsupported(model.config, "its attention cannot be reached")


def check_config(config: Any) -> None:
    """Check that a model of a library configuration can run, as at loading, as far as that shows without weights.

    Raises:
        ModelError: the message names the computation that is missing.
    """
    with silence_library():
        model = causal_part(meta_model(config, text_class(config)))
        limit = use_our_attention(model)
        store_latents(model)
        longest = getattr(decoder_config(config), "max_position_embeddings", None)
        probe = _run_empty(model)[2]
        _check_layers(text_decoder(model), min(filter(None, (longest, limit)), default=_TOKENS), probe)


def _unsupported(config: Any, reason: str) -> ModelError:
    return ModelError(f"The architecture {config.model_type} is not supported: {reason}. Use another model.")


_NO_ATTENTION: Final = LayerUse(LayerKV(0, 0, 0), None, 0)


def _check_layers(decoder: Any, context: int, probe: ProbeAttention) -> list[LayerUse]:
    """Check that each layer attends or has states, with the window of the configuration; returns the layers in order.

    Where a module attends several times, each time is a layer.
    """
    calls, sizes = probe.calls, probe.states.sizes
    config, by_layer = decoder.config, dict(calls)
    layers = range(int(config.num_hidden_layers) - skipped_blocks(decoder))
    _check_states(decoder, sizes)
    if len(by_layer) < len(calls):
        if sizes:
            raise _unsupported(config, "a layer attends more than once, and others keep a recurrent state")
        _check_windows(config, context, by_layer)
        return [use for _, use in calls]
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or [""] * len(layers)
    for layer, kind in zip(layers, kinds, strict=False):
        known = kind in _ATTENTION if layer in by_layer else layer in sizes or kind in _STATELESS
        if not known:
            owners = [type(part).__name__ for part in decoder.modules() if _number(part) == layer]
            named = kind or (*owners, "unknown")[0]
            problem = f"it has layers of type {named} ({list(kinds).count(kind)} of {len(layers)})"
            raise _unsupported(config, f"{problem}, whose computation is not known here")
    _check_windows(config, context, by_layer)
    return [by_layer.get(layer, _NO_ATTENTION) for layer in layers]


def _check_states(decoder: Any, sizes: Mapping[int, Sequence[StateSize]]) -> None:
    for module in decoder.modules():
        if is_mixer(module) and _number(module) not in (None, *sizes):
            name = type(module).__name__
            raise _unsupported(decoder.config, f"its {name} keeps a recurrent state of a kind that is not known here")


def _number(module: Any) -> int | None:
    layer = getattr(module, "layer_idx", None)
    return layer if isinstance(layer, int) else None


def _check_windows(config: Any, context: int, uses: Mapping[int, LayerUse]) -> None:
    """Reject a model that applies its window by a mask only: batchgen's attention would ignore it."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not window or window >= context or not getattr(config, "use_sliding_window", True):
        return
    for layer, use in uses.items():
        slides = kinds[layer] == "sliding_attention" if kinds else any(other.window is None for other in uses.values())
        if slides and use.window != window:
            raise _unsupported(config, f"layer {layer} does not pass its window of {window} tokens to attention")


def probe_chunk(ids: Tensor, start: int, end: int, probe: ProbeAttention) -> ModelInput:
    """The step of the tokens from `start` to `end` of one sequence."""
    states = probe.states.on(ids.device, end - start)
    return ModelInput(ids[start:end], torch.arange(start, end, device=ids.device), probe, states=states)
