"""Work is completed even if it was divided among more threads than run, or planned for another number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes import byref, c_int64
from pathlib import Path

import pytest
import torch

from batchgen.kernels.cpu.attention import CompiledAttention
from batchgen.kernels.cpu.library import library, loaded
from batchgen.kernels.cpu.matmul import matmul, methods, pack
from batchgen.kernels.types import AttentionArgs
from tests.kernels.cpu.products import randn, with_threads
from tests.kernels.steps import Shape, Step, StepBuilder

pytestmark = pytest.mark.skipif(not loaded(), reason="no C++ compiler here")

THREADS = (1, 2, 5, 17)
ALONE = """
import sys
import torch
from tests.kernels.cpu import test_work_stealing
torch.save(test_work_stealing.results(), sys.argv[1])
"""


def decode_step() -> Step:
    b = StepBuilder(Shape(9, 3, 64, 64, dtype=torch.bfloat16), num_pages=600)
    rows = [b.decode(20 + i, own_start=128) for i in range(21)]
    b.group(rows, 0, 8)
    b.chunk(40, past=90)
    step = b.build()
    CompiledAttention(step.pool, step.batch, 1).attend(
        0, step.query, step.key, step.value, AttentionArgs(0.125)
    )  # stores them
    return step


def attended(step: Step, listed: int, threads: int) -> torch.Tensor:
    """Attention by `threads` threads over a list planned for `listed` threads."""
    made = CompiledAttention(step.pool, step.batch, listed)
    out = torch.empty_like(step.query)
    stack = made.stack(step.query, out, AttentionArgs(0.125), [None])
    library().bg_attention(byref(stack.struct), c_int64(0), c_int64(threads))
    return out


def results() -> list[torch.Tensor]:
    """Products and attention, divided among several numbers of threads."""
    found = []
    for rows in (1, 64, 300):
        x, weight = randn(rows, 96, dtype=torch.bfloat16), randn(130, 96, dtype=torch.bfloat16, seed=1)
        packed = pack(weight)
        for method in methods(torch.bfloat16):
            if method in ("widened", "dot"):
                for threads in THREADS:
                    with with_threads(threads):
                        found.append(matmul(x, packed, method=method))
    step = decode_step()
    return [*found, *(attended(step, threads, threads) for threads in THREADS)]


@pytest.mark.parametrize(("listed", "threads"), [(1, 5), (2, 1), (2, 17), (3, 2), (9, 5), (17, 1), (17, 3)])
def test_a_list_for_other_threads_gives_the_same_bits(listed: int, threads: int) -> None:
    step = decode_step()
    assert torch.equal(attended(step, listed, threads), attended(step, listed, listed))


def test_one_thread_completes_work_divided_among_many(tmp_path: Path) -> None:
    """OpenMP gives only one thread, which steals the shares of the others."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "alone.pt")],
        env={**os.environ, "OMP_THREAD_LIMIT": "1", "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    alone = torch.load(tmp_path / "alone.pt")
    assert len(alone) == len(here := results())
    assert all(map(torch.equal, alone, here))
