"""Break-even saving of prefix groups: interpolation between two measurements, and its limits."""

from __future__ import annotations

import pytest
import torch

from batchgen.kernels.cpu.library import loaded
from batchgen.kernels.cpu.prefix_group_cost import LEAST, MOST, even_saving, measured_saving
from batchgen.kernels.types import LayerKV


@pytest.mark.parametrize(
    ("short_cost", "long_cost", "expected"),
    [
        (1.0, -15.0, 256),  # breaks even at 100 + 1600 / 16 = 200
        (5.0, -5.0, 1024),  # at 900
        (1.0, 0.5, MOST),  # at 3300
        (1.0, 0.9, MOST),
        (-1.0, -9.0, LEAST),  # short prefixes pay already
        (2.0, 3.0, MOST),  # a longer prefix pays less: it never pays
        (-3.0, -2.0, LEAST),  # the timing was disturbed, but both pay
    ],
)
def test_break_even_saving(short_cost: float, long_cost: float, expected: int) -> None:
    assert even_saving(100, short_cost, 1700, long_cost) == expected


@pytest.mark.skipif(not loaded(), reason="no C++ compiler here")
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_the_measured_saving_is_a_power_of_two(page_size: int) -> None:
    saving = measured_saving(LayerKV(2, 16, 16), 4, torch.float32, page_size, 2)
    assert LEAST <= saving <= MOST
    assert saving & (saving - 1) == 0
