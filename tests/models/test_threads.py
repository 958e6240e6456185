"""A step on more threads than processors: some threads start after the others have finished."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.kernels.cpu.attention import CompiledAttention
from batchgen.kernels.cpu.library import loaded, missing
from batchgen.kernels.device import HOST
from batchgen.kernels.lora import lora_step
from batchgen.models.base import CaptureSpec, ModelInput
from tests.models.adapters import save_adapter
from tests.models.loading import load_model
from tests.models.packed import PagedCache
from tests.models.tiny import save_tiny

LENGTHS = (5, 1, 17, 1, 1, 8)
LAYERS = 3


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.skipif(not loaded(), reason=str(missing()))
def test_bits_do_not_depend_on_the_number_of_threads(dtype: Any, adapted: bool, tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path / "base")
    adapters = [("a", str(save_adapter(folder, tmp_path / "a")))]
    model = load_model(
        folder, implementation="native", dtype=dtype, device="cpu", products="fixed", lora=adapters if adapted else ()
    )
    tokens = sum(LENGTHS)
    ids = torch.arange(tokens) % 50 + 3
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    given: dict[str, Any] = {"lora": lora_step(np.arange(tokens) % 2 - 1, HOST)} if adapted else {}

    def step(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        cache = PagedCache(model.spec, len(LENGTHS))
        attention = CompiledAttention(cache.pool, cache.batch(list(enumerate(LENGTHS))), deterministic=True)
        capture = CaptureSpec(torch.arange(tokens), tokens, (0, 1, LAYERS))
        wanted = None if adapted else torch.tensor([4, 22, 32])
        hidden = model.hidden(ModelInput(ids, positions, attention, wanted=wanted, capture=capture, **given))
        return [hidden, *capture.states.values(), *map(torch.nan_to_num, (*cache.pool.keys, *cache.pool.values))]

    alone = step(1)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(alone, step(9), strict=True))
