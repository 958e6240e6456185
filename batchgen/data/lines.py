"""Outputs of JSON lines, `-o x.jsonl`: their files, and which job wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from batchgen.data.files import exists, open_named
from batchgen.request.foreign_text import ForeignTextError, read_json

SUFFIX = ".jsonl"
JOB_KEY: Final = "batchgen"
"""Key of a line that names its job, see `job_mark`."""
_JOB_DIGITS = 12
_LOOKED_AT: Final = 1000
"""Lines of a file by which it is found to be another program's."""


def is_lines(path: Path) -> bool:
    """Whether an output of this name holds JSON lines."""
    return path.suffix.lower() == SUFFIX


def errors_path(path: Path) -> Path:
    """The file of failed OpenAI lines of an output of JSON lines."""
    return path.with_name(f"{path.stem}.errors{path.suffix}")


def line_digest(fingerprint: str, row_index: int) -> str:
    """The digest in the ids of a row's OpenAI line: 12 digits of the job's fingerprint, then the row's index."""
    return f"{fingerprint[:_JOB_DIGITS]}{row_index:012x}"


def job_mark(run: Mapping[str, Any], *, first: bool = False) -> dict[str, Any]:
    """The value of `JOB_KEY`: 12 digits of the job's fingerprint and, if there are any, the number of hidden states.

    Args:
        run: the run record of the results' footer.
        first: whether the line is of the first row, which also names the kernels and the format of thoughts, and with
            `--columns` has the totals of the job.
    """
    names = ("states", "kernels", "reasoning", "tool_parser", "totals") if first else ("states",)
    more = {name: run[name] for name in names if run.get(name)}
    return {"job": run["fingerprint"][:_JOB_DIGITS], **more}


def lines_of_job(path: Path, fingerprint: str) -> Mapping[str, Any] | None:
    """The mark of an output of JSON lines that the job wrote; None if it is not the job's, or holds no line."""
    mark = first_mark(path) if exists(path) else None
    return mark if mark is not None and mark["job"] == fingerprint[:_JOB_DIGITS] else None


def line_files(path: Path) -> list[Path]:
    """The files of an output of JSON lines: its own, and that of its errors if batchgen wrote one."""
    errors = errors_path(path)
    return [path, errors] if exists(errors) and has_only_marks(errors) else [path]


def has_only_marks(file: Path) -> bool:
    """Whether each line of a file is batchgen's, so that nothing of the user's is lost with it."""
    with open_named(file) as stream:
        return all(line_mark(line) is not None for line in stream)


class OddLine(NamedTuple):
    """A line that does not belong in a file of batchgen's lines."""

    number: int
    """Of the line, from 1."""
    is_whole: bool
    """Whether it is a line of another job."""


def odd_line(file: Path) -> OddLine | None:
    """The first line that is not whole, or of another job than the first, in a file of batchgen's lines.

    None if there is none, and for other files.
    """
    jobs: dict[str, int] = {}
    bad = None
    with open_named(file) as stream:
        for number, line in enumerate(stream, 1):
            mark = line_mark(line) if line.endswith(b"\n") else None
            if mark is not None:
                jobs.setdefault(mark["job"], number)
            elif bad is None:
                bad = number
            if not jobs and number == _LOOKED_AT:
                return None
    other = sorted(jobs.values())[1:2]  # the first line of another job than the first
    odd_lines = [*([OddLine(bad, False)] if jobs and bad else []), *(OddLine(number, True) for number in other)]
    return min(odd_lines, default=None)


def first_mark(path: Path) -> Mapping[str, Any] | None:
    """The mark of the first line. If all lines of a job are errors, it is in their file."""
    for file in (path, errors_path(path)):
        with suppress(OSError), open_named(file) as stream:
            if line := stream.readline():
                return line_mark(line)
    return None


def line_mark(line: bytes) -> Mapping[str, Any] | None:
    """The mark of a line; that of an OpenAI line follows from its id. None for other lines."""
    with suppress(ForeignTextError):
        value = read_json(line)
        if not isinstance(value, dict):
            return None
        mark, line_id = value.get(JOB_KEY), value.get("id")
        if isinstance(mark, dict) and isinstance(mark.get("job"), str):
            return mark
        if "custom_id" in value and isinstance(line_id, str) and line_id.startswith("batch_req_"):
            return {"job": line_id.removeprefix("batch_req_")[:_JOB_DIGITS]}
    return None
