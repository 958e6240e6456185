"""Keys that a complete output must contain, and checks of the committed rows against them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batchgen.data.store.committed import Committed, find_prompts
from batchgen.errors import BatchgenError, UsageError
from batchgen.request.table.columns import Column, Columns


class ExpectedKeys(Columns):
    """Every prompt of the job with its number of samples, added in any order."""

    _columns = ("_row", "_prompt", "_samples")

    def __init__(self) -> None:
        self._row = Column("q")
        self._prompt = Column("i")
        self._samples = Column("i")

    def add(self, row_index: int, prompt_index: int = 0, samples: int = 1) -> None:
        """Expect `samples` output rows for a prompt, or one error row instead."""
        self.pack(self._row)
        self._row.append(row_index)
        self._prompt.append(prompt_index)
        self._samples.append(samples)

    def __len__(self) -> int:
        return len(self._row)

    def keep_committed(self, refused: Iterable[int], committed: Committed) -> dict[int, int]:
        """Expect what is committed of rows that are not read any more, and an error row after it.

        Args:
            refused: their indexes. One error row is expected of each so far.
            committed: the rows that earlier runs committed.

        Returns:
            Row -> prompt index of its error row, for rows with committed results.
        """
        error_prompts: dict[int, int] = {}
        for row in refused:
            places = np.flatnonzero(committed.row_index == row)
            prompts, samples = np.unique(committed.prompt_index[places], return_counts=True)
            if len(places) and committed.is_error[places[-1]] and samples[-1] == 1:  # the error row itself
                prompts, samples = prompts[:-1], samples[:-1]
            if len(prompts):
                error_prompts[row] = int(prompts[-1]) + 1
                self._replace(row, [*zip(prompts.tolist(), samples.tolist(), strict=True), (error_prompts[row], 1)])
        return error_prompts

    def _replace(self, row: int, prompts: Sequence[tuple[int, int]]) -> None:
        """Expect (prompt index, samples) of a row instead of what was expected of it."""
        others = self._row.values() != row
        columns = {name: values[others] for name, values in self.columns().items()}
        self.restore_columns(columns)
        for prompt, samples in prompts:
            self.add(row, prompt, samples)

    def check_resumable(self, committed: Committed, work: Path) -> None:
        """Check that the rows committed in the folder `work` are part of this job, before rows are added.

        Raises:
            UsageError: a committed prompt is not expected, or has another number of samples (as after
                `--resume-anyway` with other options), so that this job could never complete.
        """
        if not len(committed):
            return
        starts = committed.starts
        row, prompt = committed.row_index[starts], committed.prompt_index[starts]
        samples = self._samples_of(row, prompt)
        wrong = np.flatnonzero(_incomplete(committed, starts, samples))
        if len(wrong):
            at = wrong[0]
            problem = "is not in this job"
            if samples[at]:
                problem = f"has {_counts(committed, starts)[at]} samples, but this job has {samples[at]}"
            raise UsageError(
                f"{work} contains work that this job cannot continue: row {row[at]}, prompt {prompt[at]} {problem}. "
                "Use the options and input of the earlier run, or name another output with -o."
            )

    def check_complete(self, committed: Committed) -> None:
        """Check that the committed rows are exactly the expected ones.

        Raises:
            BatchgenError: a prompt is missing, incomplete or not expected, which is a bug.
        """
        row, prompt, samples = self._sorted()
        starts = committed.starts
        same_rows = np.array_equal(committed.row_index[starts], row)
        if not same_rows or not np.array_equal(committed.prompt_index[starts], prompt):
            raise _mismatch(committed, row, prompt)
        wrong = np.flatnonzero(_incomplete(committed, starts, samples))
        if len(wrong):
            at = wrong[0]
            raise _bug(
                f"{len(wrong)} prompts are incomplete, the first is row {row[at]}, prompt {prompt[at]} "
                f"({_counts(committed, starts)[at]} of {samples[at]} samples)"
            )

    def _samples_of(self, row: npt.NDArray[np.int64], prompt: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """[len(row)] int32: number of samples expected of each prompt, 0 if the prompt is not expected."""
        expected_row, expected_prompt, samples = self._sorted()
        places = find_prompts((expected_row, expected_prompt), (row, prompt))
        return np.append(samples, np.int32(0))[places]  # -1, not expected, is the 0 at the end

    def _sorted(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        row, prompt, samples = self._row.values(), self._prompt.values(), self._samples.values()
        if (row[1:] > row[:-1]).all():
            return row, prompt, samples
        order = np.lexsort((prompt, row))
        return row[order], prompt[order], samples[order]


def _incomplete(
    committed: Committed, starts: npt.NDArray[np.int64], samples: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    """[prompts] bool: whether the prompts that begin at `starts` have neither all `samples` nor one error row."""
    counts = _counts(committed, starts)
    # Sample indexes of a prompt are sorted and distinct: n of them are 0..n-1 if the last is n - 1.
    last = committed.sample_index[starts + counts - 1] if len(starts) else committed.sample_index
    complete = (counts == samples) & (last == samples - 1)
    failed = (counts == 1) & (last == 0) & committed.is_error[starts]
    incomplete: npt.NDArray[np.bool_] = ~((samples > 0) & (complete | failed))
    return incomplete


def _counts(committed: Committed, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[prompts] int64: number of committed samples of each prompt."""
    return np.diff(np.append(starts, len(committed)))


def _mismatch(committed: Committed, row: npt.NDArray[np.int64], prompt: npt.NDArray[np.int32]) -> BatchgenError:
    expected = set(zip(row.tolist(), prompt.tolist(), strict=True))
    committed_prompts = set(zip(committed.row_index.tolist(), committed.prompt_index.tolist(), strict=True))
    missing, unexpected = sorted(expected - committed_prompts), sorted(committed_prompts - expected)
    example = (missing or unexpected or [(-1, -1)])[0]
    return _bug(
        f"{len(missing)} prompts are missing and {len(unexpected)} are not in this job, for example row {example[0]}, "
        f"prompt {example[1]}"
    )


def _bug(problem: str) -> BatchgenError:
    return BatchgenError(
        f"the committed rows do not match the input, which is a bug of batchgen: {problem}. Nothing was replaced."
    )
