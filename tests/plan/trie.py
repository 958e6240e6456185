"""Oracles of the planner's counts: an explicit trie with a dict per token, and pages identified by their contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Trie:
    """Trie of prompts with one node per distinct prefix."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self.root: dict[int, Any] = {}
        self.nodes = 0
        for prompt in prompts:
            self.add(prompt)

    def add(self, prompt: Sequence[int]) -> int:
        """Add a prompt; returns how many of its first tokens were in the trie."""
        known, node = 0, self.root
        for token in prompt:
            if token in node:
                known += 1
            else:
                node[token] = {}
                self.nodes += 1
            node = node[token]
        return known


class PageCount:
    """Pages that all samples fill at full length, shared ones counted once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.filled: dict[tuple[Any, ...], int] = {}
        """Contents of a page -> number of positions filled."""

    def add(self, prompt: Sequence[int], sample: tuple[int, int], positions: int) -> None:
        for begin in range(0, positions, self.size):
            end = begin + self.size
            whole = end <= len(prompt)
            page = tuple(prompt[:end]) if whole else ("own", *sample, begin)
            self.filled[page] = min(end, positions) - begin

    @property
    def waste(self) -> float:
        """Fraction of the pages' positions that stay empty."""
        return 1 - sum(self.filled.values()) / (len(self.filled) * self.size)


def count_pages(
    prompts: Sequence[Sequence[int]], samples: Sequence[int], limits: Sequence[int], size: int
) -> PageCount:
    """Count the pages of a job one by one."""
    count = PageCount(size)
    for request, prompt in enumerate(prompts):
        for sample in range(samples[request]):
            count.add(prompt, (request, sample), len(prompt) + limits[request] - 1)
    return count
