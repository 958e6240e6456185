"""The correctness gate: no figure is printed of an engine whose greedy ids are not the reference's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from batchgen.errors import BatchgenError
from batchgen.job.bench.process import BenchEngine
from batchgen.job.bench.workloads import BenchRow

__all__ = [
    "FULL_EQUALITY",
    "GateRed",
    "agreement",
    "check_exact",
    "check_lengths",
    "check_peer",
    "check_share",
    "gate_rows",
]

_ROWS = 6
_PEER_ROWS = 20
"""With peers, of whom it is a share that must be equal."""
_NEW_TOKENS = 8
FULL_EQUALITY = 0.95
"""Share of rows whose float32 ids must be the reference's for a peer's figures to stand unmarked."""
LEAST_EQUALITY = 0.7
"""Below this share a peer computes something else, and has no figures."""
LEAST_AGREEMENT = 0.25
"""Share of first tokens that a low-precision engine must have in common with float32. Of random models rounding turns
many close calls, and wrong attention leaves about none of thousands of ids right."""


class GateRed(BatchgenError):
    """An engine generates something else than the reference."""


def gate_rows(rows: Sequence[BenchRow], *, peers: bool = False, new_tokens: int = _NEW_TOKENS) -> list[BenchRow]:
    """A few rows from all over the workload, cut to `new_tokens`; more of them for `peers`."""
    count = min(_PEER_ROWS if peers else _ROWS, len(rows))
    picked = [rows[i * len(rows) // count] for i in range(count)]
    return [replace(row, max_new=min(row.max_new, new_tokens), samples=1) for row in picked]


def check_exact(
    workload: str, engine: BenchEngine, setting: Mapping[str, int], rows: Sequence[BenchRow], reference: list[list[int]]
) -> None:
    """Hold an engine's float32 ids against the reference's.

    Raises:
        GateRed: where they first differ.
    """
    outputs = engine.generate(rows, setting).outputs
    for number, (row, ids, expected) in enumerate(zip(rows, outputs, reference, strict=True)):
        if ids != expected:
            at = next(
                (i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), min(len(ids), len(expected))
            )
            raise GateRed(
                f"correctness gate red, no figures: {engine.name} on {workload} in float32, checked row {number} "
                f"({len(row.ids)} prompt tokens): output position {at} is {_at(ids, at)}, the reference has "
                f"{_at(expected, at)}"
            )


def check_peer(
    workload: str, engine: BenchEngine, setting: Mapping[str, int], rows: Sequence[BenchRow], reference: list[list[int]]
) -> float:
    """Share of rows whose float32 ids a peer has as the reference has them.

    Other orders of addition turn a close call now and then, and all of a row's later ids with it: a peer need not be
    equal everywhere, as batchgen must.

    Raises:
        GateRed: it is below `LEAST_EQUALITY`.
    """
    outputs = engine.generate(rows, setting).outputs
    share = sum(list(a) == list(b) for a, b in zip(outputs, reference, strict=True)) / len(reference)
    if share < LEAST_EQUALITY:
        raise GateRed(
            f"correctness gate red, no figures: {engine.name} on {workload} has the reference's ids in {share:.0%} of "
            f"rows in float32, at least {LEAST_EQUALITY:.0%} are needed"
        )
    return share


def agreement(outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """Share of rows whose first token is the reference's: later ones follow from it, right or wrong."""
    same = sum(list(a[:1]) == list(b[:1]) for a, b in zip(outputs, reference, strict=True))
    return same / len(reference)


def check_share(
    workload: str, engine: BenchEngine, setting: Mapping[str, int], rows: Sequence[BenchRow], reference: list[list[int]]
) -> float:
    """The agreement of an engine in the measured dtype with float32.

    Raises:
        GateRed: it is below `LEAST_AGREEMENT`, or a row has not its full length.
    """
    outputs = engine.generate(rows, setting).outputs
    check_lengths(workload, engine.name, rows, outputs)
    share = agreement(outputs, reference)
    if share < LEAST_AGREEMENT:
        raise GateRed(
            f"correctness gate red, no figures: {engine.name} on {workload} in {engine.dtype} has {share:.0%} of the "
            f"first tokens of float32, at least {LEAST_AGREEMENT:.0%} are needed"
        )
    return share


def check_lengths(workload: str, engine: str, rows: Sequence[BenchRow], outputs: Sequence[Sequence[int]]) -> None:
    """Hold an engine to as many tokens as it was asked for: a rate of fewer would be one of less work.

    Rows that ask for fields are not held to it: a constraint may end one early.

    Raises:
        GateRed: a row has another number of them.
    """
    for number, (row, ids) in enumerate(zip(rows, outputs, strict=True)):
        if not row.fields and len(ids) != row.max_new * row.samples:
            raise GateRed(
                f"correctness gate red, no figures: {engine} on {workload}, checked row {number} has "
                f"{len(ids)} new tokens, asked for {row.max_new * row.samples}"
            )


def _at(ids: Sequence[int], position: int) -> str:
    return str(ids[position]) if position < len(ids) else "missing"
