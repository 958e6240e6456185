"""`Sequence`: one sample while it is being generated. Knows nothing of pages, files or other sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batchgen.engine.constraints import GrammarState
from batchgen.engine.repetition import repeats
from batchgen.engine.shaping import Shaping
from batchgen.errors import ErrorInfo, RowError
from batchgen.request import Completion, FinishReason, Request
from batchgen.text.stops import FinishedText, StopState

__all__ = ["SampleLogprobs", "Sequence"]


@dataclass(frozen=True, slots=True)
class SampleLogprobs:
    """One sample's: C tokens."""

    drawn: list[float]
    """[C] of its tokens"""
    top_ids: list[int]
    """[C * K] most likely first, token after token"""
    top: list[float]
    """[C * K]"""
    asked: list[float]
    """[C * I] of the ids that its row names, in its order"""


class Sequence:
    """The tokens of one sample so far, with everything its row asked to be returned.

    `stops` decides when it ends. `masked_ids` are the ids that may not be drawn while fewer than
    `params.min_new_tokens` tokens are out. `repeat_span`: tokens at the end that may not go round in circles.
    `shaping` is what its own tokens do to its logits; None for a plain row. `grammar` is what its text may be.
    """

    __slots__ = (
        "_drawn_by",
        "_slot",
        "error",
        "finish_reason",
        "grammar",
        "ids_logprobs",
        "logprobs",
        "masked_ids",
        "repeat_span",
        "request",
        "sample_index",
        "shaping",
        "stops",
        "top_ids",
        "top_logprobs",
    )

    def __init__(
        self,
        request: Request,
        sample_index: int,
        stops: StopState,
        masked_ids: tuple[int, ...],
        repeat_span: int | None = None,
        shaping: Shaping | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        self.request = request
        self.sample_index = sample_index
        self.stops = stops
        self.masked_ids = masked_ids
        self.repeat_span = repeat_span
        self.shaping = shaping
        self.grammar = grammar
        self.logprobs: list[float] = []
        self.top_ids: list[int] = []
        self.top_logprobs: list[float] = []
        self.ids_logprobs: list[float] = []
        self._drawn_by: Callable[[int], int] | None = None
        self._slot = 0
        self.finish_reason: FinishReason | None = None
        self.error: ErrorInfo | None = None

    def place(self, drawn_by: Callable[[int], int], slot: int) -> None:
        """It has a slot now; `drawn_by` says how many tokens the sample at a slot has drawn."""
        self._drawn_by, self._slot = drawn_by, slot

    @property
    def drawn(self) -> int:
        """Tokens drawn, those included that the host has not heard of yet."""
        return 0 if self._drawn_by is None else self._drawn_by(self._slot)

    @property
    def plain(self) -> bool:
        """Whether its tokens may be handed to it all at once, those before the last one before that."""
        if self.stops.follows_text or self.grammar is not None or self.repeat_span is not None:
            return False
        return self.shaping is None or not self.shaping.needs_host

    @property
    def special(self) -> bool:
        """Whether its draws take more than its sampling parameters."""
        return self.shaping is not None or self.grammar is not None or bool(self.masked_ids)

    @property
    def output_ids(self) -> list[int]:
        """[C] tokens so far; those of a plain sample are here once it has ended."""
        return self.stops.output_ids

    @property
    def masks_stops(self) -> bool:
        """Whether the next token may not be one that ends the row."""
        return self.drawn < self.request.params.min_new_tokens and bool(self.masked_ids)

    @property
    def ended(self) -> bool:
        """Whether its last token is out, or it has failed."""
        return self.finish_reason is not None or self.error is not None

    def append(self, token: int) -> bool:
        """Take the next token; True if it ends the sequence."""
        most = self.request.max_new_tokens
        try:
            event = self.stops.append(token, last=len(self.output_ids) + 1 >= most)
        except RowError as problem:
            self.fail(problem.info)
            return True
        ended = self.grammar is not None and self.grammar.accept(token)
        if self.grammar is not None and self.grammar.error is not None:
            self.fail(self.grammar.error)
            return True
        if event is not None or ended:
            self.finish_reason = "stop"
        elif self.repeat_span is not None and self._repeats(self.repeat_span):
            self.finish_reason = "repetition"
        elif len(self.output_ids) >= most:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def exhaust(self) -> None:
        """End a constrained sequence for which nothing is left to draw; its draw is dropped."""
        assert self.grammar is not None
        self.grammar.exhausted()
        if self.grammar.error is not None:
            self.fail(self.grammar.error)
        else:
            self.finish_reason = "stop"

    def _repeats(self, span: int) -> bool:
        ids = self.output_ids
        return len(ids) >= self.request.params.min_new_tokens and repeats(ids, span)

    @property
    def mean_logprob(self) -> float:
        """Mean logprob of its tokens, once it has them, where its row needs logprobs; 0 of none."""
        return sum(self.logprobs) / max(1, len(self.logprobs))

    def take_logprobs(self, found: SampleLogprobs) -> None:
        """Take what was read of its tokens, all of them."""
        self.logprobs, self.top_ids = found.drawn, found.top_ids
        self.top_logprobs, self.ids_logprobs = found.top, found.asked

    def fail(self, error: ErrorInfo) -> None:
        """End the sequence with an error; what it generated is dropped."""
        self.error = error

    def completion(self, cached_tokens: int, *, prompt_ids: bool) -> Completion:
        """The finished sample (or, after `fail`, the error), with or without its prompt's ids."""
        request = self.request
        if self.error is not None:
            return Completion(
                request.row_index, request.prompt_index, self.sample_index, error=self.error, seed=request.seed
            )
        params = request.params
        count = len(self.output_ids)
        assert self.finish_reason is not None
        done = self.stops.finish(self.finish_reason)
        total = sum(self.logprobs)
        asked, top = params.return_logprob, params.return_logprob and params.top_logprobs_num > 0
        return Completion(
            row_index=request.row_index,
            prompt_index=request.prompt_index,
            sample_index=self.sample_index,
            finish_reason=done.finish_reason,
            stop_kind=done.stop_kind or ("grammar" if done.finish_reason == "stop" else None),
            matched_stop=done.matched_stop,
            matched_text=done.matched_text,
            text=done.text,
            output_ids=self.output_ids,
            # An array is a sequence of ints to its readers.
            prompt_ids=request.prompt_ids if prompt_ids and request.embeds is None else None,  # type: ignore[arg-type]
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=count,
            cached_tokens=cached_tokens,
            output_logprobs=self.logprobs if asked else None,
            output_top_ids=self.top_ids if top else None,
            output_top_logprobs=self.top_logprobs if top else None,
            output_ids_logprobs=self.ids_logprobs if asked and params.token_ids_logprob else None,
            cumulative_logprob=total if asked else None,
            mean_logprob=total / count if asked and count else None,
            min_new_tokens_unmet=count < params.min_new_tokens if params.min_new_tokens else None,
            constraint_ok=self._satisfies(done) if self.grammar is not None else None,
            seed=request.seed,
            effective_max_new_tokens=request.max_new_tokens,
        )

    def _satisfies(self, done: FinishedText) -> bool:
        """Whether the text satisfies the row's constraint, an id that ended it left aside unless it is text of it."""
        assert self.grammar is not None
        ids, text = self.output_ids, done.text
        kept = self.request.params.no_stop_trim
        if done.stop_kind in ("eos", "token") and not (kept and ids[-1] not in self.grammar.stop_ids):
            ids = ids[:-1]
            if kept:
                text = self.stops.text_of(ids)
        # What a match cut off has no tokens of its own: the text alone counts.
        return self.grammar.satisfied(text, None if done.stop_kind in ("string", "regex") else ids)
