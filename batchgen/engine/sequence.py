"""`Sequence`: one sample while it is generated, and the repetition check of `--stop-on-repeat`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchgen.engine.sampling.logits_processor import RowLogitsState
from batchgen.engine.sampling.thinking import ThinkingMask, TokenMask
from batchgen.errors import ErrorInfo, row_error
from batchgen.request.completion import Completion, FinishReason
from batchgen.request.table.request_table import Request
from batchgen.text.stops.conditions import FinishedText, StopState
from batchgen.text.tools.parser import CallParser, calls_json


def is_repeating(ids: list[int], span: int) -> bool:
    """Whether the last `span` ids repeat one block of at most `span // 4` ids.

    The block occurs at least four times; its last copy may be incomplete. The check is cheap unless the last id also
    occurs among the `span // 4` ids before it.
    """
    if len(ids) < span:
        return False
    last = ids[-1]
    for period in range(1, span // 4 + 1):
        if ids[-1 - period] == last and ids[-span + period :] == ids[-span:-period]:
            return True
    return False


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample being generated: its tokens so far, and its stop, logits and grammar state."""

    request: Request
    sample_index: int
    stops: StopState
    """Stop conditions and output ids"""
    masked_ids: Mapping[int, int]
    """Id -> number of tokens before which it cannot be sampled"""
    repeat_span: int | None = None
    """Number of last tokens that are checked for repetition; None: no check"""
    logits_state: RowLogitsState | None = None
    """Logits rules and token counts; None: no rules"""
    grammar: TokenMask | None = None
    """Mask of the row's constraint, and of the budget of its thoughts; None: neither"""
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """[C] logprobs of all its tokens, once it has ended"""
    top_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """[C * K] most likely tokens of each position, most likely first, once it has ended"""
    top_logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """[C * K] logprobs of `top_ids`"""
    ids_logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """[C * I] logprobs of the row's `token_ids_logprob`, in its order, once it has ended"""
    cumulative_logprob: float = 0.0
    """Sum of `logprobs`"""
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    _num_sampled_at: Callable[[int], int] | None = None
    _slot: int = 0
    _masked_until: int = 0

    def __post_init__(self) -> None:
        self._masked_until = max(self.masked_ids.values(), default=0)

    def set_slot(self, num_sampled_at: Callable[[int], int], slot: int) -> None:
        """Set the sequence's slot; `num_sampled_at` returns the number of sampled tokens of a slot."""
        self._num_sampled_at, self._slot = num_sampled_at, slot

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens, including those that are not on the host yet."""
        return 0 if self._num_sampled_at is None else self._num_sampled_at(self._slot)

    @property
    def plain(self) -> bool:
        """Whether it can receive its tokens all at once when it ends."""
        if self.stops.needs_each_token or self.repeat_span is not None:
            return False
        return self.logits_state is None or not self.logits_state.needs_host

    @property
    def edits_logits(self) -> bool:
        """Whether sampling changes its logits: rules, a grammar or masks of first tokens."""
        return self.logits_state is not None or self.grammar is not None or bool(self.masked_ids)

    @property
    def output_ids(self) -> list[int]:
        """[C] tokens so far; a plain sequence receives them when it ends."""
        return self.stops.output_ids

    @property
    def masks_early(self) -> bool:
        """Whether any of `masked_ids` is masked for the next token."""
        return self.num_sampled < self._masked_until

    @property
    def ended(self) -> bool:
        """Whether it has finished or failed."""
        return self.finish_reason is not None or self.error is not None

    def append(self, token: int) -> bool:
        """Append the next token; True if it ends the sequence, be it by what the row raises."""
        most = self.request.max_new_tokens
        try:
            event = self.stops.append(token, last=len(self.output_ids) + 1 >= most)
            ended = self.grammar is not None and self.grammar.accept(token)
        except Exception as error:
            self.fail(row_error(error, "looking for the row's stops"))
            return True
        if self.grammar is not None and self.grammar.error is not None:
            self.fail(self.grammar.error)
            return True
        if event is not None or ended:
            self.finish_reason = "stop"
        elif self.repeat_span is not None and self._is_repeating(self.repeat_span):
            self.finish_reason = "repetition"
        elif len(self.output_ids) >= most:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def end_exhausted(self) -> None:
        """End a constrained sequence that has no token left to sample; the sampled token is discarded."""
        assert self.grammar is not None
        self.grammar.check_can_end()
        if self.grammar.error is not None:
            self.fail(self.grammar.error)
        else:
            self.finish_reason = "stop"

    def _is_repeating(self, span: int) -> bool:
        ids = self.output_ids
        return len(ids) >= self.request.params.min_new_tokens and is_repeating(ids, span)

    @property
    def mean_logprob(self) -> float:
        """Mean logprob of its tokens; 0 without logprobs."""
        return self.cumulative_logprob / max(1, len(self.logprobs))

    def fail(self, error: ErrorInfo) -> None:
        """End the sequence with an error; its output is discarded."""
        self.error = error

    def completion(self, cached_tokens: int, *, prompt_ids: bool) -> Completion:
        """The completion of the finished sample, or its error after `fail`."""
        request = self.request
        if self.error is not None:
            row, prompt, index = request.row_index, request.prompt_index, self.sample_index
            return Completion(row, prompt, index, error=self.error, seed=request.seed)
        params, count = request.params, len(self.output_ids)
        assert self.finish_reason is not None
        done = self.stops.finish(self.finish_reason)
        returns_logprobs, top = params.return_logprob, params.return_logprob and params.top_logprobs_num > 0
        return Completion(
            row_index=request.row_index,
            prompt_index=request.prompt_index,
            sample_index=self.sample_index,
            finish_reason=done.finish_reason,
            stop_kind=done.stop_kind or ("grammar" if done.finish_reason == "stop" else None),
            matched_stop=done.matched_stop,
            matched_text=done.matched_text,
            text=done.text,
            reasoning=done.reasoning,
            reasoning_tokens=done.reasoning_tokens,
            reasoning_cut=self._reasoning_cut,
            tool_calls=self._tool_calls(done),
            tool_calls_error=done.tool_calls_error,
            output_ids=self.output_ids,
            # A numpy array is used like a sequence of ints.
            prompt_ids=request.prompt_ids if prompt_ids and request.embeds is None else None,  # type: ignore[arg-type]
            prompt_tokens=len(request.prompt_ids),
            media_tokens=request.media_tokens,
            completion_tokens=count,
            cached_tokens=cached_tokens,
            # Numpy arrays are used like sequences of numbers.
            output_logprobs=self.logprobs if returns_logprobs else None,  # type: ignore[arg-type]
            output_top_ids=self.top_ids if top else None,  # type: ignore[arg-type]
            output_top_logprobs=self.top_logprobs if top else None,  # type: ignore[arg-type]
            output_ids_logprobs=self.ids_logprobs if returns_logprobs and params.token_ids_logprob else None,  # type: ignore[arg-type]
            cumulative_logprob=self.cumulative_logprob if returns_logprobs else None,
            mean_logprob=self.mean_logprob if returns_logprobs and count else None,
            min_new_tokens_unmet=count < params.min_new_tokens if params.min_new_tokens else None,
            constraint_ok=self._satisfies_constraint(done) if params.constraint is not None else None,
            seed=request.seed,
            effective_max_new_tokens=request.max_new_tokens,
        )

    def _tool_calls(self, done: FinishedText) -> str | None:
        """The calls of the answer as JSON; None if there are none."""
        how = self.request.params.tool_calls
        if how is None or not done.tool_calls:
            return None
        length = CallParser.of(how).format.id_length
        return calls_json(done.tool_calls, self.request.prompt_ids, self.sample_index, length)

    @property
    def _reasoning_cut(self) -> bool | None:
        """Whether a budget has ended the thoughts; None without a budget."""
        if self.request.params.thinking_budget is None or not isinstance(self.grammar, ThinkingMask):
            return None
        return self.grammar.cut

    def _satisfies_constraint(self, done: FinishedText) -> bool | None:
        """Whether the text satisfies the row's constraint (None: not known).

        A stop id at the end does not count unless it is text.
        """
        assert self.grammar is not None
        params = self.request.params
        if params.tool_choice is not None:
            is_whole = not done.text and done.tool_calls_error is None  # the last call may be cut
            return self.grammar.satisfied((self._tool_calls(done) if is_whole else None) or "", None)
        ids, text = self.output_ids if params.constrains_all else self.stops.answer_ids, done.text
        kept = params.no_stop_trim
        if done.stop_kind in ("eos", "token") and not (kept and ids[-1] not in self.grammar.stop_ids):
            ids = ids[:-1]
            if kept:
                text = self.stops.decode(ids)
        if params.constrains_all and params.separate_reasoning:
            text = self.stops.decode(ids)  # the thoughts, too
        # A stop string may cut a token, so only the text is checked.
        return self.grammar.satisfied(text, None if done.stop_kind in ("string", "regex") else ids)
