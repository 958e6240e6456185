"""Token count lists for tests of penalties, and the expected penalties from counters in Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen.kernels.counts import CountLists


def lists_of(outputs: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]] | None = None) -> CountLists:
    """Lists of samples with these outputs in slots 1, 2, ..., prompt tokens with a count of 0; the rest is poisoned."""
    seen = [dict.fromkeys([*(prompts[i] if prompts else []), *output]) for i, output in enumerate(outputs)]
    width = max(1, *(len(ids) for ids in seen)) + 3
    ids = torch.full((len(seen) + 1, width), -7, dtype=torch.int32)
    counts = torch.full((len(seen) + 1, width), torch.nan)
    ids[:, 0], counts[:, 0] = 0, 0.0  # the first entry is read even if the list is empty
    for slot, (tokens, output) in enumerate(zip(seen, outputs, strict=True), 1):
        counter = Counter(output)
        ids[slot, : len(tokens)] = torch.tensor(list(tokens), dtype=torch.int32)
        counts[slot, : len(tokens)] = torch.tensor([float(counter[token]) for token in tokens])
    return CountLists(ids, counts, torch.tensor([0, *map(len, seen)], dtype=torch.int32))


def listed(lists: CountLists, slot: int) -> dict[int, float]:
    """Token -> count of one slot; asserts that no token is listed twice."""
    used = int(lists.used[slot])
    tokens = lists.ids[slot, :used].tolist()
    assert len(set(tokens)) == used
    return dict(zip(tokens, lists.counts[slot, :used].tolist(), strict=True))


def expected_penalties(
    logits: Tensor, row: int, counts: dict[int, float], repetition: float, frequency: float, presence: float
) -> None:
    """Apply the three penalties to one row of float64 logits, token by token, in place."""
    for token, count in counts.items():
        value = logits[row, token]
        value = value / repetition if value > 0 else value * repetition
        logits[row, token] = value - frequency * count - presence * (count > 0)
