"""Chooses a job's kernel backend from the options, the model and the workload."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from batchgen.config.engine_config import EngineConfig
from batchgen.engine.workload import JobWorkload
from batchgen.errors import UsageError
from batchgen.kernels.backend import (
    AttentionNeeds,
    Backend,
    BackendUnavailable,
    capability_of,
    choose_backend,
    refuse_deterministic,
)
from batchgen.kernels.chips import chip_tuning
from batchgen.kernels.cpu.command_buffer import CommandBuffers
from batchgen.kernels.measure import TypicalStep
from batchgen.kernels.vocab_parallel import vocab_parallel_ops
from batchgen.models.base import ModelSpec
from batchgen.plan.config import GROUP_MIN_SAVING


def fixed_kernels(config: EngineConfig, spec: ModelSpec) -> Backend | None:
    """The backend if it does not depend on the workload; None on a GPU, where candidates are measured on it.

    Raises:
        UsageError: the kernels of `--attention` cannot run here, or the file of `--flash-library` does not exist.
    """
    if config.flash_library is not None and not Path(config.flash_library).exists():
        raise UsageError(f"`--flash-library {config.flash_library}`: there is no such file or folder")
    refuse_kv_dtype(config, spec)
    needs = _needs(config, spec)
    if config.attention == "auto" and needs.capability is not None and not config.deterministic:
        return None
    try:
        named = choose_backend(config.attention, needs)
        measured = needs.capability is not None and named.name != "torch" and not config.deterministic
        return None if measured else named
    except BackendUnavailable as problem:
        raise _refusal(config, problem) from None


def refuse_kv_dtype(config: EngineConfig, spec: ModelSpec) -> None:
    """Reject a dtype of keys and values that no kernel reads here.

    Raises:
        UsageError: with the reason.
    """
    if config.kv_dtype == "auto":
        return
    reason = None
    if spec.device.type == "cpu" and config.attention != "triton":
        reason = "it needs a GPU"
    elif config.attention == "flash":
        reason = "flash attention reads keys and values in the dtype of the run"
    elif any(layer.latent for layer in spec.kv_layers):
        reason = f"a {spec.name} model stores latents (MLA), which are not rounded to eight bits"
    if reason is not None:
        raise UsageError(f"`--kv-dtype {config.kv_dtype}` is not supported: {reason}; leave the option out")


def refuse_anywhere(config: EngineConfig) -> None:
    """Reject options that no GPU supports, for a job that is checked on a machine without one.

    Raises:
        UsageError: as `fixed_kernels`.
    """
    if config.quantization == "int8":
        raise UsageError(f"`--quantization {config.quantization}` needs a CPU; leave the option out")
    try:
        if config.deterministic:
            refuse_deterministic(config.attention, on_gpu=True)
    except BackendUnavailable as problem:
        raise _refusal(config, problem) from None


def _refusal(config: EngineConfig, problem: BackendUnavailable) -> UsageError:
    remedy = problem.remedy or "leave the option out to use the best available kernels"
    return UsageError(f"`--attention {config.attention}` cannot run here: {problem}; {remedy}")


def kernels_for(config: EngineConfig, spec: ModelSpec, workload: JobWorkload, rows: int, tokens: int) -> Backend:
    """The backend for a workload with at most `rows` sequences and `tokens` tokens in a step.

    Raises:
        UsageError: as `fixed_kernels`.
    """
    fixed = fixed_kernels(config, spec)
    if fixed is not None:
        return fixed
    return choose_backend(config.attention, _needs(config, spec), typical_step(config, spec, workload, rows, tokens))


def of_ranks(backend: Backend, spec: ModelSpec) -> Backend:
    """The backend for one of the model's ranks: with a part of the logits, and no commands that run without others."""
    if spec.ranks.count == 1:
        return backend
    executors = tuple(each for each in backend.executors if not isinstance(each, CommandBuffers))
    return replace(backend, ops=vocab_parallel_ops(backend.ops, spec.ranks, spec.vocab_size), executors=executors)


def _needs(config: EngineConfig, spec: ModelSpec) -> AttentionNeeds:
    return AttentionNeeds(
        device=spec.device,
        capability=capability_of(spec.device),
        layers=spec.attention_layers,
        heads=spec.num_heads,
        dtype=spec.dtype,
        page_size=config.page_size,
        flash_library=config.flash_library,
        deterministic=config.deterministic,
        native=spec.implementation == "native",
        cache_dtype=spec.cache_dtype,
    )


def typical_step(
    config: EngineConfig, spec: ModelSpec, workload: JobWorkload, rows: int, tokens: int
) -> TypicalStep | None:
    """The attention work of an average step; None if the workload is empty or the model has no KV cache.

    Decode rows are at half their output and share a prefix group of average length; prompt tokens are spread evenly
    over the steps.
    """
    samples = workload.samples.astype(np.int64)
    count = int(samples.sum())
    if not count or not spec.attention_layers:
        return None
    tree, max_tokens = workload.tree, workload.max_tokens
    ends = tree.end[tree.node_of_request]
    # Samples of one prompt share all of it; a single sample shares what is above its own node.
    shared = np.where(samples > 1, ends, tree.start[tree.node_of_request])
    rows = min(rows, count)
    steps = max(1, int((samples * max_tokens).sum()) // rows)
    return TypicalStep(
        layer=spec.attention_layers[0],
        heads=spec.num_heads,
        dtype=spec.dtype,
        cache_dtype=spec.cache_dtype,
        page_size=config.page_size,
        device=spec.device,
        rows=rows,
        context=int(np.average(ends + max_tokens // 2, weights=samples)) + 1,
        shared=int(np.average(shared, weights=samples)) if count > 1 else 0,
        chunk=max(0, min(tree.distinct_tokens // steps, tokens - rows)),
    )


def group_min_saving(device: torch.device, backend: Backend | None = None) -> int:
    """Least number of cached tokens whose reads a prefix group must save per step.

    On a GPU from the chip's tuning; on a CPU measured once per process if the backend supports it; else a constant.
    """
    if device.type == "cuda":
        return chip_tuning(device).prefix_pass_tokens
    return GROUP_MIN_SAVING if backend is None or backend.group_saving is None else backend.group_saving.measure()
