"""Which nodes of the tree of decode rows get a pass of their own over their shared pages: the set that reads least.

A node's pass reads its pages once instead of once a row, behind what a chosen node above it covers, and costs as much
as reading `pass_cost` positions and `row_cost` for each of its rows. A pass at a node makes those below it shorter, so
that a saving looked at by itself says little: a short root above long groups saves as many reads as it has rows, but
takes nearly all of them from the groups' passes. The best choice is found exactly, in one walk up and one down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LevelNode", "choose_levels"]

_Hinge = tuple[float, float]
"""(turn, slope): what is saved falls by `slope` with each page covered from above, until `turn` are."""


@dataclass(frozen=True, slots=True)
class LevelNode:
    """A node with two decode rows below or more."""

    parent: int
    """Its place in the list, before this one's; -1 for a root."""
    rows: int
    full: int
    """Whole pages up to its end, at least as many as its parent's."""


def choose_levels(nodes: Sequence[LevelNode], page_size: int, pass_cost: float, row_cost: float = 0.0) -> list[int]:
    """Coverage by node: the pages that a chosen node's pass begins behind; -1 for a node without a pass.

    The sum over the chosen of `(rows - 1) * (full - covered) * page_size - pass_cost - rows * row_cost` is as large as
    it can be; each of them saves something.

    With c pages covered from above, the most that can be saved below a node is a falling convex function of c: a
    constant and a sum of hinges `slope * max(0, turn - c)`. With a pass at the node it is a line steeper than that
    everywhere, since a pass below has fewer rows; so there is one c up to which the node's pass pays.
    """
    below: list[list[_Hinge]] = [[] for _ in nodes]
    until = [0.0] * len(nodes)
    for place in range(len(nodes) - 1, -1, -1):
        node = nodes[place]
        until[place], hinges = _with_pass(node, below[place], page_size, pass_cost + row_cost * node.rows)
        if node.parent >= 0:
            below[node.parent] += hinges
        below[place] = []
    chosen, covers = [-1] * len(nodes), [0] * len(nodes)
    for place, node in enumerate(nodes):
        covered = covers[node.parent] if node.parent >= 0 else 0
        pays = covered <= until[place] and covered < node.full
        chosen[place] = covered if pays else -1
        covers[place] = node.full if pays else covered
    return chosen


def _with_pass(node: LevelNode, hinges: list[_Hinge], page_size: int, pass_cost: float) -> tuple[float, list[_Hinge]]:
    """Up to which coverage the node's pass pays (-1: never), and what is saved below the node with the best choice."""
    inside = sorted((hinge for hinge in hinges if hinge[0] < node.full), reverse=True)
    beyond = sum(slope for turn, slope in hinges if turn >= node.full)
    kept: list[_Hinge] = [(node.full, beyond)] if beyond else []
    at, gained = float(node.full), 0.0
    steeper = (node.rows - 1) * page_size - beyond
    for turn, slope in inside:
        step = steeper * (at - turn)
        if gained + step >= pass_cost:
            break
        gained += step
        at = turn
        steeper -= slope
        kept.append((turn, slope))
    if steeper <= 0:
        return -1.0, kept  # all rows go on through one child, whose pass is longer
    pays_until = at - (pass_cost - gained) / steeper
    if pays_until < 0:
        return -1.0, [*kept, *inside[len(kept) - bool(beyond) :]]
    return pays_until, [*kept, (pays_until, steeper)]
