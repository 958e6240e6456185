"""The timeline of a job: what each of its runs did over time, in a bounded number of samples.

Each part holds that of its run so far, so a run that is killed leaves its timeline to the output.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, Final

from batchgen.data.results_file import open_parquet
from batchgen.data.schema import RUN_KEY
from batchgen.request.foreign_text import ForeignTextError, Kinds, read_json, typed

TIMELINE_KEY: Final = b"batchgen.timeline"
"""Footer key of a part: the record of its run, as `Timeline.record` gives it."""
_MOST: Final = 256
"""Most samples of a run: an even number."""
_MOST_OF_JOB: Final = 512
_FIRST_SECONDS: Final = 1 / 16
"""Length of a sample in a short run."""
_SERIES: Final = ("output_tokens", "prompt_tokens", "running_seconds", "kv_use_seconds")
_NUMBER: Final = (int, float)
_KINDS: Final[Kinds] = {
    **dict.fromkeys(("began", "seconds", "end"), _NUMBER),
    **dict.fromkeys((*_SERIES, "slowest"), list),
}


class Timeline:
    """Records what a run does: call `add` between two steps."""

    def __init__(
        self, slowest: Callable[[], Sequence[tuple[float, int]]] = tuple, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`slowest`: gives the seconds of the samples that took longest so far, and their rows."""
        self._slowest, self._clock, self._lock = slowest, clock, threading.Lock()
        self._began, self._seconds, self._end = 0.0, _FIRST_SECONDS, 0.0
        self._series: dict[str, list[float]] = {name: [] for name in _SERIES}
        self._before = (0, 0)
        self._start: float | None = None

    def add(self, output_tokens: int, prompt_tokens: int, running: int, kv_use: float, *, ends: bool = False) -> None:
        """What was counted until now, and what runs now; cheap if little time has passed, unless the run `ends`."""
        now = self._clock()
        if self._start is None:
            self._start, self._began = now, time.time()
        last, end = self._end, now - self._start
        if end <= last or (end - last < self._seconds / 4 and not ends):
            return
        counts = (output_tokens, prompt_tokens)
        gained = [max(0, new - old) / (end - last) for new, old in zip(counts, self._before, strict=True)]
        with self._lock:
            while end >= _MOST * self._seconds:
                self._series, self._seconds = _in_pairs(self._series), 2 * self._seconds
            first = int(last / self._seconds)
            for at in range(first, max(first, math.ceil(end / self._seconds) - 1) + 1):
                span = min(end, (at + 1) * self._seconds) - max(last, at * self._seconds)
                for values, rate in zip(self._series.values(), (*gained, running, kv_use), strict=True):
                    values += [0.0] * (at + 1 - len(values))
                    values[at] += rate * span
            self._end, self._before = end, counts

    def record(self) -> dict[str, Any] | None:
        """The record so far, JSON; None before the first sample. For any thread.

        It has the times `began` (since 1970) and `end`, the length of each sample but the last one in `seconds`, for
        each sample the tokens generated and computed in it, and its samples in the batch and share of the KV pages in
        use, both times seconds. `slowest` has rows, and the seconds that a sample of them took.
        """
        with self._lock:
            series = {name: [round(value, 3) for value in values] for name, values in self._series.items()}
            began, end = round(self._began, 3), round(self._end, 6)
            slowest = [[row, round(seconds, 3)] for seconds, row in sorted(self._slowest(), reverse=True)]
            return {"began": began, "seconds": self._seconds, "end": end, **series, "slowest": slowest} if end else None

    def footer(self) -> dict[bytes, bytes]:
        """The footer entry of a part."""
        record = self.record()
        return {} if record is None else {TIMELINE_KEY: json.dumps(record).encode()}


def _in_pairs(series: dict[str, list[float]]) -> dict[str, list[float]]:
    """Samples of twice the length."""
    return {name: [sum(values[at : at + 2]) for at in range(0, len(values), 2)] for name, values in series.items()}


def joined(records: Iterable[Any]) -> list[dict[str, Any]]:
    """Records of the runs of a job, or of its shards, in the order of time and in a bounded number of samples.

    Of several records of one run the last one counts; what is not a record is left out.
    """
    found: dict[float, dict[str, Any]] = {}
    for record in records:
        with suppress(ForeignTextError, ValueError, TypeError):
            found[record["began"]] = _checked(record)
    runs = [dict(run) for _, run in sorted(found.items())[:_MOST_OF_JOB]]
    while sum(len(run["output_tokens"]) for run in runs) > _MOST_OF_JOB:
        longest = max(runs, key=lambda run: len(run["output_tokens"]))
        longest |= _in_pairs({name: longest[name] for name in _SERIES}) | {"seconds": 2 * longest["seconds"]}
    return runs


def _checked(record: Any) -> dict[str, Any]:
    run = typed(record, _KINDS)
    lengths = {len(run[name]) for name in _SERIES}
    numbers = [run["began"], run["seconds"], run["end"], *chain(*(run[name] for name in _SERIES), *run["slowest"])]
    if not all(type(number) in _NUMBER and math.isfinite(number) for number in numbers):
        raise ValueError("it has values that are not numbers")
    if len(lengths) > 1 or max(lengths) > _MOST_OF_JOB or any(len(pair) != 2 for pair in run["slowest"]):
        raise ValueError("its series differ in length, or are too long")
    if not 0 < run["end"] <= run["seconds"] * (max(lengths) + 1):
        raise ValueError("its times do not fit")
    return run


def timeline_of(files: Iterable[Path]) -> list[dict[str, Any]]:
    """The records that parts, or finished outputs, hold, as `joined`."""

    def records() -> Iterator[Any]:
        for file in files:
            with suppress(OSError, KeyError, TypeError, ForeignTextError), open_parquet(file) as table:
                if TIMELINE_KEY in table.about:
                    yield read_json(table.about[TIMELINE_KEY])
                else:
                    yield from read_json(table.about[RUN_KEY], unwritable=True)["timeline"]

    return joined(records())
