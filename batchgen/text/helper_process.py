"""Helper processes: foreign grammars and templates are worked on under limits of processor time and memory."""

from __future__ import annotations

import atexit
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import RLock
from typing import Generic, TypeVar

# sys.path is passed on, since a new interpreter may not find the modules of this one.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[{first}:]; from {module} import serve; serve(*map(int, sys.argv[1:{first}]))"
)


class HelperProcess:
    """A process that runs `serve(source, sink, *numbers)` of a module, with pipes to and from it.

    Args:
        module: name of the module; `source` and `sink` are descriptors of the pipes in its process.
        numbers: further arguments of `serve`.
        files: those of them that are descriptors of files.
        variables: of its environment, in addition to those of this process.
    """

    def __init__(
        self, module: str, *numbers: int, files: Sequence[int] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        request_end, requests = os.pipe()
        results, result_end = os.pipe()
        arguments = [*map(str, (request_end, result_end, *numbers))]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(module=module, first=len(arguments) + 1), *arguments, *sys.path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # the libraries' warnings repeat errors that are reported
            pass_fds=(request_end, result_end, *files),
            start_new_session=True,  # a keyboard interrupt is for the run to handle
            # By default it has one thread, since a process with several must not fork.
            env={**os.environ, **({"OMP_NUM_THREADS": "1"} if variables is None else variables)},
        )
        os.close(request_end)
        os.close(result_end)
        self._owner = os.getpid()
        self.requests, self.results = Connection(requests, readable=False), Connection(results, writable=False)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_ours(self) -> bool:
        """Whether this process started it, and not the parent from which this one is forked."""
        return self._owner == os.getpid()

    def exit_code(self) -> int:
        """Exit code after its end, for which this waits; the negative number of the signal that ended it."""
        return self._process.wait()

    def kill(self) -> None:
        """Kill the process and its forks, and wait for its end."""
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Kill the process, if it is ours, and close the pipes."""
        if self.is_ours:
            self.kill()
        self.requests.close()
        self.results.close()


_Process = TypeVar("_Process", bound=HelperProcess)


class SharedProcess(Generic[_Process]):
    """The one helper process of a kind, started when it is needed.

    Attributes:
        lock: to be held while it is used.
    """

    def __init__(self, start: Callable[[], _Process]) -> None:
        self._start = start
        self._process: _Process | None = None
        self.lock = RLock()
        atexit.register(self.stop)

    def running(self) -> _Process:
        """The process, started if there is none or it belongs to the parent of this forked process."""
        if self._process is not None and not self._process.is_ours:
            self.stop()
        if self._process is None:
            self._process = self._start()
        return self._process

    def stop(self) -> None:
        """Stop the process to free its memory; it is started again when needed."""
        with self.lock:
            if self._process is not None:
                self._process.close()
                self._process = None


def begin(source: int, sink: int) -> tuple[Connection, Connection]:
    """In a helper process: the connections for what it receives and sends, by descriptor.

    It ignores signals: the run decides when to stop, and closes the pipes then.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    return Connection(source, writable=False), Connection(sink, readable=False)


def byte_pipe() -> tuple[Connection, Connection]:
    """The end to read and the end to write of a pipe for messages that are bytes."""
    reader, writer = os.pipe()
    return Connection(reader, writable=False), Connection(writer, readable=False)


def limit_memory(size: int | None) -> None:
    """Let this process have `size` more bytes of memory than it has now, and leave no core files; None: no limit."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    pages = int(open("/proc/self/statm").read().split()[0]) if sys.platform == "linux" else 0  # noqa: PTH123, SIM115
    soft = hard if size is None or not pages else pages * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_seconds(seconds: float) -> None:
    """Let this process have so much processor time from now on; the signal SIGPROF ends it then.

    A fork has no such limit until it sets its own. 0 lifts the limit.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
