"""Collections happen at ticks and nowhere else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from batchgen.engine.collector import QuietCollector


class Ring:
    """Only a collector frees it."""

    def __init__(self) -> None:
        self.me = self


@contextmanager
def watched() -> Iterator[list[int]]:
    """The generations collected within."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


@pytest.fixture(autouse=True)
def _leave_as_found() -> Iterator[None]:
    assert gc.isenabled()
    gc.unfreeze()  # what `tests/conftest.py` set aside: a caller who froze something leaves the collector less to do
    yield
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.freeze()


def litter() -> None:
    """More objects than start a collection by themselves."""
    for _ in range(20):
        [[] for _ in range(2000)]


def test_nothing_is_collected_between_ticks() -> None:
    with watched() as seen:
        litter()
        assert seen
        with QuietCollector(every=4) as collector:
            for step in range(1, 4 * 16 * 16 + 1):
                seen.clear()
                if step < 40:
                    litter()
                assert seen == []
                collector.tick()
                rounds = step // 4
                assert seen == ([] if step % 4 else [2 if rounds % 256 == 0 else 1 if rounds % 16 == 0 else 0])


def test_what_a_run_leaves_behind_is_freed() -> None:
    with QuietCollector(every=1) as collector:
        ring = weakref.ref(Ring())
        assert ring() is not None
        collector.tick()
        assert ring() is None


def test_what_was_there_is_not_looked_at() -> None:
    kept = [Ring() for _ in range(10)]
    gone = weakref.ref(Ring())
    gc.collect()
    assert gone() is None
    with QuietCollector(every=1) as collector:
        assert gc.get_freeze_count() > 0
        collector.tick()
        assert len(gc.get_objects(generation=0)) < 100
    assert kept


def test_a_generator_closed_early_leaves_the_collector_on() -> None:
    def steps() -> Iterator[int]:
        with QuietCollector() as collector:
            for step in range(100):
                collector.tick()
                yield step

    running = steps()
    next(running)
    assert not gc.isenabled()
    running.close()
    assert gc.isenabled()
    left = steps()
    next(left)
    del left
    assert gc.isenabled()


def test_two_runs_at_once() -> None:
    first, second = QuietCollector(), QuietCollector()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_a_caller_without_a_collector_keeps_none() -> None:
    gc.disable()
    try:
        with QuietCollector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_a_start_made_is_set_aside() -> None:
    with QuietCollector(), QuietCollector(every=1) as inner:
        kept = [[] for _ in range(5000)]  # type: ignore[var-annotated]
        assert len(gc.get_objects(generation=0)) > 5000
        inner.set_aside()
        assert len(gc.get_objects(generation=0)) < 100
    assert gc.get_freeze_count() == 0
    assert kept


def test_what_a_caller_froze_is_all_that_stays_so() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with QuietCollector() as collector:
        kept = [[] for _ in range(5000)]  # type: ignore[var-annotated]
        collector.set_aside()
        assert gc.get_freeze_count() < frozen + 1000
    assert kept
    gc.unfreeze()
