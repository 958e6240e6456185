"""What sharing costs, in prompt tokens computed: the unit in which it saves.

A branch below a shared segment gets the positions of the segment's last, partly filled page either by a copy of them or
by computing them anew. Nothing else is paid for a shared segment while prompts are computed: a branch begins with a
chunk of its own whether its first positions are shared or not. (What shared pages save while rows decode, and what a
pass over them costs, is `batchgen.plan.levels`.)
"""

from __future__ import annotations

from typing import Final

__all__ = ["COPY_PAGE", "COPY_POSITION", "copying_pays"]

COPY_PAGE: Final = 0.5
"""Issuing one page's copy in all layers. A generous bound: a step's copies go to the device together."""
COPY_POSITION: Final = 0.02
"""Copying the keys and values of one position, read and written once, where computing a token reads every weight or
multiplies by it. Models of a billion parameters are at a thousandth, those of five million at a hundredth."""


def copying_pays(positions: int) -> bool:
    """Whether so many positions of a page are copied rather than computed anew."""
    return COPY_PAGE + COPY_POSITION * positions < positions
