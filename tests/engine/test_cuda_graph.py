"""Decode steps as CUDA graphs against eager steps: whole jobs, on a device with simulated graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.engine import cuda_graph as module
from batchgen.engine import engine as engine_module
from batchgen.engine.cuda_graph import DecodeGraphs, padded_rows
from batchgen.engine.engine import Engine
from batchgen.kernels.device import Graph
from batchgen.kernels.gpu.work_list import GROUPS, LARGE
from batchgen.request.completion import Completion
from tests.engine.fake_device import LateDevice
from tests.engine.reference import save_word_tokenizer
from tests.engine.test_triton import assert_same
from tests.models.tiny import VOCAB, save_tiny

SHARED, STEM = [5, 6, 7, 8], [9, 10, 11, 12]
"""First page of all prompts, and second page of most."""
PROMPTS = [
    [*SHARED, *STEM, 40],
    [*SHARED, *STEM, 41, 42],
    [*SHARED, *STEM, 43, 44, 45],
    [*SHARED, 50],
    [*SHARED, 51, 52, 53],
]
LENGTHS = [7, 7, 7, 4, 4]


def rows(**of_all: Any) -> list[dict[str, Any]]:
    """Greedy and sampled rows of two lengths: 5 rows at first, then 3. `of_all`: fields of all rows."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_k": 5, "seed": 1},
        {"temperature": 1.2, "top_p": 0.7, "seed": 2},
        {"temperature": 1.0, "min_p": 0.05, "seed": 3},
        {"temperature": 0},
    ]
    return [
        {"input_ids": prompt, "max_new_tokens": length, "ignore_eos": True, **kind, **of_all}
        for prompt, length, kind in zip(PROMPTS, LENGTHS, kinds, strict=True)
    ]


def model_folder(tmp_path: Path, model_type: str = "qwen3", **overrides: Any) -> Path:
    folder = save_tiny(model_type, tmp_path / model_type, num_hidden_layers=2, **overrides)
    save_word_tokenizer(folder, VOCAB)
    return folder


def run(
    folder: Path, work: list[dict[str, Any]], captures: bool, meanwhile: Callable[[Engine], None] = lambda _: None
) -> tuple[list[Completion], LateDevice, DecodeGraphs | None]:
    engine = Engine(str(folder), attention="triton", dtype="float32", page_size=4, max_tokens_per_step=128)
    engine.device = device = LateDevice(captures=captures)
    meanwhile(engine)
    done = list(engine.generate(work, ordered=True))
    assert engine.last_run is not None
    return done, device, engine.last_run.loop.graphs


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that share a page form a prefix group."""
    monkeypatch.setattr(engine_module, "group_min_saving", lambda *given: 1)


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated graphs record PyTorch operations; compiled CPU kernels cannot be recorded."""
    monkeypatch.setattr(engine_module, "products_of", lambda config: "torch")


def check(folder: Path, work: list[dict[str, Any]]) -> tuple[LateDevice, DecodeGraphs]:
    want, *_ = run(folder, work, captures=False)
    got, device, graphs = run(folder, work, captures=True)
    assert graphs is not None
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert_same(ours, theirs)
    assert device.counts.captures == graphs.counts.captures
    assert device.counts.replays == graphs.counts.replays
    return device, graphs


def test_plain_rows_are_sampled_inside_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of each size runs eagerly, the second is captured, the others are replays."""
    launches: list[Any] = []
    planned = module.DecodeGraphs._run

    def watched(self: DecodeGraphs, *args: Any) -> Any:
        result = planned(self, *args)
        launches.append(next(reversed(self._steps.values())).attention.launches)
        return result

    monkeypatch.setattr(module.DecodeGraphs, "_run", watched)
    device, graphs = check(model_folder(tmp_path), rows())
    counts = graphs.counts
    assert graphs.disabled_reason is None
    assert counts.first + counts.replays == len(launches)
    assert counts.captures <= counts.first < len(launches), "captured once per kind, at its second step"
    assert len(graphs._steps) == counts.first
    assert counts.replays >= 2
    assert counts.padded > 0, "5 rows are padded to 8, 3 to 4"
    grids = [launch for step in launches for launch in step]
    assert any(grid[LARGE] + grid[GROUPS] for grid in grids), "prefixes are shared inside of graphs"
    # Uploads per step: its inputs, and attention lists for layers with and without a sliding window.
    assert {len(step) for step in launches} == {2}
    assert device.counts.uploads_into == 3 * len(launches)


def test_rows_that_are_not_plain_are_sampled_after_graphs(tmp_path: Path) -> None:
    work = rows()
    work[0] |= {"return_logprob": True, "top_logprobs_num": 3}
    work[1] |= {"repetition_penalty": 1.4, "bad_words": [[7], [8, 9]]}
    work[2] |= {"return_hidden_states": {"layers": [0, 1, -1], "tokens": "all"}}
    work[3] |= {"min_new_tokens": 3, "stop_token_ids": list(range(3, VOCAB, 2)), "ignore_eos": False}
    _, graphs = check(model_folder(tmp_path, "mistral", sliding_window=6), work)
    assert graphs.disabled_reason is None
    assert graphs.counts.replays > 0


def test_experts_are_captured_inside_graphs(tmp_path: Path) -> None:
    """A transformers model's forward is captured too, because it does not wait for the host."""
    _, graphs = check(model_folder(tmp_path, "qwen3_moe"), rows(return_routed_experts=True)[:3])
    assert graphs.disabled_reason is None
    assert graphs.counts.replays > 0


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Completion]]:
    """A model, and its completions of `few` without graphs."""
    folder = model_folder(tmp_path_factory.mktemp("plain"), "llama")
    return folder, run(folder, few(), captures=False)[0]


def few() -> list[dict[str, Any]]:
    return rows()[2:4]


def test_the_least_recently_used_graph_is_dropped(
    plain: tuple[Path, list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, want = plain
    monkeypatch.setattr(DecodeGraphs.__init__, "__defaults__", (1,))
    got, _, graphs = run(folder, few(), captures=True)
    assert graphs is not None
    assert graphs.counts.first > len(graphs._steps) == 1
    for ours, theirs in zip(got, want, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("problem", ["wait", "memory"])
def test_a_step_that_cannot_be_captured_runs_eagerly(plain: tuple[Path, list[Completion]], problem: str) -> None:
    folder, want = plain

    def break_capture(engine: Engine) -> None:
        model: Any = engine.model
        logits = model.logits

        def strange(hidden: Tensor) -> Tensor:
            found: Tensor = logits(hidden)
            if problem == "wait":
                return found + float(found.sum() * 0)
            if isinstance(engine.device, LateDevice) and engine.device._capturing:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return found

        model.logits = strange

    got, device, graphs = run(folder, few(), captures=True, meanwhile=break_capture)
    assert graphs is not None
    assert graphs.disabled_reason is not None
    assert ("captured" if problem == "wait" else "memory") in graphs.disabled_reason
    assert (device.counts.captures, device.counts.replays, device.counts.releases) == (0, 0, 1)
    assert not graphs._steps
    for ours, theirs in zip(got, want, strict=True):
        assert_same(ours, theirs)


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

    _, _, graphs = run(plain[0], few(), captures=True, meanwhile=break_capture)
    assert graphs is not None
    assert graphs.disabled_reason is not None
    assert graphs.disabled_reason.endswith(": operation not permitted when stream is capturing")


def test_padded_batch_sizes() -> None:
    assert [padded_rows(n) for n in (1, 2, 3, 5, 8, 9, 17, 64, 65, 200, 256, 257, 512, 513, 1000)] == [
        1, 2, 4, 8, 8, 16, 24, 64, 80, 208, 256, 288, 512, 576, 1024,
    ]  # fmt: skip
    assert len({padded_rows(n) for n in range(1, 257)}) == 23
