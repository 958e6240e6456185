"""Recurrent layers of transformers models, called mixers, on packed rows.

A mixer that gets no cache computes its input as one row, from no state: it calls a convolution and a scan that are in
its file. While a batchgen model runs, those functions go on from the states of the step's rows instead, and keep them.
The mixer's projections, norms and gates stay the library's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchgen.errors import ModelError
from batchgen.kernels.mixers.conv import recent_inputs
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
        if is_mixer(module):
            _replace_functions(sys.modules[type(module).__module__])
            for path, ours in _METHODS.get(type(module).__name__, {}).items():
                _replace(*_owner(module, path), partial(_of_module, ours, module))
            module.register_forward_pre_hook(_enter)


def _enter(module: Any, *_: Any) -> None:
    if _active is None:
        raise ModelError("a recurrent layer runs without states")
    _active.enter(module.layer_idx)


def is_mixer(module: nn.Module) -> bool:
    """Whether a module of a layer keeps a state: it has a convolution over the tokens, or is known by name."""
    return type(module).__name__ in _METHODS or any(isinstance(child, nn.Conv1d) for child in module.children())


def number_layers(decoder: nn.Module) -> None:
    """Give mixers, and attention whose weights blocks share, the number of their block where they have none."""
    for name, module in decoder.named_modules():
        number = getattr(module, "layer_idx", -1 if is_mixer(module) else 0)
        if number in (-1, None) and (block := re.search(r"\.(\d+)\.", f".{name}.")):
            module.layer_idx = int(block[1])


def _replace_functions(source: Any) -> None:
    """Replace the functions of a file of the library that know a state."""
    for name, ours in _FUNCTIONS.items():
        if hasattr(source, name):
            _replace(source, name, ours)


def _owner(module: nn.Module, path: str) -> tuple[Any, str]:
    owner, _, name = path.rpartition(".")
    return module.get_submodule(owner), name


def _of_module(ours: Callable[..., Any], module: nn.Module, step: _Recurrence, *args: Any, **kwargs: Any) -> Any:
    return ours(step, module, *args, **kwargs)


def _replace(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Replace a function of the library, once."""
    original = getattr(owner, name)
    if hasattr(original, "batchgen_original"):
        return

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if _active is None else ours(_active, *args, **kwargs)

    call.batchgen_original = original  # type: ignore[attr-defined]
    setattr(owner, name, call)


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
    known = activation if activation in ("silu", "swish") else None
    out = step.ops.causal_conv(x[0].T.contiguous(), weight, bias, states, batches, known).T[None]
    return out if known == activation else _library_activation(activation)(out)


def _library_activation(name: str | None) -> Callable[[Tensor], Tensor]:
    from transformers.activations import ACT2FN

    found: Callable[[Tensor], Tensor] = ACT2FN[name]
    return found


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


def _lightning(step: _Recurrence, module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Forward of lightning attention: [1, T, E] -> [1, T, E]. Each head decays by a constant."""
    heads, size = module.num_attention_heads, module.head_dim
    states, batches = step.next_state(StateSize((heads, size, size)))
    mixed = module.act_fn(module.qkv_proj(hidden_states[0])).view(-1, heads, 3 * size)
    query, key, value = mixed.split(size, 2)
    decay = -module.slope_rate.view(heads).expand(len(mixed), heads)
    values = value if value.is_meta else step.ops.linear_attention(query, key, value, decay, None, states, batches)
    gate = torch.sigmoid(module.output_gate(hidden_states))
    return module.out_proj(gate * module.norm(values.reshape(1, len(mixed), -1))), None


def _conv_of_block(step: _Recurrence, module: Any, x: Tensor) -> Tensor:
    """Convolution of a recurrent block of RecurrentGemma: [1, C, T] -> [1, C, T]."""
    return _conv(step, x, module.conv_1d.weight[:, 0], module.conv_1d.bias)


def _linear_scan(
    step: _Recurrence, module: Any, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """RG-LRU, s = a s + x for each channel: [1, T, C] twice, [1, T, 1] -> [1, T, C]. Source: arXiv:2402.19427.

    It is a selective scan by steps of -log(a), whose inputs are divided by them.
    """
    states, batches = step.next_state(StateSize((hidden_states.shape[2], 1)))
    if hidden_states.is_meta:
        return hidden_states, None
    decay = -recurrent_gate[0].float().masked_fill(reset[0], 1).log()  # the state at a row's start is 0
    steps = decay.clamp(1e-20, 1e20)
    one, decays = steps.new_ones(len(steps), 1), -steps.new_ones(steps.shape[1], 1)
    out = step.ops.selective_scan(hidden_states[0].float() / steps, steps, decays, one, one, states, batches)
    return out.to(hidden_states.dtype)[None], None


def _compressed(
    step: _Recurrence, module: Any, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Projections of compressed convolutional attention: [1, T, E] -> [1, T, H, D], [1, T, K, D] twice.

    Queries and keys pass two convolutions; half of a value is that of the token before. Source: arXiv:2510.04476.
    """
    rows, size = hidden_states[0], module.head_dim
    group = module.num_key_value_groups
    query, key = module.q_proj(rows), module.k_proj(rows)
    means = (query.view(-1, key.shape[1] // size, group, size) + key.view(-1, key.shape[1] // size, 1, size)) / 2
    window = _recent(step, torch.cat([query, key], 1), module.conv_kernel_size + 1)
    mixed = module.conv_qk_grouped(module.conv_qk_depthwise(window.mT))[:, :, 0]
    before = _recent(step, rows, 2)[:, 0]
    value = torch.cat([module.v_proj_current(rows), module.v_proj_delayed(before)], 1)
    query = mixed[:, : query.shape[1]].view(len(rows), -1, size) + means.flatten(1, 2)
    key = mixed[:, -key.shape[1] :].view(len(rows), -1, size) + means.mean(2)
    return query[None], key[None], value.view(1, len(rows), -1, size)


def _recent(step: _Recurrence, x: Tensor, width: int) -> Tensor:
    """The last inputs of each token: [T, C] -> [T, width, C]."""
    states, batches = step.next_state(StateSize((width, x.shape[1]), exact=False))
    return x[:, None].expand(-1, width, -1) if x.is_meta else recent_inputs(x, width, states, batches)


_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "causal_conv1d_fn": _conv,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba,
}
"""Function of the library's files -> the one that goes on from states."""

_METHODS: Final[dict[str, dict[str, Callable[..., Any]]]] = {
    "MiniMaxLightningAttention": {"forward": _lightning},
    "RecurrentGemmaRecurrentBlock": {"conv_1d.forward": _conv_of_block, "rg_lru._rnn_scan": _linear_scan},
    "ZayaCCAProjection": {"forward": _compressed},
}
"""Class of a mixer whose recurrence is inside its methods -> the methods that go on from states."""
