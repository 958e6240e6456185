"""The attention backend, chosen once at start."""

from __future__ import annotations

from collections.abc import Callable

import torch

from batchgen.kernels.attention import TorchAttention
from batchgen.kernels.types import AttentionBatch, KVPool, PagedAttention

__all__ = ["ATTENTION_BACKENDS", "AttentionFactory", "BackendUnavailable", "attention_factory", "attention_name"]

ATTENTION_BACKENDS = ("auto", "flash", "triton", "torch")
"""Names that `attention_factory` knows; `auto` takes the fastest that is there."""

AttentionFactory = Callable[[KVPool, AttentionBatch], PagedAttention]
"""Makes one step's attention."""


class BackendUnavailable(RuntimeError):
    """A backend was asked for by name that this build or machine does not have."""


def attention_factory(name: str, device: torch.device) -> AttentionFactory:
    """What makes each step's attention on `device`, by the backend called `name`.

    Raises:
        BackendUnavailable: `name` is unknown, or its kernels are not in this build.
    """
    return _FACTORIES[attention_name(name, device)]


def attention_name(name: str, device: torch.device) -> str:
    """The backend that `name` stands for on `device`: what a footer records.

    Raises:
        BackendUnavailable: as `attention_factory`.
    """
    if name not in ATTENTION_BACKENDS:
        raise BackendUnavailable(f"unknown attention backend {name!r}; take one of {', '.join(ATTENTION_BACKENDS)}")
    if name in ("flash", "triton"):
        raise BackendUnavailable(
            f"attention backend {name!r} is not in this build (device {device}); take 'auto' or 'torch'"
        )
    return "torch"


_FACTORIES: dict[str, AttentionFactory] = {"torch": TorchAttention}
