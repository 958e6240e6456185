"""Peers of `batchgen bench`: search for the best setting, skipped peers, and timeouts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import pytest

from batchgen.bench.command import run_command as run_bench_command
from batchgen.bench.correctness import GateFailed, check_peer, gate_rows
from batchgen.bench.peers import PEERS, EngineSource
from batchgen.bench.process import EngineExited, EngineFailed, EngineProcess, Generated, LoadSpec
from batchgen.bench.results import SkippedPeers
from batchgen.bench.run import BenchConfig, best_setting, distinct_settings, run_bench
from batchgen.bench.shapes import Shape, build_model
from batchgen.bench.workloads import BenchRow
from batchgen.cli.app import run_command
from batchgen.errors import UsageError
from tests.bench.test_bench import console_text, silent_console

TINY = Shape(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, inner=48, vocab=64, context=128)
TOY = 'name = "{}"\ndescription = "d"\noutput = [2, 3]\n[[levels]]\nchildren = {}\ntokens = [2, 4]\n'


# Settings


@dataclass
class Timed:
    """An engine whose passes take the seconds in `cost`; it records its requests."""

    cost: Mapping[tuple[int, int], float]
    """(value of the setting, longest output) -> seconds; other passes fail."""
    settings: list[dict[str, int]]
    name: str = "timed"
    version: str = "0"
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    gone: bool = False
    requests: list[tuple[int, int, int]] = field(default_factory=list)

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        (value,) = setting.values()
        longest = max(row.max_new for row in rows)
        self.requests.append((value, longest, len(rows)))
        if (value, longest) not in self.cost:
            raise EngineExited("gone") if self.gone else EngineFailed(f"no memory for {setting}")
        return Generated([], self.cost[value, longest], 0.0)


ROWS = [BenchRow([5], 64)] * 12


def test_settings_are_tried_on_all_rows_and_much_slower_ones_only_once() -> None:
    engine = Timed({(1, 16): 3.0, (2, 16): 1.0, (3, 16): 2.0}, [{"threads": n} for n in (1, 2, 3)])
    assert best_setting(engine, ROWS) == {"threads": 2}
    assert engine.requests == [(n, 16, 12) for n in (1, 2, 3, 2, 3)]


def test_settings_close_to_the_fastest_are_tried_with_full_outputs() -> None:
    cost = {(1, 16): 1.0, (2, 16): 1.1, (3, 16): 2.0, (1, 64): 5.0, (2, 64): 4.0}
    engine = Timed(cost, [{"threads": n} for n in (1, 2, 3)])
    assert best_setting(engine, ROWS) == {"threads": 2}
    assert engine.requests[-2:] == [(1, 64, 12), (2, 64, 12)]


def test_batches_are_tried_on_rows_of_middle_lengths_and_compared_per_row() -> None:
    settings = [{"batch": n} for n in (4, 8, 16, 32)]
    assert distinct_settings(settings, 12) == settings[:3]
    engine = Timed({(4, 16): 1.0, (8, 16): 2.0, (16, 16): 4.0}, settings)
    assert best_setting(engine, ROWS) == {"batch": 8}
    assert {(value, rows) for value, _, rows in engine.requests} == {(4, 4), (8, 12), (16, 12)}


def test_batches_of_different_output_lengths_are_tried_with_full_outputs() -> None:
    rows = [BenchRow([5], new) for new in (3, 40, 17, 24, 9, 31)]
    engine = Timed({(2, 24): 1.0, (2, 40): 3.0, (4, 40): 6.0, (6, 40): 2.4}, [{"batch": n} for n in (2, 4, 6)])
    assert best_setting(engine, rows) == {"batch": 6}
    trials, finals = engine.requests[:3], engine.requests[3:]
    assert trials == [(2, 24, 2), (4, 40, 6), (6, 40, 6)], "the second of three batches: 24 and 17 tokens"
    assert finals == [(2, 40, 6), (6, 40, 6)], "settings close to the fastest, on all rows"


def test_the_second_trial_of_batches_runs_on_all_rows() -> None:
    rows = [BenchRow([5], new) for new in (3, 40, 17, 24, 9, 31)]
    engine = Timed({(2, 24): 1.0, (2, 40): 2.0, (6, 40): 2.4}, [{"batch": n} for n in (2, 6)])
    assert best_setting(engine, rows) == {"batch": 2}
    without = Timed({(2, 24): 1.0, (6, 40): 2.4}, [{"batch": n} for n in (2, 6)])
    assert best_setting(without, rows) == {"batch": 6}, "batch 2 fails on all rows"


def test_prompt_first_is_tried_only_if_output_lengths_differ() -> None:
    settings: list[dict[str, int]] = [{"batch": 2}, {"batch": 2, "prompt_first": 1}]
    assert best_setting(Timed({}, settings), ROWS) == {"batch": 2}, "no trial: both have the same batches"
    passes = []

    class Remembering(Timed):
        def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
            passes.append([len(row.ids) for row in rows])
            return Generated([], 1.0 if "prompt_first" in setting else 1.5, 0.0)

    rows = [BenchRow([5] * prompt, new) for prompt, new in ((1, 9), (2, 8), (3, 7), (4, 6), (5, 5), (6, 4))]
    assert best_setting(Remembering({}, settings), rows) == settings[1]
    assert passes == [[3, 4], [4, 3], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]


def test_many_batches_are_tried_on_all_lengths() -> None:
    """The third, fourth, ninth and tenth of twelve batches of 2; the third and fourth of six batches of 4."""
    rows = [BenchRow([5], new) for new in range(1, 25)]
    settings = [{"batch": n} for n in (2, 4)]
    seen = []

    class Remembering(Timed):
        def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
            seen.append([row.max_new for row in rows])
            return Generated([], float(setting["batch"]), 0.0)

    assert best_setting(Remembering({}, settings), rows) == {"batch": 2}
    assert seen[:2] == [[20, 19, 18, 17, 8, 7, 6, 5], [16, 15, 14, 13, 12, 11, 10, 9]]


def test_settings_differ_if_any_key_differs() -> None:
    settings = [{"batch": 8, "warm": 0}, {"batch": 16, "warm": 0}, {"batch": 16, "warm": 1}, {"warm": 1}]
    assert distinct_settings(settings, 8) == [settings[0], settings[2], settings[3]]


def test_a_failing_setting_is_not_the_best() -> None:
    settings = [{"threads": n} for n in (1, 2)]
    assert best_setting(Timed({(2, 16): 1.0}, settings), ROWS) == {"threads": 2}
    assert best_setting(Timed({(1, 16): 1.0}, settings), ROWS) == {"threads": 1}
    with pytest.raises(EngineFailed, match="no memory for"):
        best_setting(Timed({}, settings), ROWS)
    with pytest.raises(EngineExited):
        best_setting(Timed({(2, 16): 1.0}, settings, gone=True), ROWS)


def test_a_single_setting_is_not_tried() -> None:
    engine = Timed({}, [{"threads": 1}])
    assert best_setting(engine, ROWS) == {"threads": 1}
    assert engine.requests == []


def test_a_known_setting_is_not_tried_if_the_engine_has_it() -> None:
    settings = [{"threads": n} for n in (1, 2)]
    engine = Timed({(1, 16): 1.0}, settings)
    assert best_setting(engine, ROWS, {"threads": 2}) == {"threads": 2}
    assert engine.requests == []
    assert best_setting(engine, ROWS, {"threads": 3}) == {"threads": 1}
    assert engine.requests


# Skipped peers


def test_peers_are_skipped_on_one_workload_or_on_all() -> None:
    console = silent_console()
    skipped = SkippedPeers(console)
    with skipped.on_failure("other", "toy"):
        raise EngineFailed("other failed:\n  out of [memory]")
    assert skipped.has("other", "toy")
    assert not skipped.has("other", "next")
    assert not skipped.has("other")
    skipped.check([("batchgen", "toy"), ("other", "toy"), ("other", "next")])
    with pytest.raises(EngineFailed, match=r"no peer could be measured:\nleft out: other of toy: other failed: out of"):
        skipped.check([("batchgen", "toy"), ("other", "toy")])
    skipped.check([("batchgen", "toy")])
    with skipped.on_failure("other", "next"):
        raise EngineExited("it is gone")
    assert skipped.has("other")
    assert skipped.has("other", "any")
    assert skipped.lines() == [
        "left out: other of toy: other failed: out of [memory]",
        "left out: other: it is gone",
    ]
    assert console_text(console).splitlines() == skipped.lines()
    for ours in ("batchgen", "baseline", "deterministic"):
        with pytest.raises(GateFailed), skipped.on_failure(ours, "toy"):
            raise GateFailed("red")
    with pytest.raises(KeyError), skipped.on_failure("other"):  # a bug in the benchmark is not a peer's failure
        raise KeyError


def test_a_peer_may_differ_in_a_few_rows() -> None:
    truth = [[i, i] for i in range(20)]
    rows = [BenchRow([5], 2)] * 20

    def share(wrong: int) -> float:
        answers = [[i, i + (i < wrong)] for i in range(20)]
        return check_peer("toy", Answers(answers), {}, rows, truth)

    assert share(0) == 1
    assert share(1) == 0.95
    assert share(6) == 0.7
    with pytest.raises(
        GateFailed, match="answers on toy has the reference's ids in 65% of rows in float32, at least 70%"
    ):
        share(7)


def test_with_peers_more_rows_are_checked() -> None:
    rows = [BenchRow([i], 30) for i in range(64)]
    assert len(gate_rows(rows)) == 6
    picked = gate_rows(rows, peers=True)
    assert len(picked) == 20
    assert {row.max_new for row in picked} == {8}


@dataclass
class Answers:
    """An engine that returns fixed outputs."""

    answers: list[list[int]]
    name: str = "answers"
    version: str = "0"
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    settings: list[dict[str, int]] = field(default_factory=lambda: [{}])

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        return Generated(self.answers, 1.0, 1.0)


# Whole runs


class Model(Answers):
    """Generates a function of the prompt; `wrong` of twenty rows differ, in any dtype."""

    tries: ClassVar[list[dict[str, int]]] = [{}]

    def __init__(self, source: EngineSource, spec: LoadSpec, wrong: int = 0, fails_at: str = "") -> None:
        super().__init__([], source.name, dtype=spec.dtype, settings=self.tries)
        self._wrong, self._fails_at = wrong, fails_at
        self.fail("load")

    def fail(self, when: str) -> None:
        if self._fails_at == when:
            raise EngineFailed(f"{self.name} failed at {when}")
        if self._fails_at == f"gone at {when}":
            raise EngineExited(f"{self.name} ended at {when}")

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        self.fail(f"{len(rows)} rows in {self.dtype}")
        outputs = [
            [sum(row.ids) + i + (at % 20 < self._wrong) * (i > 0) for i in range(row.max_new)]
            for at, row in enumerate(rows)
        ]
        if self._fails_at == f"end of {len(rows)} rows in {self.dtype}":
            outputs[-1].pop()
        return Generated(outputs, 1.0, 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    build_model(TINY, path)
    return path


@pytest.fixture
def toys(tmp_path: Path, fast_rates: None) -> tuple[str, ...]:
    paths = []
    for name, rows in (("toy", 30), ("next", 25)):
        paths.append(tmp_path / f"{name}.toml")
        paths[-1].write_text(TOY.format(name, rows))
    return tuple(map(str, paths))


def run(
    folder: Path,
    toys: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tuned: Path | None = None,
    **peers: tuple[int, str],
) -> tuple[list[dict[str, object]], str]:
    """JSON lines and console text of a run with peers, each given as (number of wrong rows, failing operation)."""
    monkeypatch.setattr("batchgen.bench.run.parse_peers", lambda text: [EngineSource(name) for name in text.split(",")])

    @contextmanager
    def start(source: EngineSource, spec: LoadSpec) -> Iterator[Model]:
        yield Model(source, spec, *peers.get(source.name, (0, "")))

    lines: list[str] = []
    console = silent_console()
    config = BenchConfig(toys, str(folder), ",".join(peers), 2, "bfloat16", "cpu", 1, tuned=tuned)
    try:
        run_bench(config, lines.append, console, start)
    finally:
        run.figures = [json.loads(line) for line in lines]  # type: ignore[attr-defined]
    return [json.loads(line) for line in lines], console_text(console)


def engines(figures: Sequence[Mapping[str, object]], workload: str) -> list[object]:
    return [f["engine"] for f in figures if f["workload"] == workload and f["metric"] == "output_tokens_per_second"]


def test_settings_of_an_earlier_run(
    folder: Path, toys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Settings of `--tuned` are used for the same workload, and searched for others."""
    monkeypatch.setattr(Model, "tries", [{"eager": 0}, {"eager": 1}])
    figures, console_output = run(folder, toys[:1], monkeypatch, vllm=(0, ""))
    assert "has no setting" not in console_output
    stored = tmp_path / "figures.jsonl"
    stored.write_text("".join(json.dumps({**f, "setting": {"eager": 1}}) + "\n" for f in figures))
    figures, console_output = run(folder, toys, monkeypatch, tuned=stored, vllm=(0, ""))
    set_to = {(f["engine"], f["workload"]): f["setting"] for f in figures}
    assert set_to["vllm", "toy"] == {"eager": 1}
    assert set_to["vllm", "next"] == {"eager": 0}, "the first, because both take the same time"
    assert f"vllm on toy: setting {{'eager': 1}} from {stored}" in console_output
    assert f"{stored} has no setting of vllm for next; trying its settings" in console_output
    stored.write_text('{"workload": "plan"}\n')
    assert (
        f"{stored} has no setting of vllm for toy" in run(folder, toys[:1], monkeypatch, tuned=stored, vllm=(0, ""))[1]
    )
    with pytest.raises(UsageError, match="--tuned has no effect on plan and startup"):
        run_bench_command(BenchConfig(("plan", "startup"), tuned=stored), print, silent_console())
    with pytest.raises(UsageError, match="--tuned: cannot read"):
        run(folder, toys, monkeypatch, tuned=tmp_path / "none.jsonl", vllm=(0, ""))


def test_a_peer_that_differs_in_some_rows_is_marked(
    folder: Path, toys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, console_output = run(folder, toys, monkeypatch, vllm=(1, ""), openvino=(4, ""))
    assert engines(figures, "toy") == ["batchgen", "vllm", "openvino"]
    equal = {f["engine"]: f["rows_equal"] for f in figures}
    assert equal == {"batchgen": 1.0, "vllm": 0.95, "openvino": 0.8}
    assert "gate: openvino has the reference's ids in 80% of rows in float32" in console_output
    assert "openvino (80% equal)" in console_output
    assert "vllm (" not in console_output
    assert "left out" not in console_output


def test_the_first_pass_of_a_workload_is_not_measured(
    folder: Path, toys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all engines, with and without settings to try."""
    generate = Model.generate

    def slow_at_first(self: Model, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        done = generate(self, rows, setting)
        seen = self.__dict__.setdefault("seen", set())
        first = len(rows) not in seen
        seen.add(len(rows))
        return replace(done, seconds=9.0 if first else 1.0)

    monkeypatch.setattr(Model, "generate", slow_at_first)
    figures, _ = run(folder, toys, monkeypatch, vllm=(0, ""), openvino=(0, ""))
    rates = [f for f in figures if f["metric"] == "output_tokens_per_second"]
    assert len(rates) == 6
    assert all(f["min"] == f["max"] for f in rates)


@pytest.mark.parametrize(
    ("fails_at", "of"),
    [
        ("load", ""),
        ("gone at 20 rows in float32", ""),
        ("25 rows in bfloat16", " of next"),
        ("gone at 25 rows in bfloat16", ""),
    ],
)
def test_a_failing_peer_is_skipped_and_reported(
    folder: Path, toys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, fails_at: str, of: str
) -> None:
    figures, console_output = run(folder, toys, monkeypatch, vllm=(0, fails_at), openvino=(0, ""))
    in_toy = [] if "load" in fails_at or "float32" in fails_at else ["vllm"]
    assert engines(figures, "toy") == ["batchgen", *in_toy, "openvino"]
    assert engines(figures, "next") == ["batchgen", "openvino"]
    *others, last = figures
    assert set(others[-1]["ratio"]) == {"batchgen"}  # type: ignore[call-overload]
    assert (last["metric"], last["engine"], last["value"]) == ("left_out", "vllm", None)
    assert last["workload"] == ("next" if in_toy else None), "the workload that was not measured"
    assert str(last["reason"]) in console_output.splitlines()[-1]
    assert console_output.splitlines()[-1] == f"left out: vllm{of}: " + (
        f"vllm failed at {fails_at}" if "gone" not in fails_at else fails_at.replace("gone", "vllm ended")
    )


def test_a_peer_with_wrong_ids_is_skipped_on_that_workload(
    folder: Path, toys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, console_output = run(folder, toys, monkeypatch, vllm=(7, ""), openvino=(0, ""))
    assert engines(figures, "toy") == engines(figures, "next") == ["batchgen", "openvino"]
    assert "left out: vllm of next: correctness gate failed, no figures" in console_output
    assert "gate: vllm" not in console_output


def test_a_peer_that_stops_early_is_skipped_on_that_workload(
    folder: Path, toys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, console_output = run(folder, toys, monkeypatch, vllm=(0, "end of 25 rows in bfloat16"), openvino=(0, ""))
    assert engines(figures, "toy") == ["batchgen", "vllm", "openvino"]
    assert engines(figures, "next") == ["batchgen", "openvino"]
    assert re.search(r"left out: vllm of next: .*checked row 24 has (\d) new tokens, asked for (\d)", console_output)


def test_a_run_without_any_working_peer_fails(
    folder: Path, toys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineFailed, match="no peer could be measured:\nleft out: vllm: vllm failed at load") as failed:
        run(folder, toys, monkeypatch, vllm=(0, "load"))
    assert failed.value.exit_code == 1
    assert run.figures == []  # type: ignore[attr-defined]
    with pytest.raises(EngineFailed, match="no peer could be measured"):
        run(folder, toys[:1], monkeypatch, vllm=(0, "30 rows in bfloat16"))
    assert engines(run.figures, "toy") == ["batchgen"]  # type: ignore[attr-defined]


def test_a_failure_of_batchgen_ends_the_run(
    folder: Path, toys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineFailed, match="batchgen failed at load"):
        run(folder, toys, monkeypatch, batchgen=(0, "load"), vllm=(0, ""))
    with pytest.raises(GateFailed, match="batchgen on toy in float32, checked row 0"):
        run(folder, toys, monkeypatch, batchgen=(1, ""), vllm=(0, ""))


# Processes


def test_every_peer_has_a_script() -> None:
    scripts = Path(__file__).parents[2] / "batchgen" / "bench" / "engines"
    for name in PEERS:
        assert (scripts / f"{EngineSource(name).script}.py").is_file()


@pytest.mark.parametrize("when", ["load", "generate"])
def test_an_engine_that_does_not_answer_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    worker = tmp_path / "worker.py"
    loaded = json.dumps({"version": "1", "dtype": "float32", "device": "cpu", "threads": 1, "settings": [{}]})
    worker.write_text(
        "import sys, time\n"
        "for line in sys.stdin:\n"
        f"    if {when!r} in line[:20]:\n        time.sleep(600)\n"
        f"    print({loaded!r}, flush=True)\n"
    )
    monkeypatch.setattr("batchgen.bench.process._WORKER", worker)
    spec = LoadSpec("none", "float32", "cpu", 1)

    def ask_twice() -> None:
        with EngineProcess(EngineSource("vllm", sys.executable), spec, timeout=0.5) as engine:
            with pytest.raises(EngineExited, match=r"vllm did not answer generate within 0\.5 seconds and was killed"):
                engine.generate([], {})
            engine.generate([], {})

    message = "vllm did not answer load within" if when == "load" else "vllm ended without an answer"
    with pytest.raises(EngineExited, match=message):
        ask_twice()


def test_timeout_below_one_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", "--timeout", "0"]) == 2
    assert "--timeout" in capsys.readouterr().err
