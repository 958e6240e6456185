"""Logits processing between the model and the sampling filters.

Order: repetition → frequency, presence → logit_bias → custom processors → bad and allowed tokens

`LogitsRules` holds the rules of one parameter set and is shared by all rows that use it. `RowLogitsState` holds the
state of one sample. `LogitsProcessor` applies the rules of all rows of a step.

A custom logit processor is called once a step for all rows that name it; an error fails only the rows that cause it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.sampling.penalty_counts import PenalisedRows, TokenCounts
from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.kernels.counts import Penalties
from batchgen.kernels.device import Device
from batchgen.kernels.ops import Ops
from batchgen.request.fields.params import SamplingParams
from batchgen.request.foreign_text import read_json
from batchgen.request.processors import LoadedProcessor, LogitProcessor, ProcessorRow
from batchgen.request.table.request_table import Request
from batchgen.text.param_checks import bad_word_sequences
from batchgen.text.tokens.tokenizer import Tokenizer


class ProcessorView(ProcessorRow):
    """One sample as a custom logit processor sees it: copies of its tokens and of its parameters."""

    def __init__(self, request: Request, output_ids: list[int]) -> None:
        self._request = request
        self._output_ids = output_ids

    @cached_property
    def prompt_ids(self) -> tuple[int, ...]:
        """[P] prompt token ids; empty if the prompt is given as embeddings."""
        return tuple(self._request.known_ids.tolist())

    @property
    def output_ids(self) -> tuple[int, ...]:
        """[C] output token ids so far."""
        return tuple(self._output_ids)

    @cached_property
    def params(self) -> Mapping[str, Any]:
        """The row's `custom_params`."""
        text = self._request.params.custom_params
        return read_json(text) if text is not None else {}


_Views = Sequence[ProcessorView]


def run_processor(
    device: Device, ops: Ops, function: LogitProcessor, name: str, logits: Tensor, index: list[int], rows: _Views
) -> dict[int, ErrorInfo]:
    """Apply a custom logit processor to the rows `index` of a step's logits, in place; failed rows stay unchanged.

    If the call fails for a batch, it is repeated row by row, so that an error in one row does not affect the others.

    This waits for the device, because the processor's result decides whether a row ends. `logits`: [R, V] float32;
    `index`: [r] rows that name the processor; `rows`: [r] their views. Returns errors, by row of the step.
    """
    (at,) = device.upload(np.array(index, np.int64))
    problem = ""

    def call(logits: Tensor) -> Tensor | None:
        nonlocal problem
        result, problem = _call_processor(function, logits, rows)
        return result

    tops = ops.replace_rows(logits, at, call)
    if tops is None and len(index) == 1:
        return {index[0]: _processor_error(name, problem)}
    if tops is None:
        errors: dict[int, ErrorInfo] = {}
        for row, view in zip(index, rows, strict=True):
            errors |= run_processor(device, ops, function, name, logits, [row], [view])
        return errors
    (largest,) = device.download(tops).wait()
    bad = {index[i]: value for i, value in enumerate(largest.tolist()) if not -torch.inf < value < torch.inf}
    return {
        row: _processor_error(name, "it masked every token" if value < 0 else f"it gave {value} among the logits")
        for row, value in bad.items()
    }


def _call_processor(function: LogitProcessor, logits: Tensor, rows: _Views) -> tuple[Tensor | None, str]:
    """The processed logits, or None and an error message; `logits` is a copy that the processor may change."""
    shape, device = logits.shape, logits.device
    try:
        result = function(logits, rows)
    except (Exception, SystemExit) as problem:  # user code may raise anything
        if isinstance(problem, torch.OutOfMemoryError):
            raise  # a smaller step may fit
        lines = str(problem).strip().splitlines()
        return None, f"{type(problem).__name__}: {lines[0][:200]}" if lines else type(problem).__name__
    if not isinstance(result, Tensor):
        return None, f"it returned {type(result).__name__}, not a tensor"
    if result.shape != shape:
        return None, f"it returned shape {list(result.shape)}, not {list(shape)}"
    if result.dtype != torch.float32 or result.device != device or result.layout != torch.strided:
        return None, f"it returned {result.dtype} on {result.device}, not dense torch.float32 on {device}"
    return result, ""


def _processor_error(name: str, problem: str) -> ErrorInfo:
    message = f"the logit processor {name!r} failed on this row: {problem}"
    return ErrorInfo(ErrorCode.PROCESSOR_ERROR, message, "custom_logit_processor")


RepetitionScope = Literal["output", "prompt+output"]

Int64 = npt.NDArray[np.int64]

_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


@dataclass(frozen=True, slots=True, eq=False)
class LogitsRules:
    """Logits rules of one parameter set, as arrays."""

    params: SamplingParams
    counts_prompt: bool
    """Whether the repetition penalty also applies to prompt tokens."""
    bias_ids: Int64
    bias_values: npt.NDArray[np.float32]
    banned_ids: Int64
    """[B] bad words of one token and suppressed tokens, which are always masked."""
    bad_phrases: Mapping[int, tuple[tuple[int, ...], ...]]
    """Second-to-last token -> bad words of several tokens with that token."""
    allowed: Int64 | None
    """The only ids that may be sampled, each once; None: all."""

    @staticmethod
    def of(params: SamplingParams, tokenizer: Tokenizer, vocab_size: int, scope: RepetitionScope) -> LogitsRules:
        """The rules of `params`, with tokenised bad words."""
        words = bad_word_sequences(params.bad_words, tokenizer, vocab_size) if params.bad_words else ()
        bad_phrases: dict[int, tuple[tuple[int, ...], ...]] = {}
        for word in words:
            if len(word) > 1:
                bad_phrases[word[-2]] = (*bad_phrases.get(word[-2], ()), word)
        allowed = params.allowed_token_ids
        return LogitsRules(
            params=params,
            counts_prompt=scope == "prompt+output" and params.repetition_penalty != 1.0,
            bias_ids=np.array([token for token, _ in params.logit_bias], np.int64),
            bias_values=np.array([bias for _, bias in params.logit_bias], np.float32),
            banned_ids=np.array([*(word[0] for word in words if len(word) == 1), *params.suppress_tokens], np.int64),
            bad_phrases=bad_phrases,
            allowed=None if allowed is None else np.unique(np.array(allowed, np.int64)),
        )

    @property
    def changes_logits(self) -> bool:
        """Whether the rules change logits other than by masking them."""
        return self.params.has_penalties or len(self.bias_ids) > 0 or self.params.custom_logit_processor is not None

    @property
    def masks(self) -> bool:
        """Whether the rules mask tokens, so that none may be left to sample."""
        masked = bool(self.bad_phrases) or len(self.banned_ids) > 0 or self.allowed is not None
        return masked or self.params.custom_logit_processor is not None


class RulesCache:
    """Logits rules by parameter set, made when the first row with these parameters starts."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, scope: RepetitionScope, device: Device) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._scope: RepetitionScope = scope
        self._counts = TokenCounts(vocab_size, device)
        self._rules: dict[SamplingParams, LogitsRules] = {}

    def start(self, request: Request, output_ids: list[int]) -> RowLogitsState | None:
        """The logits state of a new sample that writes its tokens to `output_ids`; None if its row has no rules."""
        params = request.params
        if not params.modifies_logits or not request.max_new_tokens:
            return None
        rules = self._rules.get(params)
        if rules is None:
            rules = LogitsRules.of(params, self._tokenizer, self._vocab_size, self._scope)
            if not rules.changes_logits and not rules.masks:
                return None  # a constraint alone is handled by `GrammarMasks`
            self._rules[params] = rules
        return RowLogitsState(rules, request, output_ids, self._counts)

    def finish(self, logits_state: RowLogitsState) -> None:
        """Free the token counts of a sample that has ended."""
        if logits_state.slot:
            self._counts.release(logits_state.slot)
            logits_state.slot = 0


class RowLogitsState:
    """Logits rules and token counts of one sample. Tokens are counted when sampled; preemption keeps the counts."""

    __slots__ = ("counts", "output_ids", "rules", "slot", "view")

    def __init__(self, rules: LogitsRules, request: Request, output_ids: list[int], counts: TokenCounts) -> None:
        self.rules = rules
        self.output_ids = output_ids
        self.counts = counts
        self.slot = 0
        """Slot in `counts`; 0 without penalties."""
        if rules.params.has_penalties:
            self.slot = counts.add(request.known_ids if rules.counts_prompt else None)
        named = rules.params.custom_logit_processor is not None
        self.view = ProcessorView(request, output_ids) if named else None

    @property
    def needs_host(self) -> bool:
        """Whether its rules depend on its earlier tokens, which must be on the host first."""
        return self.view is not None or bool(self.rules.bad_phrases)

    def phrase_completions(self) -> Iterator[int]:
        """Tokens that would complete a bad word of several tokens."""
        output = self.output_ids
        if output:
            for word in self.rules.bad_phrases.get(output[-1], ()):
                if tuple(output[1 - len(word) :]) == word[:-1]:
                    yield word[-1]


_States = list[tuple[int, RowLogitsState]]
"""Rows of the step and their states"""


class LogitsProcessor:
    """Applies the logits rules of a fixed set of rows in every step; rebuilt when the rows change."""

    def __init__(self, rows: _States, processors: Mapping[str, LoadedProcessor], device: Device, ops: Ops) -> None:
        """`rows`: row of the step and state, of rows with rules. All arrays are uploaded in one transfer."""
        self.places = [i for i, _ in rows]
        self._device = device
        self._ops = ops
        self._processors = processors
        self._phrase_rows = [(i, s) for i, s in rows if s.rules.bad_phrases]
        self._processor_rows: dict[str, list[tuple[int, ProcessorView]]] = {}
        for i, logits_state in rows:
            if logits_state.view is not None:
                name = logits_state.rules.params.custom_logit_processor or ""
                self._processor_rows.setdefault(name, []).append((i, logits_state.view))
        penalised = [(i, s) for i, s in rows if s.slot]
        arrays = _device_arrays(rows, penalised)
        at = dict(zip(arrays, device.upload(*arrays.values()), strict=True))
        self._bias = at["bias_rows"], at["bias_ids"], at["bias_values"]
        self._banned = at["banned_rows"], at["banned_ids"]
        self._allowed_rows = at["only"]
        self._allowed = at["allowed_rows"], at["allowed_ids"]
        self._penalised: PenalisedRows | None = None
        if penalised:
            penalties = Penalties(*(at[name] for name in _PENALTIES))
            # A new array: the device may overwrite uploaded ones.
            slots = np.array([s.slot for _, s in penalised], np.int64)
            self._penalised = PenalisedRows(penalised[0][1].counts, slots, at["slots"], at["penalised"], penalties)

    @property
    def has_processors(self) -> bool:
        """Whether any row names a custom processor."""
        return bool(self._processor_rows)

    @property
    def needs_host(self) -> bool:
        """Whether any row's rules depend on its earlier tokens, which must be on the host first."""
        return bool(self._processor_rows or self._phrase_rows)

    def __call__(self, logits: Tensor, failed: Container[int]) -> dict[int, ErrorInfo]:
        """Process a step's logits [R, V] float32 in place; returns the errors of custom processors, by row.

        `failed`: rows that are not passed to custom processors.
        """
        if self._penalised is not None:
            self._penalised.penalise(logits, self._ops)
        if len(self._bias[0]):
            self._ops.add_bias(logits, *self._bias)
        errors = self._run_processors(logits, failed)
        self._mask(logits)
        return errors

    def count(self, tokens: Tensor) -> None:
        """Count the sampled tokens [R] int64 for the penalties of the next step."""
        if self._penalised is not None:
            self._penalised.count(tokens, self._ops)

    def _run_processors(self, logits: Tensor, failed: Container[int]) -> dict[int, ErrorInfo]:
        errors: dict[int, ErrorInfo] = {}
        for name, rows in self._processor_rows.items():
            shown = [(i, row) for i, row in rows if i not in failed]
            if shown:
                named = self._processors[name].function, name
                index, views = [i for i, _ in shown], [row for _, row in shown]
                errors |= run_processor(self._device, self._ops, *named, logits, index, views)
        return errors

    def _mask(self, logits: Tensor) -> None:
        if len(self._banned[0]):
            self._ops.mask_tokens(logits, *self._banned)
        ends = [(i, token) for i, logits_state in self._phrase_rows for token in logits_state.phrase_completions()]
        if ends:
            self._ops.mask_tokens(logits, *self._device.upload(*np.array(ends, np.int64).T.copy()))
        if len(self._allowed_rows):
            self._ops.keep_only(logits, self._allowed_rows, *self._allowed)


def _device_arrays(rows: _States, penalised: _States) -> dict[str, npt.NDArray[Any]]:
    """Arrays to upload for a set of rows, by name."""
    biased = [(i, s.rules) for i, s in rows if len(s.rules.bias_ids)]
    kept = [(i, s.rules.allowed) for i, s in rows if s.rules.allowed is not None]
    arrays: dict[str, npt.NDArray[Any]] = {}
    arrays["bias_rows"], arrays["bias_ids"] = _row_id_pairs([(i, rules.bias_ids) for i, rules in biased])
    arrays["bias_values"] = np.concatenate([np.zeros(0, np.float32), *(rules.bias_values for _, rules in biased)])
    banned = [(i, s.rules.banned_ids) for i, s in rows if len(s.rules.banned_ids)]
    arrays["banned_rows"], arrays["banned_ids"] = _row_id_pairs(banned)
    arrays["allowed_rows"], arrays["allowed_ids"] = _row_id_pairs(kept)
    arrays["only"] = np.array([i for i, _ in kept], np.int64)
    arrays["penalised"] = np.array([i for i, _ in penalised], np.int64)
    arrays["slots"] = np.array([s.slot for _, s in penalised], np.int64)
    for name in _PENALTIES:
        arrays[name] = np.array([getattr(s.rules.params, name) for _, s in penalised], np.float32)
    return arrays


def _row_id_pairs(ids: list[tuple[int, Int64]]) -> tuple[Int64, Int64]:
    """(rows [m], ids [m]): one pair for each id of each row."""
    rows = np.repeat(np.array([row for row, _ in ids], np.int64), [len(some) for _, some in ids])
    return rows, np.concatenate([np.zeros(0, np.int64), *(some for _, some in ids)])
