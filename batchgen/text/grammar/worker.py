"""Grammar compiler process, separate from the run; its main function is `serve`.

A grammar compiler cannot be interrupted, and a hostile grammar can make it run for hours, exhaust memory or crash.
Each grammar is therefore compiled in a fork of this process, which holds the vocabularies, under limits of processor
time and memory. A run without constraints never starts the process. It imports xgrammar without torch and transformers.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.request.foreign_text import read_json
from batchgen.request.params import Constraint
from batchgen.text.grammar.compilation import compile_constraint, invalid_grammar

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
        found = type(name, (_Stub,), {})
        setattr(self, name, found)
        return found


class _Stub:
    def __init__(self, *_: object, **__: object) -> None:
        pass


_WALL_FACTOR = 15
"""Wall time limit of a fork, as a multiple of its processor time limit."""


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Limits for compiling one grammar."""

    seconds: int = 20
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
    """A fork that compiles one grammar."""

    job: CompileJob
    pid: int
    deadline: float
    parts: list[bytes] = field(default_factory=list)


def serve(source: int, sink: int, workers: int) -> None:
    """Receive messages and compile grammars until the other side closes.

    Args:
        source: descriptor of the pipe from which `LoadVocabulary`, `DropVocabulary` and `CompileJob` are received.
        sink: descriptor of the pipe to which (job number, compressed grammar or `ErrorInfo`) is sent for each job, in
            order of completion.
        workers: number of jobs to run at a time.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the run decides when to stop and closes the pipe
    xgrammar = import_compiler()  # before forking, so that forks share it

    requests, results = Connection(source, writable=False), Connection(sink, readable=False)
    tokenizers: dict[VocabularyKey, Any] = {}
    queue: deque[CompileJob] = deque()
    running: dict[int, _Fork] = {}
    is_open = True
    while is_open or queue or running:
        while queue and len(running) < workers:
            job = queue.popleft()
            descriptor, started = _fork_job(job, tokenizers[job.vocabulary])
            running[descriptor] = started
        deadline = min((each.deadline for each in running.values()), default=None)
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([*running, *([requests] if is_open else [])], timeout)
        for descriptor in [each for each in running if each in ready or running[each].deadline <= time.monotonic()]:
            result = _read_fork(descriptor, running[descriptor])
            if result is not None:
                del running[descriptor]
                results.send(result)
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
            queue.append(message)
        elif isinstance(message, DropVocabulary):
            tokenizers.pop(message.key, None)
        else:
            assert isinstance(message, LoadVocabulary)
            size = len(message.pieces)
            tokenizers[message.key] = xgrammar.TokenizerInfo(message.pieces, vocab_size=size, stop_token_ids=[])


def _fork_job(job: CompileJob, tokenizer: Any) -> tuple[int, _Fork]:
    descriptor, child_descriptor = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(descriptor)
            _set_limits(job.limits)
            _write_result(child_descriptor, _compile(job, tokenizer))
            status = 0
        finally:
            os._exit(status)  # do not flush or close the parent's files
    os.close(child_descriptor)
    return descriptor, _Fork(job, pid, time.monotonic() + _WALL_FACTOR * job.limits.seconds)


def _compile(job: CompileJob, tokenizer: Any) -> bytes | ErrorInfo:
    return compile_constraint(job.constraint, tokenizer, lenient=job.lenient, max_size=job.limits.size)


def _set_limits(limits: CompileLimits) -> None:
    pages = int(open("/proc/self/statm").read().split()[0]) if sys.platform == "linux" else 0  # noqa: PTH123, SIM115
    if pages:
        size = pages * resource.getpagesize() + limits.memory
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.seconds, limits.seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _write_result(descriptor: int, result: bytes | ErrorInfo) -> None:
    if isinstance(result, ErrorInfo):
        result = b"E" + json.dumps([result.code, result.message, result.param]).encode()
    else:
        result = b"G" + result
    view = memoryview(result)
    while view:
        view = view[os.write(descriptor, view) :]


def _read_fork(descriptor: int, fork: _Fork) -> tuple[int, bytes | ErrorInfo] | None:
    """Read the fork's output; return its result if it has ended."""
    if fork.deadline <= time.monotonic():
        os.kill(fork.pid, signal.SIGKILL)
    else:
        part = os.read(descriptor, 1 << 20)
        if part:
            fork.parts.append(part)
            return None
    os.close(descriptor)
    _, status = os.waitpid(fork.pid, 0)
    data = b"".join(fork.parts)
    code = os.waitstatus_to_exitcode(status)
    if code == 0 and data[:1] == b"G":
        return fork.job.number, data[1:]
    if code == 0 and data[:1] == b"E":
        name, message, param = read_json(data[1:])
        return fork.job.number, ErrorInfo(ErrorCode(name), message, param)
    limits = fork.job.limits
    if -code in (signal.SIGXCPU, signal.SIGKILL):
        problem = f"takes more than {limits.seconds} seconds to compile; make it smaller"
    else:
        problem = (
            f"needs more memory than {limits.memory >> 20} MiB to compile, or crashes the compiler; make it smaller"
        )
    return fork.job.number, invalid_grammar(fork.job.constraint.kind, problem)
