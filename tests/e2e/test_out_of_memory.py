"""Out of memory: steps are split and retried, rows that never fit fail alone, and a device without memory ends the run.

The model computes as usual but raises out-of-memory errors: before its forward, after it, in the logits or draws.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen import Completion, Engine
from batchgen.engine.step.sampler import SampledTokens, SamplingMetadata
from batchgen.errors import DeviceError
from batchgen.kernels.device import HOST, Device
from batchgen.models.base import Model, ModelInput
from tests.e2e.engines import outcomes
from tests.e2e.mixed import mixed_options, mixed_rows
from tests.e2e.rows import write_lines
from tests.e2e.runner import run
from tests.e2e.same import RunResult, assert_equal
from tests.engine.fake_device import LateDevice


class LowMemoryModel:
    """A model that raises out-of-memory errors for some inputs.

    Args:
        model: the model that computes.
        forward: whether a step's input does not fit.
        head: whether [R, H] hidden states do not fit.
        late: whether the forward fails after its keys and values are written.
    """

    def __init__(
        self,
        model: Model,
        forward: Callable[[ModelInput], bool] = lambda inputs: False,
        head: Callable[[Tensor], bool] = lambda hidden: False,
        late: bool = False,
    ) -> None:
        self._model, self._forward, self._head, self._late = model, forward, head, late
        self.stream = model.stream
        self.failed = 0

    @property
    def spec(self) -> Any:
        return self._model.spec

    def accepts_embeds(self) -> bool:
        return self._model.accepts_embeds()

    def hidden(self, inputs: ModelInput) -> Tensor:
        too_large = self._forward(inputs)
        if too_large and not self._late:
            self.fail()
        hidden = self._model.hidden(inputs)
        if too_large:
            self.fail()
        return hidden

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        if self._head(hidden):
            self.fail()
        return self._model.logits(hidden)

    def fail(self) -> None:
        """Raise an out-of-memory error."""
        self.failed += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def engine_with(engine: Engine, model: Model, device: Device = HOST) -> Engine:
    """An engine like `engine` with another model and device."""
    other = Engine.from_parts(engine.config, model, engine.tokenizer, engine.grammars)
    other.device = device
    return other


@pytest.mark.parametrize(
    ("how", "kind"), [("tokens", "host"), ("rows", "late"), ("anywhere", "late"), ("draws", "late")]
)
def test_out_of_memory_does_not_change_results(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, kind: str
) -> None:
    rows = mixed_rows(50, seed=5)
    options = {"page_size": 8, "max_num_seqs": 32, "max_tokens_per_step": 96, "kv_memory": 1 << 20}
    engine = Engine(str(model), dtype="float32", **options, **mixed_options(model, tmp_path))
    random = Random(0)
    low = {
        "tokens": LowMemoryModel(engine.model, forward=lambda inputs: len(inputs.input_ids) > 11),
        "rows": LowMemoryModel(engine.model, head=lambda hidden: len(hidden) > 3),
        "anywhere": LowMemoryModel(
            engine.model,
            forward=lambda inputs: len(inputs.input_ids) > 1 and random.random() < 0.1,
            head=lambda hidden: len(hidden) > 1 and random.random() < 0.1,
            late=True,
        ),
        "draws": LowMemoryModel(engine.model),
    }[how]
    failing = engine_with(engine, low, HOST if kind == "host" else LateDevice(poison_uploads=True))
    want = RunResult.of(engine, rows)
    draw = SamplingMetadata.sample

    def sample(sampler: SamplingMetadata, logits: Tensor, *args: Any) -> SampledTokens:
        if how == "draws" and len(logits) > 3:
            low.fail()
        return draw(sampler, logits, *args)

    monkeypatch.setattr(SamplingMetadata, "sample", sample)
    got = RunResult.of(failing, rows)
    assert low.failed > 5
    assert failing.last_run is not None
    stats = failing.last_run.scheduler.stats
    assert stats.oom_retries == low.failed
    assert stats.tokens_per_step == 32, "never below max_num_seqs"
    assert failing.last_run.loop._runner.oom_splitter.limit < 32
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


def completions(engine: Engine) -> dict[int, list[Completion]]:
    found: dict[int, list[Completion]] = {}
    for done in engine.generate(prompts(), ordered=True):
        found.setdefault(done.row_index, []).append(done)
    return found


def assert_only_failed(got: dict[int, list[Completion]], want: dict[int, list[Completion]], failed: set[int]) -> None:
    """Assert that each row of `failed` is one out-of-memory error and the others are equal."""
    assert got.keys() == want.keys()
    for row, samples in got.items():
        if row not in failed:
            assert outcomes(samples) == outcomes(want[row])
            continue
        (only,) = samples
        assert only.error is not None
        assert only.error.code == "oom"
        assert "lower Engine argument `kv_memory`" in only.error.message


def test_a_row_that_never_fits_fails_alone(model: Path) -> None:
    engine = Engine(str(model), dtype="float32", max_num_seqs=16, max_tokens_per_step=64)
    want = completions(engine)
    length = max(c.prompt_tokens or 0 for c in want[18])
    # The end of its prompt, the start of its output, and a later position.
    for position in (length - 1, length, length + 5):
        low = LowMemoryModel(engine.model, forward=lambda inputs, at=position: bool((inputs.positions >= at).any()))
        failing = engine_with(engine, low, LateDevice(poison_uploads=True))
        assert_only_failed(completions(failing), want, {18})
        assert failing.last_run is not None
        assert failing.last_run.scheduler.group_pages_in_use[0] == 0
        assert failing.last_run.scheduler.stats.tokens_per_step == 64, "the limit is not lowered for one row"


def test_all_rows_that_share_a_position_that_never_fits_fail(model: Path) -> None:
    """A position of a shared prefix: every row with that prefix fails, running or waiting."""
    engine = Engine(str(model), dtype="float32", max_num_seqs=16, max_tokens_per_step=64)
    want = completions(engine)
    ids = {row: _ids(samples[0]) for row, samples in want.items()}
    prefix = ids[0]
    at = len(prefix) - 4
    assert [row for row in ids if ids[row][: at + 1] == prefix[: at + 1]] == [*range(12), 18]

    def forward(inputs: ModelInput) -> bool:
        return bool(((inputs.positions == at) & (inputs.input_ids == prefix[at])).any())

    failing = engine_with(engine, LowMemoryModel(engine.model, forward=forward), LateDevice())
    failing.order, failing.admission = "tree", "free"  # others sample first, which shows that the device has memory
    assert_only_failed(completions(failing), want, {*range(12), 18})
    assert failing.last_run is not None
    assert failing.last_run.scheduler.group_pages_in_use[0] == 0
    assert failing.last_run.scheduler.unended == 0


def test_a_device_without_memory_ends_the_run(
    engine: Engine, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = LowMemoryModel(engine.model, forward=lambda inputs: True)
    with pytest.raises(DeviceError, match="ran out of memory for 19 rows"):
        completions(engine_with(engine, dead))
    monkeypatch.setattr("batchgen.job.setup.load_checked", lambda *_: dead)
    # Distinct ids, so that no prefix is shared: the rows fail one after the other.
    source = write_lines(tmp_path / "in.jsonl", [{"input_ids": [i, 7]} for i in range(5, 9)])
    done = run(["run", source, "--model", model, "--dtype", "float32", "--max-num-seqs", "1"], tmp_path, expect=7)
    assert "out of memory for 3 rows" in done.stderr
    assert (tmp_path / "in.out.parquet.work").exists()
