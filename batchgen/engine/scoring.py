"""Scoring rows: each (prompt, text) runs as a request of its own; here they become one completion per prompt again."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchgen.engine.planning import Workload
from batchgen.engine.prompt_logprobs import PromptLogprobs
from batchgen.errors import ErrorInfo, RowError
from batchgen.request import Completion, Request, Score

__all__ = ["Scores"]


@dataclass(frozen=True, slots=True)
class _Text:
    """One text, scored."""

    logprobs: npt.NDArray[np.float32]
    is_greedy: bool

    @property
    def score(self) -> Score:
        total = float(self.logprobs.sum(dtype=np.float64))
        return Score(total, total / len(self.logprobs), len(self.logprobs), self.is_greedy)


@dataclass(slots=True)
class _Open:
    """A prompt of which some texts are still to be scored."""

    remaining: int
    texts: dict[int, _Text] = field(default_factory=dict)
    """By request."""
    errors: dict[int, ErrorInfo] = field(default_factory=dict)
    """By request; the first text's is told."""


class Scores:
    """Gathers the texts of a prompt until all are scored."""

    def __init__(self, workload: Workload, prompts: PromptLogprobs, *, prompt_ids: bool) -> None:
        """`prompt_ids`: whether completions carry the ids that ran."""
        self._table = workload.table
        self._tree = workload.tree
        self._prompts = prompts
        self._prompt_ids = prompt_ids
        self._first = workload.first_text
        self._open: dict[int, _Open] = {}

    def add(self, request: Request, failed: ErrorInfo | None) -> list[Completion]:
        """A request with a text to score is finished, or has failed; its prompt's completion if it was the last."""
        first = int(self._first[request.index])
        group = self._open.get(first)
        if group is None:
            group = self._open[first] = _Open(int(np.searchsorted(self._first, first, side="right")) - first)
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

    def _score(self, request: Request, group: _Open) -> ErrorInfo | None:
        try:
            logprobs = self._prompts.following(request.index)
        except RowError as error:
            return error.info
        likeliest = self._prompts.likeliest(request.index)
        text = request.prompt_ids[request.score_start :]
        group.texts[request.index] = _Text(logprobs, bool((likeliest == text).all()))
        return None

    def _completion(self, request: Request, group: _Open) -> Completion:
        """What a scoring row's prompt returns. Its token counts are those of every text with the prompt before it, so
        that prompt_tokens less cached_tokens are computed, as for other rows.
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
            # Arrays are sequences of numbers to their readers.
            prompt_ids=np.concatenate(ids) if shown else None,  # type: ignore[arg-type]
            prompt_tokens=sum(map(len, ids)),
            completion_tokens=0,
            cached_tokens=sum(self._tree.cached_tokens(index) for index in indexes),
            scores=[text.score for text in texts],
            score_logprobs=logprobs,  # type: ignore[arg-type]
            effective_max_new_tokens=0,
        )
