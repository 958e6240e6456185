"""Kernels here run in Triton's interpreter; `torch.empty` fills new memory with not-a-numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    """Fill new memory with not-a-numbers, so that missing writes show."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills fresh memory, as torch documents
    assert bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(before)
