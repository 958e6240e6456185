from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from batchgen.job.signals import StopRequest, handle_signals

SIGNALS = [
    (signal.SIGINT, "SIGINT", 130),
    (signal.SIGTERM, "SIGTERM", 143),
    (signal.SIGHUP, "SIGHUP", 129),
    (signal.SIGUSR1, "SIGUSR1", 75),
]


@pytest.fixture(autouse=True)
def _hangups() -> Iterator[None]:
    """As if the tests did not run under nohup."""
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, former)


@pytest.mark.parametrize(("number", "reason", "status"), SIGNALS)
def test_a_signal_sets_a_request_and_handlers_are_restored(number: int, reason: str, status: int) -> None:
    before = [signal.getsignal(n) for n, _, _ in SIGNALS]
    stop = StopRequest()
    with handle_signals(stop):
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert (stop.reason, stop.exit_status) == (reason, status)
    assert [signal.getsignal(n) for n, _, _ in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert "signals" not in {thread.name for thread in threading.enumerate()}


def test_only_the_first_request_counts() -> None:
    stop = StopRequest()
    with handle_signals(stop):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
    assert (stop.reason, stop.exit_status) == ("SIGUSR1", 75)
    error = stop.error(40, 1000)
    assert error.exit_status == 75
    assert str(error) == "stopped by SIGUSR1 with 40 of 1,000 rows committed. Run the same command again to continue."
    assert str(stop.error(0)) == "stopped by SIGUSR1 with 0 rows committed. Run the same command again to continue."


def test_a_second_stop_signal_ends_at_once() -> None:
    ended: SimpleQueue[int] = SimpleQueue()
    with handle_signals(StopRequest(), ended.put):
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert ended.get(timeout=20) == 130
    assert ended.empty()


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_a_hangup_after_another_stop_changes_nothing(first: signal.Signals) -> None:
    """A terminal that closes sends it twice, and service managers send it after SIGTERM."""
    ended: SimpleQueue[int] = SimpleQueue()
    with handle_signals(StopRequest(), ended.put) as stop:
        for number in (first, signal.SIGHUP, signal.SIGHUP, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert ended.get(timeout=20) == 130
    assert (ended.empty(), stop.reason) == (True, first.name)


def test_a_hangup_that_was_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with handle_signals(StopRequest()) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_max_time_requests_a_stop() -> None:
    now = [100.0]
    stop = StopRequest(max_time=5, clock=lambda: now[0])
    assert not stop.requested
    now[0] = 104.9
    assert not stop.requested
    now[0] = 105.0
    assert stop.requested
    assert (stop.reason, stop.exit_status) == ("--max-time", 75)
    assert StopRequest(max_time=0).requested


def test_outside_the_main_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def body() -> None:
        with handle_signals(StopRequest()):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]


BUSY = """
import select
from batchgen.job.signals import StopRequest, handle_signals
with handle_signals(StopRequest()):
    print("ready", flush=True)
    sum(1 for _ in iter(lambda: select.select([], [], [], 30), None))
"""


def test_the_second_signal_ends_a_busy_process() -> None:
    number = signal.SIGTERM
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        time.sleep(0.2)
        assert process.poll() is None, "the first signal leaves time to commit"
        process.send_signal(number)
        assert process.wait(10) == 128 + number


def test_a_loop_that_does_not_end_in_time_is_committed_from_a_thread() -> None:
    happened: SimpleQueue[object] = SimpleQueue()
    stop = StopRequest()
    stop.commit = lambda: happened.put("commit")
    with handle_signals(stop, happened.put, grace=0.05):
        os.kill(os.getpid(), signal.SIGTERM)
        assert [happened.get(timeout=20) for _ in range(2)] == ["commit", 143]


def test_a_loop_that_ends_in_time_is_not_interrupted() -> None:
    happened: list[object] = []
    with handle_signals(StopRequest(), happened.append, grace=0.05):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
    assert happened == []
