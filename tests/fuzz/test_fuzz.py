"""Every committed input keeps the promises, and so do new ones: some here, and a minute of each marked slow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType

import pytest

from tests.fuzz.fuzzer import CORPUS, MODULES, fuzzer

NEW_INPUTS = {
    "json-lines": 150,
    "json-documents": 100,
    "openai-lines": 100,
    "delimited": 100,
    "parameters": 750,
    "parquet-bytes": 150,
    "parquet-tables": 15,
    "templates": 25,
    "schemas": 4,
    "patterns": 4,
    "grammars": 4,
    "models": 40,
    "gguf": 40,
    "media-files": 50,
    "work": 1,
    "commands": 3,
}
"""Number of new inputs of each fuzzer that take about a quarter of a second."""
SECONDS = 10
"""Most time of an input."""


@contextmanager
def limited(data: bytes) -> Iterator[None]:
    """End what takes longer than an input may."""

    def hang(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"an input takes more than {SECONDS} s: {data[:500]!r}")

    former = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, 6 * SECONDS)  # by the clock, which other processes share
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def run_one(name: str, data: bytes, *, everything: bool) -> None:
    with limited(data):
        try:
            fuzzer(name).run(data, everything=everything)
        except Exception as error:
            error.add_note(f"input of {name}: {data[:2000]!r}")
            raise


@pytest.mark.parametrize("name", MODULES)
def test_every_committed_input(name: str) -> None:
    inputs = fuzzer(name).inputs()
    assert inputs, f"{CORPUS / name} has no inputs"
    for number, data in enumerate(inputs):
        run_one(name, data, everything=number % 16 == 0)


@pytest.mark.parametrize("name", MODULES)
def test_new_inputs(name: str) -> None:
    target, rng = fuzzer(name), Random(31)
    pool = [*target.inputs(), *(target.make(rng) for _ in range(5))]
    for _ in range(NEW_INPUTS[name]):
        data = target.make(rng) if rng.random() < 0.1 else target.mutate(rng.choice(pool), rng)
        run_one(name, data, everything=False)


def fuzz(name: str, folder: Path, *options: str, **env: str) -> tuple[int, dict[str, object]]:
    """Run the harness; its exit code and counts."""
    words = [sys.executable, "-m", "tests.fuzz", name, "--folder", str(folder), *options]
    code = subprocess.run(words, check=False, env={**os.environ, **env}).returncode
    return code, json.loads((folder / "counts.jsonl").read_text().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_a_minute(name: str, tmp_path: Path) -> None:
    code, counts = fuzz(name, tmp_path)
    assert code == 0, [path.read_text() for path in (tmp_path / name / "failures").glob("*.txt")]
    assert counts["inputs"]


def kept(folder: Path) -> set[bytes]:
    return {path.read_bytes() for path in (folder / "faulty" / "failures").glob("*.bin")}


def test_a_crash_and_a_broken_promise_keep_their_inputs(tmp_path: Path) -> None:
    code, counts = fuzz("faulty", tmp_path, "--plain", "--inputs", "500", FAULTS="crash promise")
    assert (code, kept(tmp_path)) == (1, {b"crash", b"promise"})
    assert counts["inputs"] >= 490  # type: ignore[operator]
    assert counts["ended_processes"] > 0  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang", "memory"])
def test_what_does_not_end_is_ended_and_keeps_its_input(fault: str, tmp_path: Path) -> None:
    code, _ = fuzz("faulty", tmp_path, "--plain", "--inputs", "300", FAULTS=fault)
    assert (code, kept(tmp_path)) == (1, {fault.encode()})
