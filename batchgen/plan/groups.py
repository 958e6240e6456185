"""Which decode rows attend to a shared prefix together."""

from __future__ import annotations

import sys
from math import ceil

from batchgen.plan.levels import LevelNode, choose_levels
from batchgen.plan.nodes import Node
from batchgen.plan.running import Running
from batchgen.plan.sequences import Sequence
from batchgen.plan.types import PrefixGroup

__all__ = ["PrefixGroups"]


class PrefixGroups:
    """Counts decode rows along the tree; builds the groups anew only after a row joined or left."""

    def __init__(self, first_row: memoryview[int], page_size: int, costs: tuple[float, float], longest: int) -> None:
        """`costs`: reads that a group must save, whatever its rows, and for each of them.

        `longest`: positions of the longest prompt.
        """
        self._first_row = first_row
        self._page_size = page_size
        self._pass_cost, self._row_cost = pass_cost, row_cost = costs
        # Of fewer rows below it not even a pass over the longest prompt's whole pages saves as much as it must.
        most = max(1, longest // page_size * page_size)
        self._fewest = max(2, ceil((pass_cost + most) / (most - row_cost))) if most > row_cost else sys.maxsize
        self._roots: dict[int, Node] = {}
        self._groups: list[PrefixGroup] | None = []
        self.saving = 0
        """Reads of cached positions that the groups last built save in a step."""

    def join(self, node: Node | None) -> None:
        """A row below `node` begins to decode."""
        self._groups = None
        while node is not None:
            node.rows += 1
            if node.rows == 2:
                self._siblings(node)[node.id] = node
            node = node.parent

    def leave(self, node: Node | None) -> None:
        """A row below `node` decodes no more."""
        self._groups = None
        while node is not None:
            node.rows -= 1
            if node.rows == 1:
                del self._siblings(node)[node.id]
            node = node.parent

    def of(self, running: Running[Sequence]) -> list[PrefixGroup]:
        """The groups of the decode rows, parents before children. The same list while no row joins or leaves."""
        if self._groups is None:
            self._groups = self._build(running)
        return self._groups

    def _siblings(self, node: Node) -> dict[int, Node]:
        return self._roots if node.parent is None else node.parent.shared

    def _build(self, running: Running[Sequence]) -> list[PrefixGroup]:
        groups: list[PrefixGroup] = []
        self.saving = 0
        rows = running.tree_rows
        nodes, places = self._shared_nodes()
        passes = choose_levels(places, self._page_size, self._pass_cost, self._row_cost)
        for node, covered in zip(nodes, passes, strict=True):
            if covered >= 0:
                low = int(rows.searchsorted(self._first_row[node.id]))
                pages = running[low].pages[covered : node.full]
                groups.append(PrefixGroup(list(range(low, low + node.rows)), pages, covered, node.full))
                self.saving += (node.rows - 1) * (node.full - covered) * self._page_size
        return groups

    def _shared_nodes(self) -> tuple[list[Node], list[LevelNode]]:
        """Nodes with as many decode rows below that a pass may pay, a parent before its children, as objects and as
        levels.
        """
        nodes: list[Node] = []
        levels: list[LevelNode] = []
        fewest = self._fewest
        stack = [(node, -1) for node in self._roots.values() if node.rows >= fewest]
        while stack:
            node, above = stack.pop()
            deeper = list(node.shared.values())
            while len(deeper) == 1 and deeper[0].rows == node.rows:
                # All go on through one child: one longer group in its place.
                node = deeper[0]
                deeper = list(node.shared.values())
            nodes.append(node)
            levels.append(LevelNode(above, node.rows, node.full))
            above = len(nodes) - 1
            stack.extend((child, above) for child in deeper if child.rows >= fewest)
        return nodes, levels
