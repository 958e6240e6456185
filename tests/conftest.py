"""Hooks for all tests: slow tests start first, imports are not garbage-collected, thread counts are reset."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator
from typing import Any

# Triton kernels run in the interpreter on CPU tensors, unless the caller sets the variable (tests/gpu on a GPU does).
# Triton reads it once, when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Waiting OpenMP threads sleep instead of spinning, because several tests share a core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from hypothesis import HealthCheck, settings

# The same few cases in every run, so that an unrelated change cannot fail on a new case;
# `--hypothesis-profile=explore` generates others, and five times as many.
# How long examples take depends on what else the machine does.
_ANY_TIME: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("steady", derandomize=True, max_examples=20, **_ANY_TIME)
settings.register_profile("explore", derandomize=False, max_examples=100, **_ANY_TIME)
settings.load_profile("steady")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # imported objects live until the end
    try:
        return (yield)
    finally:
        gc.enable()


_THREADS = pytest.StashKey[int]()


def pytest_collection_finish(session: pytest.Session) -> None:
    if torch := sys.modules.get("torch"):
        session.config.stash[_THREADS] = torch.get_num_threads()


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Undo changes of the thread count by earlier tests, including the count that the engine saved.
    if (torch := sys.modules.get("torch")) and (threads := item.config.stash.get(_THREADS, None)):
        torch.set_num_threads(threads)
        if machine := sys.modules.get("batchgen.engine.machine"):
            machine._THREADS_BEFORE.clear()
    # Only if Triton is already imported: most tests do not need it, and importing it is slow.
    if "triton.runtime.interpreter" in sys.modules:
        from tests.gpu.interpreted import speed_up_interpreter

        speed_up_interpreter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", type=int, default=1, metavar="N", help="Run every Nth test only: a sample of all.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every = config.getoption("every")
    items[:] = items[::every]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
