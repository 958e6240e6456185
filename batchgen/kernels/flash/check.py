"""Checks of flash attention, once at start: whether it supports a model, and whether a library computes correctly.

The self-test runs small paged batches with the model's heads through the library and through plain products:
`softmax(scale * Q K^T) V` and `log sum exp` in float64. The library's error may be twice that of plain products in the
model's dtype, plus a small tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchgen.kernels.flash.library import FlashLibrary, FlashUnavailable, Runs, first_line
from batchgen.kernels.types import AttentionArgs, LayerKV

_LSE_SLACK = 0.02
"""Additional tolerance of log-sum-exps: soft caps use the processor's approximate tanh."""


def flash_refusal(
    version: int, layers: Sequence[LayerKV], heads: int, dtype: torch.dtype, page_size: int
) -> str | None:
    """Why a version of flash attention does not support a model; None if it does."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it supports bfloat16 and float16, not {str(dtype).removeprefix('torch.')} (see --dtype)"
    if version == 2 and page_size % 16:
        return f"it needs a page size that is a multiple of 16, not {page_size} (see --page-size)"
    for layer in layers:
        if layer.latent:
            return "it does not support values that are part of the keys (multi-head latent attention)"
        sizes = (layer.key_dim, layer.value_dim)
        if any(size % 8 for size in sizes):
            return f"it needs a head size that is a multiple of 8, and this model's is {layer.key_dim}"
        if layer.key_dim > 256 or (layer.key_dim == layer.value_dim and layer.value_dim > 256):
            return f"it supports head sizes of up to 256, and this model's is {layer.key_dim}"
        if layer.key_dim != layer.value_dim and not (version == 3 and _fits_apart(*sizes)):
            return f"it does not support keys of size {layer.key_dim} with values of size {layer.value_dim}"
        if heads % layer.kv_heads:
            return f"it needs a number of heads that is a multiple of the kv heads, not {heads} and {layer.kv_heads}"
    return None


def _fits_apart(key_dim: int, value_dim: int) -> bool:
    """Whether version 3 has kernels for keys and values of these different sizes."""
    return (128 < key_dim <= 192 and 96 < value_dim <= 128) or (key_dim <= 64 and value_dim <= 512)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A batch of the self-test: B runs by their numbers of queries and keys."""

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    window: int | None = None
    softcap: float | None = None


_TRIALS = (
    _Trial("prefill", (7, 33, 1, 18), (7, 50, 20, 18)),
    _Trial("prefill with a window", (7, 33, 1, 18), (7, 50, 20, 18), window=9),
    _Trial("prefill with a soft cap", (7, 33, 1), (7, 50, 20), softcap=5.0),
    _Trial("decode", (1,) * 7, (1, 16, 17, 40, 100, 5, 129)),
    _Trial("decode with a window", (1,) * 5, (1, 16, 17, 40, 100), window=16),
    _Trial("decode of few long rows", (1,) * 2, (700, 3000)),  # the library splits their keys
    _Trial("decode of few long rows with a soft cap", (1,), (2000,), softcap=5.0),
)


def check_library(
    library: FlashLibrary, layer: LayerKV, heads: int, dtype: torch.dtype, page_size: int, device: torch.device
) -> FlashLibrary:
    """The library after it passed the self-test; without its scheduling if only that fails.

    Raises:
        FlashUnavailable: the library raises or computes wrong results; the message says which.
    """
    refusal = flash_refusal(library.version, [layer], heads, dtype, page_size)
    if refusal is not None:
        raise FlashUnavailable(refusal)
    candidates = [library] if library._schedule is None else [library, replace(library, _schedule=None)]
    problem = ""
    for candidate in candidates:
        try:
            problems = (_problem(candidate, trial, layer, heads, dtype, page_size, device) for trial in _TRIALS)
            problem = next((p for p in problems if p is not None), "")
        except (RuntimeError, ValueError, TypeError) as error:
            problem = f"its self-test stopped: {first_line(error)}"
        if not problem:
            return candidate
    raise FlashUnavailable(problem)


def _problem(
    library: FlashLibrary,
    trial: _Trial,
    layer: LayerKV,
    heads: int,
    dtype: torch.dtype,
    page_size: int,
    device: torch.device,
) -> str | None:
    """Fault of the library's result of one trial; None if there is none."""
    generator = torch.Generator().manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    counts = [-(-keys // page_size) for keys in trial.keys]
    pages = torch.split((torch.randperm(sum(counts), generator=generator) + 1).to(torch.int32), counts)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = own
    starts = [0]
    for count in trial.queries:
        starts.append(starts[-1] + count)
    runs = Runs(
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(trial.keys, dtype=torch.int32, device=device),
        table.to(device),
        max(trial.queries),
        max(trial.keys),
    )
    query = randn(starts[-1], heads, layer.key_dim)
    keys = randn(sum(counts) + 1, page_size, layer.kv_heads, layer.key_dim)
    values = randn(sum(counts) + 1, page_size, layer.kv_heads, layer.value_dim)
    scale = layer.key_dim**-0.5
    truth = _plain(query, keys, values, trial, table, scale, torch.float64)
    plain = _plain(query, keys, values, trial, table, scale, dtype)
    args = AttentionArgs(scale, trial.window, trial.softcap)
    schedule = library.schedule(heads, keys, values, runs, args)
    target = query.new_empty(*query.shape[:2], layer.value_dim)
    for _ in range(2):  # as the layers of a step do, which share the schedule and the output memory
        out, lse = library.attend(query, keys, values, runs, args, schedule, target)
    if out.shape != truth[0].shape or lse.shape != truth[1].shape:
        return f"its self-test failed: {trial.name} gives shapes {list(out.shape)} and {list(lse.shape)}"
    slack = 2 * torch.finfo(dtype).eps * float(truth[0].abs().max())
    for name, got, low, exact, more in (
        ("result", out, plain[0], truth[0], slack),
        ("log-sum-exp", lse, plain[1], truth[1], _LSE_SLACK),
    ):
        off, allowed = _distance(got, exact), 2 * _distance(low, exact) + more
        if not off <= allowed:
            return f"its self-test failed: the {name} of {trial.name} is off by {off:.2g}, {allowed:.2g} is allowed"
    return None


def _distance(a: Tensor, b: Tensor) -> float:
    distance = float((a.double() - b).abs().max())
    return math.inf if math.isnan(distance) else distance


def _plain(
    query: Tensor, keys: Tensor, values: Tensor, trial: _Trial, table: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Products in `dtype`, the softmax in at least float32: [t, N, Dv] and lse [N, t]."""
    parts = []
    group = query.shape[1] // keys.shape[2]
    wide = torch.promote_types(dtype, torch.float32)
    first = 0
    for run, (count, length) in enumerate(zip(trial.queries, trial.keys, strict=True)):
        own = table[run].to(keys.device, torch.int64)
        q = query[first : first + count].to(dtype).transpose(0, 1)  # [N, count, D]
        k = keys[own].flatten(0, 1)[:length].to(dtype).repeat_interleave(group, 1).transpose(0, 1)  # [N, length, D]
        v = values[own].flatten(0, 1)[:length].to(dtype).repeat_interleave(group, 1).transpose(0, 1)
        scores = (q @ k.transpose(1, 2)).to(wide) * scale
        if trial.softcap is not None:
            scores = trial.softcap * torch.tanh(scores / trial.softcap)
        behind = torch.arange(length - count, length)[:, None] - torch.arange(length)
        hidden = behind < 0 if trial.window is None else (behind < 0) | (behind >= trial.window)
        scores = scores.masked_fill(hidden.to(scores.device), -math.inf)
        lse = torch.logsumexp(scores, -1)  # [N, count]
        parts.append(((torch.softmax(scores, -1).to(dtype) @ v).transpose(0, 1), lse))
        first += count
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], -1)
