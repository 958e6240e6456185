"""Recurrent layers by `src/recurrent.cpp`; the references are `kernels.mixers`.

Tokens are computed one after another, so a token's bits depend neither on other rows nor on where chunks end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Structure, byref, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from batchgen.kernels.cpu.library import DTYPES, address, library
from batchgen.kernels.cpu.structs import fields
from batchgen.kernels.mixers import conv
from batchgen.kernels.mixers import linear_attention as linear
from batchgen.kernels.mixers import selective_scan as scan
from batchgen.kernels.mixers.states import RunBatch


class _Runs(Structure):
    """`Runs` of recurrent.cpp."""

    _fields_ = (*fields(c_void_p, "rows lengths sources slots"), *fields(c_int64, "count longest"))


class _CausalConv(Structure):
    """`CausalConv` of recurrent.cpp."""

    _fields_ = (
        ("runs", _Runs),
        *fields(c_void_p, "x weight bias states out"),
        *fields(c_int64, "channels width silu dtype weight_dtype"),
    )


class _LinearAttention(Structure):
    """`LinearAttention` of recurrent.cpp."""

    _fields_ = (
        ("runs", _Runs),
        *fields(c_void_p, "query key value decay beta states out"),
        *fields(c_int64, "groups heads key_size value_size by_channel dtype"),
    )


class _SelectiveScan(Structure):
    """`SelectiveScan` of recurrent.cpp."""

    _fields_ = (
        ("runs", _Runs),
        *fields(c_void_p, "x dt a b c states out"),
        *fields(c_int64, "channels size dtype"),
    )


def _call(function: Callable[..., None], struct: Callable[..., Any], batches: Sequence[RunBatch], *values: Any) -> None:
    """Call a compiled function for each of a step's batches, in order; `values`: of the struct, after the runs."""
    for batch in batches:
        runs = _Runs(
            *map(address, (batch.rows, batch.lengths, batch.sources, batch.slots)), len(batch.rows), batch.rows.shape[1]
        )
        function(byref(struct(runs, *values)), torch.get_num_threads())


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batches: Sequence[RunBatch], activation: str | None
) -> Tensor:
    """See `mixers.conv.causal_conv`."""
    if x.dtype not in DTYPES or x.dtype != states.dtype or weight.dtype not in (x.dtype, torch.float32):
        return conv.causal_conv(x, weight, bias, states, batches, activation)
    x, taps, out = x.contiguous(), weight.T.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    tensors = map(address, (x, taps, bias, states, out))
    sizes = (x.shape[1], weight.shape[1], activation is not None, DTYPES[x.dtype], DTYPES[weight.dtype])
    _call(library().bg_causal_conv, _CausalConv, batches, *tensors, *sizes)
    return out


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    states: Tensor,
    batches: Sequence[RunBatch],
) -> Tensor:
    """See `mixers.linear_attention.linear_attention`."""
    if value.dtype not in DTYPES:
        return linear.linear_attention(query, key, value, decay, beta, states, batches)
    query, key, decay = (x.float().contiguous() for x in (query, key, decay))
    beta = None if beta is None else beta.float().contiguous()
    value, out = value.contiguous(), torch.empty(value.shape, dtype=value.dtype)
    tensors = map(address, (query, key, value, decay, beta, states, out))
    sizes = (*key.shape[1:2], *value.shape[1:2], *states.shape[2:], decay.ndim == 3, DTYPES[value.dtype])
    _call(library().bg_linear_attention, _LinearAttention, batches, *tensors, *sizes)
    return out


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor, batches: Sequence[RunBatch]
) -> Tensor:
    """See `mixers.selective_scan.selective_scan`."""
    if x.dtype not in DTYPES:
        return scan.selective_scan(x, dt, a, b, c, states, batches)
    dt, a, b, c = (number.float().contiguous() for number in (dt, a, b, c))
    x, out = x.contiguous(), torch.empty(x.shape, dtype=torch.float32)
    tensors = map(address, (x, dt, a, b, c, states, out))
    _call(library().bg_selective_scan, _SelectiveScan, batches, *tensors, *a.shape, DTYPES[x.dtype])
    return out
