"""For all tests: the longest begin first, so that no worker waits for one that another began last; and what they all
import is set aside from the garbage collector."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator

# Triton kernels run in their interpreter, on CPU tensors, unless the caller says otherwise (tests/gpu on a GPU does).
# Triton looks once, when it is first imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Threads that wait for each other give the processor away: tests run several of them on a core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from hypothesis import settings

# The same cases in every run, so that a change that has nothing to do with it is never stopped by a new one;
# `--hypothesis-profile=explore` draws others.
settings.register_profile("steady", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("steady")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # What is imported stays: full collections would look through all of it again and again.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or libraries would find it alive at the very end, and say that it leaks


_THREADS = pytest.StashKey[int]()


def pytest_collection_finish(session: pytest.Session) -> None:
    if torch := sys.modules.get("torch"):
        session.config.stash[_THREADS] = torch.get_num_threads()


def pytest_runtest_setup(item: pytest.Item) -> None:
    # An engine takes what was set before an earlier one was given fewer threads, and a test may have set that.
    if (torch := sys.modules.get("torch")) and (threads := item.config.stash.get(_THREADS, None)):
        torch.set_num_threads(threads)
        if engine := sys.modules.get("batchgen.engine.engine"):
            engine._THREADS_BEFORE.clear()
    # Only where Triton is there already: most tests do without, and it is slow to import.
    if "triton.runtime.interpreter" in sys.modules:
        from tests.gpu.interpreted import quicken

        quicken()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
