"""Steps on which attention is checked and timed, with their sizes as arguments."""

from __future__ import annotations

import torch

from tests.gpu.device import Gpu
from tests.gpu.steps import DeviceSteps
from tests.kernels.steps import Shape, Step


def heads_shape(
    heads: int, kv_heads: int, dim: int, page: int, dtype: torch.dtype, value_dim: int = 0, latent: bool = False
) -> Shape:
    """Shape of a layer's heads and pages; `value_dim` 0: as `dim`."""
    return Shape(heads, kv_heads, dim, value_dim or dim, page, dtype, latent)


def decode_step(gpu: Gpu, shape: Shape, rows: int, shortest: int, longest: int) -> Step:
    """`rows` decode rows with random contexts from `shortest` to `longest` positions."""
    lens = gpu.randint(shortest, longest + 1, rows).tolist()
    lens[0] = longest
    steps = _builder(gpu, shape, sum(-(-n // shape.page_size) for n in lens))
    for length in lens:
        steps.decode(length)
    return steps.build()


def prefill_step(gpu: Gpu, shape: Shape, chunks: list[tuple[int, int]]) -> Step:
    """Prefill chunks, each (number of queries, number of positions before them)."""
    steps = _builder(gpu, shape, sum(-(-(new + past) // shape.page_size) for new, past in chunks))
    for new, past in chunks:
        steps.chunk(new, past)
    return steps.build()


def grouped_step(gpu: Gpu, shape: Shape, rows: int, levels: list[tuple[int, int]], longest_own: int) -> Step:
    """Decode rows under a tree of shared prefixes.

    Args:
        gpu: device and random numbers.
        shape: heads and pages.
        rows: number of decode rows.
        levels: per level, from the root: number of groups that divide the rows evenly, and pages of each group.
        longest_own: largest number of a row's positions outside the shared prefixes.
    """
    own = gpu.randint(1, longest_own + 1, rows).tolist()
    pages = sum(groups * count for groups, count in levels)
    steps = _builder(gpu, shape, pages + sum(-(-n // shape.page_size) for n in own))
    _add_grouped(steps, shape, own, levels)
    return steps.build()


def mixed_step(
    gpu: Gpu,
    shape: Shape,
    chunks: list[tuple[int, int]],
    rows: int,
    longest: int,
    levels: list[tuple[int, int]],
) -> Step:
    """Prefill chunks and decode rows in one step; the first two thirds of the rows are under `levels`."""
    own = gpu.randint(1, longest + 1, rows).tolist()
    pages = sum(-(-(new + past) // shape.page_size) for new, past in chunks)
    pages += sum(-(-n // shape.page_size) for n in own) + sum(groups * count for groups, count in levels)
    steps = _builder(gpu, shape, pages)
    for new, past in chunks:
        steps.chunk(new, past)
    grouped = 2 * rows // 3
    _add_grouped(steps, shape, own[:grouped], levels)
    for length in own[grouped:]:
        steps.decode(length)
    return steps.build()


def _builder(gpu: Gpu, shape: Shape, pages: int) -> DeviceSteps:
    """A builder with more pages than needed: the scratch page, and unused pages filled with NaN."""
    return DeviceSteps(shape, num_pages=pages + 9, gpu=gpu)


def _add_grouped(steps: DeviceSteps, shape: Shape, own: list[int], levels: list[tuple[int, int]]) -> None:
    start = sum(count for _, count in levels) * shape.page_size
    index = [steps.decode(length, start) for length in own]
    begin = 0
    for groups, count in levels:
        for group in range(groups):
            members = index[group * len(index) // groups : (group + 1) * len(index) // groups]
            if members:
                steps.group(members, begin, count)
        begin += count * shape.page_size
