"""Client of the grammar compiler process: starts it when needed, sends it batches, stops it when idle."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count
from typing import Final

from batchgen.errors import BatchgenError, ErrorInfo
from batchgen.request.fields.constraint import Constraint
from batchgen.text.grammar.kinds import KINDS
from batchgen.text.grammar.vocabulary import Vocabularies
from batchgen.text.grammar.worker import CompileJob, CompileLimits, DropVocabulary, LoadVocabulary
from batchgen.text.helper_process import HelperProcess, SharedProcess

_MAX_WORKERS = 8
_compiler_ids = count()
_closed: deque[int] = deque()
"""Ids of compilers that were closed and whose vocabularies the process may still have."""


class _CompilerProcess(HelperProcess):
    """The compiler process."""

    def __init__(self) -> None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
        super().__init__("batchgen.text.grammar.worker", min(_MAX_WORKERS, workers))
        self.vocabularies: set[tuple[int, str]] = set()
        self._sender: threading.Thread | None = None

    def start_sending(self, jobs: list[CompileJob]) -> None:
        """Send `jobs` on a thread while the caller reads: with both pipes full, two writers would deadlock."""
        self._sender = threading.Thread(target=self._send, args=(jobs,), name="grammars", daemon=True)
        self._sender.start()

    def wait_until_sent(self) -> None:
        """Wait until all jobs are sent or the process is gone."""
        if self._sender is not None:
            self._sender.join()
            self._sender = None

    def _send(self, jobs: list[CompileJob]) -> None:
        with suppress(OSError):  # the process is gone, which reading its results reports
            for job in jobs:
                self.requests.send(job)

    def close(self) -> None:
        """See `HelperProcess.close`."""
        if self.is_ours:
            self.kill()
            self.wait_until_sent()  # before the descriptor is closed, as its number may be reused
        super().close()


PROCESS: Final = SharedProcess(_CompilerProcess)
"""The compiler process."""


class GrammarCompiler:
    """Compiler of grammars for the vocabularies of one tokenizer."""

    def __init__(
        self, vocabularies: Vocabularies, *, lenient: bool = False, limits: CompileLimits | None = None
    ) -> None:
        self._vocabularies = vocabularies
        self._lenient = lenient
        self._limits = limits or CompileLimits()
        self._id = next(_compiler_ids)

    def compile(self, constraints: Iterable[Constraint]) -> Iterator[tuple[Constraint, bytes | ErrorInfo]]:
        """Yield each constraint with its compressed grammar or its error, in order of completion.

        Raises:
            RowError: `unsupported_field`: the tokenizer does not support constraints.
            BatchgenError: the process could not be started, or died.
        """
        jobs = dict(enumerate(constraints))
        vocabulary_kinds = sorted({KINDS[constraint.kind].vocabulary for constraint in jobs.values()})
        with PROCESS.lock:
            new_vocabularies = {kind: self._vocabularies[kind] for kind in vocabulary_kinds if not self._is_known(kind)}
            try:
                process = PROCESS.running()
                _drop_closed(process)
                for kind, tokens in new_vocabularies.items():
                    process.requests.send(LoadVocabulary((self._id, kind), tokens))
                    process.vocabularies.add((self._id, kind))
                process.start_sending([self._job(number, constraint) for number, constraint in jobs.items()])
                while jobs:
                    number, result = process.results.recv()
                    yield jobs.pop(number), result
                process.wait_until_sent()
            except (EOFError, OSError):
                problem = "the process that compiles grammars ended; check that xgrammar is installed"
                raise BatchgenError(problem) from None
            finally:
                if jobs:
                    PROCESS.stop()  # discard its pending results

    def _is_known(self, kind: str) -> bool:
        return (self._id, kind) in PROCESS.running().vocabularies

    def _job(self, number: int, constraint: Constraint) -> CompileJob:
        return CompileJob(
            number, constraint, (self._id, KINDS[constraint.kind].vocabulary), self._lenient, self._limits
        )

    def close(self) -> None:
        """Let the next compilation drop this compiler's vocabularies from the process.

        Takes no lock and sends nothing: the garbage collector may call it in any thread, in the middle of a message.
        """
        _closed.append(self._id)


def _drop_closed(process: _CompilerProcess) -> None:
    """Drop the vocabularies of compilers that were closed."""
    while _closed:
        number = _closed.popleft()
        for key in [key for key in process.vocabularies if key[0] == number]:
            process.vocabularies.discard(key)
            process.requests.send(DropVocabulary(key))
