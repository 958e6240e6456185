"""`Expected`: the keys a complete output must hold."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batchgen.columns import Columns
from batchgen.data.committed import Committed
from batchgen.errors import BatchgenError, UsageError

__all__ = ["Expected"]


class Expected(Columns):
    """Every prompt of the job and its number of samples, 16 bytes each, added in any order while rows are read."""

    _columns = ("_row", "_prompt", "_samples")

    def __init__(self) -> None:
        self._row = array("q")
        self._prompt = array("i")
        self._samples = array("i")

    def add(self, row_index: int, prompt_index: int = 0, samples: int = 1) -> None:
        """Expect `samples` output rows for a prompt, or one error row in their place."""
        self._row.append(row_index)
        self._prompt.append(prompt_index)
        self._samples.append(samples)

    def __len__(self) -> int:
        return len(self._row)

    def hold(self, committed: Committed, work: Path) -> None:
        """Hold what an earlier run committed in `work` against what is expected, before anything is added to it.

        Raises:
            UsageError: a prompt is not of this job, or has other samples than it asks for, as under other options by
                `--resume-anyway`. No run of this job could complete that work.
        """
        starts = np.flatnonzero(_first_of_prompt(committed.row_index, committed.prompt_index))
        row, prompt = committed.row_index[starts], committed.prompt_index[starts]
        samples = self._samples_of(row, prompt)
        wrong = np.flatnonzero(_incomplete(committed, starts, samples))
        if len(wrong):
            at = wrong[0]
            differs = "is not of this job"
            if samples[at]:
                differs = f"has {_counts(committed, starts)[at]} samples and not this job's {samples[at]}"
            raise UsageError(
                f"{work} holds work that this job cannot go on with: row {row[at]}, prompt {prompt[at]} {differs}. Run "
                "it with the options and input that it was begun with, or drop it with --overwrite."
            )

    def check(self, committed: Committed) -> None:
        """Hold what is committed against what is expected.

        Raises:
            BatchgenError: a prompt is missing, incomplete or not of this job. That is a bug, and nothing is replaced.
        """
        row, prompt, samples = self._sorted()
        first = _first_of_prompt(committed.row_index, committed.prompt_index)
        starts = np.flatnonzero(first)
        if not (
            np.array_equal(committed.row_index[starts], row) and np.array_equal(committed.prompt_index[starts], prompt)
        ):
            raise _disagreement(committed, row, prompt)
        wrong = np.flatnonzero(_incomplete(committed, starts, samples))
        if len(wrong):
            at = wrong[0]
            raise _bug(
                f"{len(wrong)} prompts have not all their samples, the first is row {row[at]}, prompt {prompt[at]} "
                f"({_counts(committed, starts)[at]} of {samples[at]})"
            )

    def _samples_of(self, row: npt.NDArray[np.int64], prompt: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """[len(row)] samples expected of each prompt, 0 where it is not expected at all."""
        expected_row, expected_prompt, samples = self._sorted()
        if not len(row) or not len(samples):
            return np.zeros(len(row), np.int32)
        stride = 1 + max(int(prompt.max()), int(expected_prompt.max()))
        keys, wanted = expected_row * stride + expected_prompt, row * stride + prompt
        places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[places] == wanted, samples[places], 0).astype(np.int32)

    def _sorted(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        row = np.array(self._row, np.int64)
        prompt = np.array(self._prompt, np.int32)
        samples = np.array(self._samples, np.int32)
        order = np.lexsort((prompt, row))
        return row[order], prompt[order], samples[order]


def _first_of_prompt(row: npt.NDArray[np.int64], prompt: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    first = np.ones(len(row), np.bool_)
    first[1:] = (row[1:] != row[:-1]) | (prompt[1:] != prompt[:-1])
    return first


def _incomplete(
    committed: Committed, starts: npt.NDArray[np.int64], samples: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    """[prompts] whether those that begin at `starts` are neither whole, with `samples` each, nor one error row."""
    counts = _counts(committed, starts)
    # Samples of a prompt are sorted and distinct: they are 0..n-1 when the first is 0 and the last n - 1.
    last = committed.sample_index[starts + counts - 1] if len(starts) else committed.sample_index
    whole = (counts == samples) & (last == samples - 1)
    failed = (counts == 1) & (last == 0) & committed.is_error[starts]
    incomplete: npt.NDArray[np.bool_] = ~((samples > 0) & (whole | failed))
    return incomplete


def _counts(committed: Committed, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[prompts] samples of each prompt."""
    return np.diff(np.append(starts, len(committed)))


def _disagreement(committed: Committed, row: npt.NDArray[np.int64], prompt: npt.NDArray[np.int32]) -> BatchgenError:
    expected = set(zip(row.tolist(), prompt.tolist(), strict=True))
    found = set(zip(committed.row_index.tolist(), committed.prompt_index.tolist(), strict=True))
    missing, surplus = sorted(expected - found), sorted(found - expected)
    example = (missing or surplus or [(-1, -1)])[0]
    return _bug(
        f"{len(missing)} prompts are missing and {len(surplus)} are not of this job, for example row {example[0]}, "
        f"prompt {example[1]}"
    )


def _bug(problem: str) -> BatchgenError:
    return BatchgenError(f"the committed rows are not those of the input: {problem}. Nothing was replaced.")
