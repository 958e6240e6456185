"""The min_new_tokens mask on the device, against a loop over rows that knows every length."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.engine.stop_mask import StopMask
from batchgen.kernels.device import HOST
from tests.engine.fake_device import LateDevice

VOCAB = 23


@dataclass
class Row:
    """What the mask asks of a sequence. `drawn` is what the device knows, `seen` what the host does."""

    min_new_tokens: int
    masked_ids: tuple[int, ...]
    drawn: int = 0
    seen: int = 0
    request: Any = field(init=False)

    def __post_init__(self) -> None:
        self.request = SimpleNamespace(params=SimpleNamespace(min_new_tokens=self.min_new_tokens))

    @property
    def masks_stops(self) -> bool:
        return self.seen < self.min_new_tokens and bool(self.masked_ids)


def some_rows(count: int, seed: int) -> list[Row]:
    rng = Random(seed)
    return [Row(rng.randint(0, 9), tuple(rng.sample(range(VOCAB), rng.randint(0, 4)))) for _ in range(count)]


def mask_of(rows: list[Row], device: Any = HOST) -> StopMask | None:
    return StopMask.of([(i, row) for i, row in enumerate(rows)], device)  # type: ignore[misc]


def hidden_by_loop(logits: Tensor, rows: list[Row]) -> Tensor:
    found = logits.clone()
    for i, row in enumerate(rows):
        if row.drawn < row.min_new_tokens:
            found[i, list(row.masked_ids)] = -torch.inf
    return found


@pytest.mark.field("min_new_tokens")
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_stops_are_hidden_until_the_minimum_is_out(lag: int, seed: int) -> None:
    """One upload for all steps, whether the host knows every row's length or that of a step before."""
    rows, device = some_rows(12, seed), LateDevice()
    mask = mask_of(rows, device)
    assert mask is not None
    calls = 0
    for step in range(12):
        for row in rows:
            row.drawn, row.seen = step, max(0, step - lag)
        logits = torch.randn(len(rows), VOCAB)
        expected = hidden_by_loop(logits, rows)
        calls += mask.hide(logits, torch.tensor([row.drawn for row in rows])) is not None
        assert torch.equal(logits, expected)
    assert device.counts.uploads == 1
    assert calls == max(row.min_new_tokens for row in rows if row.masked_ids) + lag, "then nothing is done"


def test_rows_join_at_any_length() -> None:
    rows = [Row(5, (1, 2), drawn=4, seen=4), Row(5, (3,), drawn=5, seen=4), Row(2, (4,), drawn=7, seen=7)]
    mask = mask_of(rows)
    assert mask is not None
    logits = torch.zeros(3, VOCAB)
    hidden = mask.hide(logits, torch.tensor([row.drawn for row in rows]))
    assert hidden is not None
    assert torch.equal(logits, hidden_by_loop(torch.zeros(3, VOCAB), rows))
    assert hidden.rows.tolist() == [0, 0, 1]


@pytest.mark.field("min_new_tokens")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mask_gives_way_in_empty_rows_alone(dtype: torch.dtype) -> None:
    rows = some_rows(9, 3)
    mask = mask_of(rows)
    assert mask is not None
    before = torch.randn(len(rows), VOCAB).to(dtype)
    logits = before.clone()
    hidden = mask.hide(logits, torch.zeros(len(rows), dtype=torch.int64))
    assert hidden is not None
    logits[1] = before[1] = 7.0  # what is altered later stays altered where nothing was hidden
    empty = torch.tensor([i % 2 == 0 for i in range(len(rows))])
    expected = torch.where(empty[:, None], before, logits)
    hidden.lift(logits, empty)
    assert torch.equal(logits, expected)


def test_no_minimum_no_mask() -> None:
    assert mask_of([]) is None
    assert mask_of([Row(0, (1,)), Row(3, ()), Row(3, (1,), seen=3)]) is None
