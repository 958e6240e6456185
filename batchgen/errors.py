"""Exceptions of batchgen and the error codes of rows.

```
BatchgenError
├── RowError              one input row is wrong or failed; becomes an error row, the run continues
├── UsageError            exit 2: flags, configuration
│   └── FingerprintError  exit 2: the work folder belongs to a different job
├── TooManyErrors         exit 3: more row errors than the threshold
├── InputError            exit 4: input unreadable, or invalid under `--on-bad-row fail`
├── OutputError           exit 5: output cannot be written
├── ModelError            exit 6: the model cannot be loaded
├── DeviceError           exit 7: device failure that cannot be isolated
└── Interrupted           exit 75, 129, 130 or 143: stopped early, resumable
```

A message says what is wrong and how to fix it, in one or two sentences, and is printed without a traceback.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar


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


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """Error of a row, as written to the `error` column."""

    code: ErrorCode
    message: str
    param: str | None = None


class BatchgenError(Exception):
    """Base of all errors that batchgen raises. `exit_code` is the exit code of the process."""

    exit_code: ClassVar[int] = 1


class RowError(BatchgenError):
    """One input row is wrong or failed. `info` is written to its output row."""

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.info = ErrorInfo(code, message, param)


class UsageError(BatchgenError):
    """Flags or configuration are wrong."""

    exit_code: ClassVar[int] = 2


class FingerprintError(UsageError):
    """The unfinished work next to the output belongs to a different job."""


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
