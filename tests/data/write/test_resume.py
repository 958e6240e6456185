"""A resumed job writes the same file as an uninterrupted one, after any interruption."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.data.out.finish import finish
from batchgen.data.store.committed import Committed
from batchgen.data.store.parts import PartWriter
from batchgen.data.store.work_folder import WorkFolder
from tests.data.helpers import begin, expect, group

KEYS = [(row, prompt, 1 + (row * 3 + prompt) % 3) for row in range(12) for prompt in range(1 + row % 3)]


def compute(work: WorkFolder, order: list[tuple[int, int, int]], limit: int | None = None, every: int = 4) -> None:
    """Commit what is missing, or the first `limit` prompts of it."""
    committed = Committed.read(work)
    missing = [key for key in order if key[:2] not in committed]
    with PartWriter(work, commit_every=every) as writer:
        for row, prompt, samples in missing[:limit]:
            writer.add(group(row, prompt, samples))
            if (row + prompt) % 2:
                writer.flush()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("uninterrupted") / "r.parquet"
    with begin(out) as work:
        compute(work, KEYS)
        finish(work, expect(KEYS), {"v": 1})
    return out.read_bytes()


STEP = st.tuples(
    st.integers(0, 8),
    st.sampled_from(["", "cut tmp", "garbage tmp", "cut part", "zero part", "scratch"]),
    st.integers(0, 10**6),
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEP, max_size=4), seed=st.integers(0, 1000), memory=st.sampled_from([1, 5000, 1 << 27]))
def test_interruptions_do_not_change_the_output(
    tmp_path_factory: pytest.TempPathFactory,
    uninterrupted: bytes,
    steps: list[tuple[int, str, int]],
    seed: int,
    memory: int,
) -> None:
    out = tmp_path_factory.mktemp("r") / "r.parquet"
    order = [*KEYS]
    random.Random(seed).shuffle(order)
    for limit, kind, place in steps:
        with begin(out) as work:
            compute(work, order, limit)
            damage(work, kind, place)
        assert not out.exists()
    with begin(out) as work:
        compute(work, order)
        finish(work, expect(KEYS), {"v": 1}, memory)
    assert out.read_bytes() == uninterrupted
    assert out in out.parent.iterdir()
    assert {path.name for path in out.parent.iterdir()} <= {out.name, f"{out.name}.damaged"}


def damage(work: WorkFolder, kind: str, place: int) -> None:
    """Leave files as after a crash, or on a disk that lost its last writes."""
    parts = work.part_files()
    name = f"part-{len(parts):06d}.parquet.tmp"
    if kind == "garbage tmp":
        (work.parts / name).write_bytes(random.Random(place).randbytes(place % 1000))
    elif kind == "scratch":
        (work.scratch / "bucket-000.arrow").write_bytes(b"left over")
    elif kind and parts:
        last = parts[-1].read_bytes()
        if kind == "cut tmp":
            (work.parts / name).write_bytes(last[: place % len(last)])
        else:
            parts[-1].write_bytes(last[: place % len(last)] if kind == "cut part" else bytes(len(last)))
