"""Results of generation: a finished sample, its scores and hidden states, and streaming events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np
import numpy.typing as npt

from batchgen.errors import ErrorInfo
from batchgen.request.html import html_table, one_line

Dialect = Literal["native", "openai-completions", "openai-chat", "openai-embeddings", "rerank"]
"""Format of an input row."""
FinishReason = Literal["stop", "length", "abort", "repetition"]
"""Why a sample ended."""
StopKind = Literal["eos", "token", "string", "regex", "grammar"]
"""Kind of stop condition of a sample that ended with `stop`."""


@dataclass(frozen=True, slots=True)
class Score:
    """Score of one given text of a scoring row. Field names are those of the `scores` column."""

    sum: float
    """Sum of the tokens' logprobs, natural log."""
    mean: float
    """Mean logprob of a token."""
    tokens: int
    """Number of tokens of the text."""
    is_greedy: bool
    """Whether each token is the most likely one at its position."""


@dataclass(frozen=True, slots=True)
class LabelScore:
    """Score of one label, or of a document for a query. Field names are those of the `scores` column of such rows."""

    label: str
    score: float


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Parts of `cached_tokens`. Field names are those of the column `cached_tokens_details`."""

    prefix: int = 0
    """Tokens shared with a prompt that goes on differently."""
    duplicate: int = 0
    """Tokens of a prompt that is computed for an equal prompt, or for another sample."""

    @classmethod
    def of(cls, cached: int | None, prompt_tokens: int | None) -> CachedTokens | None:
        """The parts of `cached`, of which a whole prompt is a duplicate's; None without a count."""
        if cached is None:
            return None
        return cls(duplicate=cached) if cached == prompt_tokens else cls(prefix=cached)


@dataclass(frozen=True, slots=True)
class StateBlock:
    """Hidden states of one sample at one layer."""

    layer: int
    """0: the embeddings, i: the output of block i, -1: after the final norm."""
    span: str
    """Requested tokens: `prompt`, `output`, `all` or `last`."""
    token_start: int
    """Position of the token of `values[0]`, counted over prompt and output."""
    values: npt.NDArray[np.float32]
    """[tokens, H]; one row if pooled"""
    dtype: str
    """Number format in which the model computed them, such as `bfloat16`."""

    def __repr__(self) -> str:
        shape = list(self.values.shape)
        return f"StateBlock(layer={self.layer}, span={self.span!r}, token_start={self.token_start}, values={shape})"


@dataclass(slots=True)
class AnswerCounts:
    """Counts of the samples of a job that ended, scored texts excluded."""

    answers: int = 0
    empty_texts: int = 0
    """Number of answers without text and calls of tools."""
    first_text: str | None = None
    """The text of the first answer that has one."""
    equal_texts: int = 0
    """Number of answers with the text of the first."""
    finish_reasons: Counter[str] = field(default_factory=Counter)
    """Finish reason -> number of answers."""

    def add(self, text: str | None, reason: str, *, has_calls: bool = False) -> None:
        """Count an answer."""
        self.answers += 1
        self.empty_texts += text == "" and not has_calls
        self.first_text = text if self.first_text is None else self.first_text
        self.equal_texts += text is not None and text == self.first_text
        self.finish_reasons[reason] += 1


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished (or failed) sample with everything that the row requested.

    `row_index`, `prompt_index` and `sample_index` are its key. A row that failed as a whole has one completion, with
    `error` set and prompt and sample index 0.
    """

    row_index: int
    prompt_index: int = 0
    sample_index: int = 0
    error: ErrorInfo | None = None
    finish_reason: FinishReason | None = None
    stop_kind: StopKind | None = None
    matched_stop: str | None = None
    matched_text: str | None = None
    text: str | None = None
    """The generated text, or the answer alone if the thoughts are separated from it."""
    reasoning: str | None = None
    """The thoughts; None if there are none, or if they are a part of `text`."""
    reasoning_tokens: int | None = None
    """Number of tokens of the thoughts, without their markers; None as for `reasoning`, and 0 for empty thoughts."""
    reasoning_cut: bool | None = None
    """Whether the thoughts were ended by the row's `thinking_budget`; None without a budget."""
    tool_calls: str | None = None
    """Calls of the row's tools: a JSON list as OpenAI's `message.tool_calls`; None if there are none."""
    tool_calls_error: str | None = None
    """Why something in the text that begins like a call is none."""
    output_ids: Sequence[int] | None = None
    """[C], up to and including the token that completed the stop."""
    prompt_ids: Sequence[int] | None = None
    prompt_tokens: int | None = None
    media_tokens: int | None = None
    """Prompt tokens that images and sounds became; None if the prompt has none."""
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens shared with another sample, which this sample does not compute."""
    cached_tokens_details: CachedTokens | None = None
    """What they consist of, if the row asks for it."""
    output_logprobs: Sequence[float] | None = None
    """[C] natural log; it and the other `output_*` of logprobs are arrays, float32 and int32."""
    output_top_ids: Sequence[int] | None = None
    """[C * K] flat, most likely first, ties by lowest id."""
    output_top_logprobs: Sequence[float] | None = None
    output_ids_logprobs: Sequence[float] | None = None
    """[C * len(token_ids_logprob)] flat."""
    input_logprobs: Sequence[float | None] | None = None
    """[P - logprob_start_len]; position 0 of the prompt is null (masked, so that `tolist` returns None there)."""
    input_top_ids: Sequence[int | None] | None = None
    """[(P - logprob_start_len) * K] flat; position 0 of the prompt has K nulls."""
    input_top_logprobs: Sequence[float | None] | None = None
    input_ids_logprobs: Sequence[float | None] | None = None
    output_tokens_text: Sequence[str] | None = None
    """[C] text of each output token."""
    input_tokens_text: Sequence[str] | None = None
    """[P - logprob_start_len] text of each prompt token."""
    routed_experts: Sequence[int] | None = None
    """[(P + C - 1) * MoE layers * experts per token] flat expert ids."""
    scores: Sequence[Score] | Sequence[LabelScore] | None = None
    """One score for each given text of a scoring row, or for each label of a checkpoint with a classification head."""
    embedding: Sequence[float] | None = None
    """The embedding of the prompt, a float32 array."""
    score_logprobs: Sequence[float] | None = None
    """Token logprobs of the given texts, concatenated."""
    states: Sequence[StateBlock] | None = None
    """Hidden states by layer; they are written to a separate file."""
    constraint_ok: bool | None = None
    """Whether the text satisfies the row's constraint; None without a constraint."""
    dropped_tokens: int | None = None
    """Number of tokens of the samples that `best_of` discarded; set on sample 0."""
    cumulative_logprob: float | None = None
    mean_logprob: float | None = None
    min_new_tokens_unmet: bool | None = None
    """Whether the sample ended before `min_new_tokens`; None if the row sets no minimum."""
    seed: int | None = None
    effective_max_new_tokens: int | None = None
    dedup_of: int | None = None
    """row_index of the identical greedy row from which this one was copied."""
    id: str | None = None
    """Id of the row; set for the Python API only, a job's writer looks ids up by row."""

    def __repr__(self) -> str:
        named = (
            "row_index",
            "prompt_index",
            "sample_index",
            "id",
            "error",
            "finish_reason",
            "completion_tokens",
            "text",
        )
        values = {**{name: getattr(self, name) for name in named}, "error": self._error_line}
        kept = {
            name: value
            for name, value in values.items()
            if value or (value is not None and name in ("row_index", "text"))
        }
        shown = [f"{name}={one_line(value)}" for name, value in kept.items()]
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def _error_line(self) -> str | None:
        return None if self.error is None else f"{self.error.code}: {self.error.message}"

    def _repr_html_(self) -> str:
        values = {**{each.name: getattr(self, each.name) for each in fields(self)}, "error": self._error_line}
        first = ("id", "error", "text", "reasoning", "tool_calls", "finish_reason")
        names = dict.fromkeys((*first, *values))
        return html_table((), [(name, values[name]) for name in names if values[name] is not None])

    @property
    def key(self) -> tuple[int, int, int]:
        """(row_index, prompt_index, sample_index)."""
        return (self.row_index, self.prompt_index, self.sample_index)

    def set_id(self, row_id: str) -> Completion:
        """Set the id in place and return `self`; call it before anything else holds the object.

        Copying a frozen object with this many fields is slow.
        """
        object.__setattr__(self, "id", row_id)
        return self


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a sample at an event. Field names are those of OpenAI's `usage`."""

    prompt_tokens: int
    completion_tokens: int
    """Tokens up to and including this event's."""
    total_tokens: int


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One token of a row with `stream`, or (without a `token_id`) the end of one of its samples."""

    row_index: int
    prompt_index: int
    sample_index: int
    text: str
    """Text that is final and that no earlier event contained."""
    position: int | None = None
    """Index of the token in the output, from 0."""
    token_id: int | None = None
    logprob: float | None = None
    """Logprob of the token, if the row requests logprobs."""
    finish_reason: FinishReason | None = None
    stop_kind: StopKind | None = None
    matched_stop: str | None = None
    reasoning: str | None = None
    """The thoughts of a sample that has ended, if they are separated from its text."""
    tool_calls: str | None = None
    """The calls of a sample that has ended, as in `Completion`."""
    completion_tokens: int | None = None
    usage: Usage | None = None
    """Token counts, if the row asks for them in `stream_options`."""
    error: ErrorInfo | None = None
    """Error of a failed sample; its earlier events are void."""
    id: str | None = None
    """Id of the row; set for the Python API only."""
