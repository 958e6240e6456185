"""Stored results: figures read back from the JSON lines of `batchgen bench`, and the peers that a run skipped."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from batchgen.bench.figures import Figure
from batchgen.bench.gate import GateFailed
from batchgen.bench.process import OURS, OWN_ENGINES, EngineExited, EngineFailed
from batchgen.errors import UsageError

_REQUIRED: Final = ("workload", "engine", "metric", "value")
"""Keys that make a JSON line a figure."""
_LEFT_OUT: Final = "left_out"
"""Metric of the JSON line of a skipped peer, which has a reason instead of a value."""
_SPREAD: Final = ("min", "max")
_TYPES: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    "str": ((str,), "a text"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "Mapping": ((dict,), "an object"),
}
"""Start of a field's type annotation -> types of its value, and their name in error messages."""


@dataclass(frozen=True, slots=True)
class SkippedPeer:
    """A peer without figures, and the reason."""

    model: str
    engine: str
    workload: str | None
    """None: all workloads."""
    reason: str

    def line(self) -> str:
        """The line shown to the user."""
        return f"left out: {self.engine}{f' of {self.workload}' if self.workload else ''}: {self.reason}"

    def to_json(self) -> str:
        """The JSON line, printed among those of the figures."""
        values = {"workload": self.workload, "engine": self.engine, "model": self.model}
        return json.dumps({**values, "metric": _LEFT_OUT, "value": None, "reason": self.reason}, ensure_ascii=False)


@dataclass(slots=True)
class SkippedPeers:
    """The peers that a run skips; each is reported on the console once, when it is skipped."""

    console: Console
    model: str = ""
    _peers: dict[tuple[str, str | None], SkippedPeer] = field(default_factory=dict)
    """(engine, workload, or None for all of them) -> its record."""

    def has(self, engine: str, workload: str | None = None) -> bool:
        """Whether a peer is skipped on a workload, or, without one, in the whole run."""
        return (engine, None) in self._peers or (engine, workload) in self._peers

    @contextmanager
    def on_failure(self, engine: str, workload: str | None = None) -> Iterator[None]:
        """Skip a peer on a workload (None: on all) if it fails in this block; the failure ends the block.

        Raises:
            BatchgenError: the engine that failed is batchgen itself.
        """
        try:
            yield
        except (EngineFailed, GateFailed) as error:
            if engine in OWN_ENGINES:
                raise
            self.skip(engine, None if isinstance(error, EngineExited) else workload, " ".join(str(error).split()))

    def skip(self, engine: str, workload: str | None, reason: str) -> None:
        """Skip a peer on a workload (None: on all) and report the reason; only the first reason is kept."""
        if (engine, workload) not in self._peers:
            peer = self._peers[engine, workload] = SkippedPeer(self.model, engine, workload, reason)
            print_notice(peer.line(), self.console)

    def records(self, workloads: Sequence[str], measured: Collection[tuple[str, str]]) -> Iterator[SkippedPeer]:
        """A record of each skipped peer; `measured` is (engine, workload) of every figure.

        A peer that is skipped on all workloads but has figures of some gets a record of each other workload.
        """
        for (engine, place), peer in self._peers.items():
            if place is None and any((engine, name) in measured for name in workloads):
                yield from (replace(peer, workload=name) for name in workloads if (engine, name) not in measured)
            else:
                yield peer

    def lines(self) -> list[str]:
        """One line for each skipped peer."""
        return [peer.line() for peer in self._peers.values()]

    def check(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Check that a peer is left of the (engine, workload) that the run is to measure, if there are peers.

        Raises:
            EngineFailed: all of them are skipped on every workload.
        """
        peers = [pair for pair in pairs if pair[0] != OURS]
        if peers and all(self.has(*pair) for pair in peers):
            raise EngineFailed("no peer could be measured:\n" + "\n".join(self.lines()))


def print_notice(text: str, console: Console) -> None:
    """Print a line that is not about a figure."""
    console.print(text, style="yellow", soft_wrap=True, markup=False)


@dataclass(frozen=True, slots=True)
class StoredFigures:
    """Contents of a file of figures."""

    figures: list[Figure]
    """The last figure of each engine, workload, model, dtype, device, thread count and metric."""
    others: list[Mapping[str, Any]] = field(default_factory=list)
    """JSON objects of workloads on which no engines are compared."""
    skipped: list[SkippedPeer] = field(default_factory=list)
    """Skipped peers that have no figures in this file."""


def read_figures(path: Path, flag: str = "--from") -> StoredFigures:
    """Read a file of JSON lines, as `batchgen bench` prints them. Error messages begin with `flag`.

    Raises:
        UsageError: the file cannot be read, or as `parse_figures`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{flag}: {path} is not UTF-8 text") from None
    return parse_figures(text, f"{flag}: {path}")


def parse_figures(text: str, where: str) -> StoredFigures:
    """Figures of JSON lines. Error messages begin with `where`.

    Raises:
        UsageError: a line is not a JSON object, a figure's value has the wrong type, or there is no figure.
    """
    figures: dict[tuple[Any, ...], Figure] = {}
    skipped: dict[tuple[Any, ...], SkippedPeer] = {}
    others: list[Mapping[str, Any]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        here = f"{where}, line {number}"
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"{here} is not JSON ({error.msg}): it must be what `batchgen bench` prints") from None
        if not isinstance(values, dict):
            raise UsageError(f"{here} is not a JSON object")
        if values.get("metric") == _LEFT_OUT:
            peer = _skipped_peer(values, here)
            skipped[peer.model, peer.engine, peer.workload] = peer
        elif all(name in values for name in _REQUIRED):
            f = _figure(values, here)
            key = (f.model, f.workload, f.engine, f.dtype, f.device, f.threads, f.metric)
            figures.pop(key, None)
            figures[key] = f
        else:
            others.append(values)
    if not figures and not others:
        raise UsageError(f"{where} contains no figures: it must be what `batchgen bench` prints")
    measured = {(f.model, f.engine, name) for f in figures.values() for name in (f.workload, None)}
    return StoredFigures(list(figures.values()), others, [one for key, one in skipped.items() if key not in measured])


def _skipped_peer(values: Mapping[str, Any], where: str) -> SkippedPeer:
    model, engine, workload = (values.get(name) for name in ("model", "engine", "workload"))
    if not isinstance(engine, str) or not isinstance(workload, str | None):
        raise UsageError(f"{where}: `left_out` needs an `engine`, and a `workload` or null")
    return SkippedPeer(str(model or ""), engine, workload, str(values.get("reason")))


def _figure(values: Mapping[str, Any], where: str) -> Figure:
    """The figure of a JSON object written by this or another version. Ignores unknown keys."""
    types = {known.name: str(known.type) for known in fields(Figure)}
    found = {name: value for name, value in values.items() if name in types}
    found |= {name: values["value"] for name in _SPREAD if name not in found}
    for name, value in found.items():
        kind, _, optional = types[name].partition(" | ")
        allowed, expected = _TYPES[kind.partition("[")[0]]
        fits = isinstance(value, allowed) and not isinstance(value, bool)
        if isinstance(value, float):
            fits = fits and math.isfinite(value)
        elif fits and kind.startswith("Mapping[str, Mapping"):
            fits = all(isinstance(one, dict) for one in value.values())
        if not fits and not (optional and value is None):
            raise UsageError(f"{where}: `{name}` must be {expected}, got {value!r}")
    for name, numbers in (("ratio", ("median", *_SPREAD)), ("floors", ("share",))):
        for key, one in found.get(name, {}).items():
            if not all(isinstance(one.get(number), int | float) and one[number] > 0 for number in numbers):
                raise UsageError(f"{where}: `{name}` of {key} must have {', '.join(numbers)} above 0, got {one!r}")
    return Figure(**found)
