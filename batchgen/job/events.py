"""`--events`: one JSON line per generated token and per finished sample."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from batchgen.data.files import is_file, open_to_append, open_to_replace, resolved, sync_folder, system
from batchgen.errors import OutputError
from batchgen.request.completion import StreamEvent
from batchgen.request.printable import EscapedJson

_IDS_KEPT = 1 << 14


class EventWriter:
    """Writer of events as JSON lines, flushed after each step."""

    def __init__(self, stream: BinaryIO, name: str, *, close: bool = True, durable: bool = False) -> None:
        """`name` is for error messages; `close`: whether the writer closes the stream; `durable`: it is a file's."""
        self._stream = stream
        self._name = name
        self._close = close
        self._durable = durable

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if not self._close:
            return
        try:
            self._stream.close()
        except OSError as problem:
            if error is None:  # otherwise report the earlier error
                raise _write_error(self._name, problem) from None

    def sync(self) -> None:
        """Make all events so far durable, if they are in a regular file. May be called from another thread.

        Raises:
            OutputError: they cannot be written.
        """
        if self._durable:
            try:
                system.fsync(self._stream.fileno())
            except OSError as problem:
                raise _write_error(self._name, problem) from None

    def listener(self, id_of: Callable[[int], str]) -> Callable[[Sequence[StreamEvent]], None]:
        """A callback for the events of a step; `id_of` maps a row index to the row's id.

        Raises:
            OutputError: (when called) the events cannot be written.
            OSError: (when called) stdout cannot be written, or its reader is gone.
        """
        cached_id = lru_cache(_IDS_KEPT)(id_of)
        written = False

        def write(events: Sequence[StreamEvent]) -> None:
            nonlocal written
            try:
                self._stream.write(b"".join(_line(event, cached_id(event.row_index)) for event in events))
                self._stream.flush()
            except OSError as problem:
                if not self._close or isinstance(problem, BrokenPipeError):
                    raise  # for stdout, the command reports the error and discards the buffer
                raise _write_error(self._name, problem) from None
            if not written:
                self.sync()  # whatever happens later, the file is known as one of events by its begin
                written = True

        return write


def open_events(target: str, *, append: bool) -> EventWriter:
    """Open a file of events, or stdout for "-".

    Args:
        target: path or "-"; a pipe or a device is written to as it is.
        append: continue the file of an earlier run of the job, without what follows its last whole line; otherwise
            replace the file.

    Raises:
        OutputError: the file cannot be opened.
    """
    if target == "-":
        return EventWriter(cast("BinaryIO", EscapedJson(sys.stdout.buffer)), "stdout", close=False)
    path = Path(target)
    try:
        stream = open_to_append(path) if append and is_file(path) else open_to_replace(path)
    except OSError as problem:
        raise _write_error(target, problem) from None
    try:
        regular = stat.S_ISREG(system.fstat(stream.fileno()).st_mode)
        if regular:
            if stream.readable():
                _truncate_partial_line(stream)
            sync_folder(resolved(path).parent)
    except OSError as problem:
        stream.close()
        raise _write_error(target, problem) from None
    return EventWriter(stream, target, durable=regular)


def _write_error(name: str, problem: OSError) -> OutputError:
    return OutputError(f"cannot write the events {name}: {problem.strerror or problem}")


def _truncate_partial_line(stream: BinaryIO) -> None:
    """Cut off the file after its last whole line and seek to its end.

    A power loss may leave zeros where lines were not durable yet. No row of these or later lines is committed.
    """
    end = 0
    for line in stream:
        if not line.endswith(b"\n") or b"\0" in line:
            break
        end += len(line)
    stream.truncate(end)
    stream.seek(end)


def _line(event: StreamEvent, row_id: str) -> bytes:
    """The JSON line of a token or of a finished sample, without fields that do not apply."""
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
        extracted = {"reasoning": event.reasoning, "tool_calls": event.tool_calls}
        values |= {name: text for name, text in extracted.items() if text is not None}
        if event.error is not None:
            values["error"] = {name: value and str(value) for name, value in asdict(event.error).items()}
    if event.usage is not None:
        values["usage"] = asdict(event.usage)
    return orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE)
