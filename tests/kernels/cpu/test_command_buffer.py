"""Command buffers on the background thread, against the same kernels called one by one."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from batchgen.engine.step.step_batch import select_input_ids
from batchgen.kernels import pooled as plain_copies
from batchgen.kernels.cpu.command_buffer import (
    BackgroundThread,
    current_buffer,
    fill_sampled_ids,
    record_commands,
)
from batchgen.kernels.cpu.library import loaded
from batchgen.kernels.cpu.matmul import PackedWeight, matmul, pack
from batchgen.kernels.cpu.ops import COMPILED_OPS
from batchgen.kernels.sampling import SamplingColumns
from batchgen.kernels.types import KVPool, LayerKV

pytestmark = pytest.mark.skipif(not loaded(), reason="no compiled kernels here")


@pytest.fixture
def background() -> Iterator[BackgroundThread]:
    made = BackgroundThread()
    yield made
    made.close()


def chain(x: Tensor, weights: list[PackedWeight]) -> Tensor:
    for packed in weights:
        x = matmul(x, packed)
    return x


def columns(rows: int, seed: int) -> SamplingColumns:
    found = SamplingColumns.of(*(torch.tensor(v).expand(rows).numpy() for v in (0.7, 5, 0.9, 0.01)))
    return found.with_keys(torch.randint(1 << 62, (rows,), generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize(("threads", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (5, torch.bfloat16)])
def test_recorded_kernels_give_the_same_bits(background: BackgroundThread, threads: int, dtype: torch.dtype) -> None:
    """Many chains, each submitted while the previous one may still be running."""
    for turn, (rows, inner) in enumerate([(1, 1), (3, 17), (64, 96), (65, 130), (200, 33), (7, 500)] * 2):
        torch.manual_seed(turn)
        x = torch.randn(rows, inner).to(dtype)
        weights = [pack(torch.randn(n, m).to(dtype) / m**0.5) for m, n in ((inner, 61), (61, 128), (128, 97))]
        drawn = columns(rows, turn)
        want = COMPILED_OPS.sample(chain(x, weights), drawn)
        with record_commands(threads) as buffer:
            got = COMPILED_OPS.sample(chain(x, weights), drawn)
        assert len(buffer) == 4
        assert got.bad is not None
        download = background.submit(buffer, [got.tokens, got.bad])
        if turn % 3:
            assert [a.tolist() for a in download.wait()] == [want.tokens.tolist(), want.bad.tolist()]  # type: ignore[union-attr]
            assert download.ready()
        else:
            background.join()
            assert download.ready()
            assert got.tokens.equal(want.tokens)


def test_nothing_runs_before_it_is_submitted(background: BackgroundThread) -> None:
    """Copies run in order: a page that was a source becomes a target."""
    pool, twin = (KVPool.allocate([LayerKV(2, 8, 4)] * 3, 6, 4, torch.float32, torch.device("cpu")) for _ in range(2))
    for one, other in zip((*pool.keys, *pool.values), (*twin.keys, *twin.values), strict=True):
        other.copy_(one.normal_())
    table = torch.tensor([[1, 2, 4], [2, 3, 4], [4, 1, 4]])
    before = [cache.clone() for cache in (*pool.keys, *pool.values)]
    with record_commands(2) as buffer:
        assert current_buffer() is buffer
        COMPILED_OPS.copy_pages(pool, table)
    assert current_buffer() is None
    assert all(cache.equal(old) for cache, old in zip((*pool.keys, *pool.values), before, strict=True))
    background.submit(buffer, []).wait()
    for row in table:
        plain_copies.copy_pages(twin, row[None])
    for one, other in zip((*pool.keys, *pool.values), (*twin.keys, *twin.values), strict=True):
        assert one.equal(other)


def test_sampled_ids_are_filled_into_the_next_command_buffer(background: BackgroundThread) -> None:
    """The ids are recorded before they are sampled, and no thread waits for them in between."""
    packed = pack(torch.randn(50, 50))
    for turn, (rows, tokens) in enumerate([(1, 1), (3, 7), (40, 41), (129, 64)]):
        torch.manual_seed(turn)
        x, drawing = torch.randn(rows, 50), columns(rows, turn)
        ids, source = torch.randint(50, (tokens,)), torch.randint(-1, rows, (tokens,))
        sampled = COMPILED_OPS.sample(chain(x, [packed] * 4), drawing).tokens
        want = select_input_ids(ids, source, sampled)
        with record_commands(3) as buffer:
            late = COMPILED_OPS.sample(chain(x, [packed] * 4), drawing).tokens
        first = background.submit(buffer, [late])
        with record_commands(3) as buffer:
            fill_sampled_ids(ids, source, late)
        background.submit(buffer, []).wait()
        assert ids.equal(want)
        assert (first.wait()[0] == sampled.numpy()).all()


def test_a_command_buffer_keeps_its_memory_alive(background: BackgroundThread) -> None:
    """Nothing else refers to it when it runs, and freed memory is soon reused."""
    weight = torch.randn(300, 300)
    want = chain(torch.ones(64, 300), [pack(weight)] * 6)
    for _ in range(8):
        with record_commands(2) as buffer:
            out = chain(torch.ones(64, 300), [pack(weight) for _ in range(6)])
        download = background.submit(buffer, [out])
        del buffer, out
        [torch.full((64, 300), torch.nan) for _ in range(8)]
        assert (download.wait()[0] == want.numpy()).all()


def test_several_threads_may_wait(background: BackgroundThread) -> None:
    packed = pack(torch.randn(256, 256))
    x = torch.randn(512, 256)
    want = chain(x, [packed] * 8).numpy()
    for _ in range(3):
        with record_commands(2) as buffer:
            out = chain(x, [packed] * 8)
        download = background.submit(buffer, [out])
        same: list[bool] = []
        waiting = [threading.Thread(target=lambda: same.append((download.wait()[0] == want).all())) for _ in range(4)]  # noqa: B023
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join()
        assert same == [True] * 4


def test_a_command_buffer_is_done_once_the_next_one_is_submitted(background: BackgroundThread) -> None:
    packed = pack(torch.eye(64) * 2)
    x = torch.ones(3, 64)
    with record_commands(2) as buffer:
        first = matmul(x, packed)
    early = background.submit(buffer, [first])
    with record_commands(2) as buffer:
        second = matmul(first, packed)
    late = background.submit(buffer, [second])
    assert early.ready()
    assert (late.wait()[0] == 4).all()
    assert (early.wait()[0] == 2).all()


def test_recording_cannot_be_nested() -> None:
    with record_commands(2), pytest.raises(AssertionError), record_commands(2):
        pass
    assert current_buffer() is None


def test_a_failure_ends_the_recording() -> None:
    packed = pack(torch.eye(4))
    with pytest.raises(ValueError, match="does not fit"), record_commands(2):
        matmul(torch.ones(2, 5), packed)
    assert current_buffer() is None
    assert (matmul(torch.ones(2, 4), packed) == 1).all()


EXIT = """
import torch
from batchgen.kernels.cpu.command_buffer import background_thread, record_commands
from batchgen.kernels.cpu.matmul import matmul, pack
assert background_thread() is background_thread()
x, packed = torch.randn(2048, 1024), pack(torch.randn(1024, 1024))
with record_commands(2) as buffer:
    for _ in range(10):
        x = matmul(x, packed)
background_thread().submit(buffer, [x])
print("submitted", flush=True)
{end}
"""


@pytest.mark.parametrize(("end", "code"), [pytest.param("", 0, marks=pytest.mark.slow), ("1 / 0", 1)])
def test_a_process_may_exit_with_a_command_buffer_running(end: str, code: int) -> None:
    found = subprocess.run([sys.executable, "-c", EXIT.format(end=end)], capture_output=True, text=True, timeout=100)
    assert found.stdout == "submitted\n"
    assert found.returncode == code, found.stderr
