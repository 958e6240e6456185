"""Memory that runs out: nothing is lost, what fits nowhere ends in an error of its own, and a dead device ends the run.

The model computes as ever, and now and then says that there was no memory: before its work, after it, in the logits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen import Completion, Engine
from batchgen.errors import DeviceError
from batchgen.kernels.device import HOST, Device
from batchgen.models.base import Model, ModelInput
from tests.e2e.engines import outcomes
from tests.e2e.mixed import mixed_options, mixed_rows
from tests.e2e.same import Done, assert_equal
from tests.engine.fake_device import LateDevice

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


class Short:
    """A model on a device with little memory.

    Args:
        model: computes.
        forward: says of a step's input whether there is no memory for it, [T] ids and positions at hand.
        head: the same of [R, H] states.
        late: the forward fails when its work is done and its keys and values are written.
    """

    def __init__(
        self,
        model: Model,
        forward: Callable[[ModelInput], bool] = lambda inputs: False,
        head: Callable[[Tensor], bool] = lambda hidden: False,
        late: bool = False,
    ) -> None:
        self._model, self._forward, self._head, self._late = model, forward, head, late
        self.failed = 0

    @property
    def spec(self) -> Any:
        return self._model.spec

    def takes_embeds(self) -> bool:
        return self._model.takes_embeds()

    def recordable(self) -> bool:
        return self._model.recordable()

    def hidden(self, inputs: ModelInput) -> Tensor:
        short = self._forward(inputs)
        if short and not self._late:
            self._out()
        hidden = self._model.hidden(inputs)
        if short:
            self._out()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        if self._head(hidden):
            self._out()
        return self._model.logits(hidden)

    def _out(self) -> None:
        self.failed += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def on(engine: Engine, model: Model, device: Device = HOST) -> Engine:
    other = Engine.from_parts(engine.config, model, engine.tokenizer, engine.grammars)
    other.device = device
    return other


@pytest.mark.parametrize(
    ("how", "kind"), [("tokens", "host"), ("rows", "late"), ("anywhere", "host"), ("anywhere", "late")]
)
def test_nothing_is_lost(model: Path, tmp_path: Path, how: str, kind: str) -> None:
    rows = mixed_rows(80, seed=5)
    options = {"page_size": 8, "max_num_seqs": 32, "max_tokens_per_step": 96, "kv_memory": 1 << 20}
    engine = Engine(str(model), dtype="float32", **options, **mixed_options(model, tmp_path))
    random = Random(0)
    short = {
        "tokens": Short(engine.model, forward=lambda inputs: len(inputs.input_ids) > 11),
        "rows": Short(engine.model, head=lambda hidden: len(hidden) > 3),
        "anywhere": Short(
            engine.model,
            forward=lambda inputs: len(inputs.input_ids) > 1 and random.random() < 0.1,
            head=lambda hidden: len(hidden) > 1 and random.random() < 0.1,
            late=True,
        ),
    }[how]
    hurt = on(engine, short, HOST if kind == "host" else LateDevice(poison_uploads=True))
    want, got = Done.of(engine, rows), Done.of(hurt, rows)
    assert short.failed > 5
    assert hurt.last_run is not None
    stats = hurt.last_run.scheduler.stats
    assert stats.oom_retries == short.failed
    assert stats.tokens_per_step == 32, "as few as there may be sequences"
    assert hurt.last_run.loop._runner.halver.limit < 32
    for row in rows:
        name = row.get("id") or row["custom_id"]
        for key in [key for key in want.completions if key[0] == name]:
            assert_equal(got.completions[key], want.completions[key], row)
    assert got.completions.keys() == want.completions.keys()
    assert {k: [e.text for e in v] for k, v in got.events.items()} == {
        k: [e.text for e in v] for k, v in want.events.items()
    }


PREFIX = "The quick brown fox jumps over the lazy dog. "


def prompts() -> list[dict[str, Any]]:
    """Rows that share a prefix, some with several samples, one of them long."""
    made: list[dict[str, Any]] = [{"text": f"{PREFIX}{i}", "max_new_tokens": 12, "ignore_eos": True} for i in range(12)]
    made += [{"text": f"Hello {i}", "n": 3, "max_new_tokens": 9, "temperature": 0.8, "seed": i} for i in range(6)]
    made.append({"text": PREFIX * 3, "max_new_tokens": 12, "ignore_eos": True, "n": 2, "temperature": 1.0})
    return made


def _ids(done: Completion) -> list[int]:
    return [] if done.prompt_ids is None else list(map(int, done.prompt_ids))


def run(engine: Engine) -> dict[int, list[Completion]]:
    found: dict[int, list[Completion]] = {}
    for done in engine.generate(prompts(), ordered=True):
        found.setdefault(done.row_index, []).append(done)
    return found


def same(got: dict[int, list[Completion]], want: dict[int, list[Completion]], failed: set[int]) -> None:
    """Rows `failed` are one error each, the others as they were."""
    assert got.keys() == want.keys()
    for row, samples in got.items():
        if row not in failed:
            assert outcomes(samples) == outcomes(want[row])
            continue
        (only,) = samples
        assert only.error is not None
        assert only.error.code == "oom"
        assert "lower --kv-memory" in only.error.message


@pytest.mark.parametrize("kind", ["host", "late"])
def test_a_row_that_fits_nowhere_ends_alone(model: Path, kind: str) -> None:
    engine = Engine(str(model), dtype="float32", max_num_seqs=16, max_tokens_per_step=64)
    want = run(engine)
    length = max(c.prompt_tokens or 0 for c in want[18])
    device = HOST if kind == "host" else LateDevice(poison_uploads=True)
    # Where its prompt ends, where its output begins, deep in its output, and only in the logits.
    for position in (length - 1, length, length + 5):
        short = Short(engine.model, forward=lambda inputs, at=position: bool((inputs.positions >= at).any()))
        hurt = on(engine, short, device)
        same(run(hurt), want, {18})
        assert hurt.last_run is not None
        assert hurt.last_run.scheduler.pages_in_use == 0
        assert hurt.last_run.scheduler.stats.tokens_per_step == 64, "it was the row's fault"


@pytest.mark.parametrize("kind", ["host", "late"])
def test_all_that_hangs_on_a_position_ends_with_it(model: Path, kind: str) -> None:
    """A position of the shared prefix: every row that begins with it fails, whether it has begun or not."""
    engine = Engine(str(model), dtype="float32", max_num_seqs=16, max_tokens_per_step=64)
    want = run(engine)
    ids = {row: _ids(samples[0]) for row, samples in want.items()}
    prefix = ids[0]
    at = len(prefix) - 4
    assert [row for row in ids if ids[row][: at + 1] == prefix[: at + 1]] == [*range(12), 18]

    def forward(inputs: ModelInput) -> bool:
        return bool(((inputs.positions == at) & (inputs.input_ids == prefix[at])).any())

    hurt = on(engine, Short(engine.model, forward=forward), HOST if kind == "host" else LateDevice())
    hurt.order, hurt.admission = "tree", "free"  # others draw before it is reached: the device is not hopeless
    same(run(hurt), want, {*range(12), 18})
    assert hurt.last_run is not None
    assert hurt.last_run.scheduler.pages_in_use == 0
    assert hurt.last_run.scheduler.unended == 0


def test_a_device_that_holds_nothing_ends_the_run(model: Path, tmp_path: Path) -> None:
    engine = Engine(str(model), dtype="float32")
    with pytest.raises(DeviceError, match="ran out of memory for 19 rows"):
        run(on(engine, Short(engine.model, forward=lambda inputs: True)))
    source = tmp_path / "in.jsonl"
    # Ids of their own, so that nothing is shared: one row fails after the other.
    source.write_text("".join(f'{{"input_ids": [{i}, 7]}}\n' for i in range(5, 9)), encoding="utf-8")
    words = ["run", str(source), "--model", str(model), "--dtype", "float32", "--max-num-seqs", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.dead", *words], cwd=tmp_path, env=ENV, capture_output=True, text=True
    )
    assert done.returncode == 7, done.stderr
    assert "out of memory for 3 rows" in done.stderr
    assert (tmp_path / "in.out.parquet.work").exists()
