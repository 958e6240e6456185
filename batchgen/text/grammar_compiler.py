"""The run's side of the process that compiles grammars: started when needed, asked in batches, stopped when idle."""

from __future__ import annotations

import atexit
import os
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

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Have it end."""
        self.requests.close()
        self.results.close()
        if self.owner == os.getpid():
            self._process.wait()


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
        pieces = {kind: self._vocabularies[kind] for kind in kinds if not self._is_known(kind)}
        with _lock:
            try:
                process = _running()
                for kind, tokens in pieces.items():
                    process.requests.send(Vocabulary((self._number, kind), tokens))
                    process.vocabularies.add((self._number, kind))
                # Two processes that both only write, each into a full pipe, would wait for each other.
                sender = threading.Thread(target=self._send, args=(process, list(jobs.items())), daemon=True)
                sender.start()
                while jobs:
                    number, result = process.results.recv()
                    yield jobs.pop(number), result
                sender.join()
            except (EOFError, OSError):
                problem = "the process that compiles grammars ended; is xgrammar installed?"
                raise BatchgenError(problem) from None
            finally:
                if jobs:
                    stop_compiling()  # what it has yet to say belongs to nobody

    def _is_known(self, kind: str) -> bool:
        with _lock:
            return (self._number, kind) in _running().vocabularies

    def _send(self, process: _Process, jobs: list[tuple[int, Constraint]]) -> None:
        with suppress(OSError):  # it is gone, which the other end says
            for number, constraint in jobs:
                key = (self._number, vocabulary_of(constraint))
                process.requests.send(Job(number, constraint, key, self._lenient, self._limits))

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
