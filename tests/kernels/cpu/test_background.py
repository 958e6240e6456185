"""Kernels that run beside Python, against the same kernels called one by one."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from batchgen.engine.batch import fed
from batchgen.kernels import copies as plain_copies
from batchgen.kernels.cpu import ops
from batchgen.kernels.cpu.background import Background, background, feed, record, recording
from batchgen.kernels.cpu.copies import copy_pages
from batchgen.kernels.cpu.library import loaded
from batchgen.kernels.cpu.matmul import PackedWeight, matmul, pack
from batchgen.kernels.sampling import SamplingColumns
from batchgen.kernels.types import KVPool, LayerKV

pytestmark = pytest.mark.skipif(not loaded(), reason="no compiled kernels here")

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture
def beside() -> Iterator[Background]:
    made = Background()
    yield made
    made.close()


def chain(x: Tensor, weights: list[PackedWeight]) -> Tensor:
    for packed in weights:
        x = matmul(x, packed)
    return x


def columns(rows: int, seed: int) -> SamplingColumns:
    found = SamplingColumns.of(*(torch.tensor(v).expand(rows).numpy() for v in (0.7, 5, 0.9, 0.01)))
    return found.with_keys(torch.randint(1 << 62, (rows,), generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_what_is_recorded_gives_the_same_bits(beside: Background, threads: int, dtype: torch.dtype) -> None:
    """Of many chains one after the other, each begun while somebody may still be at the one before."""
    for turn, (rows, inner) in enumerate([(1, 1), (3, 17), (64, 96), (65, 130), (200, 33), (7, 500)] * 3):
        torch.manual_seed(turn)
        x = torch.randn(rows, inner).to(dtype)
        weights = [pack(torch.randn(n, m).to(dtype) / m**0.5) for m, n in ((inner, 61), (61, 128), (128, 97))]
        drawn = columns(rows, turn)
        want = ops.sample(chain(x, weights), drawn)
        with record(threads) as noted:
            got = ops.sample(chain(x, weights), drawn)
        assert len(noted) == 4
        assert got.bad is not None
        download = beside.begin(noted, [got.tokens, got.bad])
        if turn % 3:
            assert [a.tolist() for a in download.wait()] == [want.tokens.tolist(), want.bad.tolist()]  # type: ignore[union-attr]
            assert download.ready()
        else:
            beside.join()
            assert download.ready()
            assert got.tokens.equal(want.tokens)


def test_nothing_runs_before_it_is_begun(beside: Background) -> None:
    """And copies run in their order: a page that was a source becomes a target."""
    pool, twin = (KVPool.allocate([LayerKV(2, 8, 4)] * 3, 6, 4, torch.float32, torch.device("cpu")) for _ in range(2))
    for one, other in zip((*pool.keys, *pool.values), (*twin.keys, *twin.values), strict=True):
        other.copy_(one.normal_())
    table = torch.tensor([[1, 2, 4], [2, 3, 4], [4, 1, 4]])
    before = [cache.clone() for cache in (*pool.keys, *pool.values)]
    with record(2) as noted:
        assert recording() is noted
        copy_pages(pool, table)
    assert recording() is None
    assert all(cache.equal(old) for cache, old in zip((*pool.keys, *pool.values), before, strict=True))
    beside.begin(noted, []).wait()
    for row in table:
        plain_copies.copy_pages(twin, row[None])
    for one, other in zip((*pool.keys, *pool.values), (*twin.keys, *twin.values), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("threads", [2, 3])
def test_draws_are_fed_to_what_follows_on_them(beside: Background, threads: int) -> None:
    """Recorded before they are drawn: nobody waits for them in between."""
    packed = pack(torch.randn(50, 50))
    for turn, (rows, tokens) in enumerate([(1, 1), (3, 7), (40, 41), (129, 64)]):
        torch.manual_seed(turn)
        x, drawing = torch.randn(rows, 50), columns(rows, turn)
        ids, source = torch.randint(50, (tokens,)), torch.randint(-1, rows, (tokens,))
        drawn = ops.sample(chain(x, [packed] * 4), drawing).tokens
        want = fed(ids, source, drawn)
        with record(threads) as noted:
            late = ops.sample(chain(x, [packed] * 4), drawing).tokens
        first = beside.begin(noted, [late])
        with record(threads) as noted:
            feed(ids, source, late)
        beside.begin(noted, []).wait()
        assert ids.equal(want)
        assert (first.wait()[0] == drawn.numpy()).all()


def test_a_recording_holds_what_it_works_on(beside: Background) -> None:
    """Nobody else does when it runs: memory that is given back is soon somebody else's."""
    weight = torch.randn(300, 300)
    want = chain(torch.ones(64, 300), [pack(weight)] * 6)
    for _ in range(20):
        with record(2) as noted:
            out = chain(torch.ones(64, 300), [pack(weight) for _ in range(6)])
        download = beside.begin(noted, [out])
        del noted, out
        [torch.full((64, 300), torch.nan) for _ in range(8)]
        assert (download.wait()[0] == want.numpy()).all()


def test_several_may_wait(beside: Background) -> None:
    packed = pack(torch.randn(256, 256))
    x = torch.randn(512, 256)
    want = chain(x, [packed] * 8).numpy()
    for _ in range(10):
        with record(2) as noted:
            out = chain(x, [packed] * 8)
        download = beside.begin(noted, [out])
        same: list[bool] = []
        waiting = [threading.Thread(target=lambda: same.append((download.wait()[0] == want).all())) for _ in range(4)]  # noqa: B023
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join()
        assert same == [True] * 4


def test_a_recording_that_was_overtaken_is_done(beside: Background) -> None:
    packed = pack(torch.eye(64) * 2)
    x = torch.ones(3, 64)
    with record(2) as noted:
        first = matmul(x, packed)
    early = beside.begin(noted, [first])
    with record(2) as noted:
        second = matmul(first, packed)
    late = beside.begin(noted, [second])
    assert early.ready()
    assert (late.wait()[0] == 4).all()
    assert (early.wait()[0] == 2).all()


def test_recordings_are_not_nested() -> None:
    with record(2), pytest.raises(AssertionError), record(2):
        pass
    assert recording() is None


def test_a_failure_ends_the_recording() -> None:
    packed = pack(torch.eye(4))
    with pytest.raises(ValueError, match="does not fit"), record(2):
        matmul(torch.ones(2, 5), packed)
    assert recording() is None
    assert (matmul(torch.ones(2, 4), packed) == 1).all()


def test_one_for_the_process() -> None:
    assert background() is background()


EXIT = """
import torch
from batchgen.kernels.cpu.background import background, record
from batchgen.kernels.cpu.matmul import matmul, pack
x, packed = torch.randn(4096, 1024), pack(torch.randn(1024, 1024))
with record(2) as noted:
    for _ in range(20):
        x = matmul(x, packed)
background().begin(noted, [x])
print("begun", flush=True)
{end}
"""


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1)])
def test_a_process_may_end_with_one_under_way(end: str, code: int) -> None:
    found = subprocess.run([sys.executable, "-c", EXIT.format(end=end)], capture_output=True, text=True, timeout=100)
    assert found.stdout == "begun\n"
    assert found.returncode == code, found.stderr
