"""Progress on stderr: a live display on a terminal, periodic lines in a log, JSON lines for programs, or nothing.

`update` is called at every step: it stores the state and returns unless output is due.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Literal, Self, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from batchgen.job.display.console import LastingStream, SafeConsole
from batchgen.request.printable import json_printable, printable

Phase = Literal["starting", "compiling", "reading", "planning", "loading", "generating", "writing"]
_BEFORE_ROWS: tuple[Phase, ...] = ("starting", "compiling")
"""Phases in which no rows are known yet."""
_NAMED_ELSEWHERE: tuple[Phase, ...] = ("starting", "compiling", "writing")
"""Phases that need no line of their start: the first one, one that a note announces, and one after the last row."""
Mode = Literal["auto", "bar", "plain", "json", "none"]

PLAIN_SECONDS = 30.0
JSON_SECONDS = 1.0
_SAMPLE_SECONDS = 0.25
_WINDOW_SECONDS = 10.0
_WIDE = 2.0
"""Factor between the ends of the range of a time that is shown as a range, not as one number."""
_RANGE_FROM = 0.01
"""Share of the rows that must be done before a range is shown: until then it says little."""


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """Estimated seconds until every row is generated."""

    seconds: float
    least: float
    most: float
    work_done: float
    """Fraction of the job's work that is done, earlier runs included; in units of time."""


DONE = TimeLeft(0.0, 0.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class ProgressState:
    """Progress of a job. Counts cover the whole job: rows and tokens of resumed parts are included from the start."""

    phase: Phase
    rows_done: int = 0
    """Number of finished rows, failed ones included."""
    rows_total: int | None = None
    """Number of input rows; None while the input is being read."""
    rows_error: int = 0
    completion_tokens: int = 0
    running: int = 0
    """Number of samples being generated."""
    waiting: int = 0
    """Number of samples not started yet or preempted."""
    kv_use: float = 0.0
    """Fraction of the KV cache pages in use."""
    left: TimeLeft | None = None
    """Estimated time left, and the fraction of the work that is done; None while nothing is generated."""


class Progress:
    """A progress display, to which a job reports its state. As a context manager it closes itself on exit."""

    shows_time_left = True
    """Whether `ProgressState.left` is shown."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def update(self, state: ProgressState) -> None:
        """Report the current state. Cheap enough for every step."""

    def note(self, message: str) -> None:
        """Print one message on one line, above a live display if there is one."""
        self._write(printable(message))

    def close(self) -> None:
        """Report the last state and restore the terminal."""

    def _write(self, line: str) -> None:
        with suppress(OSError):  # a log that cannot be written any more
            self._stream.write(line + "\n")
            self._stream.flush()


def make_progress(
    mode: Mode,
    stream: TextIO | None = None,
    env: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Create the display for `mode` on `stream` (default: stderr): `auto` is a bar on a colour terminal, else plain.

    `bar` falls back to `plain` if the stream is not a terminal that can move its cursor.
    """
    stream = stream or sys.stderr
    env = os.environ if env is None else env
    if mode == "none":
        return SilentProgress(stream)
    if mode == "json":
        return JsonProgress(stream, clock)
    movable = stream.isatty() and env.get("TERM", "") != "dumb"
    if mode == "plain" or not movable or (mode == "auto" and env.get("NO_COLOR")):
        return PlainProgress(stream, clock)
    return BarProgress(SafeConsole(file=cast("TextIO", LastingStream(stream))), clock)


class _Rates:
    """Tokens per second over the last ten seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.began = clock()
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, state: ProgressState) -> float:
        """Record `state` and return the current time."""
        now = self.clock()
        if state.phase == "generating" and (not self._samples or now - self._samples[-1][0] >= _SAMPLE_SECONDS):
            self._samples.append((now, state.completion_tokens))
            while len(self._samples) > 2 and self._samples[1][0] <= now - _WINDOW_SECONDS:
                self._samples.popleft()
        return now

    def tokens_per_second(self, state: ProgressState) -> float | None:
        """Tokens per second; None until there are two states at different times."""
        if not self._samples:
            return None
        then, tokens = self._samples[0]
        span = self.clock() - then
        return (state.completion_tokens - tokens) / span if span > 0 else None


class SilentProgress(Progress):
    """A display that prints notes only."""

    shows_time_left = False


class _LineProgress(Progress):
    """A line for each state that is due, and for the last one unless it is already written."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._rates = _Rates(clock)
        self._due = 0.0
        self._state: ProgressState | None = None
        self._written: ProgressState | None = None

    def update(self, state: ProgressState) -> None:
        """Write a line if one is due."""
        self._state = state
        now = self._rates.add(state)
        if self._is_due(state, now):
            self._write_state(state)

    def close(self) -> None:
        """Write the last state unless it is already written."""
        if self._state is not None and self._state != self._written:
            self._write_state(self._state)

    def _write_state(self, state: ProgressState) -> None:
        self._written = state
        self._write(self._line(state, self._rates.tokens_per_second(state)))

    def _is_due(self, state: ProgressState, now: float) -> bool:
        """Whether to write a line now; sets when the next one is due."""
        raise NotImplementedError

    def _line(self, state: ProgressState, rate: float | None) -> str:
        raise NotImplementedError


class PlainProgress(_LineProgress):
    """Text lines: one when a phase starts, one every 30 seconds, one at the end."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream, clock)
        self._due = clock() + PLAIN_SECONDS
        self._begun: set[Phase] = {*_NAMED_ELSEWHERE}

    def close(self) -> None:
        """Write the last state if rows were generated."""
        if "generating" in self._begun:
            super().close()

    def _is_due(self, state: ProgressState, now: float) -> bool:
        due = state.phase not in self._begun or now >= self._due
        if due:
            self._due = now + PLAIN_SECONDS
        return due

    def _line(self, state: ProgressState, rate: float | None) -> str:
        starts = state.phase not in self._begun
        self._begun.add(state.phase)
        if state.phase in ("generating", "writing"):
            speed = f"{_format_rate(rate)} tokens/s, {_format_eta(state)}"
            return f"{state.phase}: {_format_rows(state)} rows, {speed}, errors {state.rows_error:,}"
        if starts:
            return state.phase
        if state.phase == "reading":
            return f"reading: {_format_rows(state)} rows, errors {state.rows_error:,}"
        return f"{state.phase}: {format_clock(self._rates.clock() - self._rates.began)}"


class JsonProgress(_LineProgress):
    """JSON lines: one at each change of phase, one every second, one at the end."""

    def note(self, message: str) -> None:
        """Write `{"note": message}`."""
        self._write(json_printable(json.dumps({"note": message}, ensure_ascii=False)))

    def _is_due(self, state: ProgressState, now: float) -> bool:
        due = now >= self._due or self._written is None or state.phase != self._written.phase
        if due:
            self._due = now + JSON_SECONDS
        return due

    def _line(self, state: ProgressState, rate: float | None) -> str:
        left = state.left
        record = {
            "phase": state.phase,
            "rows": state.rows_total,
            "rows_done": state.rows_done,
            "rows_error": state.rows_error,
            "completion_tokens": state.completion_tokens,
            "output_tokens_per_second": None if rate is None else round(rate, 1),
            "work_done": None if left is None else round(left.work_done, 4),
            "eta_seconds": None if left is None else round(left.seconds, 2),
            "eta_seconds_min": None if left is None else round(left.least, 2),
            "eta_seconds_max": None if left is None else round(left.most, 2),
            "running": state.running,
            "waiting": state.waiting,
            "kv_use": round(state.kv_use, 4),
            "seconds": round(self._rates.clock() - self._rates.began, 2),
        }
        return json.dumps(record)


class BarProgress(Progress):
    """Two live lines on a terminal, drawn four times a second and removed at the end."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console.file)
        self._console = console
        self._rates = _Rates(clock)
        self._state: ProgressState | None = None
        self._live = Live(self, console=console, refresh_per_second=4, transient=True, redirect_stdout=False)

    def update(self, state: ProgressState) -> None:
        """Store the state for the next drawing."""
        self._rates.add(state)
        self._state = state
        if not self._live.is_started:
            self._live.start()

    def note(self, message: str) -> None:
        """Print one line above the display."""
        with suppress(OSError):
            self._console.print(Text(printable(message)))

    def close(self) -> None:
        """Remove the display."""
        with suppress(OSError):
            if self._live.is_started:
                self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._state is None:
            return
        rate = self._rates.tokens_per_second(self._state)
        elapsed = self._rates.clock() - self._rates.began
        blocks = "━─" if (console.encoding or "").lower().startswith("utf") else "#-"
        yield _bar_line(self._state, elapsed, options.max_width, blocks)
        yield _detail_line(self._state, rate, options.max_width)


def _bar_line(state: ProgressState, elapsed: float, width: int, blocks: str) -> Text:
    """`generating ━━━━──── 34% 120/1,000 ETA 0:03:20`, never wider than `width`."""
    timing = _format_eta(state) if state.phase == "generating" else format_clock(elapsed)
    line = Text(no_wrap=True, overflow="crop")
    line.append(state.phase, style="bold")
    line.append(" ")
    tail = f" {timing}" if state.phase in _BEFORE_ROWS else f" {_format_rows(state)} {timing}"
    bar_width = min(width - 1 - len(state.phase) - 1 - len(tail), 60)
    if bar_width >= 5 and state.rows_total:
        filled = int(bar_width * _share_done(state))
        line.append(blocks[0] * filled, style="green")
        line.append(blocks[1] * (bar_width - filled), style="dim")
        line.append(tail)
    else:
        line.append(tail.lstrip())
    line.truncate(max(width - 1, 1), overflow="crop")
    return line


def _detail_line(state: ProgressState, rate: float | None, width: int) -> Text:
    """The figures that fit in `width`, the most important first."""
    line = Text(no_wrap=True, overflow="crop")
    for text, style in _details(state, rate):
        separator = "  " if line.plain else ""
        if len(line.plain) + len(separator) + len(text) > width - 1:
            break
        line.append(separator).append(text, style=style)
    return line


def _details(state: ProgressState, rate: float | None) -> Iterator[tuple[str, str]]:
    if rate is not None:
        yield f"{_format_rate(rate)} tokens/s", "cyan"
    if state.rows_error:
        yield f"errors {state.rows_error:,}", "red"
    if state.phase == "generating":
        yield f"running {state.running:,}", ""
        yield f"waiting {state.waiting:,}", ""
        yield f"KV {state.kv_use:.0%}", ""


def _share_done(state: ProgressState) -> float:
    """Fraction of the work that is done; of the rows while the work is not known."""
    if state.left is not None:
        return state.left.work_done
    return min(state.rows_done / state.rows_total, 1.0) if state.rows_total else 1.0


def _format_rows(state: ProgressState) -> str:
    """`34% 120/1,000`: the percentage is that of the work."""
    if state.rows_total is None:
        return f"{state.rows_done:,}"
    return f"{int(100 * _share_done(state))}% {state.rows_done:,}/{state.rows_total:,}"


def _format_rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}"


def format_clock(seconds: float | None) -> str:
    """`0:03:20`; `-` for None."""
    if seconds is None:
        return "-"
    minutes, second = divmod(max(round(seconds), 0), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def _format_eta(state: ProgressState) -> str:
    """`ETA 0:03:20`; `ETA 0:02:10 to 0:05:40` where the ends are far apart; `ETA -` while nothing is known."""
    left = state.left
    begun = state.rows_done >= _RANGE_FROM * (state.rows_total or 0)
    if left is not None and begun and left.most > _WIDE * left.least and round(left.least) > 0:
        return f"ETA {format_clock(left.least)} to {format_clock(left.most)}"
    return f"ETA {format_clock(None if left is None else left.seconds)}"
