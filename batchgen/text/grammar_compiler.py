"""The run's side of the process that compiles grammars: started when needed, asked in batches, stopped when idle."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection

from batchgen.errors import BatchgenError, ErrorInfo
from batchgen.params import Constraint
from batchgen.text.grammar_vocabulary import Vocabularies
from batchgen.text.grammar_worker import Forget, Job, Limits, Vocabulary

__all__ = ["GrammarCompiler", "stop_compiling", "vocabulary_of"]

_MOST_WORKERS = 8
# The path is handed over: how this process came to find its modules, a new interpreter cannot know.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[4:]; from batchgen.text.grammar_worker import serve; "
    "serve(*map(int, sys.argv[1:4]))"
)
_numbers = count()


class _Process:
    """The process, and pipes to and from it."""

    def __init__(self) -> None:
        source, requests = os.pipe()
        results, sink = os.pipe()
        workers = min(_MOST_WORKERS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
        words = [sys.executable, "-c", _PROGRAM, str(source), str(sink), str(workers), *sys.path]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # the library warns there of what is reported here
            pass_fds=(source, sink),
            start_new_session=True,  # an interrupt from the keyboard is the run's to answer
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # a process of several threads must not fork
        )
        os.close(source)
        os.close(sink)
        self.owner = os.getpid()
        self.requests, self.results = Connection(requests, readable=False), Connection(results, writable=False)
        self.vocabularies: set[tuple[int, str]] = set()
        self._sender: threading.Thread | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin_sending(self, jobs: list[Job]) -> None:
        """Send `jobs` beside the caller, who reads: two that both only write, each into a full pipe, would wait."""
        self._sender = threading.Thread(target=self._send, args=(jobs,), name="grammars", daemon=True)
        self._sender.start()

    def end_sending(self) -> None:
        """Wait until all is sent, or cannot be."""
        if self._sender is not None:
            self._sender.join()
            self._sender = None

    def _send(self, jobs: list[Job]) -> None:
        with suppress(OSError):  # it is gone, which the other end says
            for job in jobs:
                self.requests.send(job)

    def close(self) -> None:
        """End it, and all that it forked."""
        if self.owner == os.getpid():
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self.end_sending()  # before its descriptor is closed, whose number the next process may get
        self.requests.close()
        self.results.close()


_lock = threading.RLock()
_process: _Process | None = None


def _running() -> _Process:
    """The one process of this one, started anew where it is gone, or belongs to the one that this was forked from."""
    global _process
    if _process is not None and _process.owner != os.getpid():
        stop_compiling()
    if _process is None:
        _process = _Process()
    return _process


@atexit.register
def stop_compiling() -> None:
    """End the process, which holds some hundred MB; it is started again when needed."""
    global _process
    with _lock:
        if _process is not None:
            _process.close()
            _process = None


class GrammarCompiler:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabularies: Vocabularies, *, lenient: bool = False, limits: Limits | None = None) -> None:
        self._vocabularies = vocabularies
        self._lenient = lenient
        self._limits = limits or Limits()
        self._number = next(_numbers)

    def compile(self, constraints: Iterable[Constraint]) -> Iterator[tuple[Constraint, bytes | ErrorInfo]]:
        """Each constraint with its compressed grammar or what is wrong with it, in order of completion.

        Raises:
            RowError: `unsupported_field`, where the tokenizer allows no constraints.
            BatchgenError: the process could not be started, or died.
        """
        jobs = dict(enumerate(constraints))
        kinds = sorted({vocabulary_of(constraint) for constraint in jobs.values()})
        with _lock:
            pieces = {kind: self._vocabularies[kind] for kind in kinds if not self._is_known(kind)}
            try:
                process = _running()
                for kind, tokens in pieces.items():
                    process.requests.send(Vocabulary((self._number, kind), tokens))
                    process.vocabularies.add((self._number, kind))
                process.begin_sending([self._job(number, constraint) for number, constraint in jobs.items()])
                while jobs:
                    number, result = process.results.recv()
                    yield jobs.pop(number), result
                process.end_sending()
            except (EOFError, OSError):
                problem = "the process that compiles grammars ended; is xgrammar installed?"
                raise BatchgenError(problem) from None
            finally:
                if jobs:
                    stop_compiling()  # what it has yet to say belongs to nobody

    def _is_known(self, kind: str) -> bool:
        return (self._number, kind) in _running().vocabularies

    def _job(self, number: int, constraint: Constraint) -> Job:
        return Job(number, constraint, (self._number, vocabulary_of(constraint)), self._lenient, self._limits)

    def close(self) -> None:
        """Nothing more will be compiled for this vocabulary."""
        with _lock:
            mine = [key for key in _process.vocabularies if key[0] == self._number] if _process is not None else []
            for key in mine:
                assert _process is not None
                _process.vocabularies.discard(key)
                try:
                    _process.requests.send(Forget(key))
                except OSError:
                    stop_compiling()
                    return


def vocabulary_of(constraint: Constraint) -> str:
    """The kind of vocabulary that a constraint is compiled for."""
    return {"json_schema": "json", "structural_tag": "tag"}.get(constraint.kind, "text")
