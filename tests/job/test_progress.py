from __future__ import annotations

import errno
import io
import json
import time
from dataclasses import replace

import pytest
from rich.console import Console

from batchgen.job.display.progress import (
    DONE,
    BarProgress,
    PlainProgress,
    ProgressState,
    SilentProgress,
    TimeLeft,
    make_progress,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Stream(io.StringIO):
    def __init__(self, terminal: bool = False) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def state(done: int = 0, tokens: int = 0, **more: object) -> ProgressState:
    return replace(ProgressState("generating", rows_done=done, rows_total=1000, completion_tokens=tokens), **more)


def left(seconds: float, share: float = 0.25, within: float = 0.0) -> TimeLeft:
    return TimeLeft(seconds, seconds * (1 - within), seconds * (1 + within), share)


@pytest.mark.parametrize(
    ("mode", "terminal", "env", "kind"),
    [
        ("auto", True, {"TERM": "xterm"}, "BarProgress"),
        ("auto", False, {"TERM": "xterm"}, "PlainProgress"),
        ("auto", True, {"TERM": "dumb"}, "PlainProgress"),
        ("auto", True, {"TERM": "xterm", "NO_COLOR": "1"}, "PlainProgress"),
        ("auto", True, {"TERM": "xterm", "NO_COLOR": ""}, "BarProgress"),
        ("bar", True, {"TERM": "xterm", "NO_COLOR": "1"}, "BarProgress"),
        ("bar", True, {"TERM": "dumb"}, "PlainProgress"),
        ("bar", False, {}, "PlainProgress"),
        ("plain", True, {"TERM": "xterm"}, "PlainProgress"),
        ("json", True, {}, "JsonProgress"),
        ("none", True, {}, "SilentProgress"),
    ],
)
def test_the_mode_and_the_stream_choose_the_display(mode: str, terminal: bool, env: dict[str, str], kind: str) -> None:
    assert type(make_progress(mode, Stream(terminal), env)).__name__ == kind  # type: ignore[arg-type]


def test_plain_lines() -> None:
    clock, stream = Clock(), Stream()
    with PlainProgress(stream, clock) as progress:
        progress.note("the demonstration model runs")
        progress.update(ProgressState("reading", rows_done=5))
        for second in range(100):
            clock.now += 1
            for _ in range(9):  # updates are cheap: a line is written every 30 seconds
                time_left = left(1000 - second, second / 400, within=0.4 if second < 60 else 0.3) if second else None
                progress.update(state(done=second, tokens=50 * second, rows_error=second // 50, left=time_left))
        progress.update(state(done=1000, tokens=5000, rows_error=2, left=DONE))
        clock.now += 1
    assert stream.getvalue().splitlines() == [
        "the demonstration model runs",
        "reading",
        "generating: 0% 0/1,000 rows, - tokens/s, ETA -, errors 0",
        "generating: 7% 30/1,000 rows, 50 tokens/s, ETA 0:09:42 to 0:22:38, errors 0",
        "generating: 15% 60/1,000 rows, 50 tokens/s, ETA 0:15:40, errors 1",
        "generating: 22% 90/1,000 rows, 50 tokens/s, ETA 0:15:10, errors 1",
        "generating: 100% 1,000/1,000 rows, 50 tokens/s, ETA 0:00:00, errors 2",
    ]


@pytest.mark.parametrize(
    ("estimate", "rows", "text"),
    [
        (None, 500, "ETA -"),
        (left(200), 500, "ETA 0:03:20"),
        (left(200, within=0.33), 500, "ETA 0:03:20"),
        (left(200, within=0.34), 500, "ETA 0:02:12 to 0:04:28"),
        (left(200, within=0.34), 10, "ETA 0:02:12 to 0:04:28"),
        (left(200, within=0.34), 9, "ETA 0:03:20"),  # less than a hundredth of the rows
        (left(200, within=1.0), 500, "ETA 0:03:20"),  # not 0:00:00 to 0:06:40
        (left(9000, within=0.5), 500, "ETA 1:15:00 to 3:45:00"),
        (TimeLeft(100, 95, 300, 0.5), 500, "ETA 0:01:35 to 0:05:00"),
        (DONE, 1000, "ETA 0:00:00"),
    ],
)
def test_a_time_is_a_range_where_its_ends_are_far_apart(estimate: TimeLeft | None, rows: int, text: str) -> None:
    stream = Stream()
    with PlainProgress(stream, Clock()) as progress:
        progress.update(state(done=rows, left=estimate))
    assert f" {text}, " in stream.getvalue()


def test_plain_writes_lines_in_a_long_phase_before_generating() -> None:
    clock, stream = Clock(), Stream()
    progress = PlainProgress(stream, clock)
    for rows in range(0, 62_000, 1000):
        progress.update(ProgressState("reading", rows_done=rows))
        clock.now += 1
    progress.close()
    assert stream.getvalue().splitlines() == [
        "reading",
        "reading: 30,000 rows, errors 0",
        "reading: 60,000 rows, errors 0",
    ]


def test_plain_says_what_happens_before_the_first_step() -> None:
    """A line as each phase starts, the first time; a note announces the compiler, which interrupts another phase."""
    clock, stream = Clock(), Stream()
    progress = PlainProgress(stream, clock)
    for phase in ("starting", "compiling", "starting", "reading", "loading", "reading", "planning"):
        for _ in range(3):
            progress.update(ProgressState(phase, 7, 10))  # type: ignore[arg-type]
            clock.now += 1
    clock.now += 40
    progress.update(ProgressState("loading", 7, 10))
    progress.close()
    assert stream.getvalue().splitlines() == ["reading", "loading", "planning", "loading: 0:01:01"]


def test_the_rate_is_that_of_the_last_ten_seconds_without_resumed_rows() -> None:
    clock, stream = Clock(), Stream()
    progress = PlainProgress(stream, clock)
    progress.update(state(done=900, tokens=90_000))
    clock.now += 30
    progress.update(state(done=930, tokens=93_000))
    assert "930/1,000 rows, 100 tokens/s" in stream.getvalue().splitlines()[1]
    for second in range(60):
        clock.now += 1
        progress.update(state(done=930, tokens=93_000 + 500 * second))
    assert "500 tokens/s" in stream.getvalue().splitlines()[-1]


def test_json_lines() -> None:
    clock, stream = Clock(), Stream()
    with make_progress("json", stream, {}, clock) as progress:
        progress.note("hello")
        progress.update(ProgressState("reading", rows_done=3))
        for _ in range(25):
            clock.now += 0.1
            time_left = TimeLeft(20.04, 15.0, 30.0, 0.61803)
            progress.update(state(done=500, tokens=100, running=8, waiting=2, kv_use=0.25, left=time_left))
        progress.update(state(done=1000, tokens=700))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines[0] == {"note": "hello"}
    assert [line["phase"] for line in lines[1:]] == ["reading"] + ["generating"] * 4
    assert lines[1]["rows"] is None
    assert lines[2] == {
        "phase": "generating",
        "rows": 1000,
        "rows_done": 500,
        "rows_error": 0,
        "completion_tokens": 100,
        "output_tokens_per_second": None,
        "work_done": 0.618,
        "eta_seconds": 20.04,
        "eta_seconds_min": 15.0,
        "eta_seconds_max": 30.0,
        "running": 8,
        "waiting": 2,
        "kv_use": 0.25,
        "seconds": 0.1,
    }
    assert lines[-1]["rows_done"] == 1000
    unknown = ("work_done", "eta_seconds", "eta_seconds_min", "eta_seconds_max")
    assert [lines[1][name] for name in unknown] == [lines[-1][name] for name in unknown] == [None] * 4


def test_silent_progress_prints_notes_only() -> None:
    stream = Stream()
    with SilentProgress(stream) as progress:
        progress.update(state())
        progress.note("hello")
    assert stream.getvalue() == "hello\n"


def test_a_log_that_cannot_be_written_is_ignored() -> None:
    class Gone(Stream):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    for mode in ("plain", "json"):
        with make_progress(mode, Gone(), {}) as progress:  # type: ignore[arg-type]
            progress.update(state())
            progress.note("hello")


def drawn(width: int, now: ProgressState, encoding: str = "utf-8", colour: bool = False) -> list[str]:
    class Encoded(io.StringIO):
        @property
        def encoding(self) -> str:  # type: ignore[override]
            return encoding

    console = Console(file=Encoded(), width=width, force_terminal=colour, legacy_windows=False)
    clock = Clock()
    progress = BarProgress(console, clock)
    progress._rates.add(replace(now, rows_done=0, completion_tokens=0))
    clock.now += 10
    progress._rates.add(now)
    progress._state = now
    with console.capture() as capture:
        console.print(progress)
    return capture.get().splitlines()


def test_bar_leaves_out_what_does_not_fit() -> None:
    now = state(done=100, tokens=12_345, running=64, waiting=686, kv_use=0.456, rows_error=3, left=left(30, 0.256))
    assert drawn(80, now) == [
        "generating " + "━" * 10 + "─" * 32 + " 25% 100/1,000 ETA 0:00:30",
        "1,234 tokens/s  errors 3  running 64  waiting 686  KV 46%",
    ]
    assert drawn(40, now) == ["generating 25% 100/1,000 ETA 0:00:30", "1,234 tokens/s  errors 3  running 64"]


def test_bar_in_ascii() -> None:
    now = state(done=500, left=left(10, 0.5))
    assert drawn(60, now, "ascii")[0] == "generating ###########----------- 50% 500/1,000 ETA 0:00:10"


def test_before_anything_is_generated_the_bar_fills_by_rows() -> None:
    line = drawn(60, ProgressState("reading", rows_done=500, rows_total=1000))[0]
    assert abs(line.count("━") - line.count("─")) <= 1


@pytest.mark.parametrize("width", [1, 20, 200])
@pytest.mark.parametrize(
    "now",
    [
        ProgressState("reading"),
        ProgressState("loading", rows_total=10**9),
        state(),
        state(done=10**9, tokens=10**12, rows_total=10**9, running=512, waiting=10**6, kv_use=1.0, rows_error=10**6),
        state(rows_total=0),
        state(rows_total=10**9, left=left(10**6, 0.9, within=0.9)),
    ],
)
def test_bar_never_wraps(width: int, now: ProgressState) -> None:
    lines = drawn(width, now)
    assert len(lines) == 2
    assert all(len(line) < max(width, 2) for line in lines)


def test_bar_on_a_terminal_leaves_nothing_behind() -> None:
    stream = Stream(terminal=True)
    console = Console(file=stream, force_terminal=True, width=80, legacy_windows=False)
    with BarProgress(console) as progress:
        progress.update(state(done=1, running=5))
        progress.note("above")
    text = stream.getvalue()
    assert "above" in text
    assert "\x1b[?25l" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"


@pytest.mark.parametrize(
    ("mode", "number"), [("bar", errno.EIO), ("plain", errno.EPIPE), ("json", errno.ENOSPC), ("none", errno.EIO)]
)
def test_a_stream_that_is_gone_ends_nothing(mode: str, number: int) -> None:
    """As of a terminal that was closed: neither the job nor the thread that draws fails."""

    class Gone(Stream):
        def write(self, text: str = "") -> int:
            raise OSError(number, "gone")

        def flush(self) -> None:
            self.write()

    with make_progress(mode, Gone(terminal=True), {"TERM": "xterm"}) as progress:  # type: ignore[arg-type]
        progress.note("a note")
        progress.update(state(1))
        if mode == "bar":
            time.sleep(0.3)  # it is drawn four times a second
        progress.note("another note")


def test_notes_are_one_escaped_line_each() -> None:
    for mode in ("bar", "plain", "json", "none"):
        stream = Stream(terminal=mode == "bar")
        with make_progress(mode, stream, {"TERM": "xterm"}) as progress:  # type: ignore[arg-type]
            progress.note("a\nb\x1b[31m\x9b\u202e")
        text = stream.getvalue()
        expected = "a\\nb\\x1b[31m\\x9b\\u202e" if mode != "json" else '{"note": "a\\nb\\u001b[31m\\u009b\\u202e"}'
        assert text == f"{expected}\n", mode
