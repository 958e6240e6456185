"""Loading of transformers models: checks on the meta device, then the weights, then a comparison on a few tokens."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from batchgen.errors import ModelError
from batchgen.kernels.device import device_for
from batchgen.kernels.linear import Products
from batchgen.kernels.lora import lora_step
from batchgen.kernels.ops import TORCH_OPS, Ops
from batchgen.models.architectures import check_layer_types
from batchgen.models.base import ModelInput, ModelSpec
from batchgen.models.context import scaled_context
from batchgen.models.experts import ExpertsSlot, install_experts
from batchgen.models.folder import ModelFolder
from batchgen.models.fused_projections import stack_projections
from batchgen.models.hf import (
    ATTENTION_NAME,
    HookedModel,
    KeywordDropped,
    TransformersModel,
    decoder_name,
    register_attention,
)
from batchgen.models.lora import fit_library_adapters, wrap_adapted
from batchgen.models.lora_config import Adapter
from batchgen.models.module_discovery import ModelHooks
from batchgen.models.probe import LayerUse, ProbeAttention
from batchgen.models.stored_tensors import check_library_tensors, check_unread
from batchgen.models.weights import LazyWeight, WeightReader, copy_from_files

_TEST_TOKENS: Final = 7
_TEST_SPLIT: Final = 2
"""Tokens of the test's first of two chunks; splitting reveals state other than keys and values."""
_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Tolerance of the relative difference of a token's logits: rounding, and routing near ties, may differ."""


def read_transformers_config(folder: ModelFolder, context_length: int | None) -> tuple[Any, int]:
    """Read the library's configuration, made independent of the batch, and the context length.

    transformers selects the frequencies of `longrope` by the longest position in a batch; here the context length
    selects them once for all rows.

    Raises:
        ModelError: the library cannot read it, or the requested context is longer than the model's.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # configuration classes validate with errors of many types
        raise ModelError(f"transformers cannot read {folder.path / 'config.json'}: {_first_line(error)}.") from None
    _unset_quantisation(config)
    longest = _longest_context(config)
    if longest is None and context_length is None:
        raise ModelError(f"The configuration of {folder.path} names no context length. Give --max-model-len.")
    if context_length is not None and longest is not None and context_length > longest:
        raise ModelError(f"--max-model-len {context_length} is past the model's context of {longest}. Give less.")
    context = context_length or longest
    assert context is not None, "one of them is given"
    _check_rope(config)
    _fix_longrope(config, context)
    return config, context


def _unset_quantisation(config: Any) -> None:
    """Make it the configuration of the plain model: quantised weights are dequantised before the library has them."""
    for holder in (config, config.get_text_config()):
        if getattr(holder, "quantization_config", None) is not None:
            del holder.quantization_config


def _longest_context(config: Any) -> int | None:
    """The model's context length; None if its configuration names none."""
    longest: Any = getattr(config, "max_position_embeddings", None)
    settings = _rope_settings(config)
    if longest is None or len(settings) != 1:  # one per layer type: the longest is that of the configuration
        return None if longest is None else int(longest)
    original = getattr(config, "original_max_position_embeddings", None)
    return scaled_context(str(config.model_type), int(longest), settings[0], original)


def _rope_settings(config: Any) -> list[dict[str, Any]]:
    """Rope settings of the configuration: one dict, or one per layer type."""
    settings = getattr(config, "rope_parameters", None)
    if not isinstance(settings, dict):
        return []
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return nested or [settings]


def _check_rope(config: Any) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for settings in _rope_settings(config):
        kind = settings.get("rope_type", "default")
        if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
            known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
            raise ModelError(f"config.json: rope type {kind!r} is not supported. Supported: {known}.")


def _fix_longrope(config: Any, context: int) -> None:
    for settings in _rope_settings(config):
        original = settings.get("original_max_position_embeddings")
        if settings.get("rope_type") == "longrope" and original and context > original:
            settings["short_factor"] = settings["long_factor"]


def _first_line(error: Exception) -> str:
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:300].rstrip(".")


@contextlib.contextmanager
def _silence_library() -> Iterator[None]:
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
    register_attention()
    check_layer_types(str(config.model_type), getattr(config, "layer_types", None))
    with _silence_library():
        model = _meta_model(config)
        check_library_tensors(model, folder, int(config.num_hidden_layers))
        fit_library_adapters(model, adapters)
        uses, hooks = _probe_layers(model, config, context)
    return ModelSpec(
        name=str(config.model_type),
        implementation="transformers",
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
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
        num_heads=uses[0].num_heads if uses else 1,
        embedding_size=int(model.get_input_embeddings().weight.shape[1]),
    )


def _meta_model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    config = type(config).from_dict(config.to_dict())
    for settings in _rope_settings(config):
        if settings.get("rope_type") == "dynamic":
            settings["rope_type"] = "default"  # the same frequencies within the context, without reading positions
    try:
        with torch.device("meta"):
            # Grouped expert products support only bfloat16 on this device; shapes are the same in any dtype.
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    except Exception as error:  # constructors raise errors of many types
        raise ModelError(f"transformers cannot build this {config.model_type} model: {_first_line(error)}.") from None
    _use_our_attention(model)
    return model.eval()


def _drop_padding(model: Any) -> None:
    """Unset the padding id: some forwards search every batch for padding, which would wait for the device."""
    with contextlib.suppress(Exception):  # classes of strict configurations need one
        model.config.pad_token_id = None


def _use_our_attention(model: Any) -> None:
    if model._can_set_attn_implementation():
        model.set_attn_implementation(ATTENTION_NAME)
    if model.config._attn_implementation != ATTENTION_NAME:
        raise _unsupported(model.config, "its attention in transformers does not go through the attention interface")
    _drop_padding(model)
    if decoder_name(model) is None:
        raise _unsupported(model.config, "it has no separate decoder")


def _probe_layers(model: Any, config: Any, context: int) -> tuple[list[LayerUse], ModelHooks]:
    """Record how each layer calls its attention, and find the modules to capture, by forwards on the meta device."""
    probe = ProbeAttention()
    inputs = _chunk(torch.zeros(4, dtype=torch.int64, device="meta"), 0, 4, probe)
    try:
        hooked = _hook(model, inputs)
    except NotImplementedError:
        # The forward reads values, such as the number of tokens per expert. Run it on uninitialised CPU tensors, whose
        # pages are never written and need no memory.
        probe = ProbeAttention()
        inputs = _chunk(torch.zeros(4, dtype=torch.int64), 0, 4, probe)
        hooked = _hook(model.to_empty(device="cpu"), inputs)
    uses = _check_layers(config, context, probe.calls)
    return uses, _find_hooks(hooked, inputs)


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
            raise _unsupported(model.config, f"it cannot run on packed tokens ({_first_line(error)})") from None
    raise _unsupported(model.config, "its attention cannot be reached")


def _unsupported(config: Any, reason: str) -> ModelError:
    return ModelError(f"The architecture {config.model_type} is not supported: {reason}. Use another model.")


def _check_layers(config: Any, context: int, calls: list[tuple[int, LayerUse]]) -> list[LayerUse]:
    """Check that each layer attends once, with the window of the configuration; returns the layers in order."""
    counts = Counter(layer for layer, _ in calls)
    layers = int(config.num_hidden_layers)
    if set(counts) != set(range(layers)):
        raise _unsupported(config, f"only {len(counts)} of its {layers} layers attend to separate keys and values")
    if set(counts.values()) != {1}:
        raise _unsupported(config, "a layer attends more than once")
    uses = [use for _, use in sorted(calls, key=lambda call: call[0])]
    _check_windows(config, context, [use.window for use in uses])
    return uses


def _check_windows(config: Any, context: int, passed: list[int | None]) -> None:
    """Reject a model that applies its window by a mask only: batchgen's attention would ignore it."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if kinds and "chunked_attention" in kinds and (chunk is None or chunk < context):
        raise _unsupported(config, f"it attends in chunks of {chunk} tokens (--max-model-len {chunk} would do)")
    if not window or window >= context or not getattr(config, "use_sliding_window", True):
        return
    sliding = (
        [kind == "sliding_attention" for kind in kinds] if kinds else [any(w is None for w in passed)] * len(passed)
    )
    for layer, (slides, given) in enumerate(zip(sliding, passed, strict=False)):
        if slides and given != window:
            raise _unsupported(config, f"layer {layer} does not pass its window of {window} tokens to attention")


def load_transformers(
    config: Any,
    spec: ModelSpec,
    folder: ModelFolder,
    adapters: Sequence[Adapter] = (),
    products: Products = "measured",
) -> TransformersModel:
    """Read the weights, install batchgen's attention, fuse projections, and compare logits with the library's.

    Raises:
        ModelError: weights are missing, or the logits differ from the library's.
    """
    with _silence_library(), torch.no_grad():
        model = _read_weights(config, spec, folder)
        ids = (torch.arange(_TEST_TOKENS, device=spec.device) * 7919 + 13) % spec.vocab_size  # [7]
        expected = model(input_ids=ids[None], use_cache=False).logits[0].float()  # [7, V]
        _use_our_attention(model)
        stack_projections(model, products)
        experts = install_experts(model)
        hooked = _hook(model, _chunk(ids, 0, 1, ProbeAttention()))
        hooks = _find_hooks(hooked, _chunk(ids, 0, len(ids), ProbeAttention()))
        assert (len(hooks.blocks) or None, hooks.layers) == (spec.state_layers, spec.moe_layers), (
            "differs from the meta device"
        )
        found = _check_logits(TransformersModel(hooked, spec), ids, expected)
        hooked.experts = experts
        if experts.layers and spec.device.type == "cuda":
            _check_experts(found, experts, ids, expected)
        if adapters:
            hooked.lora = wrap_adapted(model, adapters, spec.dtype, spec.device)
            _check_adapters(hooked, ids, adapters)
        return found


def _check_adapters(model: HookedModel, ids: Tensor, adapters: Sequence[Adapter]) -> None:
    """Reject an adapter with layers that the model's forward does not run, or not on all tokens."""
    for index, adapter in enumerate(adapters):
        model.lora.visited = set()
        whole = lora_step(np.full(len(ids), index), device_for(ids.device))
        model.hidden(replace(_chunk(ids, 0, len(ids), ProbeAttention()), lora=whole))
        idle = sorted(set(adapter.layers) - model.lora.visited)
        if idle:
            raise adapter.error(f"the model's forward does not run {idle[0]}; merge the adapter into the model")
    model.lora.visited = None


def _read_weights(config: Any, spec: ModelSpec, folder: ModelFolder) -> Any:
    if (folder.path / "adapter_config.json").exists():
        raise ModelError(
            f"{folder.path} also holds an adapter (adapter_config.json), which transformers would apply to every "
            "row. Move the adapter to a separate folder, and name it with --lora."
        )
    quantised = folder.quantisation is not None
    with WeightReader(folder.tensors) as reader:
        weights = {name: LazyWeight(name, reader, spec.dtype) for name in folder.tensors} if quantised else None
        model = _from_pretrained(config, spec, folder, weights)
    if spec.device.type == "cpu" and not quantised:
        copy_from_files(model)
    return model.eval().to(spec.device)


def _from_pretrained(
    config: Any, spec: ModelSpec, folder: ModelFolder, weights: Mapping[str, LazyWeight] | None
) -> Any:
    """The library's model, with the weights of the folder or, if given, `weights`.

    Raises:
        ModelError: the library cannot load it, or weights are missing.
    """
    from transformers import AutoModelForCausalLM

    # The automatic class looks for files even if it is given weights.
    cls = AutoModelForCausalLM if weights is None else type(_meta_model(config))
    try:
        model, info = cls.from_pretrained(
            folder.path if weights is None else None,
            config=config,
            state_dict=weights,
            dtype=spec.dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are listed in the loading info
        )
    except Exception as error:  # loading raises errors of many types
        raise ModelError(f"transformers cannot load {folder.path}: {_first_line(error)}.") from None
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(problem):
            first = sorted(str(entry) for entry in info[problem])[0]
            raise ModelError(
                f"{folder.path} does not hold the weights that config.json calls for ({problem}: {first}). "
                "Copy the folder again, or check that config.json belongs to these weights."
            )
    check_unread(folder, info.get("unexpected_keys") or (), spec.num_layers)
    return model


def _chunk(ids: Tensor, start: int, end: int, probe: ProbeAttention) -> ModelInput:
    return ModelInput(ids[start:end], torch.arange(start, end, device=ids.device), probe)


def _check_logits(model: TransformersModel, ids: Tensor, expected: Tensor) -> TransformersModel:
    """Compare the logits [7, V] of two chunks with the library's; returns the model."""
    worst = _difference(model, ids, expected, TORCH_OPS)
    if not worst <= _TOLERANCE[model.spec.dtype]:
        raise ModelError(
            f"The architecture {model.spec.name} is not supported: with batchgen's attention its logits differ from "
            f"transformers' by {worst:.1%}. Use another model."
        )
    return model


def _check_experts(model: TransformersModel, experts: ExpertsSlot, ids: Tensor, expected: Tensor) -> None:
    """Let the library compute the experts if batchgen's kernels fail or their logits differ."""
    from batchgen.kernels.gpu.ops import TRITON_OPS  # imported only if there is a GPU

    try:
        difference = _difference(model, ids, expected, TRITON_OPS)
    except Exception:  # compiling or launching a kernel raises errors of many types
        difference = float("inf")
    if not difference <= _TOLERANCE[model.spec.dtype]:
        experts.use_library()


def _difference(model: TransformersModel, ids: Tensor, expected: Tensor, ops: Ops) -> float:
    """Relative difference of a token's logits: the maximum over tokens in float32, the median in lower precision."""
    probe = ProbeAttention()
    bounds = ((0, _TEST_SPLIT), (_TEST_SPLIT, len(ids)))
    chunks = [replace(_chunk(ids, *pair, probe), ops=ops) for pair in bounds]
    got = torch.cat([model.logits(model.hidden(chunk)) for chunk in chunks]).float()  # [7, V]
    error = (got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)  # [7]
    return float(error.median() if model.spec.dtype != torch.float32 else error.max())
