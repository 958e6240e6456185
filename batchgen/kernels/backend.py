"""The attention backend, chosen once at start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batchgen.kernels.attention import TorchAttention
from batchgen.kernels.types import Attention, AttentionBatch, KVPool

__all__ = ["ATTENTION_BACKENDS", "AttentionBackend", "BackendUnavailable", "choose_attention"]

ATTENTION_BACKENDS = ("auto", "flash", "triton", "torch")
"""Names that `choose_attention` knows; `auto` takes the fastest that is there."""


class BackendUnavailable(RuntimeError):
    """A backend was asked for by name that this build or machine does not have."""


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """What makes each step's attention."""

    name: str
    make: Callable[[KVPool, AttentionBatch], Attention]


def choose_attention(name: str = "auto") -> AttentionBackend:
    """The backend called `name`.

    Raises:
        BackendUnavailable: `name` is unknown, or its kernels are not in this build.
    """
    if name not in ATTENTION_BACKENDS:
        raise BackendUnavailable(f"unknown attention backend {name!r}; take one of {', '.join(ATTENTION_BACKENDS)}")
    if name in ("flash", "triton"):
        raise BackendUnavailable(f"attention backend {name!r} is not in this build; take 'auto' or 'torch'")
    return AttentionBackend("torch", TorchAttention)
