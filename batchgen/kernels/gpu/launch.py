"""The one door through which kernels start, so that they can be compiled without a device.

Every launcher of this folder ends in `launch`. On a GPU (or in Triton's interpreter) that runs the kernel. Inside
`recording`, it hands the kernel with its arguments to somebody else: launchers are then called with tensors on the
`meta` device, and what is recorded is specialised exactly as a real launch would be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import triton

__all__ = ["INTERPRETED", "Recorder", "launch", "recording"]

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors: `TRITON_INTERPRET=1` when this was imported."""

Grid = tuple[int, ...]
Recorder = Callable[[Any, Grid, tuple[Any, ...], dict[str, Any]], None]
"""Called with a kernel, its grid, its arguments and its constants."""

_recorder: Recorder | None = None


def launch(kernel: Any, grid: Grid, *args: Any, **constants: Any) -> None:
    """Start `kernel` on `grid`; nothing at all on an empty grid.

    Args:
        kernel: a `triton.jit` function.
        grid: 1 to 3 numbers of programs.
        args: its run-time arguments, in order.
        constants: its `tl.constexpr` arguments, and `num_warps` and `num_stages`.
    """
    if _recorder is not None:
        _recorder(kernel, grid, args, constants)
    elif all(grid):
        kernel[grid](*args, **constants)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Hand every launch to `recorder` instead of a device, until the block ends."""
    global _recorder
    before, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = before
