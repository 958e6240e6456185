"""The stages that run whole jobs: their comparisons and judgements, and the schedule of stages, on made-up cases."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.kernels.device import HOST
from batchgen.request.completion import Completion
from tests.gpu import models
from tests.gpu.budget import DEFAULT_STAGES, STAGES, no_time, schedule
from tests.gpu.compare import Verdict
from tests.gpu.device import Gpu
from tests.gpu.goals import GOALS, with_goal
from tests.gpu.mixed import compare, mixed_job, tokens_before_near_tie
from tests.gpu.report import Measure
from tests.gpu.stages.profile import Span, busy, longest
from tests.gpu.stages.syncs import counted_syncs, judge_graphs, judge_lateness, judge_waits
from tests.gpu.steady import TimedDevice, steady_rows

GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 1.0}


def done(row: int, ids: list[int], gaps: list[float], **more: Any) -> Completion:
    """A completion with two top logprobs per token, whose differences are `gaps`."""
    top = [x for gap in gaps for x in (-1.0, -1.0 - gap)]
    return Completion(row, output_ids=ids, output_top_logprobs=top, prompt_tokens=3, **more)


def verdicts(rows: list[dict[str, Any]], got: list[Completion], want: list[Completion]) -> dict[str, Verdict]:
    return dict(compare(rows, got, want))


def test_greedy_ids_are_compared_up_to_the_first_near_tie() -> None:
    want = [done(0, [5, 6, 7], [1.0, 1e-5, 1.0])]
    assert tokens_before_near_tie(want[0]) == 1
    assert verdicts([GREEDY], [done(0, [5, 9, 9], [])], want)["greedy ids"].passed
    assert not verdicts([GREEDY], [done(0, [8, 6, 7], [])], want)["greedy ids"].passed


def test_rows_with_only_near_ties_fail() -> None:
    assert not verdicts([GREEDY], [done(0, [5], [])], [done(0, [5], [0.0])])["greedy ids"].passed


def test_one_sampled_row_of_twenty_may_differ() -> None:
    rows = [SAMPLED] * 20
    want = [done(i, [5], [1.0]) for i in range(20)]
    got = [done(i, [5 if i else 6], []) for i in range(20)]
    assert verdicts(rows, got, want)["other ids"].passed
    got[1] = done(1, [6], [])
    assert not verdicts(rows, got, want)["other ids"].passed


def test_missing_and_failed_rows_fail() -> None:
    want = [done(0, [5], [1.0]), done(1, [5], [1.0])]
    assert list(verdicts([GREEDY] * 2, want[:1], want)) == ["completions"]
    failed = replace(want[1], error=ErrorInfo(ErrorCode.OOM, "too large"))
    assert not verdicts([GREEDY] * 2, [want[0], failed], want)["errors"].passed


def test_logprobs_are_compared_where_ids_agree() -> None:
    row = {**SAMPLED, "return_logprob": True}
    want = [done(0, [5, 6], [1.0, 1.0], output_logprobs=[-1.0, -2.0])]
    assert verdicts([row], [done(0, [5, 7], [], output_logprobs=[-1.0, -9.0])], want)["logprobs"].passed
    assert not verdicts([row], [done(0, [5, 7], [], output_logprobs=[-1.1, -9.0])], want)["logprobs"].passed
    assert not verdicts([row], [done(0, [5, 7], [])], want)["logprobs"].passed


def test_a_mixed_job_has_every_kind_and_is_reproducible() -> None:
    rows = mixed_job(40, 16, 4, ["one"], seed=0)
    assert rows == mixed_job(40, 16, 4, ["one"], seed=0)
    fields = {name for row in rows for name in row}
    assert fields >= {"lora_path", "stop", "n", "top_logprobs_num", "return_hidden_states", "frequency_penalty"}


def test_stages_divide_the_time_limit_in_their_order() -> None:
    ends = schedule(DEFAULT_STAGES, 450.0)
    assert list(ends) == [stage.name for stage in STAGES if stage.name in DEFAULT_STAGES]
    assert sorted(ends.values()) == list(ends.values())
    assert ends["profile"] == pytest.approx(450.0)
    assert schedule(["parity"], 100.0) == {"parity": 100.0}
    assert "tune" not in DEFAULT_STAGES


def test_a_stage_begins_only_with_enough_time() -> None:
    engine = next(stage for stage in STAGES if stage.name == "engine")
    assert no_time(engine, engine.least) == ""
    assert no_time(engine, 1.0) == "skipped: 1 s left of its time, it needs 15 s"
    assert {stage.name for stage in STAGES if stage.least} >= {"engine", "workloads", "profile"}


# Waits


def test_waits_are_counted_by_file_and_line() -> None:
    found: Counter[str] = Counter()
    with counted_syncs(found, cuda=False):
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (function warn_or_error)", stacklevel=1)
    ((place, count),) = found.items()
    assert "gpu/test_proofs.py:" in place
    assert count == 2
    verdict = judge_waits(found, 4)
    assert (verdict.passed, verdict.error) == (False, 2.0)
    assert "0.5 a step" in verdict.note
    assert judge_waits(Counter(), 4).passed


def test_other_warnings_are_not_counted() -> None:
    found: Counter[str] = Counter()
    with pytest.warns(UserWarning, match="something else"), counted_syncs(found, cuda=False):
        warnings.warn("something else", stacklevel=1)
    assert not found


def test_torch_warns_of_waits_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with counted_syncs(Counter(), cuda=True):
        assert modes == ["warn"]
    assert modes == ["warn", 0]


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
    assert judge_lateness([1, 2]).passed
    assert not judge_lateness([1, 0]).passed
    assert not judge_lateness([]).passed


def test_steps_that_no_graph_replayed_fail() -> None:
    loop: Any = SimpleNamespace(counts=lambda: {"graph_replays": 40}, notes=[])
    assert judge_graphs(loop, 40).passed
    assert judge_graphs(loop, 41).error == 1.0
    loop.notes = ["no CUDA graphs: use_count > 0"]
    assert not judge_graphs(loop, 40).passed
    assert judge_graphs(loop, 40).note == "no CUDA graphs: use_count > 0"


def test_steady_rows_share_no_prefix() -> None:
    rows = steady_rows(50, 6, 4, 128, {"temperature": 0.5})
    assert len({row["input_ids"][0] for row in rows}) == 50
    assert {len(row["input_ids"]) for row in rows} == {6}
    assert all(4 <= i < 128 for row in rows for i in row["input_ids"])
    assert rows[0]["temperature"] == 0.5


# Profiles


def test_busy_time_counts_overlapping_spans_once() -> None:
    spans = [Span("a", 0, 10), Span("b", 5, 7), Span("c", 8, 12), Span("d", 20, 21)]
    assert busy(spans) == 13
    assert busy(reversed(spans)) == 13
    assert busy([]) == 0


def test_longest_sums_kernels_by_name_per_step() -> None:
    first, second = longest([Span("a", 0, 3), Span("b", 3, 4), Span("b", 4, 6), Span("a", 6, 9)], steps=2)
    assert first == {"name": "a", "us_per_step": 3.0, "calls_per_step": 1.0, "share": pytest.approx(2 / 3, abs=1e-4)}
    assert (second["name"], second["us_per_step"]) == ("b", 1.5)


# Models


def test_models_are_built_in_the_background_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_BUILD", "import sys; sys.exit(len(sys.argv) - 1)")
    names: list[str] = []
    monkeypatch.setattr(models, "resolve_bench_model", lambda name, device: names.append(name) or "folder")
    with models.built_in_background(("0.6b", "8b")):
        (process,) = models._building
        with models.model_folder(Gpu(torch.device("cpu"), toy=False), "8b") as folder:
            assert process.returncode == 2
            assert (folder, names) == ("folder", ["random:8b"])
    with models.built_in_background(()):
        assert not models._building


# Goals


def test_measures_get_their_goals() -> None:
    made = with_goal(Measure("w-nano", "8b", "output_tokens_per_second", 1.0, "tokens/s"))
    assert (made.goal, made.moonshot) == (7500, 9200)
    assert made.predicted is not None
    assert with_goal(Measure("w-nano", "7b", "output_tokens_per_second", 1.0, "tokens/s")).goal is None


def test_every_moonshot_is_beyond_its_goal() -> None:
    assert len({(g.workload, g.model, g.figure) for g in GOALS}) == len(GOALS)
    for goal in GOALS:
        assert goal.met(goal.moonshot)
        assert not replace(goal, goal=goal.moonshot, moonshot=goal.goal).met(goal.goal)
