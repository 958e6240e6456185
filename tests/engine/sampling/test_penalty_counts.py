"""Token counts on the device, against one counter per sample."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from batchgen import SamplingParams
from batchgen.engine.sampling.penalty_counts import PenalisedRows, TokenCounts, lists_bytes
from batchgen.engine.workload import plan_workload
from batchgen.kernels.counts import CountLists, Penalties
from batchgen.kernels.device import HOST
from batchgen.kernels.ops import TORCH_OPS
from batchgen.request.table.request_table import RequestTable
from tests.engine.fake_device import LateDevice
from tests.kernels.penalised import expected_penalties, listed

VOCAB = 300


class Sample:
    """A running sample: its slot, and the expected counts."""

    def __init__(self, counts: TokenCounts, rng: Random) -> None:
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 3, 200]))]
        self.slot = counts.add(np.array(prompt, np.int32) if prompt else None)
        self.counted: Counter[int] = Counter(dict.fromkeys(prompt, 0))
        self.left = rng.randint(1, 50)


ONES = Penalties(torch.ones(1), torch.ones(1), torch.ones(1))


def rows_of(counts: TokenCounts, samples: list[Sample], places: list[int], factors: Tensor) -> PenalisedRows:
    slots: npt.NDArray[np.int64] = np.array([sample.slot for sample in samples], np.int64)
    columns = Penalties(factors, factors - 1, factors - 2)
    return PenalisedRows(counts, slots, torch.from_numpy(slots.copy()), torch.tensor(places), columns)


@pytest.mark.field("repetition_penalty", "frequency_penalty", "presence_penalty")
def test_tokens_that_are_only_on_the_device() -> None:
    """Samples start, pause, end and reuse slots; every step's penalties match the expected counts."""
    rng, device = Random(0), LateDevice()
    counts = TokenCounts(VOCAB, device)
    running: list[Sample] = []
    started = 0
    for step in range(160):
        if step % 3 == 0:
            fresh = [Sample(counts, rng) for _ in range(rng.randint(1, 4))]
            started += len(fresh)
            running += fresh
        chosen = rng.sample(running, rng.randint(0, len(running)))  # the others were preempted
        if not chosen:
            continue
        places = rng.sample(range(len(chosen) + 3), len(chosen))
        factors = 0.5 + torch.rand(len(chosen))
        rows = rows_of(counts, chosen, places, factors)
        logits = torch.randn(len(chosen) + 3, VOCAB)
        expected = logits.double()
        for sample, place, factor in zip(chosen, places, factors.tolist(), strict=True):
            expected_penalties(expected, place, dict(sample.counted), factor, factor - 1, factor - 2)
        rows.penalise(logits, TORCH_OPS)
        torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-4)
        tokens = torch.randint(0, VOCAB, (len(chosen) + 3,))  # never copied back to the host
        rows.count(tokens, TORCH_OPS)
        for sample, place in zip(chosen, places, strict=True):
            sample.counted[int(tokens[place])] += 1
            sample.left -= 1
            if not sample.left:
                running.remove(sample)
                counts.release(sample.slot)
    lists = counts.lists()
    assert all(listed(lists, sample.slot) == dict(sample.counted) for sample in running)
    assert lists.ids.shape[0] < started, "slots were reused"
    assert lists.ids.shape[1] > 128, "lists grew"
    assert device.counts.uploads <= 54, "one upload per step with new samples"
    assert device.counts.downloads == {}


def test_new_slots_are_uploaded_together_and_only_when_used() -> None:
    device = LateDevice()
    counts = TokenCounts(VOCAB, device)
    slots = [counts.add(np.array([5, 3, 5], np.int32)), counts.add(), counts.add(np.arange(200, dtype=np.int32))]
    assert device.counts.uploads == 0
    lists = counts.lists()
    assert device.counts.uploads == 1
    assert [listed(lists, slot) for slot in slots] == [{3: 0, 5: 0}, {}, dict.fromkeys(range(200), 0)]
    assert counts.lists() is lists
    assert device.counts.uploads == 1


def test_a_slot_that_ended_before_it_was_used_is_not_uploaded() -> None:
    device = LateDevice()
    counts = TokenCounts(VOCAB, device)
    counts.release(counts.add(np.array([1], np.int32)))
    again = counts.add(np.array([2], np.int32))
    assert listed(counts.lists(), again) == {2: 0}
    counts.release(again)
    assert counts.add() == again
    assert listed(counts.lists(), again) == {}


def test_a_step_planned_before_the_end_may_still_count() -> None:
    """A list that is full when its sample ends has room for one more token of a step in flight."""
    counts = TokenCounts(1000, HOST)
    slot = counts.add(np.arange(64, dtype=np.int32))
    rows = PenalisedRows(counts, np.array([slot]), torch.tensor([slot]), torch.tensor([0]), ONES)
    counts.lists()
    counts.release(slot)
    for token in (700, 701):
        rows.penalise(torch.zeros(1, 1000), TORCH_OPS)
        rows.count(torch.tensor([token]), TORCH_OPS)
    assert listed(counts.lists(), slot) == {**dict.fromkeys(range(64), 0), 700: 1, 701: 1}


def test_lists_are_at_most_as_long_as_the_vocabulary() -> None:
    counts = TokenCounts(7, HOST)
    slot = counts.add()
    rows = PenalisedRows(counts, np.array([slot]), torch.tensor([slot]), torch.tensor([0]), ONES)
    for step in range(200):
        rows.count(torch.tensor([step % 7]), TORCH_OPS)
    assert counts.width(np.array([slot])) == 7
    assert counts.lists().ids.shape[1] == 64
    assert sum(listed(counts.lists(), slot).values()) == 200


@pytest.mark.parametrize("prompts", [False, True])
def test_lists_bytes_bounds_the_peak(prompts: bool) -> None:
    """The bound includes the copy while the lists grow, and is 0 without penalties."""
    table = RequestTable()
    rng = np.random.default_rng(0)
    for i in range(40):
        ids = rng.integers(0, VOCAB, 150 if i == 7 else 5)
        params = SamplingParams(max_new_tokens=30 + i, n=1 + i % 3, repetition_penalty=1.2 if i % 2 else 1.0)
        table.append(i, 0, ids.tolist(), params, i, 30 + i)
    workload = plan_workload(table)
    bound = lists_bytes(workload, 24, VOCAB, prompts=prompts)
    counts, most = TokenCounts(VOCAB, HOST), 0
    for _ in range(24):
        before = counts.lists()
        counts.add(table.prompt_ids(7) if prompts else None)
        after = counts.lists(219 if prompts else 69)
        most = max(most, held(after) + (held(before) if before is not after else 0))
    assert held(counts.lists()) < most <= bound
    assert bound <= 4 * most
    plain = RequestTable()
    plain.append(0, 0, [1, 2], SamplingParams(max_new_tokens=5), 0, 5)
    assert lists_bytes(plan_workload(plain), 24, VOCAB, prompts=prompts) == 0


def held(lists: CountLists) -> int:
    return sum(x.numel() * x.element_size() for x in (lists.ids, lists.counts))
