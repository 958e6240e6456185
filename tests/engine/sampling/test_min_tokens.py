"""The `min_new_tokens` mask on the device, against a loop over rows with known lengths."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.engine.step.sampler import EarlyMask
from batchgen.kernels.device import HOST
from batchgen.kernels.ops import TORCH_OPS
from tests.engine.fake_device import LateDevice

VOCAB = 23


@dataclass
class Row:
    """The part of a sequence that the mask needs. `num_sampled`: tokens on the device, `on_host`: on the host."""

    min_new_tokens: int
    stop_ids: tuple[int, ...]
    num_sampled: int = 0
    on_host: int = 0

    @property
    def masked_ids(self) -> dict[int, int]:
        return dict.fromkeys(self.stop_ids, self.min_new_tokens)

    @property
    def masks_early(self) -> bool:
        return self.on_host < self.min_new_tokens and bool(self.stop_ids)


def some_rows(count: int, seed: int) -> list[Row]:
    rng = Random(seed)
    return [Row(rng.randint(0, 9), tuple(rng.sample(range(VOCAB), rng.randint(0, 4)))) for _ in range(count)]


def mask_of(rows: list[Row], device: Any = HOST) -> EarlyMask | None:
    return EarlyMask.of([(i, row) for i, row in enumerate(rows)], device, TORCH_OPS)  # type: ignore[misc]


def masked_by_loop(logits: Tensor, rows: list[Row]) -> Tensor:
    found = logits.clone()
    for i, row in enumerate(rows):
        if row.num_sampled < row.min_new_tokens:
            found[i, list(row.stop_ids)] = -torch.inf
    return found


@pytest.mark.field("min_new_tokens")
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_stop_ids_are_masked_until_the_minimum(lag: int, seed: int) -> None:
    """One upload for all steps, whether the host knows the current lengths or those of the last step."""
    rows, device = some_rows(12, seed), LateDevice()
    mask = mask_of(rows, device)
    calls = 0
    for step in range(12):
        for row in rows:
            row.num_sampled, row.on_host = step, max(0, step - lag)
        logits = torch.randn(len(rows), VOCAB)
        expected = masked_by_loop(logits, rows)
        calls += mask.apply(logits, torch.tensor([row.num_sampled for row in rows])) is not None
        assert torch.equal(logits, expected)
    assert device.counts.uploads == 1
    assert calls == max(row.min_new_tokens for row in rows if row.stop_ids) + lag, "no mask after the minimum"


def test_rows_join_at_any_length() -> None:
    rows = [Row(5, (1, 2), 4, 4), Row(5, (3,), 5, 4), Row(2, (4,), 7, 7)]  # (minimum, ids, sampled, on the host)
    mask = mask_of(rows)
    logits = torch.zeros(3, VOCAB)
    masked = mask.apply(logits, torch.tensor([row.num_sampled for row in rows]))
    assert torch.equal(logits, masked_by_loop(torch.zeros(3, VOCAB), rows))
    assert masked.rows.tolist() == [0, 0, 1]


@pytest.mark.field("min_new_tokens")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mask_is_only_undone_in_empty_rows(dtype: torch.dtype) -> None:
    rows = some_rows(9, 3)
    mask = mask_of(rows)
    before = torch.randn(len(rows), VOCAB).to(dtype)
    logits = before.clone()
    masked = mask.apply(logits, torch.zeros(len(rows), dtype=torch.int64))
    logits[1] = before[1] = 7.0  # later changes stay where nothing was masked
    empty = torch.tensor([i % 2 == 0 for i in range(len(rows))])
    expected = torch.where(empty[:, None], before, logits)
    masked.undo(logits, empty, TORCH_OPS)
    assert torch.equal(logits, expected)
