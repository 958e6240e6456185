"""Which blocks of a model are streamed to the device, chosen before its weights are read (`--offload`)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import psutil
import torch

from batchgen.config.engine_config import EngineConfig
from batchgen.config.units import TotalShare
from batchgen.engine.memory.kv_offload import kv_refusal
from batchgen.errors import UsageError
from batchgen.kernels.stream import StreamPlan, plan_stream
from batchgen.models.base import ModelSpec
from batchgen.models.check import CheckedModel
from batchgen.models.native.own_integers import stored_sizes, stream_bytes
from batchgen.request.printable import format_size

STEP_SHARE: Final = 1 / 8
"""Share of a device's memory for steps, next to streamed weights."""
_FITS: Final = 0.8
"""Share of a device's memory that all weights may take without being streamed, if `--kv-memory` does not say."""
_SHARE: Final = 0.5
"""Share of it for weights if some are streamed: rows in a step, by which the cost of a pass is divided, need memory."""


def with_stream(config: EngineConfig, checked: CheckedModel, spec: ModelSpec) -> ModelSpec:
    """The spec of a checked model, whose numbers are chosen, with its `StreamPlan` if `--offload` asks for one.

    Raises:
        UsageError: this model or this device cannot stream, not even two blocks fit the device, or without the option
            the model does not.
    """
    on_cpu, option = spec.device.type == "cpu", f"`--offload {config.offload}`"
    if on_cpu and config.offload == "none" and config.device_memory is not None:
        raise UsageError("`--device-memory` on a CPU is the size of the device for --offload; add --offload auto")
    if on_cpu and config.offload != "none" and config.device_memory is None:
        raise UsageError(
            f"{option}: a CPU computes with the weights where they are; leave it out, or try it out with "
            "--device-memory SIZE, the memory of a device whose place the CPU then takes"
        )
    if config.offload in ("none", "kv"):
        if config.offload == "kv" and (reason := kv_refusal(config, spec)) is not None:
            raise UsageError(f"{option} is not supported: {reason}; leave the option out")
        weights, total = weight_bytes(checked, spec), config.device_memory or math.inf
        if weights > (total := total if on_cpu else min(total, torch.cuda.mem_get_info(spec.device)[1])):
            raise UsageError(
                f"the weights of the {spec.name} model take {format_size(weights)}, and the device has "
                f"{format_size(int(total))} for them; add `--offload auto` to keep some of them on the host"
            )
        return spec if config.offload == "none" else replace(spec, stream=StreamPlan((), weights))
    reason = None
    if spec.bidirectional == "text":
        reason = f"a {spec.name} encoder is computed as a whole"
    elif not spec.block_bytes:
        reason = f"the blocks of a {spec.name} model cannot be found"
    elif spec.implementation != "native" and spec.ranks.count > 1:
        reason = "with --tensor-parallel only native models are streamed"
    elif spec.implementation != "native" and spec.adapters and not spec.tiled_adapters:
        reason = "an adapter (--lora) changes more than products of linear layers"
    if reason is not None:
        raise UsageError(f"{option} is not supported: {reason}; leave the option out")
    if checked.native is not None and spec.numbers.form == "weight-only":
        blocks = stream_bytes(checked.native[1], spec.dtype.itemsize, checked.folder)
        spec = replace(spec, block_bytes=blocks)
    return replace(spec, stream=_plan(config, spec, weight_bytes(checked, spec)))


def weight_bytes(checked: CheckedModel, spec: ModelSpec) -> int:
    """Bytes of all weights in memory, on the host and the device."""
    size, form = spec.dtype.itemsize, spec.numbers.form
    stored = [] if checked.native is None else stored_sizes(checked.native[1], checked.folder, form)
    is_stored = spec.numbers.quantization == "stored"
    return spec.parameters * size + sum(nbytes - count * size for count, nbytes in stored if is_stored)


def _plan(config: EngineConfig, spec: ModelSpec, weights: int) -> StreamPlan:
    total, blocks = device_total(config, spec.device), spec.block_bytes
    others, kv = max(0, weights - sum(blocks)), config.kv_budget
    if isinstance(kv, TotalShare):
        total, kv = int(total * kv), None
    if kv is not None:
        room = total - (int(total * kv) if isinstance(kv, float) else kv) - int(total * STEP_SHARE)
    else:
        room = int(total * (_FITS if weights <= total * _FITS else _SHARE))
    most = room if kv is not None else int(total * _FITS)
    plan = plan_stream(blocks, others, max(room, min(most, others + 2 * max(blocks))))
    if plan.device_bytes > most:
        near = "" if kv is None else ", next to --kv-memory and an eighth for steps"
        raise UsageError(
            f"`--offload {config.offload}`: the embedding, the head and one block take "
            f"{format_size(plan.device_bytes)} of the device, and {format_size(max(0, most))} of "
            f"{format_size(total)} are there for weights{near}; take a device with more memory"
        )
    if plan.pass_bytes > (free := psutil.virtual_memory().available):
        raise UsageError(
            f"`--offload {config.offload}`: {format_size(plan.pass_bytes)} of streamed weights do not fit into the "
            f"{format_size(free)} of free memory of the host; take a host with more"
        )
    return plan


def device_total(config: EngineConfig, device: torch.device) -> int:
    """Bytes of a device that a job may use."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else config.device_memory
    assert free is not None, "a CPU has a limit"
    return min(config.device_memory or free, free)
