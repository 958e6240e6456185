"""The launch function of all kernels, which can record launches so that kernels are compiled without a GPU.

Every launcher of this folder calls `launch`. On a GPU (or in Triton's interpreter) it runs the kernel. Inside
`recording`, it passes the kernel and its arguments to a callback instead: launchers are then called with tensors on the
`meta` device, and the recorded launch is specialised exactly as a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import triton

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors: `TRITON_INTERPRET=1` when this was imported."""
Grid = tuple[int, ...]
Recorder = Callable[[Any, Grid, tuple[Any, ...], dict[str, Any]], None]
"""Called with a kernel, its grid, its arguments and its constants."""

_recorder: Recorder | None = None


def launch(kernel: Any, grid: Grid, *args: Any, **constants: Any) -> None:
    """Run `kernel` on `grid`; do nothing if the grid is empty.

    Args:
        kernel: a `triton.jit` function.
        grid: number of programs in 1 to 3 dimensions.
        args: its run-time arguments, in order.
        constants: its `tl.constexpr` arguments, and `num_warps` and `num_stages`.
    """
    if _recorder is not None:
        _recorder(kernel, grid, args, constants)
    elif all(grid):
        kernel[grid](*args, **constants)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Pass every launch to `recorder` instead of a device, until the block ends."""
    global _recorder
    before, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = before
