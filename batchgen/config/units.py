"""Parsers of option values: sizes, durations, thresholds, shards and lists.

A parser raises `ValueError` with a message that follows the option's name, such as "must be a number, got 'x'".
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

STDIN = "-"
"""Name of a standard stream in place of a file: input for inputs, output for reports and events."""

NAME_BYTES = 255
"""Longest name in a folder that file systems take."""
SUFFIX_BYTES = 25
"""Bytes that the names of work folders, hidden states, errors and temporary files add to that of an output."""
_PATH_BYTES = 4095

_SIZE_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_SHARE = rf"{_NUMBER}(?:e-[0-9]+)?"  # including the exponent that Python prints for small floats
_SIZE = re.compile(rf"({_NUMBER})\s*([A-Za-z]*)", re.ASCII)
_TIME_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_TIME_PARTS = re.compile(
    rf"(?:(?P<d>{_NUMBER})d)?(?:(?P<h>{_NUMBER})h)?(?:(?P<m>{_NUMBER})m)?(?:(?P<s>{_NUMBER})s)?", re.ASCII
)
_MAX_DAYS = 36500
"""A hundred years, which clocks and locks can represent."""
_SLURM_DAYS = re.compile(r"([0-9]+)-([0-9]+)(?::([0-9]+))?(?::([0-9]+))?", re.ASCII)
_CLOCK = re.compile(r"(?:([0-9]+):)?([0-9]+):([0-9]+)", re.ASCII)
_SHARD = re.compile(r"([0-9]+)/([0-9]+)", re.ASCII)
_INT = re.compile(r"([+-]?[0-9]+(?:_[0-9]+)*)([kmgKMG]?)", re.ASCII)
_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
"""Multiples of a whole number, as vLLM's options have them."""
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://", re.ASCII)
"""Begin of a URL."""
_MIN_MEMORY = 2**20
_SHOWN = 40
"""Characters of a long path in a message."""
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


class TotalShare(float):
    """Share of a device's memory that may be in use in all: by weights, steps, keys and values, and other programs."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """Most row errors of a run: a count, or a share of its rows in [0, 1]; with neither, fewer than all rows."""

    count: int | None = None
    share: float | None = None

    def exceeded(self, errors: int, rows: int) -> bool:
        """Whether `errors` of `rows` rows are too many; `rows` is the number of rows of the whole job."""
        if self.count is not None:
            return errors > self.count
        if self.share is not None:
            return errors > self.share * rows
        return 0 < rows <= errors

    def __str__(self) -> str:
        if self.count is not None:
            return str(self.count)
        return "fewer than all rows" if self.share is None else f"{self.share * 100:.12g}%"


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` (from 0) of `count` parts of a job."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_int(text: str) -> int:
    """Parse a decimal integer; underscores between digits are allowed, and `4k` is 4,000, `4K` is 4,096."""
    match = _INT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"must be a whole number, got {text!r}")
    return int(match[1]) * _THOUSANDS[match[2]]


def parse_float(text: str) -> float:
    """Parse a finite decimal number."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"must be a number, got {text!r}") from None
    if not math.isfinite(value):
        raise ValueError(f"must be a finite number, got {text!r}")
    return value


def parse_bool(text: str) -> bool:
    """Parse true/false, yes/no, on/off or 1/0."""
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(f"must be true or false, got {text!r}")
    return word in _TRUE


def parse_size(text: str) -> int:
    """Parse a size in bytes. KB, MB, GB, TB are decimal, KiB, MiB, GiB, TiB binary; fractions of a byte are dropped."""
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].upper() if match else "?"
    if match is None or unit not in _SIZE_UNITS or (unit in ("", "B") and "." in match[1]):
        raise ValueError(f"must be a size such as 4096, 512MB or 1.5GiB, got {text!r}")
    whole, _, fraction = match[1].partition(".")
    return int(whole + fraction) * _SIZE_UNITS[unit] // int(10 ** len(fraction))


def parse_total_share(text: str) -> TotalShare:
    """Parse a share of the device's memory in (0, 1]: `0.85` or `85%`."""
    number = re.fullmatch(rf"({_SHARE})\s*(%?)", text.strip())
    share = float(number[1]) / (100 if number[2] else 1) if number else math.nan
    if not 0 < share <= 1:
        raise ValueError(f"must be a share above 0 and up to 1 (0.85, 85%), got {text!r}")
    return TotalShare(share)


def parse_memory(text: str) -> int | float:
    """Parse a size in bytes (int), or a share of the device's memory in (0, 1] (float): `0.85` or `85%`."""
    stripped = text.strip()
    if stripped.endswith("%") or (re.fullmatch(_SHARE, stripped) and not stripped.isdecimal()):
        return float(parse_total_share(text))
    size = parse_size(stripped)
    if size < _MIN_MEMORY:
        raise ValueError(f"must be at least 1MiB, or a share such as 0.85 or 85%, got {text!r}")
    return size


def parse_duration(text: str) -> float:
    """Parse seconds: `90`, `90s`, `30m`, `2h`, `1h30m`, `MM:SS`, `HH:MM:SS`, or Slurm's `D-HH[:MM[:SS]]`."""
    try:
        seconds = _seconds(text)
    except OverflowError:
        seconds = math.inf
    if seconds > _MAX_DAYS * 86400:
        raise ValueError(f"must be at most {_MAX_DAYS}d, got {text!r}")
    return seconds


def parse_clock(text: str) -> str:
    """Parse a date or a time in ISO 8601: `2026-01-31`, `2026-01-31T12:00:00`, `2026-01-31 12:00:00+01:00`."""
    try:
        return datetime.fromisoformat(text.strip()).isoformat()
    except ValueError:
        raise ValueError(f"must be a date or a time such as 2026-01-31T12:00:00, got {text!r}") from None


def _seconds(text: str) -> float:
    stripped = text.strip()
    if re.fullmatch(_NUMBER, stripped):
        return float(stripped)
    if days := _SLURM_DAYS.fullmatch(stripped):
        d, h, m, s = (int(part or 0) for part in days.groups())
        return float(d * 86400 + h * 3600 + m * 60 + s)
    if clock := _CLOCK.fullmatch(stripped):
        h, m, s = (int(part or 0) for part in clock.groups())
        return float(h * 3600 + m * 60 + s)
    parts = _TIME_PARTS.fullmatch(stripped)
    if not stripped or parts is None:
        raise ValueError(f"must be a duration such as 90, 90s, 30m, 2h or 1-02:00:00, got {text!r}")
    return sum(float(parts[unit] or 0) * seconds for unit, seconds in _TIME_UNITS.items())


def parse_threshold(text: str) -> Threshold:
    """Parse a count `N`, or a share `P%` with P in [0, 100]."""
    stripped = text.strip()
    if stripped.endswith("%") and re.fullmatch(_NUMBER, stripped[:-1]) and float(stripped[:-1]) <= 100:
        return Threshold(share=float(stripped[:-1]) / 100)
    if re.fullmatch("[0-9]+", stripped):
        return Threshold(count=int(stripped))
    raise ValueError(f"must be a count such as 10 or a share such as 5%, got {text!r}")


def parse_shard(text: str, env: Mapping[str, str]) -> Shard:
    """Parse `I/N` with I from 0 to N-1, or `auto`, which reads Slurm's array variables in `env`."""
    if text.strip() == "auto":
        return _slurm_shard(env)
    match = _SHARD.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"must be I/N such as 0/16, or auto, got {text!r}")
    index, count = int(match[1]), int(match[2])
    if index >= count:
        raise ValueError(f"must be I/N with I from 0 to N-1 (shards count from 0), got {text!r}")
    return Shard(index, count)


def _slurm_shard(env: Mapping[str, str]) -> Shard:
    if "SLURM_ARRAY_TASK_ID" not in env or "SLURM_ARRAY_TASK_COUNT" not in env:
        raise ValueError(
            "auto needs SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT (a Slurm array job); elsewhere give I/N"
        )
    numbers = {
        name: int(value)
        for name, value in env.items()
        if name.startswith("SLURM_ARRAY_TASK_") and re.fullmatch("[0-9]+", value)
    }
    task, count = numbers.get("SLURM_ARRAY_TASK_ID", -1), numbers.get("SLURM_ARRAY_TASK_COUNT", 0)
    least, step = numbers.get("SLURM_ARRAY_TASK_MIN", 0), numbers.get("SLURM_ARRAY_TASK_STEP", 1)
    most = numbers.get("SLURM_ARRAY_TASK_MAX", least + step * (count - 1))
    if least > 1:  # tasks of an array that are submitted again alone would run the rows of the whole array
        raise ValueError(
            f"auto needs an array that begins at 0 or 1 (--array=0-15), this one begins at {least}; give I/N, the part "
            "and the number of parts of the whole array"
        )
    gap, uneven = divmod(most - least, max(count - 1, 1))
    gap = max(gap, 1)
    index, between = divmod(task - least, gap)
    # Slurm gives a list of ids the step 1, also where they are evenly spaced.
    if uneven or between or step not in (1, gap) or not 0 <= index < count:
        raise ValueError(
            f"auto cannot derive the part of task {task}: the array's {count} ids from {least} to {most} must be "
            "evenly spaced (--array=0-15); or give I/N, the part and the number of parts"
        )
    return Shard(index, count)


def parse_name_path(text: str) -> tuple[str, str]:
    """Parse `NAME=PATH` into (name, path)."""
    name, equals, path = text.partition("=")
    if not equals or not name.strip() or not path.strip():
        raise ValueError(f"must be NAME=PATH, got {text!r}")
    return name.strip(), check_local(path.strip())


def check_local(path: str) -> str:
    """Return the path of a local file, with `~/` replaced by the user's home as a shell does.

    Refused are paths that no file can have, and those with a scheme (`s3://`), which would name a folder.
    """
    if "\0" in path:
        raise ValueError(f"{path!r} contains a NUL character, which no file name has")
    longest = max(map(len, os.fsencode(path).split(b"/")))
    if longest > NAME_BYTES or len(os.fsencode(path)) > _PATH_BYTES:
        size, most = (longest, NAME_BYTES) if longest > NAME_BYTES else (len(os.fsencode(path)), _PATH_BYTES)
        raise ValueError(f"{path[:_SHOWN]!r}... has a name of {size} bytes, and a file has at most {most}; shorten it")
    scheme = SCHEME.match(path)
    if scheme is None:
        return os.path.expanduser(path) if path.partition("/")[0] == "~" else path  # noqa: PTH111 - keeps "./"
    if scheme[1].lower() == "file":
        raise ValueError(f"{path!r} has the scheme file://; write the path without it")
    remedy = "copy the file, or mount the storage"
    raise ValueError(f"{path!r} is not a local path ({scheme[1]}), and must be one here: {remedy}")


def check_file_to_write(path: str) -> str:
    """Return a path, as `check_local`, of a file whose name leaves room for those of temporary files."""
    local = check_local(path)
    if local.endswith("/"):
        raise ValueError(f"{path!r} is the name of a folder; name a file in it, such as {path}results.parquet")
    size = len(os.fsencode(local.rpartition("/")[2]))
    if size > NAME_BYTES - SUFFIX_BYTES:
        raise ValueError(
            f"{path[:_SHOWN]!r}... has a name of {size} bytes; names of files to write have at most "
            f"{NAME_BYTES - SUFFIX_BYTES}, as names of temporary files are made of them"
        )
    return local


def parse_name_function(text: str) -> tuple[str, str]:
    """Parse `NAME=module:function`, both of which may contain dots, into (name, "module:function")."""
    name, equals, target = (part.strip() for part in text.partition("="))
    module, colon, function = target.partition(":")
    if not (equals and name and colon and all(part.isidentifier() for part in (module + "." + function).split("."))):
        raise ValueError(f"must be NAME=module:function, got {text!r}")
    return name, target


def parse_columns(text: str) -> tuple[str, ...]:
    """Parse comma-separated unique names."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError(f"must be names separated by commas, got {text!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"names a column twice: {text!r}")
    return names


def parse_token_ids(text: str) -> tuple[int, ...]:
    """Parse comma-separated token ids."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]+", part, re.ASCII) for part in parts):
        raise ValueError(f"must be token ids separated by commas, such as 2 or 2,13, got {text!r}")
    return tuple(int(part) for part in parts)


def parse_logit_bias(text: str) -> tuple[tuple[int, float], ...]:
    """Parse comma-separated `ID=X` into (token id, bias) sorted by id; ids must be unique."""
    biases: dict[int, float] = {}
    for part in text.split(","):
        token, equals, bias = (piece.strip() for piece in part.partition("="))
        if not equals or not re.fullmatch("[0-9]+", token, re.ASCII):
            raise ValueError(f"must be ID=X separated by commas, such as 13=-100 or 13=-100,20=2.5, got {text!r}")
        if int(token) in biases:
            raise ValueError(f"names token {int(token)} twice")
        biases[int(token)] = parse_float(bias)
    return tuple(sorted(biases.items()))
