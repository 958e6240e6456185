"""Decode steps as CUDA graphs against eager steps: whole jobs, on a device with simulated graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.engine import engine as engine_module
from batchgen.engine.engine import Engine
from batchgen.engine.running import Running
from batchgen.engine.step import cuda_graph
from batchgen.engine.step.cuda_graph import padded_rows
from batchgen.errors import DeviceError
from batchgen.kernels.device import Graph
from batchgen.kernels.types import Graphs
from batchgen.models.base import ModelInput, Numbers
from batchgen.plan.scheduler import Scheduler
from batchgen.plan.step_plan import StepPlan
from batchgen.request.completion import Completion
from tests.engine.fake_device import LateDevice
from tests.engine.reference import assert_all_same, save_with_words
from tests.engine.test_deterministic import result_bits
from tests.engine.test_hybrid import TYPES
from tests.gpu.interpreted import fix_row_summation_order
from tests.models.adapters import KINDS, save_adapter
from tests.models.tiny import VOCAB

SHARED, STEM = [5, 6, 7, 8], [9, 10, 11, 12]
"""First page of all prompts, and second page of most."""
PROMPTS = [[*SHARED, *STEM, *own] for own in ([40], [41, 42], [43, 44, 45])] + [[*SHARED, 50], [*SHARED, 51, 52, 53]]
LENGTHS = [7, 7, 7, 4, 4]


def rows(**of_all: Any) -> list[dict[str, Any]]:
    """Greedy and sampled rows of two lengths: 5 rows at first, then 3. `of_all`: fields of all rows."""
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "top_k": 5, "seed": 1}]
    kinds += [{"temperature": 1.2, "top_p": 0.7, "seed": 2}, {"temperature": 1.0, "min_p": 0.05, "seed": 3}]
    kinds += [{"temperature": 0}]
    return [
        {"input_ids": prompt, "max_new_tokens": length, "ignore_eos": True, **kind, **of_all}
        for prompt, length, kind in zip(PROMPTS, LENGTHS, kinds, strict=True)
    ]


def model_folder(tmp_path: Path, model_type: str = "llama", layers: int = 1, **overrides: Any) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return save_with_words(model_type, tmp_path / model_type, num_hidden_layers=layers, **sizes, **overrides)


def engine_of(folder: Path, attention: str, **options: Any) -> Engine:
    return Engine(str(folder), attention=attention, dtype="float32", page_size=4, max_tokens_per_step=128, **options)


def without_graphs(folder: Path, work: list[dict[str, Any]], **options: Any) -> list[Completion]:
    """Results of PyTorch's kernels."""
    return list(engine_of(folder, "torch", **options).generate(work, ordered=True))


def run(
    folder: Path, work: list[dict[str, Any]], meanwhile: Callable[[Engine], None] = lambda _: None, **options: Any
) -> tuple[list[Completion], LateDevice, Running]:
    engine = engine_of(folder, "triton", **options)
    engine.device = device = LateDevice(captures=True)
    meanwhile(engine)
    done = list(engine.generate(work, ordered=True))
    assert all(c.error is None for c in done)
    return done, device, engine.last_run


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that share a page form a prefix group."""
    monkeypatch.setattr(engine_module, "group_min_saving", lambda *given: 1)


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated graphs record PyTorch operations; compiled CPU kernels cannot be recorded."""
    monkeypatch.setattr(engine_module, "choose_numbers", lambda *given: Numbers(products="torch"))


def check(folder: Path, work: list[dict[str, Any]], **options: Any) -> tuple[LateDevice, dict[str, int]]:
    """The device and counters of a run with graphs, whose results equal those of a run without."""
    got, device, last = run(folder, work, **options)
    assert_all_same(got, without_graphs(folder, work, **options))
    counts = last.loop.counts()
    counts["group_passes"] = last.scheduler.stats.group_passes
    assert last.loop.notes == []
    assert counts["graph_replays"] > 0
    captures = counts["graph_captures"] + counts["graph_prepared"]
    assert (device.counts.captures, device.counts.replays) == (captures, counts["graph_replays"])
    return device, counts


def test_plain_rows_are_sampled_inside_graphs(tmp_path: Path) -> None:
    """The first step of each size runs eagerly, the second is captured, the others are replays."""
    device, counts = check(model_folder(tmp_path, "qwen3", layers=2), rows())
    steps = counts["graph_first"] + counts["graph_replays"]
    assert steps == max(LENGTHS) - 1, "all steps but those with many prompt tokens for few rows"
    assert counts["graph_captures"] <= counts["graph_first"] < steps, "captured once per kind, at its second step"
    assert counts["graph_replays"] >= 2
    assert counts["graph_padded"] > 0, "5 rows are padded to 8, 3 to 4"
    assert counts["group_passes"] > 0, "prefixes are shared inside of graphs"
    # Uploads per step: its inputs, and attention lists for layers with and without a sliding window.
    assert device.counts.uploads_into == 3 * steps


def test_a_batch_that_shrinks_for_a_moment_gets_no_new_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = [{"input_ids": [5 + i], "max_new_tokens": 4 + i, "ignore_eos": True} for i in range(5)]
    _, counts = check(model_folder(tmp_path), ending)
    assert (counts["graph_captures"], counts["graph_first"]) == (1, 1), "5 rows to 1 run in the graph of 8"
    monkeypatch.setattr(cuda_graph, "WASTED_STEPS", 2.0)
    _, counts = check(model_folder(tmp_path), [*ending[:4], {**ending[4], "max_new_tokens": 14}])
    assert counts["graph_captures"] == 2, "after 3 steps in the graph of 8, a row that goes on alone gets another"


@pytest.mark.parametrize("shared", [pytest.param(0, marks=pytest.mark.slow), 9])
def test_sizes_that_a_job_visits_are_captured_before_its_first_step(tmp_path: Path, shared: int) -> None:
    """Rows that share nothing, or a prefix of two pages, and end one by one."""
    lengths = [32, 32, 23, 22, *[15] * 5]
    prompts = [[*range(20, 20 + shared), 5 + i, 6] for i in range(len(lengths))]
    work = [
        {"input_ids": ids, "max_new_tokens": n, "ignore_eos": True} for ids, n in zip(prompts, lengths, strict=True)
    ]
    _, counts = check(model_folder(tmp_path), work)
    assert (counts["graph_captures"], counts["graph_first"]) == (0, 0)
    assert counts["graph_prepared"] == 3, "for 16, 4 and 2 rows"
    assert counts["graph_replays"] >= max(lengths) - 2


def test_rows_that_are_not_plain_are_sampled_after_graphs(tmp_path: Path) -> None:
    work = rows()
    work[0] |= {"return_logprob": True, "top_logprobs_num": 3}
    work[1] |= {"repetition_penalty": 1.4, "bad_words": [[7], [8, 9]]}
    work[2] |= {"return_hidden_states": {"layers": [0, -1], "tokens": "all"}}
    work[3] |= {"min_new_tokens": 3, "stop_token_ids": list(range(3, VOCAB, 2)), "ignore_eos": False}
    check(model_folder(tmp_path, "mistral", sliding_window=6), work)


def test_logprobs_of_plain_rows_are_computed_inside_graphs(tmp_path: Path) -> None:
    """For all rows of a step alike, as many as the job's row with most; rows without any are between others."""
    work = rows()
    for number, top in enumerate([3, None, 0, 7, 1]):
        if top is not None:
            work[number] |= {"return_logprob": True, "top_logprobs_num": top, "n": 1 + number % 2}
    calls: list[int] = []

    def count(engine: Engine) -> None:
        assert engine.backend is not None
        ops = engine.backend.ops

        def top_logprobs(logits: Tensor, k: int, normalizers: Tensor | None = None) -> tuple[Tensor, Tensor]:
            calls.append(k)
            return ops.top_logprobs(logits, k, normalizers)

        engine.backend = replace(engine.backend, ops=replace(ops, top_logprobs=top_logprobs))

    folder = model_folder(tmp_path)
    got, _, last = run(folder, work, meanwhile=count)
    assert_all_same(got, without_graphs(folder, work))
    counts = last.loop.counts()
    assert counts["graph_replays"] > counts["graph_captures"] > 0
    assert len(calls) <= last.loop.state.steps - counts["graph_replays"] + counts["graph_captures"], "none per replay"
    assert calls[-1] == 7


def replayed(
    folder: Path, work: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[int, int, int]:
    """Steps with decode rows of a run with graphs, whose results equal those of a run without.

    Of those: steps whose rows were replayed, and those that were the first of their kind; all of them.
    """
    decoding: list[bool] = []
    plan_step = Scheduler.step

    def step(scheduler: Scheduler) -> StepPlan | None:
        plan = plan_step(scheduler)
        decoding.append(plan is not None and len(plan.decodes) > 0)
        return plan

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "step", step)
        got, device, last = run(folder, work, **options)
    assert_all_same(got, without_graphs(folder, work, **options))
    assert last.loop.notes == []
    return device.counts.replays, last.loop.counts()["graph_first"], sum(decoding)


def short_rows(prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Greedy and sampled rows of 4 to 12 tokens."""
    rng = np.random.default_rng(4)
    lengths = rng.integers(4, 13, len(prompts)).tolist()
    return [
        {"input_ids": ids, "max_new_tokens": n, "ignore_eos": True, "temperature": 0.9 * (i % 2), "seed": i}
        for i, (ids, n) in enumerate(zip(prompts, lengths, strict=True))
    ]


def distinct(count: int) -> list[list[int]]:
    """Prompts of 2 to 6 ids that share no prefix."""
    rng = np.random.default_rng(5)
    return [[3 + i, *rng.integers(3, VOCAB, rng.integers(1, 6)).tolist()] for i in range(count)]


def tree(roots: int, stems: int, leaves: int) -> list[list[int]]:
    """Prompts that share a root, and some a stem; a node ends within a page or with one."""
    found = []
    for root in range(roots):
        for stem in range(stems):
            for leaf in range(leaves):
                found.append([3 + root] * (4 + root) + [10 + stem] * (3 + stem) + [20 + leaf, *range(30, 30 + leaf)])
    return found


def test_most_steps_of_short_outputs_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows begin and end in most steps: chunks are launched behind the replay."""
    replays, _, steps = replayed(model_folder(tmp_path), short_rows(distinct(9)), monkeypatch, max_num_seqs=3)
    assert replays >= 0.9 * steps > 20


def test_most_steps_of_a_tree_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replays, _, steps = replayed(model_folder(tmp_path), short_rows(tree(1, 2, 5)), monkeypatch, max_num_seqs=3)
    assert replays >= 0.9 * steps > 20


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A model and its adapters."""
    root = tmp_path_factory.mktemp("adapted")
    folder = model_folder(root)
    kinds = {"two": KINDS["two"], "all": KINDS["all"], "dora": {**KINDS["two"], "use_dora": True}}
    found = {
        name: str(save_adapter(folder, root / name, seed=i, **kind)) for i, (name, kind) in enumerate(kinds.items())
    }
    return folder, found


def test_most_steps_with_adapters_replay(adapted: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with one adapter or the other, or none."""
    folder, found = adapted
    lora = {name: found[name] for name in ("two", "all")}
    work = [{**row, "lora_path": (None, "two", "all")[i % 3]} for i, row in enumerate(short_rows(distinct(6)))]
    replays, _, steps = replayed(folder, work, monkeypatch, max_num_seqs=3, lora=lora)
    assert replays >= 0.9 * steps > 15


def test_steps_with_adapters_that_do_more_than_add_run_eagerly(
    adapted: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found = adapted
    work = [{**row, "lora_path": "dora" if i < 2 else None} for i, row in enumerate(short_rows(distinct(3)))]
    replays, first, steps = replayed(folder, work[:2], monkeypatch, lora=found)
    assert replays == first == 0 < steps
    replays, *_ = replayed(folder, [*work[:2], {**work[2], "max_new_tokens": 16}], monkeypatch, lora=found)
    assert replays > 0, "the last row has no adapter"


def test_few_rows_are_computed_with_many_tokens_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, row, most = model_folder(tmp_path), {"ignore_eos": True, "temperature": 0}, cuda_graph._MOST_CHUNK_TOKENS
    for length, together in ((most, 0), (most + 1, 1)):
        work = [{"input_ids": ids, "max_new_tokens": n, **row} for ids, n in (([5], 5), ([6], 2), ([7] * length, 1))]
        replays, first, steps = replayed(folder, work, monkeypatch, max_num_seqs=2)
        assert steps - replays - first == together


def test_rows_of_all_kinds_begin_behind_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that read earlier tokens on the host, with states, prompt logprobs and several samples."""
    kinds: list[dict[str, Any]] = [
        {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0},
        {"repetition_penalty": 1.4, "bad_words": [[7], [8, 9]], "n": 2},
        {"return_hidden_states": {"layers": [0, -1], "tokens": "all"}},
        {"temperature": 1.0, "n": 3},
        {"min_new_tokens": 3, "stop_token_ids": list(range(3, VOCAB, 2)), "ignore_eos": False},
    ]
    work = [{**row, **kinds[i % 5]} for i, row in enumerate(short_rows(tree(1, 1, 5)))]
    replays, first, steps = replayed(model_folder(tmp_path), work, monkeypatch, max_num_seqs=3)
    assert replays + first == steps


def test_chunks_that_do_not_fit_behind_a_graph_are_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode rows in front of them are not run again."""
    folder, work = model_folder(tmp_path), short_rows(distinct(5))
    want, full = without_graphs(folder, work, max_num_seqs=3), itertools.count()

    def fill(engine: Engine) -> None:
        hidden = engine.model.hidden

        def full_once(inputs: ModelInput) -> Tensor:
            decodes = getattr(inputs.attention, "launches", None) is not None
            if not decodes and next(full) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return hidden(inputs)

        engine.model.hidden = full_once  # type: ignore[method-assign]

    got, device, last = run(folder, work, meanwhile=fill, max_num_seqs=3)
    assert_all_same(got, want)
    assert last.scheduler.stats.oom_retries == 1
    assert device.counts.replays > 0


def test_other_logprobs_are_computed_after_graphs(tmp_path: Path) -> None:
    work = rows(return_logprob=True, top_logprobs_num=2)
    folder = model_folder(tmp_path)
    check(folder, work, logprobs_mode="processed")
    check(folder, [*work[:3], {**work[3], "token_ids_logprob": [9, 4]}])
    check(folder, [*work[:3], {**work[3], "top_logprobs_num": 150}])


def test_attention_begins_again_at_the_borders_of_chunks_inside_graphs(tmp_path: Path) -> None:
    sizes = {"intermediate_size_mlp": 32, "num_local_experts": 2, "attention_chunk_size": 8, "no_rope_layers": [1, 0]}
    check(model_folder(tmp_path, "llama4_text", layers=2, **sizes), rows())


def test_experts_are_captured_inside_graphs(tmp_path: Path) -> None:
    """A transformers model's forward is captured too, because it does not wait for the host."""
    check(model_folder(tmp_path, "qwen3_moe", moe_intermediate_size=16), rows(return_routed_experts=True)[:3])


_DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 2}
RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen3_next": {**_DELTA, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1]},
    "mamba2": {"state_size": 4, "num_heads": 4, "head_dim": 16, "n_groups": 2},
    "mamba": {"state_size": 4},
}
"""Type -> fields of a tiny configuration."""


@pytest.mark.parametrize("model_type", RECURRENT)
def test_recurrent_layers_run_inside_graphs(model_type: str, tmp_path: Path) -> None:
    """3 rows are padded to 4; one that begins after the first graph finds the state before any token as it was."""
    row = {"ignore_eos": True, "temperature": 0, "return_logprob": True}
    work = [{"input_ids": [30 + number], "max_new_tokens": 3 + 3 * (number % 2), **row} for number in range(4)]
    fields = RECURRENT[model_type]
    folder = model_folder(tmp_path, model_type, layers=len(fields.get("layer_types", [0])), **fields)
    _, counts = check(folder, work, max_num_seqs=3)
    assert counts["graph_padded"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_every_recurrent_type_is_captured(model_type: str, tmp_path: Path) -> None:
    check(save_with_words(model_type, tmp_path, **TYPES[model_type]), rows(temperature=0)[2:])


def test_a_first_step_that_does_not_fit_ends_the_run_of_a_recurrent_model(tmp_path: Path) -> None:
    """It has written states, from which the same step without a graph would go on."""

    def fill(engine: Engine) -> None:
        hidden = engine.model.hidden

        def full(inputs: ModelInput) -> Tensor:
            found = hidden(inputs)
            if len(inputs.input_ids) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return found

        engine.model.hidden = full  # type: ignore[method-assign]

    work = [{"input_ids": [5, 6], "max_new_tokens": 3, "ignore_eos": True}]
    with pytest.raises(DeviceError, match="out of memory in a step of 1 tokens, which is not split"):
        run(model_folder(tmp_path, "mamba", **RECURRENT["mamba"]), work, meanwhile=fill)


def test_a_recurrent_model_runs_on_if_memory_runs_out_before_its_first_step(tmp_path: Path) -> None:
    folder, calls = model_folder(tmp_path, "mamba", **RECURRENT["mamba"]), itertools.count()

    def fill(engine: Engine) -> None:
        hidden = engine.model.hidden

        def full_at_first(inputs: ModelInput) -> Tensor:
            if not next(calls):
                assert len(inputs.input_ids) == 1, "the first call prepares a graph of a row, of a prompt of 2 ids"
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return hidden(inputs)

        engine.model.hidden = full_at_first  # type: ignore[method-assign]

    work = [{"input_ids": [5, 6], "max_new_tokens": 12, "ignore_eos": True}]
    got, _, last = run(folder, work, meanwhile=fill)
    assert_all_same(got, without_graphs(folder, work))
    assert last.loop.notes == []
    assert last.loop.counts()["graph_replays"] > 0


def breaking(problem: str) -> Callable[[Engine], None]:
    """Lets each capture fail, because the model waits for the host ("wait") or memory runs out ("memory")."""

    def break_capture(engine: Engine) -> None:
        model: Any = engine.model
        logits = model.logits

        def strange(hidden: Tensor) -> Tensor:
            found: Tensor = logits(hidden)
            if problem == "wait":
                return found + float(found.sum() * 0)
            if isinstance(engine.device, LateDevice) and engine.device.capturing:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return found

        model.logits = strange

    return break_capture


def test_deterministic_steps_have_the_same_bits_inside_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two lengths in groups of two levels: in graphs, without them after a failed capture, and alone."""
    fix_row_summation_order(monkeypatch.setattr)
    prompts = [[*range(20, 40), *(range(50, 66) if i < 3 else ()), *range(70 + 9 * i, 71 + 10 * i)] for i in range(5)]
    work = [row | {"input_ids": ids} for row, ids in zip(rows(return_logprob=True), prompts, strict=True)]
    folder = model_folder(tmp_path)
    done, _, last = run(folder, work, deterministic=True)
    found = [result_bits(c) for c in done]
    counts = last.loop.counts()
    assert last.loop.notes == []
    assert counts["graph_first"] + counts["graph_replays"] == max(LENGTHS) - 1, "all steps that only decode"
    assert counts["graph_replays"] > counts["graph_first"], counts
    assert last.scheduler.stats.group_passes > 0
    eager, device, last = run(folder, work, breaking("wait"), deterministic=True)
    assert len(last.loop.notes) == 1
    assert device.counts.replays == 0
    assert [result_bits(c) for c in eager] == found
    alone, _, last = run(folder, work[1::3], deterministic=True, max_num_seqs=1)
    assert last.loop.counts()["graph_prepared"] == 1
    assert [result_bits(c) for c in alone] == found[1::3]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Completion]]:
    """A model, and its completions of `few` without graphs."""
    folder = model_folder(tmp_path_factory.mktemp("plain"))
    return folder, without_graphs(folder, few())


def few() -> list[dict[str, Any]]:
    return rows()[2:4]


def test_the_least_recently_used_graph_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """17 rows that end one by one need graphs of six sizes; of those replaced, four may still run on the device."""
    monkeypatch.setattr(cuda_graph, "WASTED_STEPS", 0.0)

    def keep_one(engine: Engine) -> None:
        (support,) = engine.backend.executors
        assert isinstance(support, Graphs)
        engine.backend = replace(engine.backend, executors=(replace(support, max_graphs=1),))

    lengths = [13, 11, 9, 9, *[7] * 4, *[5] * 8, 3]
    work = [{"input_ids": [5 + i], "max_new_tokens": n, "ignore_eos": True} for i, n in enumerate(lengths)]
    folder = model_folder(tmp_path)
    got, device, _ = run(folder, work, meanwhile=keep_one)
    assert_all_same(got, without_graphs(folder, work))
    assert device.counts.captures > len(device.graphs) > 0
    assert len(device.graphs) <= 1 + 4


@pytest.mark.parametrize("problem", ["wait", "memory"])
def test_a_step_that_cannot_be_captured_runs_eagerly(plain: tuple[Path, list[Completion]], problem: str) -> None:
    folder, work = plain[0], [{**row, "max_new_tokens": 12} for row in few()]
    want = without_graphs(folder, work)
    got, device, last = run(folder, work, meanwhile=breaking(problem))
    (note,) = last.loop.notes
    assert ("captured" if problem == "wait" else "memory") in note
    releases = 1 if problem == "wait" else 3  # memory may be free again
    assert (device.counts.captures, device.counts.replays, device.counts.releases) == (0, 0, releases)
    assert_all_same(got, want)


class FailedCapture:
    """Like torch's: the end of a failed capture raises another error."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


def test_the_first_error_of_a_capture_is_reported(plain: tuple[Path, list[Completion]]) -> None:
    def capture(body: Callable[[], None]) -> Graph:
        with FailedCapture():
            raise RuntimeError("operation not permitted when stream is capturing\nat ...")

    def break_capture(engine: Engine) -> None:
        engine.device.capture = capture  # type: ignore[method-assign]

    *_, last = run(plain[0], few(), meanwhile=break_capture)
    (note,) = last.loop.notes
    assert note.startswith("no CUDA graphs: ")
    assert note.endswith(": operation not permitted when stream is capturing")


def test_padded_batch_sizes() -> None:
    assert [padded_rows(n) for n in (1, 2, 3, 5, 8, 9, 17, 64, 65, 200, 256, 257, 512, 513, 1000)] == [
        1, 2, 4, 8, 8, 16, 24, 64, 80, 208, 256, 288, 512, 576, 1024,
    ]  # fmt: skip
    assert len({padded_rows(n) for n in range(1, 257)}) == 23
