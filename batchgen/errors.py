"""Exceptions of batchgen and the error codes of rows.

```
BatchgenError
├── RowError              one input row is wrong or failed; becomes an error row, the run continues
├── UsageError            exit 2: flags, configuration
│   ├── FingerprintError  exit 2: the work folder belongs to a different job
│   └── UnknownArgument   in Python, also a TypeError: a function has no such argument
├── TooManyErrors         exit 3: more row errors than the threshold
├── InputError            exit 4: input unreadable, or invalid under `--on-bad-row fail`
├── OutputError           exit 5: output cannot be written
├── ModelError            exit 6: the model cannot be loaded
├── DeviceError           exit 7: device failure that cannot be isolated
└── Interrupted           exit 75, 129, 130 or 143: stopped early, resumable
```

`row_error` decides which exceptions of a step of a row's way are that row's error.

A message says what is wrong and how to fix it, in one or two sentences, and is printed without a traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final, TypeVar


class ErrorCode(StrEnum):
    """All row error codes, as written to the `error.code` column."""

    INVALID_JSON = "invalid_json"
    TRUNCATED_INPUT = "truncated_input"
    INVALID_UNICODE = "invalid_unicode"
    MISSING_PROMPT = "missing_prompt"
    AMBIGUOUS_PROMPT = "ambiguous_prompt"
    EMPTY_PROMPT = "empty_prompt"
    INVALID_FIELD = "invalid_field"
    UNKNOWN_FIELD = "unknown_field"
    UNSUPPORTED_FIELD = "unsupported_field"
    DUPLICATE_ID = "duplicate_id"
    TOKEN_OUT_OF_RANGE = "token_out_of_range"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    INVALID_GRAMMAR = "invalid_grammar"
    UNSUPPORTED_SCHEMA_KEYWORD = "unsupported_schema_keyword"
    GRAMMAR_ERROR = "grammar_error"
    UNKNOWN_ADAPTER = "unknown_adapter"
    UNKNOWN_PROCESSOR = "unknown_processor"
    PROCESSOR_ERROR = "processor_error"
    MEDIA_ERROR = "media_error"
    NAN_LOGITS = "nan_logits"
    OOM = "oom"
    ENGINE_CRASH = "engine_crash"
    INTERNAL = "internal"


class AdviceWarning(UserWarning):
    """Something in rows or results of the Python API is probably not as meant; the message has the remedy."""


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """Error of a row, as written to the `error` column."""

    code: ErrorCode
    message: str
    param: str | None = None


_MAX_ROW_MESSAGE: Final = 2000
_MAX_PARAM: Final = 200
"""Most characters of the message of a row's error, and of the name of its field."""


class BatchgenError(Exception):
    """Base of all errors that batchgen raises. `exit_code` is the exit code of the process."""

    exit_code: ClassVar[int] = 1


class RowError(BatchgenError):
    """One input row is wrong or failed. `info` is written to its output row.

    A row may have keys of any length: what is too long of a message or a name is cut.
    """

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        message = _cut(message, _MAX_ROW_MESSAGE)
        super().__init__(message)
        self.info = ErrorInfo(code, message, None if param is None else _cut(param, _MAX_PARAM))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


class UsageError(BatchgenError):
    """Flags or configuration are wrong."""

    exit_code: ClassVar[int] = 2


class FingerprintError(UsageError):
    """The unfinished work next to the output belongs to a different job."""


class UnknownArgument(UsageError, TypeError):
    """A function of the Python API has no such argument."""


class TooManyErrors(BatchgenError):
    """More rows failed than the threshold allows."""

    exit_code: ClassVar[int] = 3


class InputError(BatchgenError):
    """An input file cannot be read, or has an invalid row under `--on-bad-row fail`."""

    exit_code: ClassVar[int] = 4


class OutputError(BatchgenError):
    """The output cannot be written (disk full, no permission, another run has locked it)."""

    exit_code: ClassVar[int] = 5


class ModelError(BatchgenError):
    """The model folder is missing, incomplete, damaged or of an unsupported kind."""

    exit_code: ClassVar[int] = 6


class DeviceError(BatchgenError):
    """The device failed, and the failure cannot be attributed to one row."""

    exit_code: ClassVar[int] = 7


class Interrupted(BatchgenError):
    """The run stopped early after committing all finished rows. `exit_status` is 75, 129, 130 or 143."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


_MACHINE_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of the operating system that are the machine's, whichever row met them: no room, no handles."""
_DEVICE_WORDS: Final = ("cuda", "hip error", "cublas", "cudnn", "triton")
"""Words in the messages of `RuntimeError`s of a device, after which nothing on it can be trusted."""
_MAX_MESSAGE: Final = 300
"""Most characters of a foreign exception's message that an error row shows."""

_HOST_MEMORY_WORDS: Final = ("not enough memory", "allocate memory", "failed to map segment", "can't start new thread")
"""Words in the messages of PyTorch's allocator for CPUs, of the dynamic linker and of Python without memory."""

_T = TypeVar("_T")
_R = TypeVar("_R")


def is_out_of_host_memory(error: BaseException | None) -> bool:
    """Whether an exception, or one that it was raised in place of, is that the process gets no more memory."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        if isinstance(error, RuntimeError | ImportError) and any(words in str(error) for words in _HOST_MEMORY_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def row_error(error: Exception, step: str) -> ErrorInfo:
    """The error row of whatever a step of one row's way has raised.

    A `RowError` says what is wrong with the row. Anything else is `internal` (`oom` for a `MemoryError` of the host)
    and names the step, the type and the message. These are not the row's, and stop the run:

    - other `BatchgenError`s: the output, the device, the options, a stop request;
    - `OSError`s of the machine: a full or read-only disk, no more file handles;
    - errors of the device: torch's own types, and messages of its libraries; the loop handles memory of the device;
    - exceptions that are not an `Exception`: `KeyboardInterrupt`, `SystemExit`.

    Args:
        error: what was raised while only this row was at work.
        step: the step, as a phrase such as "the chat template".

    Raises:
        Exception: `error`, if it is not the row's.
    """
    if isinstance(error, RowError):
        return error.info
    if isinstance(error, MemoryError):
        return ErrorInfo(ErrorCode.OOM, f"{step} ran out of memory; make the row smaller, or give the run more memory")
    if isinstance(error, BatchgenError) or _is_of_machine(error):
        raise error
    what = first_line(error).encode(errors="backslashreplace").decode()
    return ErrorInfo(ErrorCode.INTERNAL, f"{step} raised {what}; change the row, or report this as a bug of batchgen")


def _is_of_machine(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _MACHINE_ERRNOS
    if type(error).__module__.partition(".")[0] in ("torch", "triton"):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _DEVICE_WORDS)


def first_line(error: BaseException) -> str:
    """The type of an error, and the first line of its message, with the next where it ends with a colon; shortened."""
    first, *others = str(error).strip().splitlines() or [""]
    if first.endswith(":") and others:
        first += f" {others[0].strip()}"
    line = first[:_MAX_MESSAGE].rstrip(".")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


@contextmanager
def library_errors(problem: str, remedy: str = "") -> Iterator[None]:
    """The one guard of calls that give a library what a foreign file holds: whatever they raise says what is wrong.

    Libraries read configurations, tokenizers, processors and weights with code of many authors, which raises errors of
    any type. Those of memory, of the machine and of the device are not the file's, and pass.

    Args:
        problem: what cannot be done, such as "the tokenizer of X cannot be loaded".
        remedy: a sentence, with its full stop.

    Raises:
        ModelError: with the problem, the library's words and the remedy.
    """
    try:
        yield
    except (BatchgenError, MemoryError):
        raise
    except BaseException as error:
        of_file = isinstance(error, Exception) and not _is_of_machine(error)
        if not of_file and type(error).__name__ != "PanicException":  # as libraries in Rust fail
            raise
        raise ModelError(f"{problem}: {first_line(error)}.{remedy and ' ' + remedy}") from error


def apart(items: Sequence[_T], work: Callable[[Sequence[_T]], Sequence[_R]], step: str) -> list[_R | ErrorInfo]:
    """What `work` gives for each of several rows' items, or the error of a row as by `row_error`.

    It is called for all items at once; if that raises, for each alone, so that only those that raise again fail.
    """
    try:
        return list(work(items))
    except Exception as error:
        failure = row_error(error, step)
    if len(items) == 1:
        return [failure]
    return [result for item in items for result in apart([item], work, step)]
