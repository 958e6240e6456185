"""What a job writes beside its results, events and a report: checked before anything is computed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from batchgen.config import STDIN, RunConfig
from batchgen.data.inputs import named_files
from batchgen.data.own import own_files
from batchgen.errors import OutputError, UsageError

__all__ = ["check_written"]


def check_written(config: RunConfig) -> None:
    """Hold `--events` and `--report` to files that are nothing else of the job, and the report to one that can be made.

    Pipes and devices take whatever comes.

    Raises:
        UsageError: one is an input, a file of the output, or the other one.
        OutputError: the report cannot be written where it is named.
    """
    own = own_files(config)
    taken: dict[str, str] = {}
    for option, target in (("--events", config.events), ("--report", config.report)):
        if target in (None, STDIN) or _is_special(Path(str(target))):
            continue
        place = os.path.realpath(str(target))
        if own.are_results(place):
            raise UsageError(f"`{option}` {target} is a file of the job's own output; give another name")
        if place in taken:
            raise UsageError(f"`{option}` {target} is the file of `{taken[place]}` too; give another name")
        if _is_input(Path(str(target)), config, own):
            raise UsageError(f"`{option}` {target} is an input of the job; give another name, that no pattern matches")
        taken[place] = option
    if config.report not in (None, STDIN):
        _check_writable(Path(str(config.report)))


def _status(path: Path) -> os.stat_result | None:
    with suppress(OSError):
        return path.stat()
    return None


def _is_special(path: Path) -> bool:
    status = _status(path)
    return status is not None and not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode)


def _is_input(path: Path, config: RunConfig, own: Container[str]) -> bool:
    """Whether the job reads the very file, under this name, another, or as standard input."""
    status = _status(path)
    if status is None:
        return False
    for name in named_files(config.inputs, own):
        with suppress(OSError):
            if os.path.samestat(status, os.fstat(0) if name == STDIN else Path(name).stat()):
                return True
    return False


def _check_writable(path: Path) -> None:
    """As far as can be told without touching it."""
    status = _status(path)
    number = 0
    if status is not None and stat.S_ISDIR(status.st_mode):
        number = errno.EISDIR
    elif status is None and not os.access(path.parent, os.F_OK):
        number = errno.ENOENT
    elif not os.access(path if status is not None else path.parent, os.W_OK):
        number = errno.EACCES
    if number:
        raise OutputError(f"cannot write the report {path}: {os.strerror(number)}")
