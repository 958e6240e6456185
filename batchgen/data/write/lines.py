"""Outputs of JSON lines, `-o x.jsonl`: their files, and which job wrote them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import orjson

SUFFIX = ".jsonl"
_JOB_DIGITS = 12


def is_lines(path: Path) -> bool:
    """Whether an output of this name holds JSON lines."""
    return path.suffix.lower() == SUFFIX


def errors_path(path: Path) -> Path:
    """The file of failed OpenAI lines of an output of JSON lines."""
    return path.with_name(f"{path.stem}.errors{path.suffix}")


def line_digest(fingerprint: str, row_index: int) -> str:
    """The digest in the ids of a row's OpenAI line: 12 digits of the job's fingerprint, then the row's index."""
    return f"{fingerprint[:_JOB_DIGITS]}{row_index:012x}"


def written_by(path: Path, fingerprint: str) -> bool | None:
    """Whether an output of OpenAI lines is of the job; None if it has no such line, so that no line names its job."""
    for file in (path, errors_path(path)):
        with suppress(OSError), file.open("rb") as stream:
            for line in stream:
                job = _job_of(line)
                if job is not None:
                    return job == fingerprint[:_JOB_DIGITS]
    return None


def _job_of(line: bytes) -> str | None:
    """The job that an OpenAI line names; None for other lines."""
    with suppress(ValueError):
        value = orjson.loads(line)
        found = value.get("id") if isinstance(value, dict) and "custom_id" in value else None
        if isinstance(found, str) and found.startswith("batch_req_"):
            return found.removeprefix("batch_req_")[:_JOB_DIGITS]
    return None
