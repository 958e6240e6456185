"""Workloads as data: the shape of the prompts' tree and the output lengths. The ids are drawn from a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np

from batchgen.errors import UsageError

__all__ = ["AdapterSet", "BenchRow", "Level", "RowsAt", "Workload", "plain"]

RowsAt = Literal["leaves", "nodes"]
"""Where the tree has rows: at its ends, or at every node, as the turns of a conversation are."""

_FIRST_ID: Final = 3
"""Ids below are special in many vocabularies."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the tree: every node above has `children`, each of `tokens` (least, most) ids of its own."""

    children: int
    tokens: tuple[int, int]


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """Random LoRA adapters, which rows take in turn."""

    count: int
    rank: int = 8

    def name(self, number: int) -> str:
        """What rows call adapter `number` by."""
        return f"rank-{self.rank}-{number}"


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One prompt and how many tokens are generated after it, whatever they are."""

    ids: list[int]
    max_new: int
    samples: int = 1
    """More than one are drawn at temperature 1: greedy ones would be the same text."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What else the row asks for, in batchgen's words. Only engines that say they know these fields get such rows."""


def plain(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows without the fields that make them special."""
    return [replace(row, fields={}) for row in rows]


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows are the leaves, or all nodes, of a tree of random segments.

    Raises:
        UsageError: a number is out of range, naming it.
    """

    name: str
    description: str
    levels: tuple[Level, ...]
    output: tuple[int, int]
    """Least and most tokens generated, uniform."""
    seed: int = 0
    samples: int = 1
    """Generated after each prompt."""
    rows_at: RowsAt = "leaves"
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What rows ask for beside tokens: `BenchRow.fields`."""
    every: int = 1
    """Of how many rows one has `fields`."""
    adapters: AdapterSet | None = None

    def __post_init__(self) -> None:
        if not self.levels:
            raise UsageError(f"workload {self.name}: `levels` is empty; give at least one")
        for number, level in enumerate(self.levels):
            _check_range(level.tokens, f"workload {self.name}: `levels[{number}].tokens`")
            if level.children < 1:
                raise UsageError(f"workload {self.name}: `levels[{number}].children` must be at least 1")
        _check_range(self.output, f"workload {self.name}: `output`")
        for name, value in (("samples", self.samples), ("every", self.every)):
            if value < 1:
                raise UsageError(f"workload {self.name}: `{name}` must be at least 1, got {value}")
        if self.samples > 1 and self.special:
            raise UsageError(
                f"workload {self.name}: `samples` above 1 beside `fields` or `adapters`: what is drawn cannot show "
                "that these change nothing else; keep one of them"
            )
        if self.adapters is not None and min(self.adapters.count, self.adapters.rank) < 1:
            raise UsageError(f"workload {self.name}: `adapters` needs a `count` and a `rank` of at least 1")

    @property
    def special(self) -> bool:
        """Whether rows ask for more than tokens."""
        return bool(self.fields) or self.adapters is not None

    @property
    def longest(self) -> int:
        """Positions of the longest row there can be."""
        return sum(level.tokens[1] for level in self.levels) + self.output[1]

    def rows(self, vocab_size: int) -> list[BenchRow]:
        """The rows, in an order drawn at random: the same for the same definition and vocabulary.

        Raises:
            UsageError: the vocabulary is too small to draw from.
        """
        if vocab_size <= _FIRST_ID:
            raise UsageError(f"workload {self.name} needs a vocabulary of more than {_FIRST_ID} ids, got {vocab_size}")
        rng = np.random.default_rng(self.seed)
        above: list[list[int]] = [[]]
        prompts: list[list[int]] = []
        for number, level in enumerate(self.levels, start=1):
            above = [
                prefix
                + rng.integers(_FIRST_ID, vocab_size, size=int(rng.integers(*level.tokens, endpoint=True))).tolist()
                for prefix in above
                for _ in range(level.children)
            ]
            if self.rows_at == "nodes" or number == len(self.levels):
                prompts += above
        lengths = rng.integers(*self.output, endpoint=True, size=len(prompts)).tolist()
        order = rng.permutation(len(prompts)).tolist()
        return [BenchRow(prompts[i], lengths[i], self.samples, self._fields(at)) for at, i in enumerate(order)]

    def _fields(self, at: int) -> Mapping[str, Any]:
        """Of row `at` in the workload's order."""
        fields = dict(self.fields) if at % self.every == 0 else {}
        return fields if self.adapters is None else fields | {"lora_path": self.adapters.name(at % self.adapters.count)}

    def part(self, factor: float, least_rows: int = 256) -> tuple[Workload, float]:
        """About `factor` of this workload's output, and how much of it that is.

        The last level's children go first, but for `least_rows` samples, which keep a device as busy; then the output.
        """
        rows = self.samples
        for level in self.levels:
            rows *= level.children
        leaves = self.levels[-1].children
        others = rows // leaves
        kept = min(leaves, max(1, round(leaves * factor), -(-least_rows // others)))
        rest = min(1.0, factor * leaves / kept)
        low, high = (max(1, round(tokens * rest)) for tokens in self.output)
        levels = (*self.levels[:-1], replace(self.levels[-1], children=kept))
        made = kept / leaves * (low + high) / sum(self.output)
        return replace(self, levels=levels, output=(low, high)), made


def _check_range(pair: tuple[int, int], name: str) -> None:
    if not 1 <= pair[0] <= pair[1]:
        raise UsageError(f"{name} must be [least, most] with 1 <= least <= most, got {list(pair)}")
