"""Parts of the GPU check on made-up cases: the 2 x rule, timing, floors, cases and shards."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields

import pytest
import torch

from batchgen.kernels.ops import Ops
from tests.gpu import runner
from tests.gpu.compare import judge, judge_equal, poisoned
from tests.gpu.device import Gpu, Timing
from tests.gpu.registry import DTYPES, Case, cases
from tests.gpu.report import figure
from tests.gpu.shards import Shard
from tests.gpu.stages.parity_sampling import MODES, judge_draws, keys_of
from tests.gpu.under_test import kernel, reference

CPU = torch.device("cpu")
TRUTH = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)


def test_twice_the_plain_error_passes_and_more_does_not() -> None:
    plain = TRUTH + torch.tensor([0.0, 0.1, 0.0])
    assert judge(TRUTH + 0.09, plain, TRUTH, torch.float32).passed
    assert not judge(TRUTH + torch.tensor([0.0, 0.0, 0.21]), plain, TRUTH, torch.float32).passed


def test_small_errors_everywhere_fail_by_their_mean_square() -> None:
    plain = torch.zeros(1000, dtype=torch.float64)
    plain[0] = 0.1
    verdict = judge(torch.full((1000,), 0.1), plain, torch.zeros(1000).double(), torch.float32)
    assert not verdict.passed
    assert "mean square" in verdict.note


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_fail_even_if_the_plain_version_has_them(value: float) -> None:
    got = TRUTH.clone()
    got[1] = value
    assert not judge(got, got, TRUTH, torch.bfloat16).passed


def test_infinities_must_be_where_the_truth_has_them() -> None:
    truth = torch.tensor([-torch.inf, 1.0], dtype=torch.float64)
    assert judge(truth.float(), truth.float(), truth, torch.float32).passed
    assert not judge(-truth.float(), truth.float(), truth, torch.float32).passed


def test_an_exact_plain_version_allows_some_ulps() -> None:
    assert judge(TRUTH + 3e-6, TRUTH, TRUTH, torch.float32).passed
    assert not judge(TRUTH + 3e-5, TRUTH, TRUTH, torch.float32).passed


def test_shapes_must_agree() -> None:
    assert not judge(TRUTH[:2], TRUTH, TRUTH, torch.float32).passed
    assert not judge_equal(TRUTH[:2], TRUTH).passed


def test_judge_equal_counts_differences() -> None:
    assert judge_equal(torch.tensor([1, 2]), torch.tensor([1, 2])).passed
    assert "1 of 2 differ, first at [1]" in judge_equal(torch.tensor([1, 2]), torch.tensor([1, 3])).note


def test_new_buffers_are_poisoned_only_inside() -> None:
    with poisoned():
        assert torch.empty(3).isnan().all()
        assert torch.zeros(2).new_empty(2).isnan().all()
        assert (torch.empty_like(torch.zeros(2, dtype=torch.int64)) > 1 << 60).all()
        assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.empty.__name__ == "empty"


class FakeEvent:
    """A CUDA event with a clock that advances one millisecond at each record."""

    now = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.now += 1.0
        self.at = FakeEvent.now

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


class FakeGraph:
    """A CUDA graph that counts its replays."""

    replays = 0

    def replay(self) -> None:
        FakeGraph.replays += 1


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A gpu of a fake CUDA device."""
    for name, fake in (
        ("Event", FakeEvent),
        ("CUDAGraph", FakeGraph),
        ("graph", lambda _: nullcontext()),
        ("synchronize", lambda *_: None),
        ("_sleep", lambda _: None),
        ("empty_cache", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    FakeGraph.replays = 0
    gpu = Gpu(CPU, toy=False)
    gpu._flush = torch.empty(1)
    gpu.device = torch.device("cuda", 0)
    return gpu


def test_functions_are_timed_as_a_graph(fake_gpu: Gpu) -> None:
    calls: list[int] = []
    timing = fake_gpu.time(lambda: calls.append(1))
    assert timing == Timing(1000.0, 1000.0, 1000.0, 20, "graph")
    assert FakeGraph.replays == 21
    assert len(calls) == 5  # three warm-ups, one to see whether it waits, one captured
    fake_gpu.free()


def test_functions_that_wait_are_timed_without_a_graph(fake_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing() -> AbstractContextManager[None]:
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr("tests.gpu.device.forbid_sync", refusing)
    calls: list[int] = []
    assert fake_gpu.time(lambda: calls.append(1)).how == "eager"
    assert FakeGraph.replays == 0
    assert len(calls) == 23


def test_the_floor_is_the_larger_of_both_times() -> None:
    gpu = Gpu(CPU, toy=False, copy_rate=1e12, matmul_rate=1e14)
    timing = Timing(9.0, 10.0, 11.0, 20, "graph")
    made = figure(gpu, "op", "what", {"rows": 1}, timing, bytes=5_000_000, flops=100_000_000)
    assert (made.floor_us, made.floor_by, made.share) == (5.0, "bandwidth", 0.5)
    assert figure(gpu, "op", "what", {}, timing, bytes=1, flops=800_000_000).floor_by == "matmul"


def test_sampled_tokens_may_differ_only_in_ties() -> None:
    gpu = Gpu(CPU, toy=True)
    logits, mode, keys = gpu.logits(3, 50), MODES["greedy"], keys_of(3)
    logits[0, 7] = logits[0, 9] = 99.0
    want = logits.argmax(-1)
    tied, wrong = want.clone(), want.clone()
    tied[0], wrong[1] = 9, (want[1] + 1) % 50
    assert judge_draws(logits, mode, keys, want, want).passed
    assert judge_draws(logits, mode, keys, tied, want).passed
    assert not judge_draws(logits, mode, keys, wrong, want).passed
    assert not judge_draws(logits, mode, keys, want + 50, want).passed


def test_a_kernel_is_not_the_plain_version() -> None:
    assert kernel("rms_norm") is not reference("rms_norm")
    assert kernel("rms_norm").__module__ == "batchgen.kernels.gpu.norm"


def checks(toy: bool) -> list[Case]:
    return [*cases("parity", toy), *cases("flash", toy)]


def test_shards_have_each_case_once_and_keep_kernels_together() -> None:
    every = checks(toy=False)
    parts = [Shard(i, 6).select(every) for i in range(6)]
    assert sorted(c.name for part in parts for c in part) == sorted(c.name for c in every)
    shards: dict[tuple[object, ...], set[int]] = {}
    for i, part in enumerate(parts):
        for case in part:
            shards.setdefault((case.op, case.dtype, case.shape.get("dim")), set()).add(i)
    assert all(len(shard) == 1 for shard in shards.values())


def test_every_operation_of_the_engine_is_checked() -> None:
    declared = {field.name for field in fields(Ops)} - {"copy_pages"}  # PyTorch copies pages on a device, too
    assert declared
    assert declared <= {case.op for case in checks(toy=False)}
    assert declared <= {case.op for case in checks(toy=True)}


def test_case_names_are_unique_and_toys_are_the_same_functions() -> None:
    real, toy = checks(toy=False), checks(toy=True)
    assert len({case.name for case in real}) == len(real)
    assert {case.name.split("[")[0] for case in real} == {case.name.split("[")[0] for case in toy}
    assert {case.dtype for case in real} == set(DTYPES)


def test_a_stage_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(runner, "measure_rates", fail)
    monkeypatch.setattr(runner, "tune", lambda *given: {"fragment": ""})
    report = runner.run(runner.Options(("bench", "tune"), toy=True, time_limit=60.0))
    assert report.exit_code == 1
    assert report.tuning == {"fragment": ""}
    assert [note.split(": ")[0] for note in report.withheld] == ["bench"]
    assert "the device is lost" in report.withheld[0]
