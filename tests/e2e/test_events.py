"""`stream` and `--events`: the events of each sample, their order, and their agreement with the results."""

from __future__ import annotations

import io
import json
import os
import sys
from collections import defaultdict
from dataclasses import astuple
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from batchgen import Completion, Engine, SamplingParams
from batchgen.errors import OutputError
from batchgen.job.events import open_events
from batchgen.request.completion import StreamEvent
from tests.e2e.engines import outcomes
from tests.e2e.rows import prompts, rows_of, write_lines
from tests.e2e.runner import run

Key = tuple[int, int, int]


def streaming_rows(count: int) -> list[dict[str, Any]]:
    rows = []
    for i, text in enumerate(prompts(count, 5)):
        row: dict[str, Any] = {"id": f"r{i}", "text": text, "temperature": 1.2, "seed": i, "max_new_tokens": i % 50}
        row |= [
            {},
            {"stop": ["th", "e "], "no_stop_trim": True},
            {"n": 3, "return_logprob": True, "top_logprobs_num": 2},
            {"stop_regex": [r"[a-z]{3}"], "min_new_tokens": min(4, i % 50)},
            {"echo": True, "suffix": " END", "skip_special_tokens": False},
            {"temperature": 0, "text": "every sixth is the same", "max_new_tokens": 15, "ignore_eos": True},
        ][i % 6]
        rows.append({**row, "stream": i % 7 != 6})
    return rows


def listen(engine: Engine, rows: list[dict[str, Any]]) -> tuple[list[StreamEvent], list[Completion]]:
    events: list[StreamEvent] = []
    completions = list(engine.generate(rows, ordered=True, on_event=events.append))
    return events, completions


def by_sample(events: list[StreamEvent]) -> dict[Key, list[StreamEvent]]:
    found: dict[Key, list[StreamEvent]] = defaultdict(list)
    for event in events:
        found[event.row_index, event.prompt_index, event.sample_index].append(event)
    return found


@pytest.mark.field("stream")
def test_events_agree_with_the_results(engine: Engine) -> None:
    rows = streaming_rows(72)
    events, completions = listen(engine, rows)
    samples = by_sample(events)
    assert samples.keys() == {c.key for c in completions if rows[c.row_index]["stream"]}
    early = 0
    for done in completions:
        if done.key not in samples:
            continue
        *tokens, end = samples[done.key]
        assert [event.token_id for event in tokens] == list(done.output_ids or [])
        assert [event.position for event in tokens] == list(range(len(tokens)))
        assert "".join(event.text for event in (*tokens, end)) == done.text
        logprobs = [None] * len(tokens) if done.output_logprobs is None else list(done.output_logprobs)
        assert [e.logprob for e in tokens] == logprobs
        assert (end.token_id, end.finish_reason, end.stop_kind) == (None, done.finish_reason, done.stop_kind)
        assert (end.matched_stop, end.completion_tokens, end.error) == (done.matched_stop, done.completion_tokens, None)
        assert {event.id for event in (*tokens, end)} == {done.id}
        early += sum(bool(event.text) for event in tokens)
    assert early > 200, "text comes with the tokens, not only at the end"
    assert len({c.dedup_of for c in completions}) > 1, "copies were among them"
    silent = list(engine.generate([{**row, "stream": False} for row in rows], ordered=True))
    assert outcomes(silent) == outcomes(completions)
    order = [(event.row_index, event.sample_index) for event in events]
    assert any(a != b for a, b in pairwise(order)), "events of samples are interleaved"


@pytest.mark.field("stream")
def test_a_failed_sample_has_an_event_with_its_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.text.stops.search.SEARCH_SECONDS", 0.01)
    monkeypatch.setattr("batchgen.text.stops.search.SEARCH_SECONDS_PER_TOKEN", 0.0)
    pattern = "(?=.)" + "[^\ue000]+" * 4 + "[\ue000\ue001]"  # never matches; a search takes some milliseconds
    slow = {"stop_regex": pattern, "ignore_eos": True, "max_new_tokens": 60, "stream": True, "text": "x"}
    events, completions = listen(engine, [slow, {"text": "x", "stream": True, "max_new_tokens": 0}, {"stream": True}])
    samples = by_sample(events)
    end = samples[0, 0, 0][-1]
    assert end.error is not None
    assert end.error == completions[0].error
    assert (end.finish_reason, end.text) == (None, "")
    assert [event.finish_reason for event in samples[1, 0, 0]] == ["length"]
    assert len(samples) == 2, "a row that never ran has no events"


@pytest.mark.field("stream", "best_of")
def test_rows_that_cannot_be_streamed_are_refused(engine: Engine) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "x", "stream": True},
        {"text": "x", "stream": False, "max_new_tokens": 1},
        {"text": "x", "stream": True, "best_of": 3},
    ]
    first, second, third = engine.generate(rows, ordered=True)
    assert first.error is not None
    assert (first.error.code, first.error.param) == ("invalid_field", "stream")
    assert "`on_event` of generate()" in first.error.message
    assert second.error is None
    assert third.error is not None
    assert "best_of" in third.error.message
    events: list[StreamEvent] = []
    params = SamplingParams(stream=True, max_new_tokens=2, temperature=0, ignore_eos=True)
    list(engine.generate(["x"], params, on_event=events.append))
    assert [event.token_id is None for event in events] == [False, False, True]


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.split("\n")[:-1]]


@pytest.mark.field("stream")
def test_a_file_of_events_and_stdout(engine: Engine, model: Path, tmp_path: Path) -> None:
    rows = [{**row, "stream": True} for row in streaming_rows(24)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    command = ["run", source, "--model", model, "--dtype", "float32"]
    run([*command, "-o", "a.parquet", "--events", "events.jsonl"], tmp_path)
    written = lines((tmp_path / "events.jsonl").read_text())
    seen, _ = listen(engine, rows)
    names = ("id", "row_index", "prompt_index", "sample_index", "position", "token_id", "text", "finish_reason")
    shown = [{name: event[name] for name in names if event.get(name) is not None} for event in written]
    assert shown == [
        {name: getattr(event, name) for name in names if getattr(event, name) is not None} for event in seen
    ]
    assert [event["event"] == "finish" for event in written] == [event.token_id is None for event in seen]
    assert ["logprob" in event for event in written] == [event.logprob is not None for event in seen]
    assert lines(run([*command, "-o", "b.parquet", "--events", "-"], tmp_path).stdout) == written
    before = (tmp_path / "events.jsonl").stat().st_mtime_ns
    run([*command, "-o", "a.parquet", "--events", "events.jsonl"], tmp_path)
    assert (tmp_path / "events.jsonl").stat().st_mtime_ns == before, "a finished job does nothing"
    run([*command, "-o", "c.parquet", "--max-errors", "100%"], tmp_path)
    assert {row["error"]["param"] for row in rows_of(tmp_path / "c.parquet")} == {"stream"}
    refused = run([*command, "-o", "d.parquet", "--events", "no/such/folder"], tmp_path, expect=5)
    assert "cannot write the events" in refused.stderr


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""),
        (b"a\nb\n", b"a\nb\n"),
        (b"a\nb", b"a\n"),
        (b"cut", b""),
        (b"x\n" + b"y" * 200_000, b"x\n"),
        (b"x\n\0\0\0\ny\n", b"x\n"),
    ],
)
def test_a_partial_last_line_is_dropped(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(before)
    event = StreamEvent(0, 0, 0, "é", position=0, token_id=5)
    with open_events(str(path), append=True) as writer:
        writer.listener(lambda row: f"row-{row}")([event])
    data = path.read_bytes()
    assert data.startswith(after)
    assert json.loads(data[len(after) :]) == {
        "event": "token", "id": "row-0", "row_index": 0, "prompt_index": 0, "sample_index": 0, "position": 0,
        "token_id": 5, "text": "é",
    }  # fmt: skip
    with open_events(str(path), append=False):
        pass
    assert path.read_bytes() == b""


EVENT = StreamEvent(0, 0, 0, "x", position=0, token_id=5)


@pytest.mark.parametrize("append", [False, True])
def test_events_go_to_a_pipe_or_a_device(tmp_path: Path, append: bool) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for target in (str(pipe), os.devnull):
        with open_events(target, append=append) as writer:
            writer.listener(str)([EVENT])
    written = os.read(reader, 1 << 16)
    os.close(reader)
    assert json.loads(written)["id"] == "0"
    begin, end = os.pipe()
    with open_events(f"/dev/fd/{end}", append=append) as writer:  # as a shell passes >(jq .)
        writer.listener(str)([EVENT])
    os.close(end)
    with os.fdopen(begin, "rb") as stream:
        assert stream.read() == written


def test_the_error_of_events_that_cannot_be_written_has_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "cannot write the events /dev/full: No space left on device"
    with pytest.raises(OutputError, match=why), open_events("/dev/full", append=False) as writer:
        writer.listener(str)([EVENT])
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=full))
        # Not an OutputError: the command reports it as an error of stdout.
        with open_events("-", append=False) as writer, pytest.raises(OSError, match="No space left"):
            writer.listener(str)([EVENT])
        monkeypatch.undo()
    opened = []
    (tmp_path / "events.jsonl").touch()

    def refuse(stream: BinaryIO) -> None:
        opened.append(stream)
        raise io.UnsupportedOperation("no seeking here")

    monkeypatch.setattr("batchgen.job.events._truncate_partial_line", refuse)
    with pytest.raises(OutputError, match=r"events\.jsonl: no seeking here"):
        open_events(str(tmp_path / "events.jsonl"), append=True)
    assert opened[0].closed


@pytest.mark.field("stream_options")
def test_usage_in_events(engine: Engine) -> None:
    row: dict[str, Any] = {"text": "abc", "stream": True, "max_new_tokens": 5, "ignore_eos": True, "n": 2}
    last, every = {"include_usage": True}, {"continuous_usage_stats": True, "include_obfuscation": False}
    options = [None, {}, {"include_usage": False}, last, every, last | every]
    events, completions = listen(engine, [row | {"stream_options": option} for option in options])
    prompt = completions[0].prompt_tokens
    assert prompt
    for key, found in by_sample(events).items():
        *tokens, end = [event.usage and astuple(event.usage) for event in found]
        option = options[key[0]] or {}
        counts = [(prompt, count, prompt + count) for count in (1, 2, 3, 4, 5, 5)]
        assert tokens == (counts[:5] if option.get("continuous_usage_stats") else [None] * 5), key
        assert end == (counts[5] if any(option.get(name) for name in ("include_usage", *every)) else None), key


def test_usage_in_the_lines_of_events(model: Path, tmp_path: Path) -> None:
    row = {"id": "a", "text": "abc", "stream": True, "max_new_tokens": 2, "stream_options": {"include_usage": True}}
    source = write_lines(tmp_path / "in.jsonl", [row, {**row, "id": "quiet", "stream": False}])
    run(["run", source, "-o", "out.parquet", "--model", model, "--events", "events"], tmp_path)
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    tokens = rows_of(tmp_path / "out.parquet")[0]["prompt_tokens"]
    assert {event["id"] for event in events} == {"a"}
    assert [event.get("usage") for event in events[:-1]] == [None] * (len(events) - 1)
    count = events[-1]["completion_tokens"]
    expected = {"prompt_tokens": tokens, "completion_tokens": count, "total_tokens": tokens + count}
    assert events[-1]["usage"] == expected
