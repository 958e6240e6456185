"""Recurrent layers of transformers models, called mixers, on packed rows.

A mixer that gets no cache computes its input as one row, from no state: it calls a convolution and a scan that are in
its file. While a batchgen model runs, those functions go on from the states of the step's rows instead, and keep them.
The mixer's projections, norms and gates stay the library's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchgen.errors import ModelError
from batchgen.kernels.mixers.states import RunBatch, States, StateSize
from batchgen.kernels.ops import Ops


class _Recurrence:
    """What the mixers of a step read: its states and operations, and which mixer runs."""

    __slots__ = ("_index", "layer", "ops", "states")

    def __init__(self, states: States, ops: Ops) -> None:
        self.states, self.ops = states, ops
        self.layer, self._index = -1, 0

    def enter(self, layer: int) -> None:
        """Begin the forward of a mixer."""
        self.layer, self._index = layer, 0

    def next_state(self, size: StateSize) -> tuple[Tensor, Sequence[RunBatch]]:
        """The next state of the mixer that runs."""
        self._index += 1
        return self.states.of(self.layer, self._index - 1, size)


_active: _Recurrence | None = None
"""Of the step that runs; None: none, and the library's functions compute what they are called for."""


@contextmanager
def recurrence(states: States | None, ops: Ops) -> Iterator[None]:
    """Set a step's states and operations while its forward runs; None: the model has no states."""
    global _active
    before = _active
    _active = None if states is None else _Recurrence(states, ops)
    try:
        yield
    finally:
        _active = before


def install_recurrence(decoder: nn.Module) -> None:
    """Let the mixers of a decoder go on from the states of a step. Without mixers it is unchanged."""
    for module in decoder.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and is_mixer(module):
            _replace_functions(sys.modules[type(module).__module__])
            module.register_forward_pre_hook(partial(_enter, layer))


def _enter(layer: int, *_: Any) -> None:
    if _active is None:
        raise ModelError("a recurrent layer runs without states")
    _active.enter(layer)


def is_mixer(module: nn.Module) -> bool:
    """Whether a module of a layer keeps a state: it has a convolution over the tokens."""
    return any(isinstance(child, nn.Conv1d) for child in module.children())


def _replace_functions(source: Any) -> None:
    """Replace the functions of a file of the library that know a state, once."""
    for name, ours in _FUNCTIONS.items():
        original = vars(source).get(name)
        if original is not None and not hasattr(original, "batchgen_original"):
            setattr(source, name, _switch(original, ours))


def _switch(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if _active is None else ours(_active, *args, **kwargs)

    call.batchgen_original = original  # type: ignore[attr-defined]
    return call


def _conv(
    step: _Recurrence,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Convolution of packed rows: [1, C, T] -> [1, C, T]."""
    states, batches = step.next_state(StateSize((weight.shape[1], weight.shape[0]), exact=False))
    if x.is_meta:
        return torch.empty_like(x)
    rows = x[0].T.contiguous()
    return step.ops.causal_conv(rows, weight, bias, states, batches, activation).T[None]


def _delta_rule(
    step: _Recurrence,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Linear attention with a delta rule: [1, T, G, K] twice, [1, T, H, V], [1, T, H] or [1, T, H, K], [1, T, H]."""
    size = key.shape[3]
    states, batches = step.next_state(StateSize((value.shape[2], size, value.shape[3])))
    if value.is_meta:
        return torch.empty_like(value), None
    q, k = (_unit(x[0]) if use_qk_l2norm_in_kernel else x[0].float() for x in (query, key))
    return step.ops.linear_attention(q * size**-0.5, k, value[0], g[0], beta[0], states, batches)[None], None


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _mamba2(
    step: _Recurrence,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """Scan of Mamba-2: [1, T, H, V], [1, T, H], [H], [1, T, G, K] twice, [H] -> [1, T, H, V] float32."""
    heads, size = hidden_states.shape[2:]
    states, batches = step.next_state(StateSize((heads, B.shape[3], size)))
    x = hidden_states[0].float()
    if x.is_meta:
        return x[None]
    lengths = _step_lengths(dt[0], dt_bias, dt_softplus).clamp(*dt_limit).float()
    values = step.ops.linear_attention(C[0], B[0], x * lengths[..., None], lengths * A.float(), None, states, batches)
    return (values if D is None else values + D[:, None] * x)[None]


def _mamba(
    step: _Recurrence,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> Tensor:
    """Scan of Mamba-1: [1, C, T] twice, [C, N], [1, N, T] twice, [C], [1, C, T] -> [1, C, T] float32."""
    states, batches = step.next_state(StateSize((A.shape[0], A.shape[1])))
    if hidden_states.is_meta:
        return hidden_states.float()
    lengths = _step_lengths(dt[0].T, delta_bias, delta_softplus)
    out = step.ops.selective_scan(hidden_states[0].T, lengths, A, B[0].T, C[0].T, states, batches).T[None]
    if D is not None:
        out = out + hidden_states * D[:, None]
    return out if z is None else out * F.silu(z)


def _step_lengths(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "causal_conv1d_fn": _conv,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba,
}
"""Function of the library's files -> the one that goes on from states."""
