"""The run's side of the process that compiles grammars: started when needed, asked in batches, stopped when idle."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection

from batchgen.errors import BatchgenError, ErrorInfo
from batchgen.params import Constraint
from batchgen.text.grammar_vocabulary import Vocabularies
from batchgen.text.grammar_worker import Job

__all__ = ["GrammarCompiler", "vocabulary_of"]

_MOST_WORKERS = 8
# The path is handed over: how this process came to find its modules, a new interpreter cannot know.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[4:]; from batchgen.text.grammar_worker import serve; "
    "serve(*map(int, sys.argv[1:4]))"
)


class GrammarCompiler:
    """Compiles grammars for one vocabulary in another process."""

    def __init__(self, vocabularies: Vocabularies, *, lenient: bool = False) -> None:
        self._vocabularies = vocabularies
        self._lenient = lenient
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: Connection | None = None
        self._results: Connection | None = None
        self._sent: set[str] = set()

    def compile(self, constraints: Iterable[Constraint]) -> Iterator[tuple[Constraint, bytes | ErrorInfo]]:
        """Each constraint with its compressed grammar or what is wrong with it, in order of completion.

        Raises:
            RowError: `unsupported_field`, where the tokenizer allows no constraints.
            BatchgenError: the process could not be started, or died.
        """
        jobs = dict(enumerate(constraints))
        if not jobs:
            return
        for constraint in jobs.values():
            self._send_vocabulary(vocabulary_of(constraint))
        requests, results = self._connect()
        try:
            for number, constraint in jobs.items():
                requests.send(Job(number, constraint, vocabulary_of(constraint), self._lenient))
            while jobs:
                number, result = results.recv()
                yield jobs.pop(number), result
        except (EOFError, OSError):
            self.close()
            problem = "the process that compiles grammars ended; is xgrammar installed?"
            raise BatchgenError(problem) from None

    def _send_vocabulary(self, kind: str) -> None:
        if kind not in self._sent:
            pieces = self._vocabularies[kind]
            self._connect()[0].send(("vocabulary", kind, pieces))
            self._sent.add(kind)

    def _connect(self) -> tuple[Connection, Connection]:
        if self._requests is None or self._results is None:
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
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # a process of several threads must not fork
            )
            os.close(source)
            os.close(sink)
            self._requests, self._results = Connection(requests, readable=False), Connection(results, writable=False)
        return self._requests, self._results

    def close(self) -> None:
        """Stop the process; it is started again when needed."""
        for connection in (self._requests, self._results):
            if connection is not None:
                connection.close()
        if self._process is not None:
            self._process.wait()
        self._process = self._requests = self._results = None
        self._sent.clear()


def vocabulary_of(constraint: Constraint) -> str:
    """The kind of vocabulary that a constraint is compiled for."""
    return {"json_schema": "json", "structural_tag": "tag"}.get(constraint.kind, "text")
