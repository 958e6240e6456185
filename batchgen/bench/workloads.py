"""Workload definitions: a tree of random prompts and a range of output lengths, generated from a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal

import numpy as np

from batchgen.errors import UsageError

RowsAt = Literal["leaves", "nodes"]
"""Nodes of the tree that are rows: the leaves, or all, as in the turns of a conversation."""

_FIRST_ID: Final = 3
"""Smallest id of random prompts; many vocabularies have special tokens below it."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the tree: the number of children of every node above, and the (least, most) ids of each child."""

    children: int
    tokens: tuple[int, int]


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """Random LoRA adapters, assigned to the rows in rotation."""

    count: int
    rank: int = 8

    def name(self, number: int) -> str:
        """`lora_path` of adapter `number`."""
        return f"rank-{self.rank}-{number}"


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One prompt and its number of new tokens; generation ignores stops."""

    ids: list[int]
    max_new: int
    samples: int = 1
    """Number of samples; several are generated at temperature 1, because greedy ones would be equal."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of batchgen's input rows. Only engines that support them run such rows."""
    image: str = ""
    """A picture file in base64, whose tokens are among `ids`; empty for none."""
    keys: Sequence[int] = ()
    """Equal where rows have the same token or the same part of the same picture; `ids` if empty."""


def plain(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Copies of the rows without `fields`."""
    return [replace(row, fields={}) for row in rows]


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload whose prompts are the leaves, or all nodes, of a tree of random segments.

    Raises:
        UsageError: a number is out of range; the message names it.
    """

    name: str
    description: str
    levels: tuple[Level, ...]
    output: tuple[int, int]
    """Least and most new tokens of a row, uniformly distributed."""
    seed: int = 0
    samples: int = 1
    """Number of samples of each prompt."""
    rows_at: RowsAt = "leaves"
    fields: Mapping[str, Any] = field(default_factory=dict)
    """`BenchRow.fields` of special rows."""
    every: int = 1
    """One of this many rows has `fields`."""
    adapters: AdapterSet | None = None
    pictures: ClassVar[bool] = False
    """Whether rows have pictures."""

    def __post_init__(self) -> None:
        if not self.levels:
            raise UsageError(f"workload {self.name}: `levels` is empty; give at least one")
        for number, level in enumerate(self.levels):
            check_range(level.tokens, f"workload {self.name}: `levels[{number}].tokens`")
            if level.children < 1:
                raise UsageError(f"workload {self.name}: `levels[{number}].children` must be at least 1")
        check_range(self.output, f"workload {self.name}: `output`")
        for name, value in (("samples", self.samples), ("every", self.every)):
            if value < 1:
                raise UsageError(f"workload {self.name}: `{name}` must be at least 1, got {value}")
        if self.samples > 1 and self.special:
            raise UsageError(
                f"workload {self.name}: `samples` above 1 cannot be combined with `fields` or `adapters`, because the "
                "gate cannot compare random samples; remove one of them"
            )
        if self.adapters is not None and min(self.adapters.count, self.adapters.rank) < 1:
            raise UsageError(f"workload {self.name}: `adapters` needs a `count` and a `rank` of at least 1")

    @property
    def special(self) -> bool:
        """Whether rows have fields or adapters."""
        return bool(self.fields) or self.adapters is not None

    @property
    def longest(self) -> int:
        """Number of positions of the longest possible row."""
        return sum(level.tokens[1] for level in self.levels) + self.output[1]

    def rows(self, vocab_size: int) -> list[BenchRow]:
        """The rows in random order; deterministic for a definition and vocabulary size.

        Raises:
            UsageError: the vocabulary is too small.
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
        """Fields of row `at` in the workload's order."""
        fields = dict(self.fields) if at % self.every == 0 else {}
        return fields if self.adapters is None else fields | {"lora_path": self.adapters.name(at % self.adapters.count)}


def check_range(pair: tuple[int, int], name: str) -> None:
    """Check that a pair is a range: `UsageError` that names it otherwise."""
    if not 1 <= pair[0] <= pair[1]:
        raise UsageError(f"{name} must be [least, most] with 1 <= least <= most, got {list(pair)}")
