"""Plain float32 attention over several sequences, an independent oracle for the tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from batchgen.kernels.types import AttentionArgs


class DenseCache:
    """Keys and values of each (layer, sequence), extended by every step."""

    def __init__(self) -> None:
        self.keys: dict[tuple[int, int], Tensor] = {}
        self.values: dict[tuple[int, int], Tensor] = {}

    def step(self, parts: list[tuple[int, int]]) -> DenseAttention:
        """Attention of a step whose flat tokens are `parts`: (sequence, tokens), in order."""
        return DenseAttention(self, parts)


class DenseAttention:
    """Attention of one step (the `Attention` protocol)."""

    def __init__(self, cache: DenseCache, parts: list[tuple[int, int]]) -> None:
        self.cache = cache
        self.parts = parts

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        assert query.shape[0] == key.shape[0] == value.shape[0] == sum(count for _, count in self.parts)
        out, start = [], 0
        for sequence, count in self.parts:
            at = (layer, sequence)
            new_k, new_v = key[start : start + count], value[start : start + count]
            self.cache.keys[at] = torch.cat([self.cache.keys[at], new_k]) if at in self.cache.keys else new_k.clone()
            self.cache.values[at] = (
                torch.cat([self.cache.values[at], new_v]) if at in self.cache.values else new_v.clone()
            )
            k, v = self.cache.keys[at].float(), self.cache.values[at].float()
            rows = query[start : start + count].float()
            out.append(torch.stack([_row(rows, i, k, v, args) for i in range(count)]))
            start += count
        return torch.cat(out).to(query.dtype)


def _row(rows: Tensor, i: int, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
    """Attention of query i of [n, N, D] over keys [S, K, D]; the queries are the last n positions."""
    end = len(k) - len(rows) + i + 1
    begin = 0 if args.window is None else max(0, end - args.window)
    groups = rows.shape[1] // k.shape[1]
    out = []
    for head in range(rows.shape[1]):
        scores = k[begin:end, head // groups] @ rows[i, head] * args.scale
        if args.softcap is not None:
            scores = args.softcap * torch.tanh(scores / args.softcap)
        weights = torch.exp(scores - scores.max())
        total = weights.sum()
        if args.sinks is not None:
            total = total + math.exp(float(args.sinks[head]) - float(scores.max()))
        out.append(weights / total @ v[begin:end, head // groups])
    return torch.stack(out)
