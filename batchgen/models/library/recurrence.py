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
from torch import Tensor, nn

from batchgen.errors import ModelError
from batchgen.kernels.mixers.states import RunBatch, States, StateSize
from batchgen.kernels.ops import TORCH_OPS, Ops


class RecurrenceSlot:
    """The states of the current step, for the mixers of one model."""

    __slots__ = ("_index", "_layer", "ops", "states")

    def __init__(self) -> None:
        self.states: States | None = None
        self.ops: Ops = TORCH_OPS
        self._layer, self._index = -1, 0

    @contextmanager
    def step_context(self, states: States | None, ops: Ops) -> Iterator[None]:
        """Set the step's states and operations while its forward runs."""
        global _active
        self.states, self.ops, before = states, ops, _active
        _active = self
        try:
            yield
        finally:
            _active, self.states, self.ops = before, None, TORCH_OPS

    def enter(self, layer: int, *_: Any) -> None:
        """Begin the forward of a mixer."""
        self._layer, self._index = layer, 0

    def next_state(self, size: StateSize) -> tuple[Tensor, Sequence[RunBatch]]:
        """The next state of the mixer that runs."""
        if self.states is None:
            raise ModelError("a recurrent layer runs without states")
        self._index += 1
        return self.states.of(self._layer, self._index - 1, size)


_active: RecurrenceSlot | None = None
"""Of the model whose forward runs; None: none, and the library's functions compute what they are called for."""


def install_recurrence(decoder: nn.Module) -> RecurrenceSlot:
    """Let the mixers of a decoder go on from the states of a step. Without mixers it is unchanged."""
    slot = RecurrenceSlot()
    for module in decoder.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and is_mixer(module):
            _replace_functions(sys.modules[type(module).__module__])
            module.register_forward_pre_hook(partial(_enter, slot, layer))
    return slot


def _enter(slot: RecurrenceSlot, layer: int, *_: Any) -> None:
    slot.enter(layer)


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
    slot: RecurrenceSlot,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Convolution of packed rows: [1, C, T] -> [1, C, T]."""
    states, batches = slot.next_state(StateSize((weight.shape[1], weight.shape[0]), exact=False))
    if x.is_meta:
        return torch.empty_like(x)
    rows = x[0].T.contiguous()
    return slot.ops.causal_conv(rows, weight, bias, states, batches, activation).T[None]


def _gated_delta(
    slot: RecurrenceSlot,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Gated delta rule of packed rows: [1, T, H, K] twice, [1, T, Hv, V], [1, T, Hv] twice -> [1, T, Hv, V]."""
    heads, size = value.shape[2], key.shape[3]
    states, batches = slot.next_state(StateSize((heads, size, value.shape[3])))
    if value.is_meta:
        return torch.empty_like(value), None
    q, k = (_unit(x[0]) if use_qk_l2norm_in_kernel else x[0].float() for x in (query, key))
    if q.shape[1] != heads:
        q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    return slot.ops.gated_delta(q * size**-0.5, k, value[0], g[0], beta[0], states, batches)[None], None


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "causal_conv1d_fn": _conv,
    "torch_chunk_gated_delta_rule": _gated_delta,
}
"""Function of the library's files -> the one that goes on from states."""
