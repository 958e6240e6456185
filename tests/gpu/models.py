"""Random models at real shapes, built in the background while kernels compile; small ones in a toy run."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from batchgen.bench.shapes import SHAPES, Shape, build_model, resolve_bench_model
from tests.gpu.device import Gpu

_BUILD = """
import sys, torch
from batchgen.bench.shapes import resolve_bench_model
resolve_bench_model(f"random:{sys.argv[1]}", torch.device("cuda"))
"""
_building: dict[str, subprocess.Popen[bytes]] = {}

_TOY_SHAPES = {
    "0.6b": Shape(2, 32, 4, 2, 8, 48, 400, context=512, family="qwen3"),
    "1b": Shape(2, 32, 4, 2, 8, 48, 400, context=512),
    "8b": Shape(2, 32, 4, 2, 8, 48, 400, context=512, tied=False),
}


def model_shape(gpu: Gpu, name: str) -> Shape:
    """The shape of "0.6b", "1b" or "8b"; in a toy run that of a small model of the same family."""
    return _TOY_SHAPES[name] if gpu.toy else SHAPES[name]


@contextmanager
def model_folder(gpu: Gpu, name: str) -> Iterator[str]:
    """Folder of a checkpoint of `model_shape`. Real ones stay in the user's cache folder for the next stage."""
    if not gpu.toy:
        if name in _building:
            _building[name].wait()
        yield resolve_bench_model(f"random:{name}", gpu.device)
        return
    with tempfile.TemporaryDirectory() as folder:
        build_model(_TOY_SHAPES[name], Path(folder))
        yield folder


@contextmanager
def built_in_background(names: Iterable[str]) -> Iterator[None]:
    """Inside, a process per model builds it. `model_folder` waits for it, and builds the model if it failed."""
    root = Path(__file__).parents[2]
    for name in names:
        command = [sys.executable, "-c", _BUILD, name]
        _building[name] = subprocess.Popen(command, cwd=root, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        for process in _building.values():
            process.kill()
            process.wait()
        _building.clear()
