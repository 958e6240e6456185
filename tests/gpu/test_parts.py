"""Parts of the workloads for GPUs, and the floors that their rates are compared with. They need no GPU."""

from __future__ import annotations

import pytest

from batchgen.bench.shapes import SHAPES, Shape
from batchgen.bench.workloads import GPU_WORKLOADS, BenchRow, Level, Workload
from tests.gpu.engines import part_of
from tests.gpu.floors import H200, DeviceRates, device_floor


@pytest.mark.parametrize("factor", [1.0, 0.5, 0.1, 0.01])
@pytest.mark.parametrize("name", sorted(GPU_WORKLOADS))
def test_a_part_has_about_that_share_of_the_workloads_output(name: str, factor: float) -> None:
    whole = GPU_WORKLOADS[name]
    part, made = part_of(whole, factor)

    def tokens(workload: Workload) -> float:
        count = workload.samples * sum(workload.output) / 2
        for level in workload.levels:
            count *= level.children
        return count

    assert tokens(part) / tokens(whole) == pytest.approx(made)
    assert made == pytest.approx(factor, rel=0.3)
    assert part_of(whole, 1.0) == (whole, 1.0)


def test_parts_have_fewer_rows_before_they_have_shorter_outputs() -> None:
    part, _ = part_of(GPU_WORKLOADS["w-prefix"], 1 / 8)
    assert (part.levels[-1].children, part.output) == (512, (128, 128))
    part, _ = part_of(GPU_WORKLOADS["w-prefix"], 1 / 32)
    assert (part.levels[-1].children, part.output) == (256, (64, 64))
    part, _ = part_of(Workload("toy", "toy", (Level(2, (4, 4)),), (8, 8)), 1e-9)
    assert (part.levels[-1].children, part.output) == (2, (1, 1))


def test_a_floor_of_a_named_workload_model_and_device() -> None:
    """Thousands of tokens per second, computed independently; the tolerance covers different rounding of batches."""
    floor = device_floor(GPU_WORKLOADS["w-prefix"].rows(128_256), SHAPES["8b"], H200, 1024)
    assert (floor.overlap / 1e3, floor.serial / 1e3) == pytest.approx((33.5, 28.9), rel=0.08)


def test_a_floor_by_hand() -> None:
    """A model of one layer and one head of 2: 8 operations and 8 bytes of attention for a cached position."""
    rows = [BenchRow([5, 6, 7, 8], 3), BenchRow([5, 6, 9], 2, samples=2)]
    shape = Shape(layers=1, hidden=2, heads=1, kv_heads=1, head_dim=2, inner=2, vocab=10)
    rates = DeviceRates("slow", 1.0, 1.0)
    layers, head = shape.parameters - 20, 20
    levels = device_floor(rows, shape, rates, 3)
    assert levels.output_tokens == 7
    # Segments [5, 6], [7, 8] and [9], read for 3, 3 and 2 steps; outputs attend to 3 earlier outputs and twice to 1.
    assert levels.memory == 3 * 2 * (layers + head) + 8 * (2 * 3 + 2 * 3 + 1 * 2 + 3 + 2)
    assert levels.prefill == 2 * layers * 5 + 8 * (1 + 2 + 3 + 4 + 3)
    assert levels.compute == 2 * (layers + head) * 7 + 8 * (4 * 3 + 2 * 2 * 3 + 3 + 2)
    assert levels.serial < levels.overlap
    # With one sample at a time each token reads the weights, and each row reads the shared segment.
    alone = device_floor(rows, shape, rates, 1)
    assert alone.memory == 7 * 2 * (layers + head) + 8 * (2 * 3 * 3 + 2 * 3 + 1 * 2 * 2 + 3 + 2)
