"""`Scores`: joins the (prompt, text) requests of scoring rows into one completion per prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchgen.engine.capture.prompt_logprobs import PromptLogprobs
from batchgen.engine.workload import JobWorkload
from batchgen.errors import ErrorInfo, RowError
from batchgen.request.completion import Completion, Score
from batchgen.request.table import Request

__all__ = ["Scores"]


@dataclass(frozen=True, slots=True)
class _ScoredText:
    """One scored text."""

    logprobs: npt.NDArray[np.float32]
    """[T] logprob of each token of the text"""
    is_greedy: bool
    """Whether each token is the most likely one"""

    @property
    def score(self) -> Score:
        total = float(self.logprobs.sum(dtype=np.float64))
        return Score(total, total / len(self.logprobs), len(self.logprobs), self.is_greedy)


@dataclass(slots=True)
class _OpenPrompt:
    """A prompt with texts that are not scored yet."""

    remaining: int
    texts: dict[int, _ScoredText] = field(default_factory=dict)
    """Request -> scored text"""
    errors: dict[int, ErrorInfo] = field(default_factory=dict)
    """Request -> error; the completion has the first one"""


class Scores:
    """Collects the texts of each prompt until all are scored."""

    def __init__(self, workload: JobWorkload, prompts: PromptLogprobs, *, prompt_ids: bool) -> None:
        """`prompt_ids`: whether completions contain the token ids of prompts and texts."""
        self._table = workload.table
        self._tree = workload.tree
        self._prompts = prompts
        self._prompt_ids = prompt_ids
        self._first = workload.first_text
        self._open: dict[int, _OpenPrompt] = {}

    def add(self, request: Request, failed: ErrorInfo | None) -> list[Completion]:
        """Add a finished or failed request with a text to score; returns its prompt's completion if it was the last."""
        first = int(self._first[request.index])
        group = self._open.get(first)
        if group is None:
            group = self._open[first] = _OpenPrompt(int(np.searchsorted(self._first, first, side="right")) - first)
        if failed is None:
            failed = self._score(request, group)
        if failed is not None:
            group.errors[request.index] = failed
        group.remaining -= 1
        if group.remaining:
            return []
        del self._open[first]
        if group.errors:
            return [Completion(request.row_index, request.prompt_index, error=group.errors[min(group.errors)])]
        return [self._completion(request, group)]

    def _score(self, request: Request, group: _OpenPrompt) -> ErrorInfo | None:
        try:
            logprobs = self._prompts.target_logprobs(request.index)
        except RowError as error:
            return error.info
        most_likely = self._prompts.most_likely_ids(request.index)
        text = request.prompt_ids[request.score_start :]
        group.texts[request.index] = _ScoredText(logprobs, bool((most_likely == text).all()))
        return None

    def _completion(self, request: Request, group: _OpenPrompt) -> Completion:
        """The completion of a prompt. Its token counts add up prompt and text of all requests, so that `prompt_tokens`
        minus `cached_tokens` is the number of computed tokens, as for other rows.
        """
        indexes = sorted(group.texts)
        texts = [group.texts[index] for index in indexes]
        ids = [self._table.prompt_ids(index) for index in indexes]
        logprobs = np.concatenate([text.logprobs for text in texts])
        shown = self._prompt_ids and request.embeds is None
        return Completion(
            row_index=request.row_index,
            prompt_index=request.prompt_index,
            finish_reason="length",
            # Numpy arrays are used like sequences of numbers.
            prompt_ids=np.concatenate(ids) if shown else None,  # type: ignore[arg-type]
            prompt_tokens=sum(map(len, ids)),
            completion_tokens=0,
            cached_tokens=sum(self._tree.cached_tokens(index) for index in indexes),
            scores=[text.score for text in texts],
            score_logprobs=logprobs,  # type: ignore[arg-type]
            effective_max_new_tokens=0,
        )
