from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from batchgen.kernels import measure
from batchgen.kernels.attention.torch_attention import TorchAttention
from batchgen.kernels.gpu.attention import TritonAttention
from batchgen.kernels.measure import (
    ProductStep,
    TypicalStep,
    WeightSize,
    device_timer,
    grouped_weights_pay,
    layer_milliseconds,
)
from batchgen.kernels.quantization import INT4
from batchgen.kernels.types import AttentionArgs, AttentionBatch, KVPool, LayerKV, PagedAttention
from tests.kernels.oracle import attend_by_token

STEP = TypicalStep(LayerKV(2, 8, 8), 4, torch.float32, 4, torch.device("cpu"), rows=3, context=21, shared=9, chunk=6)


def steady(call: Callable[[], object]) -> float:
    call()
    return 1.0


# The step


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    "step",
    [
        STEP,
        replace(STEP, chunk=0),
        replace(STEP, rows=1, context=1, shared=0),
        replace(STEP, context=12, shared=12),  # own pages hold the input token only
        replace(STEP, context=20, shared=3),  # shares no whole page
    ],
)
def test_every_backend_can_run_the_step(step: TypicalStep, grouped: bool) -> None:
    pool, batch, query = step.sample(grouped=grouped)
    args = AttentionArgs(0.3)
    truth = attend_by_token(batch, query, pool.keys[0], pool.values[0], args)
    for backend in (TorchAttention, TritonAttention):
        got = backend(pool, batch).attend_stored(0, query, args)
        assert float((got - truth).abs().max()) < 1e-5
    shared = step.shared // 4 if grouped else 0
    assert [len(g.pages) for g in batch.groups] == [shared] * (shared > 0)
    assert batch.decode_lens is not None
    assert batch.decode_own_start is not None
    assert (batch.decode_lens + batch.decode_own_start).tolist() == [max(step.context, 4 * shared + 1)] * step.rows
    assert len(batch.slot_mapping) == len(query) == step.rows + step.chunk
    assert 0 not in batch.slot_mapping // step.page_size  # page 0 is scratch


def test_pages_repeat_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_POOL_BYTES", 8 * KVPool.page_bytes([STEP.layer], 4, torch.float32))
    pool, batch, query = STEP.sample(grouped=True)
    assert pool.keys[0].shape[0] == 8
    assert batch.decode_pages is not None
    assert 1 <= batch.decode_pages.min() <= batch.decode_pages.max() < 8
    TorchAttention(pool, batch).attend_stored(0, query, AttentionArgs(1.0))


# The measurement


class NamedCandidate:
    """A candidate identified by its name."""

    def __init__(self, name: str, made: list[tuple[str, bool]], pool: KVPool, batch: AttentionBatch) -> None:
        made.append((name, bool(batch.groups)))
        self.name = name

    def attend_stored(self, layer: int, query: torch.Tensor, args: AttentionArgs) -> None:
        if self.name == "broken":
            raise RuntimeError("no room\nmore of it")
        if self.name == "odd":
            raise OutOfResources


def candidates(made: list[tuple[str, bool]], *names: str) -> dict[str, Callable[..., PagedAttention]]:
    return {name: partial(NamedCandidate, name, made) for name in names}  # type: ignore[misc]


def test_with_and_without_the_group_and_their_mean() -> None:
    made: list[tuple[str, bool]] = []
    answers = iter([1.0, 10.0, 3.0, 20.0])
    found = layer_milliseconds(candidates(made, "a", "b"), STEP, lambda call: next(answers))
    assert found == {"a": 2.0, "b": 15.0}
    assert made == [("a", False), ("b", False), ("a", True), ("b", True)]


def test_without_shared_positions_once() -> None:
    made: list[tuple[str, bool]] = []
    assert layer_milliseconds(candidates(made, "a"), replace(STEP, shared=3), steady) == {"a": 1.0}
    assert made == [("a", False)]


class OutOfResources(Exception):
    """An error that derives from none of Python's or torch's usual types, as Triton's do."""


def test_failures_are_reported_and_the_rest_is_measured() -> None:
    found = layer_milliseconds(candidates([], "broken", "odd", "a"), STEP, steady)
    assert found == {"broken": "no room", "odd": "OutOfResources", "a": 1.0}


def test_a_pool_is_freed_before_the_next_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    allocate = KVPool.allocate

    def watched(*sizes: Any) -> KVPool:
        assert [ref() for ref in made] == [None] * len(made)
        pool = allocate(*sizes)
        made.append(weakref.ref(pool.keys[0]))
        return pool

    monkeypatch.setattr(KVPool, "allocate", watched)
    layer_milliseconds({"torch": TorchAttention}, STEP, steady)
    assert [ref() for ref in made] == [None, None]


def test_the_device_times_calls_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    now = 0.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = 0.0

        def record(self) -> None:
            self.at = now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    def call() -> None:
        nonlocal calls, now
        calls += 1
        now += 100.0 if calls in (1, 5) else 2.0  # the first call compiles, the fifth is disturbed

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert device_timer(torch.device("cuda"))(call) == 2.0


@pytest.mark.parametrize(("times", "pays"), [((1, 2, 5, 2), True), ((1, 1, 1, 1), True), ((2, 1, 1, 3), False)])
def test_grouped_weights_pay_if_their_steps_take_less_time(times: tuple[float, ...], pays: bool) -> None:
    """Seconds of a step with few and with many rows, over weights in groups and dequantised; three of the former."""
    left = iter(times)

    def timer(call: Callable[[], object]) -> float:
        call()
        return next(left)

    step = ProductStep(torch.device("cpu"), torch.float32, timer, cache_bytes=0)
    assert grouped_weights_pay({WeightSize(24, 64, 32, INT4): 2}, [(3, 3.0), (200, 1.0)], step) is pays


def test_few_small_weights_are_measured() -> None:
    """As many as exceed a cache would take minutes."""
    step = ProductStep(torch.device("cpu"), torch.float32, steady, cache_bytes=1 << 30)
    assert grouped_weights_pay({WeightSize(8, 32, 32, INT4): 1}, [(1, 1.0)], step)
