"""Peers of `batchgen bench`: search for the best setting, skipped peers, and timeouts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from batchgen.bench.command import run_command
from batchgen.bench.config import BenchConfig
from batchgen.bench.engines import peer_tools
from batchgen.bench.gate import GateFailed
from batchgen.bench.process import (
    PEERS,
    VARIANTS,
    EngineExited,
    EngineFailed,
    EngineProcess,
    EngineSource,
    Generated,
    LoadSpec,
    parse_peers,
)
from batchgen.bench.run import best_setting, distinct_settings
from batchgen.bench.workloads import BenchRow
from batchgen.errors import UsageError
from tests.bench.fakes import Stub, console_text, silent_console, starting

TOYS = 'name = "{}"\ndescription = "d"\noutput = [2, 3]\n[[levels]]\nchildren = {}\ntokens = [2, 4]\n'

# The command line


def test_peers_of_a_command_line(tmp_path: Path) -> None:
    assert parse_peers("none") == []
    assert parse_peers("auto") == [EngineSource("transformers", sys.executable)]
    assert parse_peers(f"transformers={sys.executable}") == [EngineSource("transformers", sys.executable)]
    for name, variant in zip(VARIANTS, parse_peers(",".join(VARIANTS)), strict=True):
        assert (variant.name, variant.script) == (name, "engine_batchgen")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # no site-packages
    python.chmod(0o755)
    for text, message in (
        ("sglan", r"unknown peer 'sglan' \(did you mean sglang\?\); known: transformers"),
        ("transformers,transformers", "given more than once"),
        ("transformers=/no/such/python", "cannot run /no/such/python"),
        ("transformers,", "a name is missing; known"),
        ("vllm=/tmp", r"vllm= must name a Python .*, got the folder /tmp; .* vllm=/tmp/bin/python"),
        ("vllm=", r"vllm= must name a Python .*, got nothing; .* vllm=ENVIRONMENT/bin/python"),
        ("deterministic=/x", "deterministic is this batchgen with other options and has no Python"),
        ("baseline", "baseline=FOLDER"),
        (f"baseline={tmp_path}", "baseline=FOLDER"),
        (f"transformers={python}", "cannot import transformers; install it there, or give --peers tr"),
        (f"vllm-zentorch={python}", "cannot import vllm and zentorch; install it there"),
    ):
        with pytest.raises(UsageError, match=message):
            parse_peers(text)


def test_every_peer_has_a_script() -> None:
    folder = Path(peer_tools.__file__).parent
    for name in (*PEERS, "batchgen", "baseline", *VARIANTS):
        assert (folder / f"{EngineSource(name).script}.py").is_file()


# Settings


@dataclass
class Timed(Stub):
    """An engine whose passes take the seconds in `cost`; it records its requests."""

    cost: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """(value of the setting, longest output) -> seconds; other passes fail."""
    gone: bool = False
    requests: list[tuple[int, int, int]] = field(default_factory=list)
    """(value of the setting, longest output, number of rows) of each pass."""

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        (value,) = setting.values()
        longest = max(row.max_new for row in rows)
        self.requests.append((value, longest, len(rows)))
        if (value, longest) not in self.cost:
            raise EngineExited("gone") if self.gone else EngineFailed(f"no memory for {setting}")
        return Generated([], self.cost[value, longest], 0.0)


def timed(cost: Mapping[tuple[int, int], float], key: str, *values: int, gone: bool = False) -> Timed:
    return Timed([], cost=cost, settings=[{key: value} for value in values], gone=gone)


ROWS = [BenchRow([5], 64)] * 12
MIXED = [BenchRow([5], new) for new in (3, 40, 17, 24, 9, 31)]


@pytest.mark.parametrize(
    ("cost", "key", "values", "rows", "best"),
    [
        pytest.param({(1, 16): 3, (2, 16): 1, (3, 16): 2}, "threads", (1, 2, 3), ROWS, 2, id="short outputs"),
        pytest.param(
            {(1, 16): 1, (2, 16): 1.1, (3, 16): 2, (1, 64): 5, (2, 64): 4}, "threads", (1, 2, 3), ROWS, 2,
            id="settings close to the fastest again with full outputs",
        ),
        pytest.param(
            {(4, 16): 1, (8, 16): 2, (16, 16): 4}, "batch", (4, 8, 16, 32), ROWS, 8, id="batches, compared per row"
        ),
        pytest.param(
            {(2, 24): 1, (2, 40): 3, (4, 40): 6, (6, 40): 2.4}, "batch", (2, 4, 6), MIXED, 6,
            id="full outputs if they differ, then all rows",
        ),
        pytest.param(
            {(2, 24): 1, (2, 40): 2, (6, 40): 2.4}, "batch", (2, 6), MIXED, 2,
            id="the second trial of batches on all rows",
        ),
        pytest.param({(2, 24): 1, (6, 40): 2.4}, "batch", (2, 6), MIXED, 6, id="a batch that fails on all rows"),
        pytest.param({(2, 16): 1, (2, 64): 1}, "threads", (1, 2), ROWS, 2, id="a setting that fails"),
        pytest.param({}, "threads", (1,), ROWS, 1, id="a single setting"),
    ],
)  # fmt: skip
def test_the_best_setting_is_found_by_trying(
    cost: dict[tuple[int, int], float], key: str, values: tuple[int, ...], rows: list[BenchRow], best: int
) -> None:
    assert best_setting(timed(cost, key, *values), rows) == {key: best}


def test_no_setting_is_found_if_all_fail_or_the_engine_is_gone() -> None:
    with pytest.raises(EngineFailed, match="no memory for"):
        best_setting(timed({}, "threads", 1, 2), ROWS)
    with pytest.raises(EngineExited):
        best_setting(timed({(2, 16): 1.0}, "threads", 1, 2, gone=True), ROWS)


def test_a_known_setting_is_not_tried_if_the_engine_has_it() -> None:
    engine = timed({(1, 16): 1.0}, "threads", 1, 2)
    assert best_setting(engine, ROWS, {"threads": 2}) == {"threads": 2}
    assert engine.requests == []
    assert best_setting(engine, ROWS, {"threads": 3}) == {"threads": 1}
    assert engine.requests


def test_trials_of_batches_cover_all_lengths() -> None:
    """The third, fourth, ninth and tenth of twelve batches of 2; the third and fourth of six batches of 4."""
    seen = []

    class Remembering(Stub):
        def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
            seen.append([(len(row.ids), row.max_new) for row in rows])
            return Generated([], setting["batch"] * (1.0 if "prompt_first" in setting else 1.5), 0.0)

    rows = [BenchRow([5], new) for new in range(1, 25)]
    assert best_setting(Remembering([], settings=[{"batch": n} for n in (2, 4)]), rows) == {"batch": 2}
    assert [[new for _, new in trial] for trial in seen[:2]] == [
        [20, 19, 18, 17, 8, 7, 6, 5], [16, 15, 14, 13, 12, 11, 10, 9]
    ]  # fmt: skip
    seen.clear()
    orders: list[dict[str, int]] = [{"batch": 2}, {"batch": 2, "prompt_first": 1}]
    rows = [BenchRow([5] * prompt, new) for prompt, new in ((1, 9), (2, 8), (3, 7), (4, 6), (5, 5), (6, 4))]
    assert best_setting(Remembering([], settings=orders), rows) == orders[1]
    assert [[prompt for prompt, _ in trial] for trial in seen[:2]] == [[3, 4], [4, 3]]
    seen.clear()
    assert best_setting(Remembering([], settings=orders), ROWS) == orders[0]
    assert seen == [], "no trial: both have the same batches"


def test_settings_differ_if_any_key_differs() -> None:
    settings = [{"batch": 8, "warm": 0}, {"batch": 16, "warm": 0}, {"batch": 16, "warm": 1}, {"warm": 1}]
    assert distinct_settings(settings, 8) == [settings[0], settings[2], settings[3]]


# Whole runs


class Model(Stub):
    """Generates a function of the prompt; `wrong` of twenty rows differ, in any dtype."""

    tries: ClassVar[list[dict[str, int]]] = [{}]

    def __init__(self, source: EngineSource, spec: LoadSpec, wrong: int = 0, fails_at: str = "") -> None:
        super().__init__([], name=source.name, dtype=spec.dtype, settings=self.tries)
        self._wrong, self._fails_at = wrong, fails_at
        self._seen: set[int] = set()
        self.fail("load")

    def fail(self, when: str) -> None:
        if self._fails_at == when:
            raise EngineFailed(f"{self.name} failed at {when}:\n  out of [memory]")
        if self._fails_at == f"bug at {when}":
            raise KeyError(when)
        if self._fails_at == f"gone at {when}":
            raise EngineExited(f"{self.name} ended at {when}")

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        """The first pass of a workload is slow."""
        self.fail(f"{len(rows)} rows in {self.dtype}")
        outputs = [
            [sum(row.ids) + i + (at % 20 < self._wrong) * (i > 0) for i in range(row.max_new)]
            for at, row in enumerate(rows)
        ]
        if self._fails_at == f"end of {len(rows)} rows in {self.dtype}":
            outputs[-1].pop()
        first = len(rows) not in self._seen
        self._seen.add(len(rows))
        return Generated(outputs, 9.0 if first else 1.0, 1.0)


@dataclass
class Run:
    """JSON lines, console text and error of one run."""

    figures: list[dict[str, Any]]
    text: str
    error: Exception | None

    def engines(self, workload: str) -> list[str]:
        return [f["engine"] for f in self.rates() if f["workload"] == workload]

    def rates(self) -> list[dict[str, Any]]:
        return [f for f in self.figures if f["metric"] == "output_tokens_per_second"]


@pytest.fixture
def run(folder: Path, tmp_path: Path, fast_rates: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs peers, each given as (number of wrong rows, failing operation), on 30 rows `toy` and 25 rows `next`."""
    monkeypatch.setattr("batchgen.bench.run.parse_peers", lambda text: [EngineSource(name) for name in text.split(",")])
    paths = []
    for name, rows in (("toy", 30), ("next", 25)):
        paths.append(tmp_path / f"{name}.toml")
        paths[-1].write_text(TOYS.format(name, rows))

    def measure(workloads: int = 2, files: Mapping[str, Path] = {}, **peers: tuple[int, str]) -> Run:
        lines: list[str] = []
        console = silent_console()
        names, error = tuple(map(str, paths[:workloads])), None
        config = BenchConfig(names, str(folder), ",".join(peers), 2, "bfloat16", "best", "cpu", 1, **files)
        start = starting(lambda source, spec: Model(source, spec, *peers.get(source.name, (0, ""))))
        try:
            run_command(config, lines.append, console, start)
        except (EngineFailed, GateFailed, UsageError) as found:
            error = found
        return Run([json.loads(line) for line in lines], console_text(console), error)

    return measure


def test_settings_of_an_earlier_run_are_used_for_the_same_workload(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Model, "tries", [{"eager": 0}, {"eager": 1}])
    first = run(1, vllm=(0, ""))
    assert "has no setting" not in first.text
    stored = tmp_path / "figures.jsonl"
    stored.write_text("".join(json.dumps({**f, "setting": {"eager": 1}}) + "\n" for f in first.figures))
    again = run(files={"tuned": stored}, vllm=(0, ""))
    set_to = {(f["engine"], f["workload"]): f["setting"] for f in again.figures}
    assert set_to["vllm", "toy"] == {"eager": 1}
    assert f"vllm on toy: setting {{'eager': 1}} from {stored}" in again.text
    assert set_to["vllm", "next"] in Model.tries
    assert f"{stored} has no setting of vllm for next; trying its settings" in again.text
    assert "--tuned: cannot read" in str(run(files={"tuned": tmp_path / "none.jsonl"}, vllm=(0, "")).error)


def test_engines_are_measured_after_a_first_pass_and_marked_if_rows_differ(run: Any) -> None:
    found = run(vllm=(1, ""), openvino=(4, ""))
    assert found.engines("toy") == found.engines("next") == ["batchgen", "vllm", "openvino"]
    assert all(f["min"] == f["max"] for f in found.rates())
    assert {f["engine"]: f["rows_equal"] for f in found.figures} == {"batchgen": 1.0, "vllm": 0.95, "openvino": 0.8}
    assert "gate: openvino has the reference's ids in 80% of rows in float32" in found.text
    assert "openvino (80% equal)" in found.text
    assert "vllm (" not in found.text
    assert "left out" not in found.text


@pytest.mark.parametrize(
    ("fails_at", "of"),
    [
        ("load", ""),
        ("gone at 20 rows in float32", ""),
        ("25 rows in bfloat16", " of next"),
        ("gone at 25 rows in bfloat16", ""),
    ],
)
def test_a_failing_peer_is_skipped_and_reported(run: Any, fails_at: str, of: str) -> None:
    found = run(vllm=(0, fails_at), openvino=(0, ""))
    in_toy = [] if "load" in fails_at or "float32" in fails_at else ["vllm"]
    assert found.engines("toy") == ["batchgen", *in_toy, "openvino"]
    assert found.engines("next") == ["batchgen", "openvino"]
    *others, last = found.figures
    assert set(others[-1]["ratio"]) == {"batchgen"}
    assert (last["metric"], last["engine"], last["value"]) == ("left_out", "vllm", None)
    assert last["workload"] == ("next" if in_toy else None), "the workload that was not measured"
    gone = "gone" in fails_at
    reason = fails_at.replace("gone", "vllm ended") if gone else f"vllm failed at {fails_at}: out of [memory]"
    assert last["reason"] == reason
    assert found.text.splitlines()[-1] == f"left out: vllm{of}: {reason}"


def test_a_bug_of_the_benchmark_is_not_a_peers_failure(run: Any) -> None:
    with pytest.raises(KeyError):
        run(1, vllm=(0, "bug at load"))


def test_a_peer_with_wrong_or_too_few_ids_is_skipped_on_that_workload(run: Any) -> None:
    wrong = run(vllm=(7, ""), openvino=(0, ""))
    assert wrong.engines("toy") == wrong.engines("next") == ["batchgen", "openvino"]
    assert "left out: vllm of next: correctness gate failed, no figures" in wrong.text
    assert "gate: vllm" not in wrong.text
    short = run(vllm=(0, "end of 25 rows in bfloat16"), openvino=(0, ""))
    assert short.engines("toy") == ["batchgen", "vllm", "openvino"]
    assert short.engines("next") == ["batchgen", "openvino"]
    assert re.search(r"left out: vllm of next: .*checked row 24 has (\d) new tokens, asked for (\d)", short.text)


def test_a_run_fails_without_a_working_peer_and_if_batchgen_fails(run: Any) -> None:
    at_load = run(vllm=(0, "load"))
    assert str(at_load.error).startswith("no peer could be measured:\nleft out: vllm: vllm failed at load")
    assert at_load.error.exit_code == 1
    assert at_load.figures == []
    measured = run(1, vllm=(0, "30 rows in bfloat16"))
    assert "no peer could be measured" in str(measured.error)
    assert measured.engines("toy") == ["batchgen"]
    assert "batchgen failed at load" in str(run(batchgen=(0, "load"), vllm=(0, "")).error)
    for ours in ("batchgen", "deterministic"):
        assert f"{ours} on toy in float32, checked row 0" in str(run(**{ours: (1, ""), "vllm": (0, "")}).error)


def test_a_failed_run_draws_what_it_measured(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = run(files={"chart": tmp_path / "x.svg"}, batchgen=(0, "25 rows in bfloat16"), vllm=(0, ""))
    assert "batchgen failed at 25 rows in bfloat16" in str(found.error)
    assert "toy" in (tmp_path / "x.svg").read_text(encoding="utf-8")


# Processes


@pytest.mark.parametrize("when", ["load", "generate"])
def test_an_engine_that_does_not_answer_is_killed(tmp_path: Path, when: str) -> None:
    loaded = json.dumps({"version": "1", "dtype": "float32", "device": "cpu", "threads": 1, "settings": [{}]})
    (tmp_path / "served.py").write_text(
        "import sys, time\n"
        "for line in sys.stdin:\n"
        f"    if {when!r} in line[:20]:\n        time.sleep(600)\n"
        f"    print({loaded!r}, flush=True)\n"
    )
    python = executable(tmp_path, f"exec {sys.executable} {tmp_path}/served.py")

    def ask_twice() -> None:
        with EngineProcess(EngineSource("vllm", python), SPEC, timeout=0.5) as engine:
            with pytest.raises(EngineExited, match=r"vllm did not answer generate within 0\.5 seconds and was killed"):
                engine.generate([], {})
            engine.generate([], {})

    message = "vllm did not answer load within" if when == "load" else "vllm ended without an answer"
    with pytest.raises(EngineExited, match=message):
        ask_twice()


SPEC = LoadSpec("none", "float32", "cpu", 3)


def executable(folder: Path, line: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def test_an_engine_is_killed_after_its_lifetime(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="ended without an answer"):
        EngineProcess(EngineSource("transformers", executable(tmp_path, "exec sleep 600")), SPEC, lifetime=0.1)


def test_every_engine_gets_the_same_threads(tmp_path: Path) -> None:
    """The environment variables for the number of threads are set independently of this process's."""
    recorded = tmp_path / "environment"
    with pytest.raises(EngineFailed):
        EngineProcess(EngineSource("vllm", executable(tmp_path, f"env > {recorded}")), SPEC)
    found = dict(line.partition("=")[::2] for line in recorded.read_text().splitlines())
    assert {name for name, value in found.items() if name.endswith("_THREADS") and value == "3"} >= {
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "RAYON_NUM_THREADS",
    }


@pytest.mark.parametrize(
    ("python", "message"), [("/no/python", "cannot start"), ("/bin/false", "ended without an answer")]
)
def test_a_process_that_does_not_run_is_reported(python: str, message: str) -> None:
    with pytest.raises(EngineFailed, match=message):
        EngineProcess(EngineSource("batchgen", python), SPEC)
