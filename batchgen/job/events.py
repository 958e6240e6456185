"""`--events`: token-by-token events as JSON lines."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import orjson

from batchgen.errors import OutputError
from batchgen.request import StreamEvent

__all__ = ["EventWriter", "open_events"]

_IDS_KEPT = 1 << 14


class EventWriter:
    """Writes events to a stream, a line each, and flushes after each step's."""

    def __init__(self, stream: BinaryIO, name: str, *, close: bool = True) -> None:
        """`name` is for messages; `close`: whether the stream is ours to close."""
        self._stream = stream
        self._name = name
        self._close = close

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._close:
            return
        try:
            self._stream.close()
        except OSError as problem:
            if error is None:  # else it says what could not be written
                raise _unwritten(self._name, problem) from None

    def listener(self, id_of: Callable[[int], str]) -> Callable[[Sequence[StreamEvent]], None]:
        """What the engine calls with a step's events; `id_of` gives a row's id by its index.

        Raises:
            OutputError: (when called) the events cannot be written.
            OSError: (when called) stdout cannot be written, or nobody reads it any more.
        """
        known = lru_cache(_IDS_KEPT)(id_of)

        def write(events: Sequence[StreamEvent]) -> None:
            try:
                self._stream.write(b"".join(_line(event, known(event.row_index)) for event in events))
                self._stream.flush()
            except OSError as problem:
                if not self._close or isinstance(problem, BrokenPipeError):
                    raise  # of stdout the command says it, and lets go of what is left in the buffer
                raise _unwritten(self._name, problem) from None

        return write


def open_events(target: str, *, go_on: bool) -> EventWriter:
    """Open a file of events, or stdout for "-".

    Args:
        target: path or "-"; to a pipe or a device events are just written.
        go_on: add to what an earlier run of the job wrote, less a line cut off by its end; else begin anew.

    Raises:
        OutputError: the file cannot be opened.
    """
    if target == "-":
        return EventWriter(sys.stdout.buffer, "stdout", close=False)
    path = Path(target)
    try:
        stream = path.open("r+b" if go_on and path.is_file() else "wb")
    except OSError as problem:
        raise _unwritten(target, problem) from None
    try:
        if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            _to_end_of_lines(stream)
    except OSError as problem:
        stream.close()
        raise _unwritten(target, problem) from None
    return EventWriter(stream, target)


def _unwritten(name: str, problem: OSError) -> OutputError:
    return OutputError(f"cannot write the events {name}: {problem.strerror or problem}")


def _to_end_of_lines(stream: BinaryIO, block: int = 1 << 16) -> None:
    """Cut off a last line without an end, and stand behind the one before."""
    end = stream.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - block)
        stream.seek(begin)
        at = stream.read(end - begin).rfind(b"\n")
        if at >= 0:
            end = begin + at + 1
            break
        end = begin
    stream.truncate(end)
    stream.seek(end)


def _line(event: StreamEvent, row_id: str) -> bytes:
    """A token's event, or a sample's end, with the fields that say something."""
    values: dict[str, Any] = {
        "event": "token" if event.token_id is not None else "finish",
        "id": row_id,
        "row_index": event.row_index,
        "prompt_index": event.prompt_index,
        "sample_index": event.sample_index,
    }
    if event.token_id is not None:
        values |= {"position": event.position, "token_id": event.token_id, "text": event.text}
        if event.logprob is not None:
            values["logprob"] = event.logprob
    else:
        values |= {
            "text": event.text,
            "finish_reason": event.finish_reason,
            "stop_kind": event.stop_kind,
            "matched_stop": event.matched_stop,
            "completion_tokens": event.completion_tokens,
        }
        if event.error is not None:
            values["error"] = {name: value and str(value) for name, value in asdict(event.error).items()}
    return orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE)
