"""Client of the grammar compiler process: starts it when needed, sends it vocabularies and batches of grammars."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count
from random import Random
from typing import Final

from batchgen.errors import BatchgenError, ErrorCode, ErrorInfo, RowError
from batchgen.library_settings import processors
from batchgen.request.fields.constraint import Constraint
from batchgen.text.grammar.kinds import KINDS
from batchgen.text.grammar.worker import CompileJob, CompileLimits, DropVocabulary, LoadVocabulary
from batchgen.text.helper_process import HelperProcess, SharedProcess
from batchgen.text.tokens.detokenize import TokenBytes
from batchgen.text.tokens.tokenizer import Tokenizer

_MAX_WORKERS = 8
_CONTROL = re.compile(rb"[\x00-\x1f]")
_TRIALS = 32
"""Sequences of each length on which the bytes of tokens are compared with decoded texts."""
_compiler_ids = count()
_closed: deque[int] = deque()
"""Ids of compilers that were closed and whose vocabularies the process may still have."""


class Vocabularies:
    """Bytes of every token, by kind of vocabulary: `text`, `json` in one line, or `tag` for structural tags.

    Tokens with no bytes are never sampled under a constraint. Special tokens have no bytes, since the text leaves them
    out, except in structural tags. Tokens with control characters have none in JSON, which is written on one line with
    such characters escaped. End-of-sequence ids never have any.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: size of the model's vocabulary; ids past the tokenizer's vocabulary have no bytes."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._pieces: list[bytes] | None = None

    def __getitem__(self, kind: str) -> list[bytes]:
        """[V] bytes of each token of the model's vocabulary, for a kind of vocabulary.

        Raises:
            RowError: `unsupported_field`: the text of a token depends on its neighbours.
        """
        if self._pieces is None:
            self._pieces = _pieces(self._tokenizer, self._vocab_size)
        barred = set(self._tokenizer.eos_ids)
        if kind != "tag":
            barred |= self._tokenizer.special_ids
        pieces = list(self._pieces)
        for token in barred:
            if token < self._vocab_size:
                pieces[token] = b""
        if kind == "json":
            pieces = [b"" if _CONTROL.search(piece) else piece for piece in pieces]
        return pieces


def _pieces(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    known = min(vocab_size, tokenizer.vocab_size)
    token_bytes = TokenBytes(tokenizer)
    pieces = [token_bytes[token] for token in range(known)]
    if tokenizer.vocab_bytes is None:
        _check_pieces(tokenizer, pieces)
    return pieces + [b""] * (vocab_size - known)


def _check_pieces(tokenizer: Tokenizer, pieces: list[bytes]) -> None:
    """Compare joined pieces with decoded texts: only a leading space may differ.

    Raises:
        RowError: `unsupported_field`: something else differs.
    """
    rng = Random(0)
    plain = [token for token, piece in enumerate(pieces) if piece and token not in tokenizer.special_ids]
    for size in (1, 2, 8) * _TRIALS if plain else ():
        ids = rng.choices(plain, k=size)
        text, joined = tokenizer.decode(ids, False), b"".join(pieces[token] for token in ids)
        if text.encode() not in (joined, joined[1:] if joined[:1] == b" " else joined) and "\ufffd" not in text:
            message = (
                "the model's tokenizer decodes tokens depending on their neighbours, so the text of a single token is "
                "unknown to a constraint; remove the constraint"
            )
            raise RowError(ErrorCode.UNSUPPORTED_FIELD, message)


class _CompilerProcess(HelperProcess):
    """The compiler process."""

    def __init__(self) -> None:
        super().__init__("batchgen.text.grammar.worker", min(_MAX_WORKERS, processors()))
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
