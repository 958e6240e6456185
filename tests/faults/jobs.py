"""Small jobs with every kind of row, run by a model that computes nothing, and what their files must hold."""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import batchgen.job.setup as setup
from batchgen.cli.app import run_command
from tests.e2e import instant
from tests.e2e.model import save_model
from tests.e2e.rows import read, write_lines
from tests.e2e.runner import ProcessResult, run
from tests.faults.disk import Tree
from tests.faults.layer import Kill, Layer, in_place
from tests.media.samples import pixels, saved
from tests.models.tiny_media import save_media

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.e2e.warm", "tests.faults.jobs"])

_SHORT = {"temperature": 0.8, "max_new_tokens": 2, "ignore_eos": True}
_LINE = {"method": "POST", "url": "/v1/chat/completions"}
_BODY = {"model": "*", "max_tokens": 2, "seed": 3}

ROWS: list[bytes | dict[str, Any]] = [
    {"id": "greedy", "text": "One", "temperature": 0, "max_new_tokens": 3, "stream": True, "tag": "kept"},
    {"id": "states", "text": "Two and", **_SHORT, "return_hidden_states": True},
    {"id": "samples", "text": "Three", **_SHORT, "n": 2, "stream": True, "return_logprob": True},
    {"id": "no prompt", "note": "bad"},
    {"id": "several", "text": ["Four", "Five"], **_SHORT, "return_hidden_states": {"tokens": "last"}},
    b'{"id": "cut", "text": ',
    {"id": "again", "text": "One", "temperature": 0, "max_new_tokens": 3, "stream": True},
    {"id": "scored", "text": "Six", "completions": [" seven", [7, 8]]},
    {"id": "ids", "input_ids": [5, 6, 7], **_SHORT},
]
STREAMED = {"greedy", "samples", "again"}
"""Ids of the rows with events."""
LINES: list[bytes | dict[str, Any]] = [
    {"custom_id": "a", **_LINE, "body": {**_BODY, "messages": [{"role": "user", "content": "One"}]}},
    {"custom_id": "bad", **_LINE, "body": {**_BODY, "messages": [], "temperature": 9}},
    {"custom_id": "b", **_LINE, "body": {**_BODY, "messages": [{"role": "user", "content": "Two"}], "n": 2}},
    {"custom_id": "c", **_LINE, "body": {**_BODY, "messages": [{"role": "user", "content": "Three"}]}},
]
IMAGES: list[bytes | dict[str, Any]] = [
    {"id": f"image {i}", "text": "<image> One", "image_data": base64.b64encode(png).decode(), **_SHORT}
    for i, png in enumerate(saved(pixels(seed=seed), "PNG") for seed in range(6))
]


@dataclass(frozen=True, slots=True)
class FaultJob:
    """A job of the fault tests."""

    name: str
    rows: list[bytes | dict[str, Any]]
    words: tuple[str, ...]
    """Its options."""
    save_model: Callable[[Path], object] = save_model
    """Saves its model in a folder."""

    def write_input(self, folder: Path) -> None:
        """Write its input file."""
        folder.mkdir(parents=True, exist_ok=True)
        write_lines(folder / "in.jsonl", self.rows)

    def command(self, model: Path) -> list[str]:
        """Its command line."""
        common = ["--model", str(model), "--commit-every", "2", "--max-num-seqs", "2", "--progress", "none"]
        return ["run", "in.jsonl", *self.words, *common, "--kv-memory", "1MiB", "--cpu-threads", "1"]


JOBS = [
    FaultJob("parquet", ROWS, ("-o", "out.parquet", "--events", "events.jsonl", "--report", "report.json")),
    FaultJob("lines", LINES, ("-o", "out.jsonl")),
    FaultJob("shard", ROWS, ("-o", "out", "--shard", "0/2", "--events", "events.jsonl")),
    FaultJob("pictures", IMAGES, ("-o", "out.parquet", "--deterministic"), partial(save_media, "llava")),
]


@contextmanager
def instant_model() -> Iterator[None]:
    """Let jobs run with the model that computes nothing."""
    with patch.multiple(setup, checked_spec=instant.inspect, load_checked=instant.load):
        yield


def run_with(layer: Layer | None, job: FaultJob, folder: Path, model: Path, expect: int | None = 0) -> ProcessResult:
    """Run a job in this process, with a layer under its file operations."""
    with instant_model():
        if layer is None:
            return run(job.command(model), folder, expect)
        with in_place(layer):
            return run(job.command(model), folder, expect)


def run_killed(job: FaultJob, folder: Path, model: Path, number: int) -> bool:
    """Run a job in another process, which is killed at an operation; whether it came so far."""
    process = _CONTEXT.Process(target=_run_killed, args=(job, str(folder), str(model), number))
    process.start()
    process.join(120)
    assert process.exitcode in (0, -9)
    return process.exitcode == -9


def _run_killed(job: FaultJob, folder: str, model: str, number: int) -> None:
    os.chdir(folder)
    with instant_model(), in_place(Kill(Path(folder), number)):
        code = run_command(job.command(Path(model)))
    os._exit(code)


def run_short_of_memory(job: FaultJob, folder: Path, model: Path, first: int) -> int:
    """Run a job in another process, in which ten allocations from number `first` on fail; its exit code."""
    process = _CONTEXT.Process(target=_run_short_of_memory, args=(job, str(folder), str(model), first))
    process.start()
    process.join(120)
    if process.is_alive():  # a thread of a library waits for one that died
        process.kill()
        process.join()
    return int(process.exitcode or 0)


def _run_short_of_memory(job: FaultJob, folder: str, model: str, first: int) -> None:
    import _testcapi  # not in every build of Python

    os.chdir(folder)
    os.close(2)
    os.open(os.devnull, os.O_WRONLY)
    with instant_model():
        _testcapi.set_nomemory(first, first + 10)
        code = run_command(job.command(Path(model)))
        _testcapi.remove_mem_hooks()
    os._exit(code)


def results_of(tree: Tree, folder: Path) -> dict[str, Any]:
    """What the files that a job leaves hold, without what differs from run to run.

    Args:
        tree: the files, all below `folder`.
        folder: the folder, to read Parquet files from.
    """
    found: dict[str, Any] = {}
    for path, content in tree.items():
        if content is None:
            found[path] = None
        elif path.endswith(".parquet"):
            table = read(folder / path)
            found[path] = [str(table.schema.remove_metadata()), table.to_pylist()]
        elif path == "report.json":
            report = json.loads(content)
            found[path] = {name: report[name] for name in ("rows", "rows_ok", "rows_error", "errors", "fingerprint")}
        elif path == "events.jsonl":
            found[path] = _last_events(content)
        elif path.endswith(".jsonl") and path != "in.jsonl":
            found[path] = [_without_time(json.loads(line)) for line in content.splitlines()]
    return found


def _last_events(content: bytes) -> dict[tuple[int, ...], list[Any]]:
    """The last set of events of each sample: one that was not committed has its events again."""
    found: dict[tuple[int, ...], list[Any]] = {}
    for line in content.splitlines():
        event = json.loads(line)
        key = event["row_index"], event["prompt_index"], event["sample_index"]
        if event.get("position") == 0:
            found[key] = []
        found.setdefault(key, []).append(event)
    return found


def _without_time(line: Mapping[str, Any]) -> Any:
    if isinstance(body := (line.get("response") or {}).get("body"), dict):
        body.pop("created", None)
    return line
