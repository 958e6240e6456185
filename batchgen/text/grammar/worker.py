"""Grammar compiler process, separate from the run; its main function is `serve`.

A grammar compiler cannot be interrupted, and a hostile grammar can make it run for hours, exhaust memory or crash.
Grammars are therefore compiled in forks of this process, which holds the vocabularies, under limits of processor time
and memory. A fork compiles several grammars, as forking takes longer than most of them; the error of a grammar is
believed only if it is the first of its fork, so that it does not depend on those before it. A run without constraints
never starts the process. It imports xgrammar without torch and transformers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.request.checks import invalid_grammar
from batchgen.request.fields.constraint import Constraint
from batchgen.request.foreign_text import read_json
from batchgen.text.grammar.compilation import compile_constraint
from batchgen.text.helper_process import begin, byte_pipe, limit_memory, limit_seconds

_STUBBED_MODULES = ("torch", "transformers")
"""Modules that xgrammar imports for device masks and tokenizers, which the compiler does not use."""


def import_compiler() -> Any:
    """Import xgrammar without its slow, large dependencies; token bitmasks are numpy arrays then.

    If these modules are imported already, or this version of xgrammar needs them, it is imported normally.
    """
    if any(name in sys.modules for name in ("xgrammar", *_STUBBED_MODULES)):
        return import_module("xgrammar")
    try:
        sys.modules["torch"] = None  # type: ignore[assignment]  # means not installed, which tvm_ffi supports
        import_module("tvm_ffi")
        sys.modules.update((name, _StubModule(name)) for name in _STUBBED_MODULES)
        return import_module("xgrammar")
    except Exception:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("xgrammar", *_STUBBED_MODULES)]:
            del sys.modules[name]
        return import_module("xgrammar")
    finally:
        for name in _STUBBED_MODULES:
            if isinstance(sys.modules.get(name), _StubModule | None):
                sys.modules.pop(name, None)


class _StubModule(ModuleType):
    """Module in which every name is a class that has no instances."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        stub = type(name, (_Stub,), {})
        setattr(self, name, stub)
        return stub


class _Stub:
    def __init__(self, *_: object, **__: object) -> None:
        pass


_WALL_FACTOR = 15
"""Wall time limit of a grammar, as a multiple of its processor time limit."""
_MOST_JOBS = 32
"""Most grammars that a fork compiles."""


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Limits for compiling one grammar."""

    seconds: float = 20
    """Processor time in seconds."""
    memory: int = 2 << 30
    """Bytes of memory while compiling."""
    size: int = 256 << 20
    """Bytes of the compiled grammar."""


VocabularyKey = tuple[int, str]
"""(id of a `GrammarCompiler`, kind of vocabulary)"""


@dataclass(frozen=True, slots=True)
class LoadVocabulary:
    """Message: the bytes of every token, for jobs that name `key`."""

    key: VocabularyKey
    pieces: list[bytes]


@dataclass(frozen=True, slots=True)
class DropVocabulary:
    """Message: no further job names `key`."""

    key: VocabularyKey


@dataclass(frozen=True, slots=True)
class CompileJob:
    """Message: one grammar to compile."""

    number: int
    constraint: Constraint
    vocabulary: VocabularyKey
    lenient: bool
    limits: CompileLimits


@dataclass(slots=True)
class _Fork:
    """A fork that compiles grammars."""

    jobs: deque[CompileJob]
    """Those without a result yet, in order."""
    pid: int
    deadline: float
    """Time at which the first of `jobs` takes too long."""
    is_first: bool = True
    """Whether the fork has compiled no grammar yet."""

    def set_deadline(self) -> None:
        self.deadline = time.monotonic() + _WALL_FACTOR * self.jobs[0].limits.seconds


def serve(source: int, sink: int, workers: int) -> None:
    """Receive messages and compile grammars until the other side closes.

    Args:
        source: descriptor of the pipe from which `LoadVocabulary`, `DropVocabulary` and `CompileJob` are received.
        sink: descriptor of the pipe to which (job number, compressed grammar or `ErrorInfo`) is sent for each job, in
            order of completion.
        workers: number of jobs to run at a time.
    """
    requests, results = begin(source, sink)
    xgrammar = import_compiler()  # before forking, so that forks share it
    tokenizers: dict[VocabularyKey, Any] = {}
    queue: deque[CompileJob] = deque()
    running: dict[Connection, _Fork] = {}
    is_open = True
    while is_open or queue or running:
        while queue and len(running) < workers:
            count = min(_MOST_JOBS, -(-len(queue) // workers))
            pipe, fork = _start_fork([queue.popleft() for _ in range(count)], tokenizers)
            running[pipe] = fork
        deadline = min((each.deadline for each in running.values()), default=None)
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([*running, *([requests] if is_open else [])], timeout)
        for pipe in [each for each in running if each in ready or running[each].deadline <= time.monotonic()]:
            fork = running[pipe]
            if _read_fork(pipe, fork, results):
                del running[pipe]
                queue.extendleft(reversed(fork.jobs))
        if requests not in ready:
            continue
        try:
            message = requests.recv()
        except EOFError:
            is_open = False
            queue.clear()
            for each in running.values():
                os.kill(each.pid, signal.SIGKILL)
            continue
        if isinstance(message, CompileJob):
            if message.vocabulary[1] != "text":
                import_module("batchgen.text.grammar.schemas.translations")  # before forking, so that forks share it
            queue.append(message)
        elif isinstance(message, DropVocabulary):
            tokenizers.pop(message.key, None)
        else:
            assert isinstance(message, LoadVocabulary)
            size = len(message.pieces)
            tokenizers[message.key] = xgrammar.TokenizerInfo(message.pieces, vocab_size=size, stop_token_ids=[])


def _start_fork(jobs: list[CompileJob], tokenizers: dict[VocabularyKey, Any]) -> tuple[Connection, _Fork]:
    pipe, sink = byte_pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            pipe.close()
            limit_memory(jobs[0].limits.memory)
            for job in jobs:
                limit_seconds(job.limits.seconds)
                tokenizer, limit = tokenizers[job.vocabulary], job.limits.size
                result = compile_constraint(job.constraint, tokenizer, lenient=job.lenient, max_size=limit)
                if isinstance(result, ErrorInfo) and job is not jobs[0]:
                    break  # its next fork says whether it is an error
                sink.send_bytes(_written(result))
            status = 0
        finally:
            os._exit(status)  # do not flush or close the parent's files
    sink.close()
    fork = _Fork(deque(jobs), pid, 0.0)
    fork.set_deadline()
    return pipe, fork


def _written(result: bytes | ErrorInfo) -> bytes:
    """A result as bytes: what a fork sends is not trusted to be objects."""
    if isinstance(result, ErrorInfo):
        return b"E" + json.dumps([result.code, result.message, result.param]).encode()
    return b"G" + result


def _read(data: bytes) -> bytes | ErrorInfo:
    if data[:1] == b"G":
        return data[1:]
    code, message, param = read_json(data[1:])
    return ErrorInfo(ErrorCode(code), message, param)


def _read_fork(pipe: Connection, fork: _Fork, results: Connection) -> bool:
    """Pass on the fork's next result; return whether the fork has ended, with `jobs` left over."""
    result: bytes | ErrorInfo | None = None
    if fork.jobs and fork.deadline <= time.monotonic():
        os.kill(fork.pid, signal.SIGKILL)
    else:
        with suppress(EOFError, OSError):  # else it has ended, perhaps inside a result
            result = _read(pipe.recv_bytes())
    if result is not None:
        fork.is_first = False
        results.send((fork.jobs.popleft().number, result))
        if fork.jobs:
            fork.set_deadline()
        return False
    pipe.close()
    _, status = os.waitpid(fork.pid, 0)
    if fork.jobs and fork.is_first:
        job = fork.jobs.popleft()
        results.send((job.number, _death(job, os.waitstatus_to_exitcode(status))))
    return True


def _death(job: CompileJob, code: int) -> ErrorInfo:
    """The error of a grammar whose fork ended before its result."""
    if -code in (signal.SIGPROF, signal.SIGKILL):
        problem = f"takes more than {job.limits.seconds} seconds to compile; make it smaller"
    else:
        needs = f"needs more memory than {job.limits.memory >> 20} MiB to compile"
        problem = f"{needs}, or crashes the compiler; make it smaller"
    return invalid_grammar(job.constraint.kind, problem).info
