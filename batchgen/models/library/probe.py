"""Dense attention over a few sequences that records the shapes and windows of each layer.

It runs a model before there is a paged pool: to determine the shapes of its cache, and to compare it with the library's
attention at load. On the meta device it only records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.kernels.device import device_for
from batchgen.kernels.mixers.states import Run, RunBatch, StateSize, chunk_batches
from batchgen.kernels.types import AttentionArgs, LayerKV


@dataclass(frozen=True, slots=True)
class LayerUse:
    """Attention shapes and window of a layer."""

    kv: LayerKV
    window: int | None
    num_heads: int
    """Number of query heads."""
    restarts: bool = False
    """As in `AttentionArgs`."""


class ProbeAttention:
    """Causal attention (the `Attention` protocol) over sequences fed in order, with contiguous keys and values."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, LayerUse]] = []
        """(layer, use) in the order of the calls."""
        self.parts: tuple[tuple[int, int], ...] = ()
        """(sequence, tokens) of the next forward, in order; empty for all tokens in one sequence."""
        self.starts: Sequence[int] = (0,)
        """First position of each sequence."""
        self.states = ProbeStates(self)
        """Recurrent states of the same sequences."""
        self._keys: dict[tuple[int, int], Tensor] = {}
        self._values: dict[tuple[int, int], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        """See `Attention.attend`."""
        kv = LayerKV(key.shape[1], key.shape[2], value.shape[2], args.latent)
        self.calls.append((layer, LayerUse(kv, args.window, query.shape[1], args.restarts)))
        if query.is_meta:
            return query.new_empty(*query.shape[:2], value.shape[2])
        sequences, counts = zip(*(self.parts or ((0, query.shape[0]),)), strict=True)
        split = zip(sequences, *(torch.split(x, list(counts)) for x in (query, key, value)), strict=True)
        return torch.cat([self._attend_one((layer, number), q, k, v, args) for number, q, k, v in split])

    def _attend_one(
        self, at: tuple[int, int], query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs
    ) -> Tensor:
        if at in self._keys:
            key, value = torch.cat((self._keys[at], key)), torch.cat((self._values[at], value))
        self._keys[at], self._values[at] = key, value
        return _dense(query, key, value, args, self.starts[at[1]])


class ProbeStates:
    """Recurrent states (the `States` protocol) of the sequences of a `ProbeAttention`, which records their sizes."""

    def __init__(self, attention: ProbeAttention) -> None:
        self._attention = attention
        self.sizes: dict[int, list[StateSize]] = {}
        """Layer -> its states, in the order of the calls."""
        self._device: torch.device | None = None
        self._tokens = 0
        self._states: dict[tuple[int, int], Tensor] = {}

    def on(self, device: torch.device, tokens: int) -> ProbeStates:
        """The states for a forward over `tokens` tokens on a device; on the meta device it only records."""
        self._device, self._tokens = device, tokens
        return self

    def of(self, layer: int, index: int, size: StateSize) -> tuple[Tensor, Sequence[RunBatch]]:
        """See `States.of`."""
        sizes = self.sizes.setdefault(layer, [])
        if index == len(sizes):
            sizes.append(size)
        assert self._device is not None
        if self._device.type == "meta":
            return torch.empty(0), ()
        sequences = len(self._attention.starts)
        if (layer, index) not in self._states:
            self._states[layer, index] = torch.zeros(sequences + 1, *size.shape, device=self._device)
        runs, at = [], 0
        for number, count in self._attention.parts or ((0, self._tokens),):
            runs.append([Run(at, at + count, number + 1, number + 1)])
            at += count
        return self._states[layer, index], chunk_batches(runs, device_for(self._device))


def _dense(query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs, start: int) -> Tensor:
    """[T, N, D], [S, K, D], [S, K, Dv] -> [T, N, Dv]; the queries are the last T of S positions from `start` on."""
    tokens, length = query.shape[0], key.shape[0]
    group = query.shape[1] // key.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (key, value))  # [S, N, D], [S, N, Dv]
    scores = torch.einsum("tnd,snd->nts", query.float(), k) * args.scale  # [N, T, S]
    if args.softcap is not None:
        scores = torch.tanh(scores / args.softcap) * args.softcap
    keys = torch.arange(start, start + length, device=query.device)  # [S]
    at = keys[length - tokens :, None]  # [T, 1]
    visible = keys <= at  # [T, S]
    if args.window is not None:
        visible &= keys >= at // args.window * args.window if args.restarts else keys > at - args.window
    scores = scores.masked_fill(~visible, -torch.inf)
    if args.sinks is not None:
        scores = torch.cat((scores, args.sinks.float()[:, None, None].expand(-1, tokens, 1)), -1)  # [N, T, S + 1]
    weights = scores.softmax(-1)[..., :length]  # [N, T, S]
    return torch.einsum("nts,snd->tnd", weights, v).to(query.dtype)  # [T, N, Dv]
