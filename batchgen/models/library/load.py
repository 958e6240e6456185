"""Loading of transformers models: checks on the meta device, then the weights, then a comparison on a few tokens."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from batchgen.errors import ModelError, first_line, library_errors
from batchgen.kernels.device import device_for
from batchgen.kernels.lora import lora_step
from batchgen.kernels.mixers.states import StateSize
from batchgen.kernels.ops import TORCH_OPS
from batchgen.kernels.types import LayerKV
from batchgen.models.architectures import check_layer_types
from batchgen.models.base import ModelInput, ModelSpec, windows_within
from batchgen.models.checkpoint.folder import ModelFolder, placed
from batchgen.models.checkpoint.stored_tensors import (
    check_library_tensors,
    check_unread,
    library_names,
    tower_test,
)
from batchgen.models.checkpoint.weights import LazyWeight, WeightReader
from batchgen.models.library.experts import ExpertsSlot, install_experts
from batchgen.models.library.fused_projections import stack_projections
from batchgen.models.library.latent import store_latents
from batchgen.models.library.load_test import Expected, library_logits
from batchgen.models.library.lora import check_visited, library_sites, wrap_adapted
from batchgen.models.library.media_config import media_traits
from batchgen.models.library.model import (
    ATTENTION_NAME,
    HookedModel,
    KeywordDropped,
    TransformersModel,
    register_attention,
    silence_library,
)
from batchgen.models.library.module_discovery import ModelHooks
from batchgen.models.library.probe import LayerUse, ProbeAttention
from batchgen.models.library.rope import LibraryRope, freeze_rope
from batchgen.models.library.text import (
    causal_part,
    decoder_config,
    is_unread,
    library_class,
    library_contexts,
    renamed_keys,
    skipped_blocks,
    text_decoder,
    text_runs_alone,
    unread_modules,
    without_modules,
)
from batchgen.models.lora.config import Adapter
from batchgen.models.lora.fit import Sites, fit_adapters

_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Tolerance of the relative difference of a token's logits: rounding, and routing near ties, may differ."""


def transformers_spec(
    config: Any,
    folder: ModelFolder,
    dtype: torch.dtype,
    device: torch.device,
    context: int,
    adapters: Sequence[Adapter] = (),
) -> ModelSpec:
    """Determine the spec of a model by a forward on the meta device, without reading weights.

    Raises:
        ModelError: the architecture cannot run with batchgen's attention, the folder holds weights that the model does
            not read, or an adapter does not fit the model.
    """
    text = decoder_config(config)
    check_layer_types(str(text.model_type), getattr(text, "layer_types", None))
    with silence_library():
        whole = meta_model(config, text_class(config))
        renamed = renamed_keys(whole, folder) if text_runs_alone(folder) else None
        check_library_tensors(whole, folder, int(text.num_hidden_layers), renamed, is_unread)
        model = causal_part(whole)
        _use_our_attention(model)
        sites = library_sites(model)
        fitted = fit_adapters(adapters, sites, tower_test(folder))
        store_latents(model)
        uses, states, hooks = _probe_layers(model, context)
    text, contexts = decoder_config(config), library_contexts(decoder_config(config))
    traits = media_traits(folder)
    return ModelSpec(
        name=str(config.model_type),
        implementation="transformers",
        vocab_size=int(text.vocab_size),
        hidden_size=int(text.hidden_size),
        num_layers=len(uses),
        context_length=context,
        kv_layers=tuple(use.kv for use in uses),
        dtype=dtype,
        device=device,
        parameters=sum(p.numel() for p in model.parameters()),
        state_layers=len(hooks.blocks) or None,
        moe_layers=hooks.layers,
        experts_per_token=hooks.experts_per_token,
        adapters=tuple(adapter.name for adapter in adapters),
        tower_adapters=tuple(adapter.towers for adapter in fitted),
        num_heads=max((use.num_heads for use in uses), default=1),
        states=states,
        windows=windows_within([use.window for use in uses], context),
        attention_chunk=next((use.window for use in uses if use.restarts), None),
        embedding_size=int(model.get_input_embeddings().weight.shape[1]),
        tied=getattr(model.get_output_embeddings(), "weight", None) is model.get_input_embeddings().weight,
        adapts_head=any(map(sites.changes_head, fitted)),
        plain_adapters=all(map(sites.is_plain, fitted)),
        unscaled_context=None if contexts is None else contexts.unscaled_of(context),
        rope_axes=traits.rope_axes,
        deepstack=traits.deepstack,
        bidirectional=traits.bidirectional,
    )


def text_class(config: Any) -> Any:
    """The library's class of a configuration, without the modules that text does not run.

    Raises:
        ModelError: the library cannot build it, or it cannot run with batchgen's attention.
    """
    cls = library_class(config)
    if not config.sub_configs:
        return cls
    with silence_library():
        model = meta_model(config, cls)
        part = causal_part(model)
        _use_our_attention(part)

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


def _use_our_attention(model: Any) -> None:
    """Let the text decoder of a causal part attend through batchgen's attention."""
    register_attention()
    decoder = text_decoder(model)
    if decoder is None:
        raise _unsupported(model.config, "it has no separate decoder")
    part = model if decoder.config is model.config else decoder
    if part._can_set_attn_implementation():
        part.set_attn_implementation(ATTENTION_NAME)
    if part.config._attn_implementation != ATTENTION_NAME:
        raise _unsupported(model.config, "its attention in transformers does not go through the attention interface")
    for module in (model, decoder):
        # Some forwards search every batch for padding, which would wait for the device. Some classes check assignments.
        vars(module.config)["pad_token_id"] = None


def _run_empty(model: Any) -> tuple[HookedModel, ModelInput, ProbeAttention]:
    """Run a model on the meta device; returns it with what it was run on."""
    probe = ProbeAttention()
    inputs = _chunk(torch.zeros(4, dtype=torch.int64, device="meta"), 0, 4, probe)
    try:
        return _hook(model, inputs), inputs, probe
    except NotImplementedError:
        # The forward reads values, such as the number of tokens per expert. Run it on uninitialised CPU tensors, whose
        # pages are never written and need no memory.
        probe = ProbeAttention()
        inputs = _chunk(torch.zeros(4, dtype=torch.int64), 0, 4, probe)
        return _hook(model.to_empty(device="cpu"), inputs), inputs, probe


def _probe_layers(model: Any, context: int) -> tuple[list[LayerUse], tuple[tuple[StateSize, ...], ...], ModelHooks]:
    """Record how each layer calls its attention, and find the modules to capture, by forwards on the meta device."""
    hooked, inputs, probe = _run_empty(model)
    decoder = text_decoder(model)
    sizes = probe.states.sizes
    if any(0 in size.shape for layer in sizes.values() for size in layer):
        raise _unsupported(decoder.config, "a recurrent layer has a state of size 0")
    uses = _check_layers(decoder.config, context, probe.calls, skipped_blocks(decoder), bool(sizes))
    states = tuple(tuple(sizes.get(layer, ())) for layer in range(len(uses))) if sizes else ()
    return uses, states, _find_hooks(hooked, inputs)


def _find_hooks(hooked: HookedModel, inputs: ModelInput) -> ModelHooks:
    with torch.no_grad():
        hooked.find_hooks(replace(inputs, attention=ProbeAttention()))
    return hooked.hooks


def _hook(model: Any, inputs: ModelInput) -> HookedModel:
    """Wrap the model, with attention passed by keyword or by slot, whichever works; runs `inputs` once."""
    for use_slot in (False, True):
        hooked = HookedModel(model, use_slot=use_slot)
        try:
            with torch.no_grad():
                hooked.hidden(inputs)
            return hooked
        except KeywordDropped:
            continue
        except (ModelError, NotImplementedError):
            raise
        except Exception as error:  # such a forward may raise anything
            if inputs.input_ids.is_meta and "meta tensors" in str(error):  # it reads values
                raise NotImplementedError(str(error)) from None
            raise _unsupported(model.config, f"it cannot run on packed tokens ({first_line(error)})") from None
    raise _unsupported(model.config, "its attention cannot be reached")


def _unsupported(config: Any, reason: str) -> ModelError:
    return ModelError(f"The architecture {config.model_type} is not supported: {reason}. Use another model.")


_NO_ATTENTION: Final = LayerUse(LayerKV(0, 0, 0), None, 0)


def _check_layers(
    config: Any, context: int, calls: list[tuple[int, LayerUse]], skipped: int, hybrid: bool
) -> list[LayerUse]:
    """Check that each layer attends once, with the window of the configuration; returns the layers in order.

    In a `hybrid` model layers may have states instead, or neither.
    """
    counts = Counter(layer for layer, _ in calls)
    layers = int(config.num_hidden_layers) - skipped
    if set(counts) != set(range(layers)) and not hybrid:
        raise _unsupported(config, f"only {len(counts)} of its {layers} layers attend to separate keys and values")
    if set(counts.values()) - {1}:
        raise _unsupported(config, "a layer attends more than once")
    by_layer = dict(calls)
    uses = [by_layer.get(layer, _NO_ATTENTION) for layer in range(layers)]
    _check_windows(config, context, [use.window for use in uses])
    return uses


def _check_windows(config: Any, context: int, passed: list[int | None]) -> None:
    """Reject a model that applies its window by a mask only: batchgen's attention would ignore it."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not window or window >= context or not getattr(config, "use_sliding_window", True):
        return
    sliding = (
        [kind == "sliding_attention" for kind in kinds] if kinds else [any(w is None for w in passed)] * len(passed)
    )
    for layer, (slides, own) in enumerate(zip(sliding, passed, strict=False)):
        if slides and own != window:
            raise _unsupported(config, f"layer {layer} does not pass its window of {window} tokens to attention")


def load_transformers(
    config: Any, spec: ModelSpec, folder: ModelFolder, adapters: Sequence[Adapter] = ()
) -> TransformersModel:
    """Read the weights, install batchgen's attention, fuse projections, and compare logits with the library's.

    Raises:
        ModelError: weights are missing, or the logits differ from the library's.
    """
    with silence_library(), torch.no_grad():
        model = causal_part(_read_weights(config, spec, folder, text_class(config)))
        rope, sites = LibraryRope(model, spec.context_length), library_sites(model)
        expected = library_logits(model, spec.vocab_size, spec.context_length, spec.num_layers, spec.device)
        ids = expected.ids
        _use_our_attention(model)
        store_latents(model)
        stack_projections(model, spec.numbers.products)
        experts = install_experts(model)
        hooked = _hook(model, _chunk(ids, 0, 1, ProbeAttention()))
        hooks = _find_hooks(hooked, _chunk(ids, 0, len(ids), ProbeAttention()))
        assert (len(hooks.blocks) or None, hooks.layers) == (spec.state_layers, spec.moe_layers), (
            "differs from the meta device"
        )
        loaded = _check_logits(hooked, spec, expected)
        hooked.experts, hooked.rope = experts, rope
        if experts.layers and spec.device.type == "cuda":
            _check_experts(loaded, experts, expected)
        if adapters:
            _add_adapters(hooked, model, ids, fit_adapters(adapters, sites, tower_test(folder)), sites)
        return loaded


def _add_adapters(hooked: HookedModel, model: Any, ids: Tensor, adapters: Sequence[Adapter], sites: Sites) -> None:
    """Wrap the modules that adapters change; an adapter with layers that the forward does not run is rejected."""
    hooked.lora = wrap_adapted(model, adapters, sites, model.get_input_embeddings().weight.new_empty(0))
    hooked.renew_head(model)
    for index, adapter in enumerate(adapters):
        whole = lora_step(np.full(len(ids), index), device_for(ids.device))
        inputs = replace(_chunk(ids, 0, len(ids), ProbeAttention()), lora=whole)
        check_visited(partial(hooked.hidden, inputs), hooked.lora, adapter, sites.head)


def _read_weights(config: Any, spec: ModelSpec, folder: ModelFolder, cls: Any) -> Any:
    if (folder.path / "adapter_config.json").exists():
        raise ModelError(
            f"{folder.path} also holds an adapter (adapter_config.json), which transformers would apply to every "
            "row. Move the adapter to a separate folder, and name it with --lora."
        )
    with WeightReader(folder.tensors) as reader:
        alone = text_runs_alone(folder)
        built = meta_model(config, cls) if alone or reader.converts(spec.dtype) else None
        renamed = renamed_keys(built, folder) if alone else None
        exact = () if built is None else {*built._keep_in_fp32_modules, *built._keep_in_fp32_modules_strict}
        weights = {
            name: LazyWeight(name, reader, torch.float32 if any(part in name for part in exact) else spec.dtype)
            for name in folder.tensors
        }
        model, info = library_model(cls, config, spec, folder, weights, renamed)
    others = [name for name in info.get("unexpected_keys") or () if not is_unread(name, model, folder)]
    layers = int(decoder_config(config).num_hidden_layers)
    spare = {*folder.spare, *(target for _, target, _ in library_names(model, folder.spare, renamed))}
    check_unread(folder, [name for name in others if name not in spare], layers)
    return model.eval().to(spec.device)


def library_model(
    cls: Any,
    config: Any,
    spec: ModelSpec,
    folder: ModelFolder,
    weights: Mapping[str, LazyWeight],
    renamed: dict[str, str] | None = None,
    part: str = "",
) -> tuple[Any, Mapping[str, Any]]:
    """The library's model with `weights`, and its loading info.

    They are read into memory of the process: a change of a mapped file would change the model in the middle of a job,
    and a shorter file would end the process. `part`: what of the checkpoint it is, for messages; "": all that runs.

    Raises:
        ModelError: the library cannot load it, or weights are missing.
    """
    named, own = (f"the {part} of ", f"of the {part} ") if part else ("", "")
    with library_errors(f"transformers cannot load {named}{folder.path}"):
        model, info = cls.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            key_mapping=renamed,
            dtype=spec.dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are listed in the loading info
        )
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(problem):
            first = sorted(str(entry) for entry in info[problem])[0]
            raise ModelError(
                f"{folder.path} does not hold the weights {own}that config.json calls for "
                f"({problem}: {first}{placed(first, folder.absent)}). Copy the folder again, or check that "
                "config.json belongs to these weights."
            )
    return model, info


def _chunk(ids: Tensor, start: int, end: int, probe: ProbeAttention) -> ModelInput:
    states = probe.states.on(ids.device, end - start)
    return ModelInput(ids[start:end], torch.arange(start, end, device=ids.device), probe, states=states)


def _check_logits(hooked: HookedModel, spec: ModelSpec, expected: Expected) -> TransformersModel:
    """Compare the logits with the library's; a decoder that counts by its cache gets the positions through one."""
    model = TransformersModel(hooked, spec)
    worst = expected.difference(model, TORCH_OPS)
    if worst <= _TOLERANCE[spec.dtype]:
        return model
    with suppress(Exception):  # it may use a cache in other ways too
        hooked.counts_by_cache = True
        if expected.difference(model, TORCH_OPS) <= _TOLERANCE[spec.dtype]:
            return model
    raise ModelError(
        f"The architecture {spec.name} is not supported: with batchgen's attention its logits differ from "
        f"transformers' by {worst:.1%}. Use another model."
    )


def _check_experts(model: TransformersModel, experts: ExpertsSlot, expected: Expected) -> None:
    """Let the library compute the experts if batchgen's kernels fail or their logits differ."""
    from batchgen.kernels.gpu.ops import TRITON_OPS  # imported only if there is a GPU

    try:
        difference = expected.difference(model, TRITON_OPS)
    except Exception:  # compiling or launching a kernel raises errors of many types
        difference = float("inf")
    if not difference <= _TOLERANCE[model.spec.dtype]:
        experts.use_library()
