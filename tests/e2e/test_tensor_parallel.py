"""`--tensor-parallel`: processes that compute a model together give the rows of one, and end together."""

from __future__ import annotations

import gc
import json
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from batchgen import Engine
from batchgen.engine.front_end import FrontEnd
from batchgen.engine.memory.dummy_run import dummy_run, expected_bytes
from batchgen.engine.parallel.peers import Peers
from batchgen.errors import BatchgenError, DeviceError, ErrorCode, UsageError
from batchgen.kernels.grouped import GroupedPool
from tests.e2e.mixed import mixed_options, mixed_rows
from tests.e2e.processors import PAUSED, PAUSING
from tests.e2e.rows import write_lines
from tests.e2e.runner import run, start
from tests.e2e.same import RunResult, assert_equal
from tests.models.loading import load_model
from tests.models.test_library_parallel import in_turns

STEP = ("page_size", "max_num_seqs", "max_tokens_per_step")
SMALL: dict[str, Any] = {"dtype": "float32", "page_size": 8, "max_num_seqs": 32, "max_tokens_per_step": 64}
ROWS = [{"id": f"id {i}", "text": f"Hello {i % 7}", "max_new_tokens": 4 + i % 9, "temperature": 0.7} for i in range(40)]


@pytest.mark.parametrize(("count", "path"), [(2, "native"), (4, "native"), (2, "transformers")])
def test_mixed_rows_equal_those_of_one_process(count: int, path: str, model: Path, tmp_path: Path) -> None:
    """All fields: penalties, masks, constraints, logprobs, hidden states, adapters, processors, embeddings."""
    options, rows = {**mixed_options(model, tmp_path), "model_impl": path}, mixed_rows(60, seed=3)
    expected = RunResult.of(Engine(str(model), **SMALL, **options), rows)
    found = RunResult.of(Engine(str(model), **SMALL, **options, tensor_parallel=count), rows)
    assert found.completions.keys() == expected.completions.keys()
    by_id = {row.get("id") or row.get("custom_id"): row for row in rows}
    for key, completion in found.completions.items():
        assert_equal(completion, expected.completions[key], by_id[key[0]])
    assert {key: [event.text for event in events] for key, events in found.events.items()} == {
        key: [event.text for event in events] for key, events in expected.events.items()
    }


def test_deterministic_rows_have_equal_bits_in_every_batch(model: Path) -> None:
    rows = [{**row, "return_logprob": True} for row in ROWS[:12]]
    options: dict[str, Any] = {"dtype": "float32", "tensor_parallel": 3, "deterministic": True}
    found = []
    for size in (3, 12):
        engine = Engine(str(model), max_num_seqs=size, **options)
        found.append([np.asarray(c.output_logprobs).tolist() for c in engine.generate(rows, ordered=True)])
    assert found[0] == found[1]
    assert all(map(len, found[0]))


def test_a_job_that_a_caller_leaves_is_followed_by_another(model: Path) -> None:
    engine = Engine(str(model), dtype="float32", tensor_parallel=2)
    expected = [c.text for c in engine.generate(ROWS, ordered=True)]
    for completions in range(3):
        job = engine.generate(ROWS)
        for _, _ in zip(range(completions), job, strict=False):
            pass
        job.close()
    assert [c.text for c in engine.generate(ROWS, ordered=True)] == expected


class _Astray(Peers):
    """Rank 0 as another process would hear it that has drawn other tokens in the first step."""

    def agree(self, value: Callable[[], Any]) -> Any:
        known = value()
        return (*known[:2], known[2] + 1) if isinstance(known, tuple) and known[2:] and known[2] else known


def test_a_process_that_draws_other_tokens_ends(engine: Engine) -> None:
    front_end = FrontEnd.build(engine.config, engine.model.spec, engine.tokenizer, {})
    astray = Engine.from_front_end(engine.model, front_end, _Astray())
    with pytest.raises(DeviceError, match="has drawn other tokens than rank 0"):
        list(astray.generate(ROWS))


def test_one_job_runs_at_a_time(model: Path) -> None:
    engine = Engine(str(model), dtype="float32", tensor_parallel=2)
    first, second = engine.generate(ROWS), engine.generate(ROWS)
    next(first)
    next(second)
    with pytest.raises(UsageError, match="exhaust or close the first iterator"):
        list(first)
    assert len(list(second)) == len(ROWS) - 1


@pytest.mark.parametrize("count", [2, 3])
def test_an_interrupt_in_a_step_waits_for_its_end(count: int, model: Path) -> None:
    at = 3

    def interrupt(logits: Any, rows: Any) -> Any:  # in this process alone, which could not send it to the others
        if any(len(row.output_ids) == at for row in rows):
            signal.raise_signal(signal.SIGINT)
        return logits

    named = [{**row, "custom_logit_processor": "interrupt"} for row in ROWS[:6]]
    engine = Engine(str(model), dtype="float32", tensor_parallel=count, logit_processor={"interrupt": interrupt})
    expected = [c.text for c in engine.generate(ROWS, ordered=True)]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            list(engine.generate([*ROWS[6:], *named]))
        assert [c.text for c in engine.generate(ROWS, ordered=True)] == expected
    at = -1
    assert [c.text for c in engine.generate(named, ordered=True)] == expected[:6]


def test_rows_that_take_too_long_end_on_all_ranks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = {"dtype": "float32", "max_num_seqs": 8}
    slow = [{"text": f"Hello {i}", "regex": "[a-z]+", "max_new_tokens": 9} for i in range(6)]
    expected = [c.text for c in Engine(str(model), **options).generate(ROWS, ordered=True)]
    engine = Engine(str(model), **options, tensor_parallel=2)
    monkeypatch.setattr("batchgen.engine.sampling.constraints.MAX_SECONDS", 1e-9)
    found = list(engine.generate([*ROWS[:9], *slow, *ROWS[9:]], ordered=True))
    errors = [c.error.code if c.error else None for c in found]
    assert errors == [None] * 9 + [ErrorCode.GRAMMAR_ERROR] * 6 + [None] * (len(ROWS) - 9)
    monkeypatch.undo()
    assert [c.text for c in engine.generate(ROWS, ordered=True)] == expected


def test_a_rank_that_cannot_load_the_model_says_why(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = partial(replace, model="/gone")
    monkeypatch.setattr("batchgen.engine.parallel.peers.replace", lambda config, **given: gone(config, **given))
    with pytest.raises(BatchgenError, match=r"rank 1 of .* failed: ModelError: There is no model folder /gone"):
        Engine(str(model), tensor_parallel=2)


def ranks_of(model: Path) -> tuple[Engine, list[psutil.Process]]:
    """An engine of two ranks, and the processes of those above 0."""
    others = {each.pid for each in psutil.Process().children()}
    engine = Engine(str(model), dtype="float32", tensor_parallel=2)
    started = [each for each in psutil.Process().children() if each.pid not in others]
    return engine, [each for each in started if "follower" in str(each.cmdline())]


def test_a_rank_that_dies_between_jobs_ends_the_engine(model: Path) -> None:
    engine, ranks = ranks_of(model)
    ranks[0].kill()
    for message in (r"rank 1 of .* has ended by signal 9", "make a new engine"):
        with pytest.raises(BatchgenError, match=message):
            list(engine.generate(ROWS))


def test_ranks_end_with_the_last_use_of_their_engine(model: Path) -> None:
    engine, ranks = ranks_of(model)
    gc.disable()
    try:
        assert len(list(engine.generate(ROWS))) == len(ROWS)
        del engine
    finally:
        gc.enable()
    assert len(ranks) == 1
    assert not ranks[0].is_running()


def test_a_step_that_does_not_fit_is_not_split_by_one_rank_alone(model: Path) -> None:
    def full(logits: Any, rows: Any) -> Any:  # in this process alone
        raise torch.OutOfMemoryError("out of memory")

    engine = Engine(str(model), dtype="float32", tensor_parallel=2, logit_processor={"full": full})
    for message in ("out of memory in a step of", "make a new engine"):
        with pytest.raises(DeviceError, match=message):
            list(engine.generate([*ROWS, {"text": "Hi", "custom_logit_processor": "full"}]))


def command(model: Path, folder: Path, rows: list[dict[str, Any]], *options: object) -> list[object]:
    source = write_lines(folder / "in.jsonl", rows)
    return ["run", source, "-o", "out.parquet", "--model", model, "--dtype", "float32", "--commit-every", "5", *options]


def test_a_rank_that_dies_ends_the_run_and_the_same_command_goes_on(model: Path, tmp_path: Path) -> None:
    rows = [*ROWS, {"id": "p", "text": "Hi", **PAUSED}]
    words = command(model, tmp_path, rows, *PAUSING, "--tensor-parallel", "3", "--max-num-seqs", "4")
    run([*words, "--tensor-parallel", "1"], tmp_path)
    expected = pq.read_table(tmp_path / "out.parquet")
    (tmp_path / "out.parquet").unlink()
    (tmp_path / "pause").touch()
    job = start(words, tmp_path)
    job.wait_for(lambda: (tmp_path / "reached").exists())
    ranks = psutil.Process(job.pid).children()
    assert len(ranks) == 2
    ranks[1].send_signal(signal.SIGKILL)
    (tmp_path / "pause").unlink()
    result = job.wait()
    assert result.code == 7
    assert "rank 2 of --tensor-parallel has ended by signal 9" in result.stderr
    assert "Traceback" not in result.stderr
    psutil.wait_procs(ranks, timeout=30)
    assert not [each for each in ranks if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    committed = sum(pq.read_metadata(part).num_rows for part in (tmp_path / "out.parquet.work/parts").glob("*.parquet"))
    assert 0 < committed < len(rows)
    assert f"resumed {committed}" in run(words, tmp_path).stderr.replace(",", "")
    assert pq.read_table(tmp_path / "out.parquet").drop(["cached_tokens"]).equals(expected.drop(["cached_tokens"]))


def test_no_rank_outlives_a_job_that_is_killed(model: Path, tmp_path: Path) -> None:
    words = command(model, tmp_path, [{"id": "p", "text": "Hi", **PAUSED}], *PAUSING, "--tensor-parallel", "2")
    (tmp_path / "pause").touch()
    job = start(words, tmp_path)
    job.wait_for(lambda: (tmp_path / "reached").exists())
    ranks = psutil.Process(job.pid).children()
    job.signal(signal.SIGKILL)
    psutil.wait_procs(ranks, timeout=30)
    assert ranks
    assert not [each for each in ranks if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def test_an_interrupted_job_is_resumed(model: Path, tmp_path: Path) -> None:
    rows = [*ROWS, {"id": "p", "text": "Hi", **PAUSED}]
    words = command(model, tmp_path, rows, *PAUSING, "--tensor-parallel", "2", "--max-num-seqs", "4")
    (tmp_path / "pause").touch()
    job = start(words, tmp_path)
    job.wait_for(lambda: (tmp_path / "reached").exists())
    job.signal(signal.SIGTERM)
    (tmp_path / "pause").unlink()
    assert job.wait().code == 143
    run(words, tmp_path)
    assert len(pq.read_table(tmp_path / "out.parquet")) == len(rows)


def tensor_bytes(root: object) -> int:
    """Bytes of all tensors that an object leads to, each memory once."""
    seen: set[int] = set()
    sizes: dict[int, int] = {}
    waiting = [root]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        waiting += gc.get_referents(each)
    return sum(sizes.values())


@pytest.mark.parametrize(("count", "path"), [(2, "native"), (4, "native"), (2, "transformers")])
def test_check_says_what_each_process_needs(count: int, path: str, model: Path, tmp_path: Path) -> None:
    # No library packs weights of float16 in another layout.
    words = command(model, tmp_path, ROWS, "--tensor-parallel", count, "--attention", "torch", "--dtype", "float16")
    words += ["--model-impl", path]
    report = json.loads(run(["check", *words[1:], "--json"], tmp_path).stdout)
    planned = report["ranks"]
    options: Any = {"dtype": "float16", "device": "cpu", "products": "torch", "implementation": path}
    models = in_turns(count, lambda ranks: load_model(model, **options, ranks=ranks))
    small = 4096  # rotary frequencies and empty tensors
    for loaded, needs in zip(models, planned, strict=True):
        assert needs["weights"] <= tensor_bytes(loaded) < needs["weights"] + small
        spec = loaded.spec
        pool = GroupedPool.allocate(spec.kv_layers, [range(spec.num_layers)], [3], 16, spec.kv_dtype, spec.device)
        assert pool.nbytes == 3 * 16 * needs["kv_token"]
    whole = json.loads(run(["check", *words[1:], "--json", "--tensor-parallel", "1"], tmp_path).stdout)
    assert max(needs["weights"] for needs in planned) < whole["model"]["weight_bytes"] / count * 1.5
    assert whole["ranks"] == []
    text = run(["check", *words[1:]], tmp_path).stdout
    assert f"processes       {count}, each with" in text
    assert "at the peak, program included, of the first process" in text


def test_steps_take_no_more_memory_than_planned(model: Path) -> None:
    """Of rank 0, counted by PyTorch's allocator in a job whose cache the job before has made."""
    engine = Engine(str(model), **SMALL, tensor_parallel=2)
    rows = [{**row, "ignore_eos": True} for row in ROWS]
    list(engine.generate(rows))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        list(engine.generate(rows))
    events = [each for each in measured.profiler.kineto_results.events() if each.name() == "[memory]"]
    sizes = np.array([each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())])
    assert engine.last_run is not None
    job = dummy_run(engine.last_run.workload, engine.model.spec, *(SMALL[n] for n in STEP))
    assert 0 < sizes.cumsum().max() <= expected_bytes(engine.model.spec, job)


def test_more_ranks_than_heads_are_refused(model: Path, tmp_path: Path) -> None:
    stderr = run(command(model, tmp_path, ROWS, "--tensor-parallel", "5"), tmp_path, expect=2).stderr
    assert "`--tensor-parallel` 5: the model has 4 query heads" in stderr
    with pytest.raises(BatchgenError, match="use at most 4"):
        Engine(str(model), tensor_parallel=5)
