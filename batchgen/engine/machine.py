"""What an engine takes of its machine: the CPU threads, and the default limits of a step."""

from __future__ import annotations

import torch

from batchgen.config.engine_config import EngineConfig
from batchgen.kernels.device import cpu_quota

_THREADS_BEFORE: dict[int, int] = {}
"""Number of threads set by an engine -> number of threads before that."""


def step_limits(config: EngineConfig, device: torch.device) -> tuple[int, int]:
    """(max_num_seqs, max_tokens_per_step): the options, or defaults of the device that fit the given one."""
    cuda = device.type == "cuda"
    seqs, tokens = config.max_num_seqs, config.max_tokens_per_step
    if seqs is None:
        seqs = min(256, tokens or 256)  # many rows per step spread the cost of a step in Python
    # On a CPU, a step's activations should fit into the last-level cache.
    return seqs, tokens or max(8192 if cuda else 1024, seqs)


def prepare_device(config: EngineConfig) -> None:
    """Set the number of CPU threads; oversubscribed cores are very slow.

    An engine without `cpu_threads` restores the number that the process had before an earlier engine changed it.
    """
    now = torch.get_num_threads()
    free = _THREADS_BEFORE.get(now, now)
    threads = config.cpu_threads or min(free, cpu_quota() or free)
    if threads != now:
        torch.set_num_threads(threads)
    _THREADS_BEFORE.clear()  # a later change by the caller is kept
    _THREADS_BEFORE[threads] = free
