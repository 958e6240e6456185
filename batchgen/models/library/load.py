"""Loading of transformers models: checks on the meta device, then the weights, then a comparison on a few tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from batchgen.errors import ModelError, library_errors
from batchgen.kernels.device import device_for
from batchgen.kernels.lora import lora_step
from batchgen.kernels.ops import TORCH_OPS
from batchgen.kernels.ranks import ALONE, Ranks
from batchgen.kernels.stream import LayerStream, StreamPlan, in_lines, plan_stream
from batchgen.models.base import ModelSpec, windows_within
from batchgen.models.checkpoint.folder import ModelFolder, placed
from batchgen.models.checkpoint.stored_tensors import (
    check_library_tensors,
    check_unread,
    library_names,
    tower_test,
)
from batchgen.models.checkpoint.weights import LazyWeight, WeightReader
from batchgen.models.library.latent import store_latents
from batchgen.models.library.layers.experts import ExpertsSlot, install_experts
from batchgen.models.library.layers.fused_projections import stack_projections
from batchgen.models.library.load_test import Expected, library_logits
from batchgen.models.library.lora import check_visited, library_sites, wrap_adapted
from batchgen.models.library.media_config import media_traits
from batchgen.models.library.meta import (
    find_model_hooks,
    hook_model,
    meta_model,
    probe_chunk,
    probe_layers,
    text_class,
    use_our_attention,
)
from batchgen.models.library.model import HookedModel, TransformersModel, silence_library
from batchgen.models.library.module_discovery import block_bytes, block_parameters, decoder_blocks
from batchgen.models.library.parallel import Cut
from batchgen.models.library.probe import ProbeAttention
from batchgen.models.library.rope import LibraryRope
from batchgen.models.library.text import (
    causal_part,
    changed_class,
    decoder_config,
    is_unread,
    library_contexts,
    renamed_keys,
    text_decoder,
    text_runs_alone,
)
from batchgen.models.lora.config import Adapter
from batchgen.models.lora.fit import Sites, fit_adapters

_INDEXED: Final = "past it a learned index selects the keys of attention, which is not supported"
TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Tolerance of the relative difference of a token's logits: rounding, and routing near ties, may differ."""


def transformers_spec(
    config: Any,
    folder: ModelFolder,
    dtype: torch.dtype,
    device: torch.device,
    context: int,
    adapters: Sequence[Adapter] = (),
    ranks: Ranks = ALONE,
) -> ModelSpec:
    """Determine the spec of a model by a forward on the meta device, without reading weights or asking other ranks.

    Raises:
        ModelError: the architecture cannot run with batchgen's attention, the folder holds weights that the model does
            not read, or an adapter does not fit the model.
    """
    text = decoder_config(config)
    with silence_library():
        whole = meta_model(config, text_class(config))
        renamed = renamed_keys(whole, folder) if text_runs_alone(folder) else None
        check_library_tensors(whole, folder, int(text.num_hidden_layers), renamed, is_unread)
        cut = Cut(ranks, whole)
        model = causal_part(whole)
        limit = use_our_attention(model)
        sites = library_sites(model)
        fitted = fit_adapters(adapters, sites, tower_test(folder))
        cut.apply(model)
        cut.exchange(model, lambda x: x)
        store_latents(model)
        blocks = block_bytes(text_decoder(model), model, dtype.itemsize)
        longest, context = context, min(context, limit or context)
        uses, states, hooks = probe_layers(model, context)
    contexts, traits = library_contexts(text), media_traits(folder)
    return ModelSpec(
        name=str(config.model_type),
        implementation="transformers",
        vocab_size=int(text.vocab_size),
        hidden_size=int(text.hidden_size),
        num_layers=len(uses),
        context_length=context,
        context_reason=_INDEXED if context < longest else "",
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
        tiled_adapters=all(map(sites.is_tiled, fitted)) and not any(use.kv.latent for use in uses),
        unscaled_context=None if contexts is None else contexts.unscaled_of(context),
        rope_axes=traits.rope_axes,
        deepstack=traits.deepstack,
        bidirectional=traits.bidirectional,
        ranks=ranks,
        block_bytes=blocks,
    )


def load_transformers(
    config: Any, spec: ModelSpec, folder: ModelFolder, adapters: Sequence[Adapter] = ()
) -> TransformersModel:
    """Read the weights, install batchgen's attention, fuse projections, and compare logits with the library's.

    Raises:
        ModelError: weights are missing, or the logits differ from the library's.
    """
    with silence_library(), torch.no_grad():
        streams = spec.stream is not None and bool(spec.stream.blocks)
        home, stream = torch.device("cpu") if streams else spec.device, None
        cls = text_class(config)
        whole = meta_model(config, cls) if spec.ranks.count > 1 else None
        cut = Cut(spec.ranks, whole)
        model = causal_part(_read_weights(config, spec, folder, cls, cut, whole).to(home))
        cut.apply(model)
        rope = LibraryRope(model, spec.context_length)
        sites = library_sites(model if whole is None else causal_part(whole))
        handles = cut.exchange(model)
        expected = library_logits(model, replace(spec, device=home))
        for handle in handles:
            handle.remove()
        use_our_attention(model)
        store_latents(model)
        if spec.stream is None or not streams:
            stack_projections(model, spec.numbers.products)
        else:  # views of a slot cannot be stacked
            stream, expected = _stream_blocks(model, spec.stream, spec.device), expected.to(spec.device)
            spec = replace(spec, stream=spec.stream if stream is None else stream.plan)
        ids = expected.ids
        experts = install_experts(model)
        cut.exchange(model)
        probe = ProbeAttention()
        hooked = hook_model(model, probe_chunk(ids, 0, 1, probe), probe)
        hooks = find_model_hooks(hooked, probe_chunk(ids, 0, len(ids), ProbeAttention()))
        assert (len(hooks.blocks) or None, hooks.layers) == (spec.state_layers, spec.moe_layers), (
            "differs from the meta device"
        )
        loaded = _check_logits(hooked, spec, expected)
        loaded.stream = stream
        hooked.experts, hooked.rope = experts, rope
        if experts.layers and spec.device.type == "cuda":
            _check_experts(loaded, experts, expected)
        if adapters:
            _add_adapters(hooked, model, ids, fit_adapters(adapters, sites, tower_test(folder)), sites, cut)
        return loaded


def _stream_blocks(model: Any, plan: StreamPlan, device: torch.device) -> LayerStream | None:
    """Move a model that is on the host to the device, but for the parameters of the blocks that are streamed.

    Buffers of blocks stay on the device: they are small, and modules may write to them. Parameters may have other
    dtypes than `plan` counts, so that the same number of bytes is planned again for them.

    Returns:
        What copies the blocks, called by hooks; None: all fit.
    """
    decoder: Any = text_decoder(model)
    parameters, blocks = block_parameters(decoder, model), decoder_blocks(decoder)
    sizes = [sum(in_lines(own.nbytes) for own in block) for block in parameters]
    plan = plan_stream(sizes, plan.others, plan.device_bytes + max(0, sum(sizes) - sum(plan.blocks)))
    if not plan.streamed:
        model.to(device)
        return None
    stream = LayerStream(plan, device_for(device))
    for number in plan.streamed:
        own, parameters[number] = parameters[number], []  # a block's memory is freed before the next one is copied
        places = stream.move(number, (each.data for each in own))
        moved = {id(old): nn.Parameter(new, requires_grad=False) for old, new in zip(own, places, strict=True)}
        for module in blocks[number].modules():
            for name, each in module._parameters.items():
                module._parameters[name] = moved.get(id(each), each)
        blocks[number].register_forward_pre_hook(lambda *_, number=number: stream.enter(number))
        blocks[number].register_forward_hook(lambda *_, number=number: stream.leave(number))
    model.to(device)
    return stream


def _add_adapters(
    hooked: HookedModel, model: Any, ids: Tensor, adapters: Sequence[Adapter], sites: Sites, cut: Cut
) -> None:
    """Wrap the modules that adapters change; an adapter with layers that the forward does not run is rejected."""
    hooked.lora = wrap_adapted(model, adapters, sites, model.get_input_embeddings().weight.new_empty(0), cut)
    hooked.renew_head(model)
    for index, adapter in enumerate(adapters):
        whole = lora_step(np.full(len(ids), index), device_for(ids.device))
        inputs = replace(probe_chunk(ids, 0, len(ids), ProbeAttention()), lora=whole)
        check_visited(partial(hooked.hidden, inputs), hooked.lora, adapter, sites.head)


def _read_weights(config: Any, spec: ModelSpec, folder: ModelFolder, cls: Any, cut: Cut, whole: Any) -> Any:
    if (folder.path / "adapter_config.json").exists():
        raise ModelError(
            f"{folder.path} also holds an adapter (adapter_config.json), which transformers would apply to every "
            "row. Move the adapter to a separate folder, and name it with --lora."
        )
    with WeightReader(folder.tensors) as reader:
        alone = text_runs_alone(folder)
        built = whole or (meta_model(config, cls) if alone or reader.converts(spec.dtype) else None)
        renamed = renamed_keys(built, folder) if alone else None
        indexes = {} if whole is None else cut.stored(whole, folder, renamed)
        exact = () if built is None else {*built._keep_in_fp32_modules, *built._keep_in_fp32_modules_strict}
        kinds = {n: torch.float32 if any(part in n for part in exact) else spec.dtype for n in folder.tensors}
        weights = {name: LazyWeight(name, reader, kind, indexes.get(name, ((),))) for name, kind in kinds.items()}
        if whole is not None:
            cls = changed_class(cls, lambda model: cut.apply(causal_part(model), cut.read_in_part))
        model, info = library_model(cls, config, spec, folder, weights, renamed)
    others = [name for name in info.get("unexpected_keys") or () if not is_unread(name, model, folder)]
    layers = int(decoder_config(config).num_hidden_layers)
    spare = {*folder.spare, *(target for _, target, _ in library_names(model, folder.spare, renamed))}
    check_unread(folder, [name for name in others if name not in spare], layers)
    return model.eval()


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


def _check_logits(hooked: HookedModel, spec: ModelSpec, expected: Expected) -> TransformersModel:
    """Compare the logits with the library's; a decoder that counts by its cache gets the positions through one."""
    model = TransformersModel(hooked, spec)
    worst = expected.difference(model, TORCH_OPS)
    if worst <= TOLERANCE[spec.dtype]:
        return model
    with suppress(Exception):  # it may use a cache in other ways too
        hooked.counts_by_cache = True
        if expected.difference(model, TORCH_OPS) <= TOLERANCE[spec.dtype]:
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
    if not difference <= TOLERANCE[model.spec.dtype]:
        experts.use_library()
