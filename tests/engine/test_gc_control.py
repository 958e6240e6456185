"""`DeferredGC`: collections only run in `tick`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from batchgen.engine.memory.gc_control import DeferredGC


class Ring:
    """A reference cycle, which only the garbage collector frees."""

    def __init__(self) -> None:
        self.me = self


@contextmanager
def watched() -> Iterator[list[int]]:
    """The generations that are collected inside the block."""
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
    yield
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def litter() -> None:
    """Create enough objects to trigger an automatic collection."""
    for _ in range(20):
        [[] for _ in range(2000)]


def test_nothing_is_collected_between_ticks() -> None:
    with watched() as seen:
        litter()
        assert seen
        with DeferredGC(every=4) as deferred_gc:
            for step in range(1, 4 * 16 * 16 + 1):
                seen.clear()
                if step < 40:
                    litter()
                assert seen == []
                deferred_gc.tick()
                rounds = step // 4
                assert seen == ([] if step % 4 else [2 if rounds % 256 == 0 else 1 if rounds % 16 == 0 else 0])


def test_garbage_of_a_run_is_freed_and_older_objects_are_frozen() -> None:
    kept = [Ring() for _ in range(10)]
    gone = weakref.ref(Ring())
    gc.collect()
    assert gone() is None
    with DeferredGC(every=1) as deferred_gc:
        assert gc.get_freeze_count() > 0
        ring = weakref.ref(Ring())
        assert ring() is not None
        deferred_gc.tick()
        assert ring() is None
        assert len(gc.get_objects(generation=0)) < 100
    assert kept


def test_closing_a_generator_early_turns_the_collector_on() -> None:
    def steps() -> Iterator[int]:
        with DeferredGC() as deferred_gc:
            for step in range(100):
                deferred_gc.tick()
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


def test_the_collector_is_left_as_the_first_run_found_it() -> None:
    first, second = DeferredGC(), DeferredGC()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    try:
        with DeferredGC():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_freeze_all_freezes_new_objects() -> None:
    with DeferredGC(), DeferredGC(every=1) as inner:
        kept = [[] for _ in range(5000)]  # type: ignore[var-annotated]
        assert len(gc.get_objects(generation=0)) > 5000
        inner.freeze_all()
        assert len(gc.get_objects(generation=0)) < 100
    assert gc.get_freeze_count() == 0
    assert kept


def test_freeze_all_keeps_a_caller_s_freeze() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with DeferredGC() as deferred_gc:
        kept = [[] for _ in range(5000)]  # type: ignore[var-annotated]
        deferred_gc.freeze_all()
        assert gc.get_freeze_count() < frozen + 1000
    assert kept
    gc.unfreeze()
