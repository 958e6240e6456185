"""What an engine takes of its machine: the CPU threads, and the default limits of a step."""

from __future__ import annotations

import os

import torch

from batchgen.config.engine_config import EngineConfig
from batchgen.engine.memory.dummy_run import dummy_run, expected_bytes
from batchgen.engine.memory.kv_budget import RESERVE, DeviceMemory
from batchgen.engine.memory.kv_offload import rows_at_once
from batchgen.engine.memory.offload import STEP_SHARE
from batchgen.engine.workload import JobWorkload
from batchgen.kernels.device import cpu_quota
from batchgen.models.base import ModelSpec

_SMALL = 1_300_000_000
"""Most parameters of a model whose steps of twice as many rows and tokens still take little memory and time."""

STREAMED_ROWS = 8192
"""Most rows of a step that copies weights to the device."""
_LEAST_WIDTH = 1024
"""Tokens that such a step has room for, however few its rows."""

_THREADS_BEFORE: dict[int, int] = {}
"""Number of threads set by an engine -> number of threads before that."""


def step_limits(
    config: EngineConfig, spec: ModelSpec, workload: JobWorkload | None = None, memory: DeviceMemory | None = None
) -> tuple[int, int]:
    """(max_num_seqs, max_tokens_per_step): the options, or defaults of the device that fit the given one.

    On a GPU as many rows run at once as its `memory`, with the weights loaded, holds of those of `workload`, up to a
    number that depends on the model's size; without the two, that number.

    A step that copies weights to the device takes at least as long as that, whatever its rows and tokens: up to
    `STREAMED_ROWS` rows run at once, with room for as many tokens of prompts, as far as a share of the memory holds
    what the step computes.
    """
    seqs, tokens = config.max_num_seqs, config.max_tokens_per_step
    if spec.stream is not None and spec.stream.streamed:
        return _streamed_limits(config, spec, workload, memory)
    # Many rows spread the cost of a step. On a CPU, a step's activations should fit into the last-level cache.
    most, width = (256, 1024)
    if spec.device.type == "cuda":
        most, width = gpu_limits(spec.parameters)
    if seqs is None:
        seqs = min(most, tokens or most)
        if spec.device.type == "cuda" and workload is not None and memory is not None and workload.samples.any():
            seqs = rows_at_once(workload, spec, config, memory, (seqs, tokens or max(width, seqs)))
    return seqs, tokens or max(width, seqs)


def _streamed_limits(
    config: EngineConfig, spec: ModelSpec, workload: JobWorkload | None, memory: DeviceMemory | None
) -> tuple[int, int]:
    seqs, tokens = config.max_num_seqs, config.max_tokens_per_step
    most = seqs or min(STREAMED_ROWS, tokens or STREAMED_ROWS)
    if workload is None or memory is None or not workload.samples.any():
        return most, tokens or max(_LEAST_WIDTH, 2 * most)
    rows = seqs or rows_at_once(workload, spec, config, memory, (most, tokens or max(_LEAST_WIDTH, 2 * most)))

    def fits(rows: int, tokens: int) -> bool:
        step = expected_bytes(spec, dummy_run(workload, spec, config.page_size, rows, tokens))
        return step <= (STEP_SHARE - RESERVE) * memory.total

    while seqs is None and rows > 1 and not fits(rows, tokens or rows):
        rows //= 2
    width = max(_LEAST_WIDTH, 2 * rows)
    while width > rows and not fits(rows, width):
        width = max(rows, width // 2)
    return rows, tokens or width


def gpu_limits(parameters: int) -> tuple[int, int]:
    """Most rows and tokens of a step by default on a GPU, of a model of so many parameters."""
    return (2048, 16384) if parameters <= _SMALL else (1024, 8192)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(number) for number in range(torch.cuda.device_count())] if named is None else named.split(",")


def prepare_device(config: EngineConfig) -> None:
    """Set the number of CPU threads; oversubscribed cores are very slow. Ranks share them.

    An engine without `cpu_threads` restores the number that the process had before an earlier engine changed it.
    """
    now = torch.get_num_threads()
    free = _THREADS_BEFORE.get(now, now)
    threads = max(1, (config.cpu_threads or min(free, cpu_quota() or free)) // config.tensor_parallel)
    if threads != now:
        torch.set_num_threads(threads)
    _THREADS_BEFORE.clear()  # a later change by the caller is kept
    _THREADS_BEFORE[threads] = free
