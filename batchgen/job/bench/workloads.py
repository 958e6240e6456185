"""Workloads as data: the shape of the prompts' tree and the output lengths. The ids are drawn from a seed."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from batchgen.errors import UsageError

__all__ = ["GPU_WORKLOADS", "WORKLOADS", "BenchRow", "Level", "Workload", "find_workload", "load_workload"]

_FIRST_ID = 3
"""Ids below are special in many vocabularies."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the tree: every node above has `children`, each of `tokens` (least, most) ids of its own."""

    children: int
    tokens: tuple[int, int]


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One prompt and how many tokens are generated after it, whatever they are."""

    ids: list[int]
    max_new: int
    samples: int = 1
    """More than one are drawn at temperature 1: greedy ones would be the same text."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What else batchgen's own rows ask for; peers are not given it."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows are the leaves of a tree of random segments.

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

    def __post_init__(self) -> None:
        if not self.levels:
            raise UsageError(f"workload {self.name}: `levels` is empty; give at least one")
        for number, level in enumerate(self.levels):
            _check_range(level.tokens, f"workload {self.name}: `levels[{number}].tokens`")
            if level.children < 1:
                raise UsageError(f"workload {self.name}: `levels[{number}].children` must be at least 1")
        _check_range(self.output, f"workload {self.name}: `output`")

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
        prefixes: list[list[int]] = [[]]
        for level in self.levels:
            prefixes = [
                prefix
                + rng.integers(_FIRST_ID, vocab_size, size=int(rng.integers(*level.tokens, endpoint=True))).tolist()
                for prefix in prefixes
                for _ in range(level.children)
            ]
        lengths = rng.integers(*self.output, endpoint=True, size=len(prefixes)).tolist()
        order = rng.permutation(len(prefixes)).tolist()
        return [BenchRow(prefixes[i], lengths[i], self.samples) for i in order]

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


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("unique", "64 prompts of 32-256 tokens that share nothing, 64 out", (Level(64, (32, 256)),), (64, 64)),
        Workload(
            "shared-prefix",
            "64 prompts of 32 tokens after one prefix of 1,024, 32 out",
            (Level(1, (1024, 1024)), Level(64, (32, 32))),
            (32, 32),
        ),
        Workload(
            "few-shot-tree",
            "a root of 256 tokens, 8 groups of 512, 8 prompts of 32 in each, 32 out",
            (Level(1, (256, 256)), Level(8, (512, 512)), Level(8, (32, 32))),
            (32, 32),
        ),
        Workload("mixed-lengths", "64 prompts of 32-256 tokens, 8-256 out", (Level(64, (32, 256)),), (8, 256)),
    )
}
"""The named workloads, in the order in which they run."""

GPU_WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            "w-nano",
            "256 prompts of 100-1,024 tokens that share nothing, 100-1,024 out",
            (Level(256, (100, 1024)),),
            (100, 1024),
        ),
        Workload(
            "w-prefix",
            "4,096 prompts of 64 tokens after one prefix of 2,000, 128 out",
            (Level(1, (2000, 2000)), Level(4096, (64, 64))),
            (128, 128),
        ),
        Workload(
            "w-unshared",
            "4,096 prompts of 2,064 tokens that share nothing, 128 out: w-prefix without its prefix",
            (Level(4096, (2064, 2064)),),
            (128, 128),
        ),
        Workload(
            "w-tree",
            "a root of 300 tokens, 16 tasks of 1,200, 256 questions of 120 in each, 4 samples of 200 out",
            (Level(1, (300, 300)), Level(16, (1200, 1200)), Level(256, (120, 120))),
            (200, 200),
            samples=4,
        ),
    )
}
"""Sized for a GPU: hours on a CPU, so that they run only where they are named."""


def find_workload(name: str) -> Workload:
    """A named workload, or the definition in a .toml file.

    Raises:
        UsageError: there is none of this name, or the file is wrong.
    """
    if name.endswith(".toml"):
        return load_workload(Path(name))
    known = WORKLOADS | GPU_WORKLOADS
    if name not in known:
        raise UsageError(f"unknown workload {name!r}; take one of {', '.join(known)}, or a .toml file")
    return known[name]


def load_workload(path: Path) -> Workload:
    """Read a definition.

    Raises:
        UsageError: it cannot be read, or a key is missing, unknown or wrong.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the workload {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    _check_keys(values, {"name", "description", "levels", "output"}, {"seed"}, str(path))
    levels = values["levels"]
    if not isinstance(levels, list) or not all(isinstance(level, dict) for level in levels):
        raise UsageError(f"{path}: `levels` must be tables, as in [[levels]]")
    for level in levels:
        _check_keys(level, {"children", "tokens"}, set(), f"{path}: `levels`")
    return Workload(
        name=_text(values["name"], f"{path}: `name`"),
        description=_text(values["description"], f"{path}: `description`"),
        levels=tuple(
            Level(_whole(x["children"], f"{path}: `children`"), _pair(x["tokens"], f"{path}: `tokens`")) for x in levels
        ),
        output=_pair(values["output"], f"{path}: `output`"),
        seed=_whole(values.get("seed", 0), f"{path}: `seed`"),
    )


def _check_keys(values: Mapping[str, Any], needed: set[str], allowed: set[str], where: str) -> None:
    if missing := needed - values.keys():
        raise UsageError(f"{where}: `{min(missing)}` is missing")
    if unknown := values.keys() - needed - allowed:
        raise UsageError(f"{where}: unknown key `{min(unknown)}`; known: {', '.join(sorted(needed | allowed))}")


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} must be a text")
    return value


def _whole(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(f"{name} must be a whole number, got {value!r}")
    return value


def _pair(value: object, name: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise UsageError(f"{name} must be [least, most], got {value!r}")
    return _whole(value[0], name), _whole(value[1], name)
