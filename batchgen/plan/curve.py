"""Pages in use at each step from now on, if samples end where they are expected to: an array over steps.

Pages only grow between two ends. A sample's last page and what it shares with nobody go after its end, a node's after
the last end below it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Curve", "Samples", "pages_by_step", "peak_pages", "with_begun"]

Int64s = npt.NDArray[np.int64]

Curve = npt.NDArray[np.float64]
"""[T] pages in use in each step beyond those in use now; the last one holds from then on. Whole numbers, as floats,
which numpy sums by places without converting."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples under way and nodes that go with them, by column; steps are counted from now."""

    end: Int64s
    """[R] last step in which each holds its pages."""
    fed: Int64s
    """[R] position fed now; one more with each step."""
    have: Int64s
    """[R] pages of positions 0.. that it need not take any more, its nodes' included."""
    freed: Int64s
    """[R] of the pages in use those that it gives back at its end; what it takes until then goes, too."""
    release: Int64s
    """[N] of nodes of which the end is known: the last step in which their pages are held ..."""
    pages: Int64s
    """[N] ... and how many these are."""


def pages_by_step(samples: Samples, page_size: int) -> Curve:
    """The pages that samples take and give back, as a curve that ends when all have."""
    if not len(samples.end):
        return np.zeros(1)
    into = samples.fed % page_size
    taken = (into + samples.end) // page_size  # pages begun after now
    now = samples.fed // page_size + 1 - samples.have
    steps = int(max(samples.end.max(), samples.release.max(initial=0))) + 1
    # A sample `into` its page begins the k-th further one in step k * page_size - into. By that step, less one, as
    # [k, offset]: how many samples take their last page there, and from the end on how many take one at all.
    rounds = -(-steps // page_size)
    last = (taken - 1) * page_size + (page_size - 1 - into)
    taking = np.bincount(last[taken > 0], minlength=rounds * page_size).reshape(rounds, page_size)
    change = np.zeros(steps + 1)
    change[1:] = taking[::-1].cumsum(axis=0)[::-1].reshape(-1)[:steps]
    change[0] = now.sum()
    change -= np.bincount(samples.end + 1, now + taken + samples.freed, steps + 1)
    if len(samples.release):
        change -= np.bincount(samples.release + 1, samples.pages, steps + 1)
    return change.cumsum()


def with_begun(curve: Curve, ends: Int64s, fed: int, have: int, spared: int, page_size: int) -> Curve:
    """A curve and samples that begin together, which come to hold the pages behind the first `have`.

    Args:
        curve: that of all others.
        ends: [n] the samples' last steps.
        fed: position that all of them feed now; one more with each step.
        have: pages of positions 0.. that they need not take ...
        spared: ... and those that the first of them need not take besides.
        page_size: S.
    """
    under_way = np.bincount(ends)[::-1].cumsum()[::-1]  # [T] samples by step
    own = np.arange(fed, fed + len(under_way))
    own //= page_size
    own += 1 - have
    own *= under_way
    both = _extended(curve, len(own) + 1)
    both[: len(own)] += own
    both[: ends[0] + 1] -= spared
    return both


def _extended(curve: Curve, steps: int) -> Curve:
    """A copy, of so many steps at least."""
    if len(curve) >= steps:
        return curve.copy()
    longer = np.empty(steps)
    longer[: len(curve)] = curve
    longer[len(curve) :] = curve[-1]
    return longer


def peak_pages(curve: Curve) -> int:
    """The most of a curve; 0 at least."""
    return max(0, int(curve.max()))
