"""The stages about whole jobs, held to cases made by hand: what they judge by, and how the time is shared out."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.request import Completion
from tests.gpu import runner
from tests.gpu.budget import DEFAULT_STAGES, STAGES, schedule
from tests.gpu.compare import Verdict
from tests.gpu.lab import Lab
from tests.gpu.mixed import compare, mixed_job, settled

GREEDY: dict[str, Any] = {"temperature": 0}
DRAWN: dict[str, Any] = {"temperature": 1.0}


def done(row: int, ids: list[int], gaps: list[float], **more: Any) -> Completion:
    """With two logprobs for each token, so far apart."""
    top = [x for gap in gaps for x in (-1.0, -1.0 - gap)]
    return Completion(row, output_ids=ids, output_top_logprobs=top, prompt_tokens=3, **more)


def verdicts(rows: list[dict[str, Any]], got: list[Completion], want: list[Completion]) -> dict[str, Verdict]:
    return dict(compare(rows, got, want))


def test_greedy_ids_count_up_to_the_first_near_tie() -> None:
    want = [done(0, [5, 6, 7], [1.0, 1e-5, 1.0])]
    assert settled(want[0]) == 1
    assert verdicts([GREEDY], [done(0, [5, 9, 9], [])], want)["greedy ids"].passed
    assert not verdicts([GREEDY], [done(0, [8, 6, 7], [])], want)["greedy ids"].passed


def test_rows_of_nothing_but_near_ties_prove_nothing() -> None:
    assert not verdicts([GREEDY], [done(0, [5], [])], [done(0, [5], [0.0])])["greedy ids"].passed


def test_one_drawn_row_of_twenty_may_differ() -> None:
    rows = [DRAWN] * 20
    want = [done(i, [5], [1.0]) for i in range(20)]
    got = [done(i, [5 if i else 6], []) for i in range(20)]
    assert verdicts(rows, got, want)["other ids"].passed
    got[1] = done(1, [6], [])
    assert not verdicts(rows, got, want)["other ids"].passed


def test_missing_and_failed_rows_are_told() -> None:
    want = [done(0, [5], [1.0]), done(1, [5], [1.0])]
    assert list(verdicts([GREEDY] * 2, want[:1], want)) == ["completions"]
    failed = replace(want[1], error=ErrorInfo(ErrorCode.OOM, "too large"))
    assert not verdicts([GREEDY] * 2, [want[0], failed], want)["errors"].passed


def test_logprobs_count_where_ids_agree() -> None:
    row = {**DRAWN, "return_logprob": True}
    want = [done(0, [5, 6], [1.0, 1.0], output_logprobs=[-1.0, -2.0])]
    assert verdicts([row], [done(0, [5, 7], [], output_logprobs=[-1.0, -9.0])], want)["logprobs"].passed
    assert not verdicts([row], [done(0, [5, 7], [], output_logprobs=[-1.1, -9.0])], want)["logprobs"].passed
    assert not verdicts([row], [done(0, [5, 7], [])], want)["logprobs"].passed


def test_a_mixed_job_has_every_kind_and_is_the_same_twice() -> None:
    rows = mixed_job(40, 16, 4, ["one"], seed=0)
    assert rows == mixed_job(40, 16, 4, ["one"], seed=0)
    fields = {name for row in rows for name in row}
    assert fields >= {"lora_path", "stop", "n", "top_logprobs_num", "return_hidden_states", "frequency_penalty"}


def test_stages_share_the_limit_in_their_order() -> None:
    ends = schedule(DEFAULT_STAGES, 450.0)
    assert list(ends) == [stage.name for stage in STAGES if stage.name in DEFAULT_STAGES]
    assert sorted(ends.values()) == list(ends.values())
    assert ends["profile"] == pytest.approx(450.0)
    assert schedule(["parity"], 100.0) == {"parity": 100.0}
    assert "tune" not in DEFAULT_STAGES


@pytest.mark.parametrize(("stage", "fails"), [("engine", True), ("workloads", False)])
def test_a_stage_without_time_is_skipped_and_told(stage: str, fails: bool) -> None:
    lab = Lab(torch.device("cpu"), toy=False, deadline=time.monotonic() + 1.0)
    run = object.__new__(runner._Run)
    run._lab, run._options = lab, runner.Options([stage], False, "", 1.0, "0", "", 1, "")
    run.report = runner.Report(False, {}, {}, "0", "", [stage])
    run._proofs(stage)
    assert [note.split(":")[0] for note in run.report.withheld] == [stage]
    assert "skipped" in run.report.withheld[0]
    assert [check.status for check in run.report.checks] == (["unreached"] if fails else [])
