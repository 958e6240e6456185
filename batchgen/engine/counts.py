"""`TokenCounts`: how often one sample generated each token, kept as arrays that a step reads without a Python loop."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["TokenCounts"]


class TokenCounts:
    """Distinct tokens of a sample and their counts, in order of first sight. Told of each token once, when drawn."""

    __slots__ = ("_counts", "_ids", "_place")

    def __init__(self, seen: npt.NDArray[np.int32] | None = None) -> None:
        """`seen`: ids that count as seen although the sample did not generate them (its prompt)."""
        ids = np.unique(seen).astype(np.int64) if seen is not None else np.zeros(0, np.int64)
        self._place = {token: place for place, token in enumerate(ids.tolist())}
        self._ids = np.concatenate([ids, np.zeros(16, np.int64)])
        self._counts = np.zeros(len(self._ids), np.float32)

    def add(self, token: int) -> None:
        """Count one generated token."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] += 1

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """[D] distinct tokens; a view that the next `add` may change."""
        found: npt.NDArray[np.int64] = self._ids[: len(self._place)]
        return found

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """[D] how often each was generated; 0 for one that was only seen."""
        return self._counts[: len(self._place)]
