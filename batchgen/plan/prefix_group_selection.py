"""Selection of prefix groups: which decode rows attend to a shared prefix together, in one attention pass.

A node's pass reads the node's pages once instead of once per row, from where a selected ancestor's pass ends. It costs
as much as reading `pass_cost` positions plus `row_cost` per row. A pass at a node shortens those below it, so savings
cannot be judged in isolation: a short root above long groups saves a read per row, but takes nearly all of them from
the groups' passes. The optimal set is found exactly, in one traversal up and one down.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import ceil

from batchgen.plan.block_manager import Node
from batchgen.plan.running import Running
from batchgen.plan.sequences import ScheduledSequence
from batchgen.plan.step_plan import PrefixGroup

_Hinge = tuple[float, float]
"""(knee, slope): savings fall by `slope` with each page covered from above, until `knee` pages are covered."""


@dataclass(frozen=True, slots=True)
class SharedNode:
    """A prefix tree node with at least two decode rows below."""

    parent: int
    """Index of its parent in the list, before its own; -1 for a root."""
    rows: int
    """Number of decode rows below."""
    full_pages: int
    """Number of full pages up to its end, at least as many as its parent's."""


def select_groups(nodes: list[SharedNode], page_size: int, pass_cost: float, row_cost: float = 0.0) -> list[int]:
    """Select the nodes that get a pass.

    Maximises the sum over the selected nodes of
    `(rows - 1) * (full_pages - covered) * page_size - pass_cost - rows * row_cost`; each term is positive.

    With c pages covered from above, the maximum savings below a node are a falling convex function of c: a constant
    plus a sum of hinges `slope * max(0, knee - c)`. With a pass at the node they are a line that is steeper everywhere,
    since a pass below has fewer rows; so the node's pass pays up to exactly one c.

    Returns:
        The first page of each node's pass, i.e. the pages that selected ancestors cover; -1 for a node without a pass.
    """
    below: list[list[_Hinge]] = [[] for _ in nodes]
    until = [0.0] * len(nodes)
    for place in range(len(nodes) - 1, -1, -1):
        node = nodes[place]
        until[place], hinges = _best_savings(node, below[place], page_size, pass_cost + row_cost * node.rows)
        if node.parent >= 0:
            below[node.parent] += hinges
        below[place] = []
    chosen, covers = [-1] * len(nodes), [0] * len(nodes)
    for place, node in enumerate(nodes):
        covered = covers[node.parent] if node.parent >= 0 else 0
        pays = covered <= until[place] and covered < node.full_pages
        chosen[place] = covered if pays else -1
        covers[place] = node.full_pages if pays else covered
    return chosen


def _best_savings(
    node: SharedNode, hinges: list[_Hinge], page_size: int, pass_cost: float
) -> tuple[float, list[_Hinge]]:
    """Coverage up to which the node's pass pays (-1: never), and the hinges of the best savings from the node down."""
    inside = sorted((hinge for hinge in hinges if hinge[0] < node.full_pages), reverse=True)
    beyond = sum(slope for knee, slope in hinges if knee >= node.full_pages)
    kept: list[_Hinge] = [(node.full_pages, beyond)] if beyond else []
    at, gained = float(node.full_pages), 0.0
    steeper = (node.rows - 1) * page_size - beyond
    for knee, slope in inside:
        step = steeper * (at - knee)
        if gained + step >= pass_cost:
            break
        gained += step
        at = knee
        steeper -= slope
        kept.append((knee, slope))
    if steeper <= 0:
        return -1.0, kept  # all rows continue through one child, whose pass is longer
    pays_until = at - (pass_cost - gained) / steeper
    if pays_until < 0:
        return -1.0, [*kept, *inside[len(kept) - bool(beyond) :]]
    return pays_until, [*kept, (pays_until, steeper)]


class PrefixGroups:
    """Prefix groups of the decode rows, rebuilt only after a row was added or removed."""

    def __init__(self, first_row: memoryview[int], page_size: int, costs: tuple[float, float], longest: int) -> None:
        """Create the groups of no rows.

        Args:
            first_row: [M] `PrefixTree.first_row`.
            page_size: positions per page.
            costs: reads that a group must save: a constant, and an amount per row.
            longest: positions of the longest prompt.
        """
        self._first_row = first_row
        self._page_size = page_size
        self._pass_cost, self._row_cost = pass_cost, row_cost = costs
        # With fewer rows not even a pass over all full pages of the longest prompt pays.
        most = max(1, longest // page_size * page_size)
        self._min_rows = max(2, ceil((pass_cost + most) / (most - row_cost))) if most > row_cost else sys.maxsize
        self._roots: dict[int, Node] = {}
        self._groups: list[PrefixGroup] | None = []
        self.saving = 0
        """Reads of cached positions per step that the current groups save."""

    def add_row(self, node: Node | None) -> None:
        """Add a decode row below `node`."""
        self._groups = None
        while node is not None:
            node.rows += 1
            if node.rows == 2:
                self._siblings(node)[node.id] = node
            node = node.parent

    def remove_row(self, node: Node | None) -> None:
        """Remove a decode row below `node`."""
        self._groups = None
        while node is not None:
            node.rows -= 1
            if node.rows == 1:
                del self._siblings(node)[node.id]
            node = node.parent

    def groups_of(self, running: Running[ScheduledSequence]) -> list[PrefixGroup]:
        """Groups of the decode rows, parents before children; the same list until a row is added or removed."""
        if self._groups is None:
            self._groups = self._build(running)
        return self._groups

    def _siblings(self, node: Node) -> dict[int, Node]:
        return self._roots if node.parent is None else node.parent.shared_children

    def _build(self, running: Running[ScheduledSequence]) -> list[PrefixGroup]:
        groups: list[PrefixGroup] = []
        self.saving = 0
        rows = running.tree_rows
        nodes, shared_nodes = self._shared_nodes()
        passes = select_groups(shared_nodes, self._page_size, self._pass_cost, self._row_cost)
        for node, covered in zip(nodes, passes, strict=True):
            if covered >= 0:
                low = int(rows.searchsorted(self._first_row[node.id]))
                pages = running[low].pages[covered : node.full_pages]
                groups.append(PrefixGroup(list(range(low, low + node.rows)), pages, covered, node.full_pages))
                self.saving += (node.rows - 1) * (node.full_pages - covered) * self._page_size
        return groups

    def _shared_nodes(self) -> tuple[list[Node], list[SharedNode]]:
        """Nodes with enough decode rows for a pass to pay, parents before children, as `Node` and `SharedNode`."""
        nodes: list[Node] = []
        shared_nodes: list[SharedNode] = []
        min_rows = self._min_rows
        stack = [(node, -1) for node in self._roots.values() if node.rows >= min_rows]
        while stack:
            node, above = stack.pop()
            deeper = list(node.shared_children.values())
            while len(deeper) == 1 and deeper[0].rows == node.rows:
                # All rows continue through one child: its longer group replaces this one.
                node = deeper[0]
                deeper = list(node.shared_children.values())
            nodes.append(node)
            shared_nodes.append(SharedNode(above, node.rows, node.full_pages))
            above = len(nodes) - 1
            stack.extend((child, above) for child in deeper if child.rows >= min_rows)
        return nodes, shared_nodes
