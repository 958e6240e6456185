"""Early stop: signals and `--max-time` set a `StopRequest` that the job's loop polls.

| event | exit status | what happens |
|---|---|---|
| SIGINT, SIGTERM, SIGHUP | 130, 143, 129 | the loop ends after its current step and commits every finished row |
| 15 s after one of these | the same | if the loop has not ended by then, a thread commits and ends the process |
| SIGINT or SIGTERM after one of these | the same | the process ends at once; committed rows are kept |
| SIGUSR1, `--max-time` | 75 | as the first line |

A terminal that closes sends SIGHUP twice, from its shell and from the kernel, and service managers send it after
SIGTERM, so a second SIGHUP changes nothing. It stays ignored if it was at the start, as by nohup.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from batchgen.errors import Interrupted
from batchgen.request.printable import unescaped

RESUMABLE = 75
"""Exit status of a run that stopped early by design (EX_TEMPFAIL)."""

GRACE_SECONDS = 15.0
"""Seconds that the loop may take to end after a signal; the documented limit is 20 s."""

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOW_CURSOR = "\x1b[?25h"


class StopRequest:
    """A request to stop, with its reason and exit status. Only the first request counts."""

    def __init__(self, max_time: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_time`: seconds from now until a stop is requested."""
        self._clock = clock
        self._deadline = None if max_time is None else clock() + max_time
        self.reason: str | None = None
        """Name of the signal, or "--max-time"; None without a request."""
        self.exit_status: int | None = None
        """75, 129, 130 or 143; None without a request."""
        self.commit: Callable[[], None] = lambda: None
        """Commits all finished rows; called from another thread if the loop does not end in time."""
        self.abandon: Callable[[], None] = lambda: None
        """Called from another thread just before a signal ends the process without unwinding."""

    def request(self, reason: str, exit_status: int) -> None:
        """Request a stop."""
        if self.reason is None:
            self.reason, self.exit_status = reason, exit_status

    @property
    def requested(self) -> bool:
        """Whether to stop now. Checks the deadline, and is cheap enough for every step."""
        if self.reason is None and self._deadline is not None and self._clock() >= self._deadline:
            self.request("--max-time", RESUMABLE)
        return self.reason is not None

    def error(self, rows_done: int, rows: int | None = None) -> Interrupted:
        """The error that the job raises after committing; `rows` is None if the number of rows is not known yet."""
        return self._error(f"with {rows_done:,}{'' if rows is None else f' of {rows:,}'} rows committed")

    def error_at_start(self) -> Interrupted:
        """The error that the job raises before it looks for committed rows."""
        return self._error("at the start")

    def _error(self, when: str) -> Interrupted:
        assert self.exit_status is not None
        message = f"stopped by {self.reason} {when}. Run the same command again to continue."
        return Interrupted(message, self.exit_status)


@contextmanager
def handle_signals(
    stop: StopRequest, exit_now: Callable[[int], None] | None = None, grace: float = GRACE_SECONDS
) -> Iterator[StopRequest]:
    """Turn signals into requests on `stop`; restore the former handlers on exit.

    On a SIGINT or SIGTERM after an earlier stop, `exit_now` (default: `os._exit`) ends the process. `grace` seconds
    after the first, `stop.commit` and then `exit_now` are called. Outside the main thread, where Python allows no
    handlers, nothing is installed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    statuses = {number: 128 + number for number in _STOPS} | {signal.SIGUSR1: RESUMABLE}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        del statuses[signal.SIGHUP]

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.request(signal.Signals(number).name, statuses[signal.Signals(number)])

    reader, writer = socket.socketpair()
    writer.setblocking(False)
    # Python runs its handlers between bytecodes of the main thread. A second signal must not wait for a long tensor
    # operation there, so a thread reads the signal numbers that the interpreter's C handler writes as they arrive.
    watcher = threading.Thread(
        target=_watch, args=(reader, stop, exit_now or _exit_now, grace), daemon=True, name="signals"
    )
    former = {number: signal.signal(number, on_signal) for number in statuses}
    former_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    watcher.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(former_fd)
        for number, handler in former.items():
            signal.signal(number, handler)
        writer.close()
        watcher.join()
        reader.close()


def _watch(reader: socket.socket, stop: StopRequest, exit_now: Callable[[int], None], grace: float) -> None:
    stops = 0
    timer: threading.Timer | None = None
    while numbers := reader.recv(64):
        for number in numbers:
            if number in _STOPS:
                stops += 1
                if stops > 1 and number != signal.SIGHUP:
                    with suppress(Exception):
                        stop.abandon()
                    exit_now(128 + number)
                elif stops == 1:
                    timer = threading.Timer(grace, _on_grace_expired, (stop, exit_now, 128 + number))
                    timer.daemon = True
                    timer.start()
    if timer is not None:
        timer.cancel()


def _on_grace_expired(stop: StopRequest, exit_now: Callable[[int], None], status: int) -> None:
    """The loop did not end in time: commit, then end the process."""
    with suppress(Exception):
        stop.commit()
    with suppress(Exception):
        stop.abandon()
    with suppress(OSError, ValueError):
        sys.stderr.write("stopped during a long step; finished rows are committed. Run the same command again.\n")
    exit_now(stop.exit_status or status)


def _exit_now(status: int) -> None:
    """End the process without unwinding; committed parts are durable."""
    with suppress(OSError, ValueError):
        if sys.stderr.isatty():
            unescaped(sys.stderr).write(_SHOW_CURSOR)
        sys.stderr.flush()
    os._exit(status)
