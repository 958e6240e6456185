"""Runs `batchgen` command lines in separate processes.

`start` and `run` fork from a server that has imported torch and transformers, so that a process with its own signals
and limits starts quickly. `batchgen` starts a fresh interpreter, as a user does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Job", "ProcessResult", "batchgen", "run", "start"]


_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.e2e.warm", "tests.e2e.runner"])

SECONDS = 120.0
"""Time limit of a job."""


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """Exit code and output of a process that ended."""

    code: int
    """Exit code; minus the signal's number where a signal ended the process."""
    stdout: str
    stderr: str

    @property
    def report(self) -> dict[str, Any]:
        """The report that `--report -` wrote."""
        value: dict[str, Any] = json.loads(self.stdout)
        return value


class Job:
    """A running `batchgen` process."""

    def __init__(self, process: Any, folder: Path) -> None:
        self._process = process
        self._folder = folder

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def alive(self) -> bool:
        return bool(self._process.is_alive())

    @property
    def stderr(self) -> str:
        """Its stderr so far."""
        return self._text("stderr")

    def signal(self, number: int) -> None:
        """Send a signal if the process is still running."""
        if self.alive:
            os.kill(self.pid, number)

    def wait(self, seconds: float = SECONDS) -> ProcessResult:
        """Wait for the process to end, at most `seconds`.

        Raises:
            AssertionError: it is still running after `seconds`; it is killed.
        """
        self._process.join(seconds)
        if self.alive:
            self._process.kill()
            self._process.join()
            raise AssertionError(f"still running after {seconds} s:\n{self._text('stderr')}")
        return ProcessResult(int(self._process.exitcode), self._text("stdout"), self._text("stderr"))

    def kill_after(self, seconds: float) -> bool:
        """`kill -9` after `seconds` unless the process ends before; return whether it was killed."""
        self._process.join(seconds)
        killed = self.alive
        if killed:
            self._process.kill()
        self._process.join()
        return killed

    def wait_for(self, condition: Any, seconds: float = SECONDS) -> None:
        """Wait until `condition()` is true.

        Raises:
            AssertionError: the process ends before, or `seconds` pass.
        """
        end = time.monotonic() + seconds
        while not condition():
            if not self.alive:
                raise AssertionError(f"ended early:\n{self._text('stderr')}")
            if time.monotonic() > end:
                raise AssertionError(f"nothing happened in {seconds} s:\n{self._text('stderr')}")
            time.sleep(0.005)

    def _text(self, name: str) -> str:
        return (self._folder / name).read_text(encoding="utf-8", errors="replace")


_number = 0


def start(
    arguments: Sequence[object],
    folder: Path,
    *,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    file_size: int | None = None,
) -> Job:
    """Start `batchgen ARGUMENTS` in `folder`. `file_size`: the largest file it may write, in bytes."""
    global _number
    _number += 1
    streams = folder / f".streams-{_number}"
    streams.mkdir()
    (streams / "stdin").write_bytes(stdin)
    (streams / "stdout").touch()
    (streams / "stderr").touch()
    words = [str(argument) for argument in arguments]
    process = _CONTEXT.Process(target=_child, args=(words, str(folder), str(streams), dict(env or {}), file_size))
    process.start()
    return Job(process, streams)


def run(arguments: Sequence[object], folder: Path, expect: int | None = 0, **more: Any) -> ProcessResult:
    """`start`, and wait for the process to end with the exit code `expect` (None: any)."""
    done = start(arguments, folder, **more).wait()
    assert expect is None or done.code == expect, f"exit code {done.code}, not {expect}:\n{done.stderr}"
    return done


def batchgen(arguments: Sequence[object], folder: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the console script's entry point in a fresh interpreter."""
    words = [sys.executable, "-c", "from batchgen.cli.app import main; main()", *map(str, arguments)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False, **more)


def _child(words: list[str], folder: str, streams: str, env: dict[str, str], file_size: int | None) -> None:
    """Redirect the standard streams, set the limits and run the command: the main function of a forked process."""
    from batchgen.cli.app import run_command

    os.chdir(folder)
    os.environ.update(env)
    for number, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
        descriptor = os.open(f"{streams}/{name}", flags)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # multiprocessing closed the original
    if file_size is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python itself does at its start
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    sys.exit(run_command(words))
