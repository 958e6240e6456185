"""Output that goes round in circles: the rule of `--stop-on-repeat N`."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["repeats"]


def repeats(ids: Sequence[int], span: int) -> bool:
    """Whether the last `span` ids are one block of at most `span // 4` ids over and over.

    The block stands at least four times; its last copy may be cut off. Cheap where the last id does not stand among
    the `span // 4` before it, which is the rule in text that says something.
    """
    if len(ids) < span:
        return False
    last = ids[-1]
    for period in range(1, span // 4 + 1):
        if ids[-1 - period] == last and ids[-span + period :] == ids[-span:-period]:
            return True
    return False
