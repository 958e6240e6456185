from __future__ import annotations

import pytest
import torch

from batchgen.kernels.attention import TorchAttention
from batchgen.kernels.backend import BackendUnavailable, choose_backend

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_torch_is_taken(name: str) -> None:
    assert choose_backend(name, CPU).attention is TorchAttention


@pytest.mark.parametrize("name", ["flash", "triton"])
def test_what_is_not_built_is_refused_by_name(name: str) -> None:
    with pytest.raises(BackendUnavailable, match=f"'{name}' is not in this build"):
        choose_backend(name, CPU)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(BackendUnavailable, match="'fast'; take one of auto, flash, triton, torch"):
        choose_backend("fast", CPU)
