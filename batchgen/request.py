"""The values that travel between floors: a parsed row, a request, a finished sample.

Nothing here knows of files or tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.columns import Columns
from batchgen.embeds import EmbedsStore
from batchgen.errors import ErrorInfo
from batchgen.params import Constraint, SamplingParams
from batchgen.prompts import Prompt, StoredPrompt

__all__ = [
    "Completion",
    "Dialect",
    "FinishReason",
    "ParsedRow",
    "Request",
    "RequestTable",
    "Score",
    "StateBlock",
    "StopKind",
    "StreamEvent",
]

Dialect = Literal["native", "openai-completions", "openai-chat"]
FinishReason = Literal["stop", "length", "abort", "repetition"]
StopKind = Literal["eos", "token", "string", "regex", "grammar"]


class ParsedRow(NamedTuple):
    """One input row after validation and before tokenisation."""

    row_index: int
    id: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    extra: Mapping[str, Any]
    """Unknown top-level keys, carried to the output."""
    dialect: Dialect = "native"
    completions: tuple[str | tuple[int, ...], ...] = ()
    """Texts or ids to score after each prompt; empty for a row that generates."""


@dataclass(frozen=True, slots=True)
class Request:
    """One tokenised prompt and how to continue it. `index` is its place in its `RequestTable`."""

    index: int
    row_index: int
    prompt_index: int
    prompt_ids: npt.NDArray[np.int32]
    """[P]; zeros that mean nothing where tokens are given as embeddings"""
    params: SamplingParams
    seed: int
    """The row's own seed, or the one derived for it."""
    max_new_tokens: int
    """Effective: clipped to the context."""
    embeds: StoredPrompt | None = None
    """The tokens at the prompt's beginning that are given as embeddings."""
    score_start: int = -1
    """Where the text to score begins in `prompt_ids`; -1: none is scored."""

    @property
    def known_ids(self) -> npt.NDArray[np.int32]:
        """[P] the prompt's ids, less those that are none."""
        return self.prompt_ids if self.embeds is None else self.prompt_ids[self.embeds.length :]


class RequestTable(Columns):
    """All prompts of a job by column, about 40 bytes a prompt beside its tokens.

    Equal `SamplingParams` are stored once, the seed in a column of its own. Tokens live in one flat int32 buffer:
    in memory while rows are appended, or a memory map that a caller hands to `spill`. Prompts given as embeddings have
    zeros for ids, and a place in `embeds`, for whose rows the table takes a store. `columns` and `fill` leave tokens,
    parameter sets and embeddings out.
    """

    _columns = ("_offsets", "_row_index", "_prompt_index", "_params_id", "_seed", "_max_new", "_score_start")

    def __init__(self, embeds: EmbedsStore | None = None) -> None:
        self.embeds = embeds
        self._spans: list[StoredPrompt] = []
        self._span_ids: dict[StoredPrompt, int] = {}
        self._embeds_id = array("i")
        """Begins with the first request that has embeddings; empty while there is none."""
        self._tokens = array("i")
        self._offsets = array("q", [0])
        self._row_index = array("q")
        self._prompt_index = array("i")
        self._params_id = array("i")
        self._seed = array("q")
        self._max_new = array("i")
        self._score_start = array("i")
        self._params: list[SamplingParams] = []
        self._interned: dict[SamplingParams, int] = {}
        self._places: dict[int, int] = {}
        """By the identity of those in `_params`: rows mostly share one, and hashing its fields takes longer."""
        self._mapped: npt.NDArray[np.int32] | None = None

    def append(
        self,
        row_index: int,
        prompt_index: int,
        prompt_ids: Sequence[int] | npt.NDArray[np.int32],
        params: SamplingParams,
        seed: int,
        max_new_tokens: int,
        embeds: StoredPrompt | None = None,
        score_start: int = -1,
    ) -> int:
        """Add a prompt and return its index. A prompt with a text to score has it behind `score_start`; the texts of
        one (row, prompt) are added one after the other.
        """
        if embeds is not None or self._embeds_id:
            self._embeds_id.extend([-1] * (len(self) - len(self._embeds_id)))
            self._embeds_id.append(-1 if embeds is None else self._intern(embeds))
        if self._mapped is None:
            self._tokens.frombytes(np.asarray(prompt_ids, dtype=np.int32).tobytes())
        params_id = self._places.get(id(params))
        if params_id is None:
            params_id = self._intern_params(params)
        self._offsets.append(self._offsets[-1] + len(prompt_ids))
        self._row_index.append(row_index)
        self._prompt_index.append(prompt_index)
        self._params_id.append(params_id)
        self._seed.append(seed)
        self._max_new.append(max_new_tokens)
        self._score_start.append(score_start)
        return len(self._row_index) - 1

    def _intern_params(self, params: SamplingParams) -> int:
        shared = replace(params, seed=None) if params.seed is not None else params
        number = self._interned.setdefault(shared, len(self._params))
        if number == len(self._params):
            self._params.append(shared)
            self._places[id(shared)] = number
        return number

    def _intern(self, span: StoredPrompt) -> int:
        number = self._span_ids.setdefault(span, len(self._spans))
        if number == len(self._spans):
            self._spans.append(span)
        return number

    def spill(self, tokens: npt.NDArray[np.int32]) -> None:
        """Use `tokens` [total] (usually a memory map holding the same ids) in place of the in-memory buffer.

        Called with an empty array before the first `append`, it tells the table that its caller keeps the ids.
        """
        self._mapped = tokens.view(np.ndarray)  # slicing a np.memmap costs twenty times that of a plain array
        self._tokens = array("i")

    def take(self, params: Sequence[SamplingParams], tokens: npt.NDArray[np.int32]) -> None:
        """Complete what `fill` put here: the parameter sets and tokens [total] of the table whose columns they were."""
        self._params = list(params)
        self.spill(tokens)

    def prompt_ids(self, index: int) -> npt.NDArray[np.int32]:
        """[P] the ids of one prompt."""
        return self.tokens[self._offsets[index] : self._offsets[index + 1]]

    def embeds_of(self, index: int) -> StoredPrompt | None:
        """The tokens at a prompt's beginning that are given as embeddings."""
        number = self._embeds_id[index]
        return None if number < 0 else self._spans[number]

    def __len__(self) -> int:
        return len(self._row_index)

    def __iter__(self) -> Iterator[Request]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> Request:
        return Request(
            index=index,
            row_index=self._row_index[index],
            prompt_index=self._prompt_index[index],
            prompt_ids=self.prompt_ids(index),
            params=self._params[self._params_id[index]],
            seed=self._seed[index],
            max_new_tokens=self._max_new[index],
            embeds=self.embeds_of(index) if self._embeds_id else None,
            score_start=self._score_start[index],
        )

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """[total] all prompts' ids, one after the other."""
        if self._mapped is not None:
            return self._mapped
        return np.frombuffer(self._tokens, dtype=np.int32) if self._tokens else np.zeros(0, np.int32)

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """[N + 1] prompt i is `tokens[offsets[i]:offsets[i + 1]]`."""
        return np.frombuffer(self._offsets, dtype=np.int64)

    @property
    def row_index(self) -> npt.NDArray[np.int64]:
        """[N] the input row each prompt came from."""
        return _column(self._row_index, np.int64)

    @property
    def prompt_index(self) -> npt.NDArray[np.int32]:
        """[N] which prompt of its row each is."""
        return _column(self._prompt_index, np.int32)

    @property
    def params_id(self) -> npt.NDArray[np.int32]:
        """[N] index into `params`."""
        return _column(self._params_id, np.int32)

    @property
    def seed(self) -> npt.NDArray[np.int64]:
        """[N] row seeds."""
        return _column(self._seed, np.int64)

    @property
    def max_new_tokens(self) -> npt.NDArray[np.int32]:
        """[N] effective limits."""
        return _column(self._max_new, np.int32)

    @property
    def embeds_id(self) -> npt.NDArray[np.int32] | None:
        """[N] equal for prompts of equal embeddings only, -1 for prompts of ids; None where all are such."""
        return np.frombuffer(self._embeds_id, np.int32) if self._embeds_id else None

    @property
    def score_start(self) -> npt.NDArray[np.int32]:
        """[N] first position of the text to score, -1 where none is."""
        return _column(self._score_start, np.int32)

    @property
    def params(self) -> list[SamplingParams]:
        """The distinct parameter sets, seeds removed."""
        return self._params

    def constraints(self, done: npt.NDArray[np.bool_] | None = None) -> list[Constraint]:
        """Constraints of the requests, less those that are `done` [N]."""
        used = np.unique(self.params_id if done is None else self.params_id[~done])
        return [found for index in used.tolist() if (found := self._params[index].constraint) is not None]


def _column(values: array[int], dtype: type) -> npt.NDArray[Any]:
    return np.frombuffer(values, dtype=dtype) if values else np.zeros(0, dtype)


@dataclass(frozen=True, slots=True)
class Score:
    """What a scoring row learns of one given text. Field names are those of the `scores` column."""

    sum: float
    """Sum of its tokens' logprobs, natural log."""
    mean: float
    tokens: int
    is_greedy: bool
    """Whether each token was the most likely one."""


@dataclass(frozen=True, slots=True)
class StateBlock:
    """Hidden states of one sample at one layer."""

    layer: int
    """0: the embeddings, i: the output of block i, -1: after the final norm."""
    span: str
    """`prompt`, `output`, `all` or `last`, as asked for."""
    token_start: int
    """Position of the first row's token in prompt and output together."""
    values: npt.NDArray[np.float32]
    """[rows, H]; one row where pooled"""
    dtype: str
    """The format the model computed them in, as `bfloat16`."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished (or failed) sample with everything that was asked for.

    `row_index`, `prompt_index` and `sample_index` are its key. A row that failed as a whole has one completion with
    `error` set, prompt and sample index 0.
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
    output_ids: Sequence[int] | None = None
    """[C], up to and including the token that completed the stop."""
    prompt_ids: Sequence[int] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that another sample's computation covers; the job's prompt tokens less these are computed."""
    output_logprobs: Sequence[float] | None = None
    """[C] natural log."""
    output_top_ids: Sequence[int] | None = None
    """[C * K] flat, most likely first, ties by lowest id."""
    output_top_logprobs: Sequence[float] | None = None
    output_ids_logprobs: Sequence[float] | None = None
    """[C * ids of `token_ids_logprob`] flat"""
    input_logprobs: Sequence[float | None] | None = None
    """[P - logprob_start_len]; only position 0 of the prompt is null (masked, so that `tolist` gives None)."""
    input_top_ids: Sequence[int | None] | None = None
    """[(P - logprob_start_len) * K] flat; K nulls for position 0 of the prompt."""
    input_top_logprobs: Sequence[float | None] | None = None
    input_ids_logprobs: Sequence[float | None] | None = None
    output_tokens_text: Sequence[str] | None = None
    """[C]"""
    input_tokens_text: Sequence[str] | None = None
    """[P - logprob_start_len]"""
    routed_experts: Sequence[int] | None = None
    """[(P + C - 1) * MoE layers * experts per token] flat"""
    scores: Sequence[Score] | None = None
    """One for each given text of a scoring row."""
    score_logprobs: Sequence[float] | None = None
    """The given texts' token logprobs, flat, one text after the other."""
    states: Sequence[StateBlock] | None = None
    """Hidden states, by layer; they go to a file of their own."""
    constraint_ok: bool | None = None
    """Whether the text satisfies the row's constraint; None where there is none."""
    dropped_tokens: int | None = None
    """Tokens of the samples that `best_of` did not keep; on sample 0."""
    cumulative_logprob: float | None = None
    mean_logprob: float | None = None
    min_new_tokens_unmet: bool | None = None
    """Whether the sample ended before `min_new_tokens`; None where none was asked for."""
    seed: int | None = None
    effective_max_new_tokens: int | None = None
    dedup_of: int | None = None
    """row_index of the identical greedy row this one was copied from."""
    id: str | None = None
    """Filled for the Python API; a job's writer looks ids up by row."""

    @property
    def key(self) -> tuple[int, int, int]:
        """(row_index, prompt_index, sample_index)."""
        return (self.row_index, self.prompt_index, self.sample_index)

    def named(self, row_id: str) -> Completion:
        """Itself, told its row's id before anybody else has it: a copy of so many fields takes as long as it did."""
        object.__setattr__(self, "id", row_id)
        return self


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A token of a row with `stream`, or (without a `token_id`) the end of one of its samples."""

    row_index: int
    prompt_index: int
    sample_index: int
    text: str
    """What is certain beyond the text of the events before."""
    position: int | None = None
    """Of the token in the output, from 0."""
    token_id: int | None = None
    logprob: float | None = None
    """Of the token, where the row asks for logprobs."""
    finish_reason: FinishReason | None = None
    stop_kind: StopKind | None = None
    matched_stop: str | None = None
    completion_tokens: int | None = None
    error: ErrorInfo | None = None
    """Set where the sample failed: its tokens' events are void."""
    id: str | None = None
    """Filled for the Python API."""
