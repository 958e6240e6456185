"""The process that compiles grammars, apart from the run: `serve` is its whole life.

xgrammar is C++ that no thread can be called back from, and a hostile grammar can make it compute for hours, take all
memory or crash. Each grammar is therefore compiled in a fork of this process, which has the vocabularies ready: under a
limit of processor time and of memory, and killed where it goes past them. A run that needs no grammar never starts it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import time
import zlib
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from batchgen.errors import ErrorCode, ErrorInfo, RowError
from batchgen.params import Constraint
from batchgen.text.grammar_library import import_compiler
from batchgen.text.grammar_rules import can_end, left_recursive_rule
from batchgen.text.grammar_sources import grammar_source

__all__ = ["Forget", "Job", "Limits", "Vocabulary", "serve"]

_WALL_FACTOR = 15
"""A fork that is still there after this many times its processor time is stuck."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one grammar may take."""

    seconds: int = 20
    """Processor time to compile it."""
    memory: int = 2 << 30
    """Bytes to compile it."""
    size: int = 256 << 20
    """Bytes that it holds once it is compiled."""


Key = tuple[int, str]
"""Whose vocabulary, and of which kind."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Bytes of every token, for jobs that name `key`."""

    key: Key
    pieces: list[bytes]


@dataclass(frozen=True, slots=True)
class Forget:
    """No job will name `key` again."""

    key: Key


@dataclass(frozen=True, slots=True)
class Job:
    """One grammar to compile."""

    number: int
    constraint: Constraint
    vocabulary: Key
    lenient: bool
    limits: Limits


@dataclass(slots=True)
class _Running:
    job: Job
    pid: int
    deadline: float
    parts: list[bytes] = field(default_factory=list)


def serve(source: int, sink: int, workers: int) -> None:
    """Compile what comes until the other side closes.

    Takes a `Vocabulary`, `Forget` or `Job` at a time from descriptor `source`; for each job sends (number, compressed
    grammar as bytes, or an `ErrorInfo`) to descriptor `sink`, in order of completion, `workers` jobs at a time.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the run decides when to stop, and closes the pipe
    xgrammar = import_compiler()  # here, once for all forks

    requests, results = Connection(source, writable=False), Connection(sink, readable=False)
    tokenizers: dict[Key, Any] = {}
    queue: deque[Job] = deque()
    running: dict[int, _Running] = {}
    open_ = True
    while open_ or queue or running:
        while queue and len(running) < workers:
            job = queue.popleft()
            end, started = _start(job, tokenizers[job.vocabulary])
            running[end] = started
        deadline = min((each.deadline for each in running.values()), default=None)
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([*running, *([requests] if open_ else [])], timeout)
        for end in [each for each in running if each in ready or running[each].deadline <= time.monotonic()]:
            result = _read(end, running[end])
            if result is not None:
                del running[end]
                results.send(result)
        if requests not in ready:
            continue
        try:
            message = requests.recv()
        except EOFError:
            open_ = False
            queue.clear()
            for each in running.values():
                os.kill(each.pid, signal.SIGKILL)
            continue
        if isinstance(message, Job):
            queue.append(message)
        elif isinstance(message, Forget):
            tokenizers.pop(message.key, None)
        else:
            assert isinstance(message, Vocabulary)
            size = len(message.pieces)
            tokenizers[message.key] = xgrammar.TokenizerInfo(message.pieces, vocab_size=size, stop_token_ids=[])


def _start(job: Job, tokenizer: Any) -> tuple[int, _Running]:
    end, child_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(end)
            _limit(job.limits)
            _send(child_end, _compiled(job, tokenizer))
            status = 0
        finally:
            os._exit(status)  # nothing of the parent's is to be flushed or closed twice
    os.close(child_end)
    return end, _Running(job, pid, time.monotonic() + _WALL_FACTOR * job.limits.seconds)


def _limit(limits: Limits) -> None:
    pages = int(open("/proc/self/statm").read().split()[0]) if sys.platform == "linux" else 0  # noqa: PTH123, SIM115
    if pages:
        size = pages * resource.getpagesize() + limits.memory
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.seconds, limits.seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _send(end: int, result: bytes | ErrorInfo) -> None:
    if isinstance(result, ErrorInfo):
        result = b"E" + json.dumps([result.code, result.message, result.param]).encode()
    else:
        result = b"G" + result
    view = memoryview(result)
    while view:
        view = view[os.write(end, view) :]


def _read(end: int, job: _Running) -> tuple[int, bytes | ErrorInfo] | None:
    """What the fork has to say so far; its result once it has ended."""
    if job.deadline <= time.monotonic():
        os.kill(job.pid, signal.SIGKILL)
    else:
        part = os.read(end, 1 << 20)
        if part:
            job.parts.append(part)
            return None
    os.close(end)
    _, status = os.waitpid(job.pid, 0)
    data = b"".join(job.parts)
    code = os.waitstatus_to_exitcode(status)
    if code == 0 and data[:1] == b"G":
        return job.job.number, data[1:]
    if code == 0 and data[:1] == b"E":
        name, message, param = json.loads(data[1:])
        return job.job.number, ErrorInfo(ErrorCode(name), message, param)
    limits = job.job.limits
    if -code in (signal.SIGXCPU, signal.SIGKILL):
        problem = f"takes more than {limits.seconds} seconds to compile; make it smaller"
    else:
        problem = (
            f"needs more memory than {limits.memory >> 20} MiB to compile, or crashes the compiler; make it smaller"
        )
    return job.job.number, _invalid(job.job.constraint.kind, problem)


def _compiled(job: Job, tokenizer: Any) -> bytes | ErrorInfo:
    """The grammar, serialised and compressed, or what is wrong with the row's constraint."""
    constraint = job.constraint
    try:
        source = grammar_source(constraint, lenient=job.lenient)
        compiled = _compile(constraint.kind, source, tokenizer)
    except RowError as error:
        return error.info
    except (RuntimeError, ValueError) as error:
        return _invalid(constraint.kind, f"does not compile: {_reason(error)}")
    except (MemoryError, RecursionError):
        return _invalid(constraint.kind, "is too large to compile; make it smaller")
    most = job.limits.size
    if compiled.memory_size_bytes > most:
        problem = f"compiles to {compiled.memory_size_bytes:,} bytes, more than {most:,}; make it smaller"
        return _invalid(constraint.kind, problem)
    return _unusable(constraint.kind, compiled) or zlib.compress(compiled.serialize_json().encode(), 1)


def _compile(kind: str, source: str, tokenizer: Any) -> Any:
    import xgrammar

    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
    if kind == "json_schema":
        if "$ref" in source and not can_end(str(xgrammar.Grammar.from_json_schema(source, any_whitespace=False))):
            raise ValueError("every value that it allows holds another one without end")
        return compiler.compile_json_schema(source, any_whitespace=False)
    if kind == "regex":
        return compiler.compile_regex(source)
    if kind == "structural_tag":
        return compiler.compile_structural_tag(source)
    grammar = xgrammar.Grammar.from_ebnf(source)
    rule = left_recursive_rule(source, str(grammar)) if kind == "ebnf" else None
    if rule is not None:
        raise ValueError(f"rule {rule[:100]} is left-recursive; put what it begins with in front of it")
    if not can_end(str(grammar)):
        raise ValueError("it allows no text that ends")
    return compiler.compile_grammar(grammar)


def _unusable(kind: str, compiled: Any) -> ErrorInfo | None:
    """What the first token shows: a grammar without any text, or JSON that may be nothing."""
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiled)
    mask = np.full(xgrammar.get_bitmask_shape(1, compiled.tokenizer_info.vocab_size), -1, np.int32)
    matcher.fill_next_token_bitmask(mask)
    completed = matcher.is_completed()
    if (completed and kind == "json_schema") or not (completed or mask.any()):
        return _invalid(kind, "allows no text at all")
    return None


def _reason(error: Exception) -> str:
    """The compiler's own words, without the place in its source."""
    text = str(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    return re.sub(r"^\[.*?\.cc:\d+: |Check failed: \(.*?\) is false: ", "", line)[:300]


def _invalid(field_name: str, problem: str) -> ErrorInfo:
    return ErrorInfo(ErrorCode.INVALID_GRAMMAR, f"`{field_name}` {problem}", field_name)
