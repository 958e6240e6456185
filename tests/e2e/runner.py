"""Runs `batchgen` command lines.

`run` and `interrupt` run a command in this process, with its own standard streams, folder and environment. `start`
forks from a server that has imported torch and transformers, for tests whose subject is the process: its signals, its
limits, its death. `batchgen` starts a fresh interpreter, as a user does.
"""

from __future__ import annotations

import importlib
import io
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from batchgen.cli.app import run_command
from batchgen.job.signals import RESUMABLE

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

    def ends_within(self, seconds: float) -> bool:
        """Whether the process ends in so many seconds, for which this waits."""
        self._process.join(seconds)
        return not self.alive

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


def run(
    arguments: Sequence[object],
    folder: Path,
    expect: int | None = 0,
    *,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    terminal: bool = False,
) -> ProcessResult:
    """Run `batchgen ARGUMENTS` in `folder`, in this process, to its end with the exit code `expect` (None: any).

    `terminal`: whether its standard streams are a terminal's.
    """
    with _as_process(folder, stdin, env, _Terminal if terminal else io.TextIOWrapper) as (stdout, stderr):
        code = run_command([str(argument) for argument in arguments])
    texts = (stream.getvalue().decode(errors="replace") for stream in (stdout, stderr))
    done = ProcessResult(code, *texts)
    assert expect is None or done.code == expect, f"exit code {done.code}, not {expect}:\n{done.stderr}"
    return done


def interrupt(arguments: Sequence[object], folder: Path, out: str = "out.parquet", parts: int = 2) -> int:
    """`run` a job and stop it by SIGUSR1 between two steps, when `parts` parts of `out` are committed.

    Returns:
        The number of parts.
    """
    options = ["--commit-every", _Stopped.ROWS, "--max-num-seqs", "4", "--progress", "json"]
    with (
        patch("batchgen.job.display.progress.JSON_SECONDS", 0.0),  # a line at each step
        _as_process(folder, b"", None, partial(_Stopped, folder / out, parts)) as (_, stderr),
    ):
        code = run_command([*map(str, arguments), *map(str, options)])
    assert code == RESUMABLE, f"exit code {code}, not {RESUMABLE}:\n{stderr.getvalue().decode(errors='replace')}"
    return len(parts_of(folder / out))


def parts_of(out: Path) -> list[Path]:
    """Committed parts of an unfinished output."""
    return sorted((out.with_name(out.name + ".work") / "parts").glob("part-*.parquet"))


class _Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


class _Stopped(io.TextIOWrapper):
    """Standard error of a job that is stopped: the job waits at a progress line until its rows are committed."""

    ROWS = 5
    """Rows of a part."""

    def __init__(self, out: Path, parts: int, buffer: io.BytesIO, **options: Any) -> None:
        super().__init__(buffer, **options)
        self.out = out
        self.parts = parts
        self.rows = self.seen = 0
        """Rows that were done, and parts, when the job waited last."""

    def write(self, text: str) -> int:
        if text.startswith('{"phase": "generating"'):
            self._wait(json.loads(text)["rows_done"], time.monotonic() + SECONDS)
        return super().write(text)

    def _wait(self, rows: int, end: float) -> None:
        """Wait for a part of the rows done since the last one; stop the job if these are all that it is to have."""
        if rows - self.rows >= self.ROWS:
            while len(parts_of(self.out)) == self.seen:
                assert time.monotonic() < end, "the rows that are done are not committed"
                time.sleep(0.001)
            self.rows, self.seen = rows, len(parts_of(self.out))
            if self.seen >= self.parts:
                signal.raise_signal(signal.SIGUSR1)


@contextmanager
def _as_process(
    folder: Path, stdin: bytes, env: Mapping[str, str] | None, kind: Callable[..., io.TextIOWrapper]
) -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    """Give a command its own streams, folder and environment; modules that it imports from the folder are dropped.

    Its processes for grammars and templates are kept for the next command.
    """
    stdout, stderr = io.BytesIO(), io.BytesIO()
    streams = {
        "stdin": io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"),
        "stdout": kind(stdout, encoding="utf-8"),
        "stderr": kind(stderr, encoding="utf-8", errors="backslashreplace", write_through=True),
    }
    importlib.invalidate_caches()
    with (
        patch.multiple(sys, dont_write_bytecode=True, path=[*sys.path], **streams),
        patch.dict(os.environ, env or {}),
        patch("batchgen.engine.front_end.FrontEnd.release"),
        chdir(folder),
    ):
        try:
            yield stdout, stderr
        finally:
            sys.stdout.flush()
            for stream in streams.values():
                stream.detach()
            for name, module in [*sys.modules.items()]:
                if str(getattr(module, "__file__", None) or "").startswith(f"{folder}{os.sep}"):
                    del sys.modules[name]


def batchgen(arguments: Sequence[object], folder: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the console script's entry point in a fresh interpreter."""
    words = [sys.executable, "-c", "from batchgen.cli.app import main; main()", *map(str, arguments)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False, **more)


_BEFORE_TORCH = """
import io, json, sys
from contextlib import redirect_stderr
from batchgen.cli.app import run_command
found = []
for words in json.load(sys.stdin):
    with redirect_stderr(io.StringIO()) as stderr:
        code = run_command(words)
    heavy = sorted({"torch", "transformers", "xgrammar"} & set(sys.modules))
    found.append([code, stderr.getvalue(), heavy])
json.dump(found, sys.stdout)
"""


def ended_before_torch(lines: Sequence[Sequence[object]], folder: Path) -> list[ProcessResult]:
    """Run command lines one after the other in a fresh interpreter, none of which may import torch."""
    given = json.dumps([list(map(str, words)) for words in lines])
    words = [sys.executable, "-c", _BEFORE_TORCH]
    done = subprocess.run(words, cwd=folder, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = []
    for words, (code, stderr, heavy) in zip(lines, json.loads(done.stdout), strict=True):
        assert not heavy, f"{words} imported {heavy}"
        found.append(ProcessResult(code, "", stderr))
    return found


def _child(words: list[str], folder: str, streams: str, env: dict[str, str], file_size: int | None) -> None:
    """Redirect the standard streams, set the limits and run the command: the main function of a forked process."""
    os.chdir(folder)
    os.environ.update(env)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    for number, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
        descriptor = os.open(f"{streams}/{name}", flags)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # multiprocessing closed the original
    if file_size is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python itself does at its start
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    sys.exit(run_command(words))
