"""Which kernels a run works with: the option, the model and the workload, put to `kernels.backend`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from batchgen.config import EngineConfig
from batchgen.engine.planning import Workload
from batchgen.engine.quantization import refuse_quantization
from batchgen.errors import UsageError
from batchgen.kernels.backend import (
    AttentionNeeds,
    Backend,
    BackendUnavailable,
    capability_of,
    choose_backend,
    refuse_deterministic,
)
from batchgen.kernels.linear import Products
from batchgen.kernels.measure import TypicalStep
from batchgen.models.base import ModelSpec

__all__ = ["fixed_kernels", "kernels_for", "products_of", "typical_step"]


def fixed_kernels(config: EngineConfig, spec: ModelSpec) -> Backend | None:
    """The kernels where they do not depend on the workload; None on a GPU, where something is measured on it.

    Raises:
        UsageError: `--attention` names kernels that cannot run here, or `--flash-library` a file that is not there.
    """
    if config.flash_library is not None and not Path(config.flash_library).exists():
        raise UsageError(f"`--flash-library {config.flash_library}`: there is no such file or folder")
    refuse_quantization(config, spec)
    needs = _needs(config, spec)
    if config.attention == "auto" and needs.capability is not None and not config.deterministic:
        return None
    try:
        named = choose_backend(config.attention, needs)
        measured = needs.capability is not None and named.name != "torch" and not config.deterministic
        return None if measured else named
    except BackendUnavailable as problem:
        raise _refusal(config, problem) from None


def products_of(config: EngineConfig) -> Products:
    """What may multiply on a CPU: kernels compiled on the machine are no plain PyTorch, and clocks no fixed choice."""
    if config.attention == "torch":
        return "torch"
    # What is going to be quantised is multiplied in full a few times only.
    return "fixed" if config.deterministic or config.quantization != "none" else "measured"


def refuse_anywhere(config: EngineConfig) -> None:
    """Refuse kernels that no GPU runs, for a job that is checked where there is none.

    Raises:
        UsageError: as `fixed_kernels`.
    """
    if config.quantization != "none":
        raise UsageError(f"`--quantization {config.quantization}` is for CPUs; leave the option out")
    try:
        if config.deterministic:
            refuse_deterministic(config.attention, on_gpu=True)
    except BackendUnavailable as problem:
        raise _refusal(config, problem) from None


def _refusal(config: EngineConfig, problem: BackendUnavailable) -> UsageError:
    remedy = problem.remedy or "leave the option out to take the best there is here"
    return UsageError(f"`--attention {config.attention}` cannot run here: {problem}; {remedy}")


def kernels_for(config: EngineConfig, spec: ModelSpec, workload: Workload, rows: int, tokens: int) -> Backend:
    """The kernels for a workload of at most `rows` sequences and `tokens` tokens in a step.

    Raises:
        UsageError: as `fixed_kernels`.
    """
    fixed = fixed_kernels(config, spec)
    if fixed is not None:
        return fixed
    return choose_backend(config.attention, _needs(config, spec), typical_step(config, spec, workload, rows, tokens))


def _needs(config: EngineConfig, spec: ModelSpec) -> AttentionNeeds:
    return AttentionNeeds(
        device=spec.device,
        capability=capability_of(spec.device),
        layers=spec.kv_layers,
        heads=spec.num_heads,
        dtype=spec.dtype,
        page_size=config.page_size,
        flash_library=config.flash_library,
        deterministic=config.deterministic,
        native=spec.implementation == "native",
    )


def typical_step(
    config: EngineConfig, spec: ModelSpec, workload: Workload, rows: int, tokens: int
) -> TypicalStep | None:
    """What a layer does in most steps of a workload; None where there is nothing to do or no cache.

    Rows at half their output, in one prefix group as long as prompts share on the average, beside as many prompt tokens
    as come with each step if these are spread evenly.
    """
    samples = workload.samples.astype(np.int64)
    count = int(samples.sum())
    if not count or not spec.kv_layers:
        return None
    tree, draws = workload.tree, workload.draws
    ends = tree.end[tree.node_of_request]
    # All samples of a prompt share it whole, single ones share what lies above their own node.
    shared = np.where(samples > 1, ends, tree.start[tree.node_of_request])
    rows = min(rows, count)
    steps = max(1, int((samples * draws).sum()) // rows)
    return TypicalStep(
        layer=spec.kv_layers[0],
        heads=spec.num_heads,
        dtype=spec.dtype,
        page_size=config.page_size,
        device=spec.device,
        rows=rows,
        context=int(np.average(ends + draws // 2, weights=samples)) + 1,
        shared=int(np.average(shared, weights=samples)) if count > 1 else 0,
        chunk=max(0, min(tree.distinct_tokens // steps, tokens - rows)),
    )
