"""For all tests: the longest begin first, so that no worker waits for one that another began last."""

from __future__ import annotations

import os

# Triton kernels run in their interpreter, on CPU tensors, unless the caller says otherwise (tests/gpu on a GPU does).
# Triton looks once, when it is first imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
