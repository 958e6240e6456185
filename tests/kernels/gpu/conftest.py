"""Kernels here run in Triton's interpreter, and whatever `torch.empty` hands out is full of not-a-numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    """What a kernel forgets to write must show."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills fresh memory, as torch documents
    assert bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(before)
