"""The kernels that a run works with, chosen once at start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from batchgen.kernels import torch_ops
from batchgen.kernels.attention import TorchAttention
from batchgen.kernels.ops import Ops
from batchgen.kernels.types import AttentionBatch, KVPool, PagedAttention

__all__ = ["ATTENTION_BACKENDS", "AttentionFactory", "Backend", "BackendUnavailable", "choose_backend"]

ATTENTION_BACKENDS = ("auto", "flash", "triton", "torch")
"""Names that `choose_backend` knows; `auto` takes the fastest that is there."""

AttentionFactory = Callable[[KVPool, AttentionBatch], PagedAttention]
"""Makes one step's attention."""


class BackendUnavailable(RuntimeError):
    """A backend was asked for by name that this build or machine does not have."""


@dataclass(frozen=True, slots=True)
class Backend:
    """The kernels of a run."""

    name: str
    """What a footer records: "torch", "triton" or "flash"."""
    attention: AttentionFactory
    ops: Ops
    """All operations but attention."""


TORCH = Backend("torch", TorchAttention, torch_ops)
"""Plain PyTorch: the CPU's, and the oracle of the others."""


def choose_backend(name: str, device: torch.device) -> Backend:
    """The kernels for `device` with the attention called `name`.

    Raises:
        BackendUnavailable: `name` is unknown, or its kernels are not in this build.
    """
    if name not in ATTENTION_BACKENDS:
        raise BackendUnavailable(f"unknown attention backend {name!r}; take one of {', '.join(ATTENTION_BACKENDS)}")
    if name in ("flash", "triton"):
        raise BackendUnavailable(
            f"attention backend {name!r} is not in this build (device {device}); take 'auto' or 'torch'"
        )
    return TORCH
