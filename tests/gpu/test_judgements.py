"""What the GPU check concludes from made-up results: a wrong result must not pass, and nothing may be left out."""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.kernels.device import HOST
from batchgen.kernels.ops import Ops
from batchgen.request.completion import Completion
from tests.gpu import runner
from tests.gpu.budget import DEFAULT_STAGES, STAGES, commands, no_time, schedule
from tests.gpu.compare import Verdict, judge, judge_equal, poisoned
from tests.gpu.device import Gpu, Timing
from tests.gpu.goals import GOALS
from tests.gpu.mixed import compare, mixed_job, tokens_before_near_tie
from tests.gpu.registry import DTYPES, Case, cases
from tests.gpu.report import figure
from tests.gpu.shards import Shard
from tests.gpu.stages.parity_sampling import MODES, judge_draws, keys_of
from tests.gpu.stages.profile import Span, busy
from tests.gpu.stages.syncs import counted_syncs, judge_graphs, judge_lateness, judge_waits
from tests.gpu.steady import TimedDevice, steady_rows
from tests.gpu.under_test import kernel, reference
from tests.kernels.op_cases import PYTORCH_ONLY

CPU = torch.device("cpu")
TRUTH = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
PLAIN = TRUTH + torch.tensor([0.0, 0.1, 0.0])
INF = torch.tensor([-torch.inf, 1.0], dtype=torch.float64)
OFTEN = torch.zeros(1000, dtype=torch.float64)


def with_value(value: float) -> torch.Tensor:
    return torch.tensor([1.0, value, 3.0], dtype=torch.float64)


# Numbers: the 2 x rule.


@pytest.mark.parametrize(
    ("got", "plain", "truth", "passed"),
    [
        (TRUTH + 0.09, PLAIN, TRUTH, True),
        (TRUTH + torch.tensor([0.0, 0.0, 0.21]), PLAIN, TRUTH, False),
        (TRUTH + 3e-6, TRUTH, TRUTH, True),  # an exact plain version allows some ulps
        (TRUTH + 3e-5, TRUTH, TRUTH, False),
        (OFTEN + 0.1, torch.cat((OFTEN[:1] + 0.1, OFTEN[1:])), OFTEN, False),  # by the mean square
        *((with_value(x), with_value(x), TRUTH, False) for x in (torch.nan, torch.inf, -torch.inf)),
        (INF.float(), INF.float(), INF, True),
        (-INF.float(), INF.float(), INF, False),
        (TRUTH[:2], TRUTH, TRUTH, False),
    ],
)
def test_errors_of_up_to_twice_the_plain_error_pass(
    got: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor, passed: bool
) -> None:
    assert judge(got, plain, truth, torch.float32).passed == passed


def test_equal_tensors_pass() -> None:
    assert judge_equal(torch.tensor([1, 2]), torch.tensor([1, 2])).passed
    assert "1 of 2 differ, first at [1]" in judge_equal(torch.tensor([1, 2]), torch.tensor([1, 3])).note
    assert not judge_equal(TRUTH[:2], TRUTH).passed


def test_new_buffers_are_poisoned_only_inside() -> None:
    with poisoned():
        assert torch.empty(3).isnan().all()
        assert torch.zeros(2).new_empty(2).isnan().all()
        assert (torch.empty_like(torch.zeros(2, dtype=torch.int64)) > 1 << 60).all()
        assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.empty.__name__ == "empty"


def test_sampled_tokens_may_differ_only_in_ties() -> None:
    gpu = Gpu(CPU, toy=True)
    logits, mode, keys = gpu.logits(3, 50), MODES["greedy"], keys_of(3)
    logits[0, 7] = logits[0, 9] = 99.0
    want = logits.argmax(-1)
    tied, wrong = want.clone(), want.clone()
    tied[0], wrong[1] = 9, (want[1] + 1) % 50
    judged = [judge_draws(logits, mode, keys, got, want).passed for got in (want, tied, wrong, want + 50)]
    assert judged == [True, True, False, False]


# Whole jobs.

GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 1.0}
SCORED = {**SAMPLED, "return_logprob": True}


def done(row: int, ids: list[int], gaps: list[float], **more: Any) -> Completion:
    """A completion with two top logprobs per token, whose differences are `gaps`."""
    top = [x for gap in gaps for x in (-1.0, -1.0 - gap)]
    return Completion(row, output_ids=ids, output_top_logprobs=top, prompt_tokens=3, **more)


WANT = done(0, [5, 6, 7], [1.0, 1e-5, 1.0])
TWENTY = [done(i, [5], [1.0]) for i in range(20)]
KNOWN = done(0, [5, 6], [1.0, 1.0], output_logprobs=[-1.0, -2.0])


@pytest.mark.parametrize(
    ("rows", "got", "want", "what", "passed"),
    [
        ([GREEDY], [done(0, [5, 9, 9], [])], [WANT], "greedy ids", True),  # equal up to the first near tie
        ([GREEDY], [done(0, [8, 6, 7], [])], [WANT], "greedy ids", False),
        ([GREEDY], [done(0, [5], [])], [done(0, [5], [0.0])], "greedy ids", False),  # only near ties
        ([SAMPLED] * 20, [done(0, [6], []), *TWENTY[1:]], TWENTY, "other ids", True),
        ([SAMPLED] * 20, [done(0, [6], []), done(1, [6], []), *TWENTY[2:]], TWENTY, "other ids", False),
        ([GREEDY] * 2, TWENTY[:1], TWENTY[:2], "completions", False),
        ([GREEDY], [replace(WANT, error=ErrorInfo(ErrorCode.OOM, "too large"))], [WANT], "errors", False),
        ([SCORED], [done(0, [5, 7], [], output_logprobs=[-1.0, -9.0])], [KNOWN], "logprobs", True),
        ([SCORED], [done(0, [5, 7], [], output_logprobs=[-1.1, -9.0])], [KNOWN], "logprobs", False),
        ([SCORED], [done(0, [5, 7], [])], [KNOWN], "logprobs", False),
    ],
)
def test_jobs_are_compared(
    rows: list[dict[str, Any]], got: list[Completion], want: list[Completion], what: str, passed: bool
) -> None:
    assert dict[str, Verdict](compare(rows, got, want))[what].passed == passed


def test_made_up_rows() -> None:
    """Mixed jobs have every kind and are reproducible; steady rows share no prefix."""
    assert tokens_before_near_tie(WANT) == 1
    rows = mixed_job(40, 16, 4, ["one"], seed=0)
    assert rows == mixed_job(40, 16, 4, ["one"], seed=0)
    names = {name for row in rows for name in row}
    assert names >= {"lora_path", "stop", "n", "top_logprobs_num", "return_hidden_states", "frequency_penalty"}
    steady = steady_rows(50, 6, 4, 128, {"temperature": 0.5})
    assert len({row["input_ids"][0] for row in steady}) == 50
    assert {len(row["input_ids"]) for row in steady} == {6}
    assert all(4 <= i < 128 for row in steady for i in row["input_ids"])


# Waits for the device.


def test_waits_are_counted_by_file_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    found: Counter[str] = Counter()

    def step() -> None:
        assert modes == ["warn"]
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (function warn_or_error)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    with pytest.warns(UserWarning, match="something else"), counted_syncs(found, cuda=True):
        step()
    assert modes == ["warn", 0]
    ((place, count),) = found.items()
    assert "gpu/test_judgements.py:" in place
    assert count == 2
    verdict = judge_waits(found, 4)
    assert (verdict.passed, verdict.error) == (False, 2.0)
    assert "0.5 a step" in verdict.note
    assert judge_waits(Counter(), 4).passed


def test_lateness_counts_later_downloads() -> None:
    device = TimedDevice(HOST, {"asynchronous": True})
    assert (device.asynchronous, device.captures) == (True, False)
    first = device.download(torch.zeros(1))
    device.download(torch.zeros(1), lane="outputs").wait()
    second = device.download(torch.zeros(1))
    first.wait()
    second.wait()
    assert device.lateness == [1, 0]
    assert device.waited > 0
    assert [judge_lateness(found).passed for found in ([1, 2], [1, 0], [])] == [True, False, False]


def test_steps_that_no_graph_replayed_fail() -> None:
    loop: Any = SimpleNamespace(counts=lambda: {"graph_replays": 40}, notes=[])
    assert judge_graphs(loop, 40).passed
    assert judge_graphs(loop, 41).error == 1.0
    loop.notes = ["no CUDA graphs: use_count > 0"]
    assert not judge_graphs(loop, 40).passed


# Times.


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


@pytest.mark.parametrize("waits", [False, True])
def test_functions_are_timed_as_a_graph_unless_they_wait(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[int] = []
    nothing: Any = lambda *_: None  # noqa: E731
    for name, fake in (
        *(("Event", FakeEvent), ("CUDAGraph", lambda: SimpleNamespace(replay=lambda: replays.append(1)))),
        *(("graph", nullcontext), ("synchronize", nothing), ("_sleep", nothing), ("empty_cache", nothing)),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)

    def refusing() -> AbstractContextManager[None]:
        raise RuntimeError("called a synchronizing CUDA operation")

    if waits:
        monkeypatch.setattr("tests.gpu.device.forbid_sync", refusing)
    gpu = Gpu(CPU, toy=False)
    gpu._flush = torch.empty(1)
    gpu.device = torch.device("cuda", 0)
    timing = gpu.time(lambda: None)
    assert timing == Timing(1000.0, 1000.0, 1000.0, 20, "eager" if waits else "graph")
    assert len(replays) == (0 if waits else 21)


def test_the_floor_is_the_larger_of_both_times() -> None:
    gpu = Gpu(CPU, toy=False, memory_rate=1e12, matmul_rate=1e14)
    timing = Timing(9.0, 10.0, 11.0, 20, "graph")
    made = figure(gpu, "op", "what", {"rows": 1}, timing, bytes=5_000_000, flops=100_000_000)
    assert (made.floor_us, made.floor_by, made.share) == (5.0, "bandwidth", 0.5)
    assert figure(gpu, "op", "what", {}, timing, bytes=1, flops=800_000_000).floor_by == "matmul"


def test_busy_time_counts_overlapping_spans_once() -> None:
    spans = [Span("a", 0, 10), Span("b", 5, 7), Span("c", 8, 12), Span("d", 20, 21)]
    assert busy(spans) == busy(reversed(spans)) == 13
    assert busy([]) == 0


def test_every_moonshot_is_beyond_its_goal() -> None:
    assert len({(g.workload, g.model, g.figure) for g in GOALS}) == len(GOALS)
    for goal in GOALS:
        assert goal.met(goal.moonshot)
        assert not replace(goal, goal=goal.moonshot, moonshot=goal.goal).met(goal.goal)


# Stages and cases: nothing is left out.


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


def test_every_operation_is_checked_by_its_kernel() -> None:
    declared = {field.name for field in fields(Ops)} - PYTORCH_ONLY
    real, toy = checks(toy=False), checks(toy=True)
    assert declared <= {case.op for case in real}
    assert declared <= {case.op for case in toy}
    assert len({case.name for case in real}) == len(real)
    assert {case.name.split("[")[0] for case in real} == {case.name.split("[")[0] for case in toy}
    assert {case.dtype for case in real} == set(DTYPES)
    assert kernel("rms_norm") is not reference("rms_norm")
    assert kernel("rms_norm").__module__ == "batchgen.kernels.gpu.norm"


def test_stages_divide_the_time_limit_in_their_order() -> None:
    ends = schedule(DEFAULT_STAGES, 450.0)
    assert list(ends) == [stage.name for stage in STAGES if stage.name in DEFAULT_STAGES]
    assert sorted(ends.values()) == list(ends.values())
    assert ends["profile"] == pytest.approx(450.0)
    assert schedule(["parity"], 100.0) == {"parity": 100.0}
    assert "tune" not in DEFAULT_STAGES
    engine = next(stage for stage in STAGES if stage.name == "engine")
    assert no_time(engine, engine.least) == ""
    assert no_time(engine, 1.0) == "skipped: 1 s left of its time, it needs 15 s"


def test_commands_fill_the_time_of_a_machine() -> None:
    lines = commands(900)
    limits = [float(line.split("--time-limit ")[1].split()[0]) for line in lines]
    assert sum(limits) == pytest.approx(900 - 90, abs=2)
    assert ",".join(line.split("--stages ")[1].split()[0] for line in lines).split(",") == list(DEFAULT_STAGES)


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
