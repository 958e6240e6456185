"""Completions of ended sequences: `OutputProcessor` makes them, `Scores` and `OpenPrompts` join those of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.engine.capture.hidden_states import hidden_state_collector
from batchgen.engine.capture.prompt_logprobs import PromptLogprobs
from batchgen.engine.outputs.streaming import Streams
from batchgen.engine.sampling.constraints import GrammarState
from batchgen.engine.sampling.logits_processor import RulesCache
from batchgen.engine.sampling.thinking import ThinkingMask, TokenMask
from batchgen.engine.sequence import Sequence
from batchgen.engine.settings import EngineResources, LoopSettings
from batchgen.engine.workload import JobWorkload
from batchgen.errors import ErrorInfo, row_error
from batchgen.kernels.ops import Ops
from batchgen.request.completion import CachedTokens, Completion, LabelScore, Score, StateBlock
from batchgen.request.fields.params import SamplingParams
from batchgen.request.table.request_table import Request
from batchgen.text.reasoning import ReasoningState
from batchgen.text.stops.conditions import StopState, all_stop_token_ids
from batchgen.text.tokens.detokenize import add_echo_and_suffix
from batchgen.text.tokens.tokenizer import Tokenizer


def keep_best(
    samples: list[tuple[float, Completion]], keep: int, cached_tokens: Callable[[int], int]
) -> list[Completion]:
    """The `keep` samples with the highest mean logprob, best first, renumbered from 0; of ties the first.

    `samples`: (mean logprob, sample) of one prompt; `cached_tokens`: by new sample index. `dropped_tokens` of the first
    is the number of tokens of those that are not kept.
    """
    ranked = [sample for _, sample in sorted(samples, key=lambda pair: (-pair[0], pair[1].sample_index))]
    kept = [replace(s, sample_index=i, **_cached(s, cached_tokens(i))) for i, s in enumerate(ranked[:keep])]
    dropped = sum(sample.completion_tokens or 0 for sample in ranked[keep:])
    return [replace(kept[0], dropped_tokens=dropped), *kept[1:]]


def _cached(done: Completion, cached_tokens: int | None) -> dict[str, Any]:
    """Fields of `done` for another number of cached tokens."""
    details = done.cached_tokens_details and CachedTokens.of(cached_tokens, done.prompt_tokens)
    return {"cached_tokens": cached_tokens, "cached_tokens_details": details}


class OutputProcessor:
    """Makes the completions of one job."""

    def __init__(
        self, workload: JobWorkload, tokenizer: Tokenizer, vocab_size: int, ops: Ops, *, prompt_ids: bool
    ) -> None:
        """`prompt_ids`: whether completions contain their prompt's ids."""
        self._workload = workload
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._token_text = lru_cache(1 << 16)(tokenizer.token_text)
        self.prompts = PromptLogprobs(workload, vocab_size, self._token_text, ops)

    def finish_sample(self, sequence: Sequence) -> Completion:
        """The completion of an ended sample, with token texts, `echo` and `suffix` applied."""
        request = sequence.request
        cached = self._workload.tree.cached_tokens(request.index, sequence.sample_index)
        # An echo with logprobs needs the prompt's ids to say which tokens the logprobs belong to.
        params = request.params
        done = sequence.completion(cached, prompt_ids=self._prompt_ids or (params.echo and params.return_logprob))
        if done.error is None and params.return_text_in_logprobs:
            done = replace(done, output_tokens_text=[self._token_text(token) for token in sequence.output_ids])
        if done.error is None and params.return_cached_tokens_details:
            done = replace(done, cached_tokens_details=CachedTokens.of(done.cached_tokens, done.prompt_tokens))
        if done.text is None or not (params.echo or params.suffix):
            return done
        text = add_echo_and_suffix(done.text, request.known_ids.tolist(), params, self._tokenizer)
        return replace(done, text=text)

    def finish_prompt(self, request: Request, samples: list[tuple[float, Completion]]) -> list[Completion]:
        """The completions of a prompt whose samples have all ended; `samples`: (mean logprob, completion)."""
        index, params = request.index, request.params
        failed = [done for _, done in samples if done.error is not None]
        if failed:
            # A failed prompt yields one error row: that of its first failed sample.
            completions = [replace(min(failed, key=lambda done: done.sample_index), sample_index=0)]
        elif params.best_of is not None:
            completions = keep_best(samples, params.n, lambda i: self._workload.tree.cached_tokens(index, i))
        else:
            completions = sorted((done for _, done in samples), key=lambda done: done.sample_index)
        if not failed and params.return_logprob:
            completions = self.prompts.add_to_completions(request, completions)
        leader = int(self._workload.leader[index])
        if leader == index:
            return completions
        # It duplicates a row that an earlier run has committed, so it was generated, but `dedup_of` names that row.
        return [replace(done, dedup_of=int(self._workload.table.row_index[leader])) for done in completions]

    def copy_for_follower(self, follower: int, samples: list[Completion]) -> list[Completion]:
        """The completions of a duplicate request, copied from those of its leader."""
        request = self._workload.table[follower]
        tree, leader = self._workload.tree, samples[0].row_index
        return [
            replace(
                done,
                row_index=request.row_index,
                prompt_index=request.prompt_index,
                seed=request.seed,
                dedup_of=leader,
                **_cached(done, tree.cached_tokens(follower, done.sample_index) if done.error is None else None),
            )
            for done in samples
        ]


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
class _OpenTexts:
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
        self._table, self._tree = workload.table, workload.tree
        self._prompts, self._prompt_ids = prompts, prompt_ids
        self._workload = workload
        self._open: dict[int, _OpenTexts] = {}

    @cached_property
    def _first(self) -> npt.NDArray[np.int64]:
        """`first_text` of the workload, made for the first text: most jobs have none."""
        return self._workload.first_text

    def add(self, request: Request, failed: ErrorInfo | None) -> list[Completion]:
        """Add a finished or failed request with a text to score; returns its prompt's completion if it was the last."""
        first = int(self._first[request.index])
        group = self._open.get(first)
        if group is None:
            group = self._open[first] = _OpenTexts(int(np.searchsorted(self._first, first, side="right")) - first)
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

    def _score(self, request: Request, group: _OpenTexts) -> ErrorInfo | None:
        try:
            logprobs = self._prompts.target_logprobs(request.index)
            most_likely = self._prompts.most_likely_ids(request.index)
            text = request.prompt_ids[request.score_start :]
            group.texts[request.index] = _ScoredText(logprobs, bool((most_likely == text).all()))
        except Exception as error:
            return row_error(error, "scoring the text")
        return None

    def _completion(self, request: Request, group: _OpenTexts) -> Completion:
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
            media_tokens=sum(self._table.media_tokens(index) or 0 for index in indexes) or None,
            completion_tokens=0,
            cached_tokens=sum(self._tree.cached_tokens(index) for index in indexes),
            scores=[text.score for text in texts],
            score_logprobs=logprobs,  # type: ignore[arg-type]
            effective_max_new_tokens=0,
        )


@dataclass(slots=True)
class _OpenPrompt:
    """A request with samples that are still being generated."""

    remaining: int
    finished: list[tuple[float, Completion]] = field(default_factory=list)
    """(mean logprob, completion) of finished samples; `best_of` ranks by mean logprob."""


class OpenPrompts:
    """Starts the samples of a job's requests, and makes the completions of a request when its last sample has ended."""

    def __init__(
        self, workload: JobWorkload, resources: EngineResources, settings: LoopSettings, streams: Streams
    ) -> None:
        model, spec = resources.model, resources.model.spec
        self._workload = workload
        self._model = model
        self._tokenizer = resources.tokenizer
        self._grammars = resources.grammars
        self._reasoning, self._heads = resources.reasoning, resources.heads
        self._repeat_span = settings.repeat_span
        self._streams = streams
        self._rules = RulesCache(resources.tokenizer, spec.vocab_size, settings.repetition_scope, resources.device)
        self._outputs = OutputProcessor(
            workload, resources.tokenizer, spec.vocab_size, resources.backend.ops, prompt_ids=settings.prompt_ids
        )
        self.prompts = self._outputs.prompts
        """Prompt logprobs"""
        self.states = hidden_state_collector(workload, spec, exact=settings.exact_states)
        """Hidden states and routed experts; None: no row returns them"""
        self._scores = Scores(workload, self.prompts, prompt_ids=settings.prompt_ids)
        self._open: dict[int, _OpenPrompt] = {}

    def start(self, number: int, request: Request, sample_index: int) -> Sequence:
        """Start sequence `number`, one sample of a request; it has failed already if the row raises."""
        sequence = self._sequence_or_failed(request, sample_index)
        if request.index not in self._open:
            self._open[request.index] = _OpenPrompt(remaining=request.params.samples)
        self._streams.start(number, sequence)
        if self.states is not None:
            self.states.add(number, request)
        return sequence

    def _sequence_or_failed(self, request: Request, sample_index: int) -> Sequence:
        try:
            return self._sequence(request, sample_index)
        except Exception as error:
            # Its place in the step is kept, by a sequence without any of the row's options.
            plain = SamplingParams()
            stops = StopState(plain, self._tokenizer.eos_ids, self._tokenizer)
            sequence = Sequence(replace(request, params=plain), sample_index, stops, {})
            sequence.fail(row_error(error, "starting the row"))
            return sequence

    def _sequence(self, request: Request, sample_index: int) -> Sequence:
        params, eos = request.params, self._tokenizer.eos_ids
        thoughts = None
        if self._reasoning is not None and (params.separate_reasoning or params.thinking_budget is not None):
            thoughts = self._reasoning.start(request.known_ids.tolist())
        stops = StopState(params, eos, self._tokenizer, thoughts)
        masked = dict.fromkeys(params.begin_suppress_tokens, 1)
        if params.min_new_tokens:
            vocab = self._model.spec.vocab_size
            masked |= {i: params.min_new_tokens for i in sorted(all_stop_token_ids(params, eos)) if i < vocab}
            if len(masked) == vocab:
                masked = {}  # no token would be left; `min_new_tokens_unmet` reports an early end
        logits_state = self._rules.start(request, stops.output_ids)
        grammar = self._mask(params, thoughts)
        return Sequence(request, sample_index, stops, masked, self._repeat_span, logits_state, grammar)

    def _mask(self, params: SamplingParams, thoughts: ReasoningState | None) -> TokenMask | None:
        """The mask of a sample with these parameters, whose tokens `thoughts` follows."""
        constraint, budget = params.constraint, params.thinking_budget
        grammar = GrammarState(self._grammars, params, constraint) if constraint is not None else None
        if thoughts is None or (budget is None and (grammar is None or params.constrains_all)):
            return grammar
        return ThinkingMask(thoughts, budget, grammar)

    def end(self, number: int, sequence: Sequence) -> Iterator[list[Completion]]:
        """End a sample; yield its prompt's samples if it was the last one, then those of duplicate requests."""
        done = self._finished(number, sequence)
        if sequence.logits_state is not None:
            self._rules.finish(sequence.logits_state)
        if self._streams:
            self._streams.finish(number, done)
        yield from self._add(sequence, done)

    def _finished(self, number: int, sequence: Sequence) -> Completion:
        """The completion of an ended sample, with the states and experts that its row returns, or its row's error."""
        request, index, states = sequence.request, sequence.sample_index, self.states
        try:
            done = self._outputs.finish_sample(sequence)
            if states is not None and done.error is None:
                blocks, routed = states.finish(number, len(done.output_ids or ()))
                # A numpy array is used like a sequence of ints.
                done = replace(done, states=blocks, routed_experts=routed)  # type: ignore[arg-type]
                if blocks is not None and request.params.task is not None:
                    done = self._with_task(request, done, blocks[0])
        except Exception as error:
            sequence.fail(info := row_error(error, "finishing the text"))
            done = Completion(request.row_index, request.prompt_index, index, error=info, seed=request.seed)
        if states is not None and done.error is not None:
            states.drop(number)
        return done

    def _with_task(self, request: Request, done: Completion, block: StateBlock) -> Completion:
        """The completion of a row with a task, given the states that it reads."""
        assert self._heads is not None, "made for jobs with such rows"
        params, values = request.params, replace(done, states=None, text=None, output_ids=None, seed=None)
        if params.embed:
            found = self._heads.embedding(block.values, len(request.prompt_ids), params.dimensions)
            return replace(values, embedding=found)  # type: ignore[arg-type]  # a numpy array is used like a sequence
        scores = [LabelScore(*pair) for pair in self._heads.scores(block.values, rerank=params.rerank)]
        best = None if params.rerank else max(scores, key=lambda each: each.score).label
        return replace(values, text=best, scores=scores)

    def fail(
        self, request: Request, error: ErrorInfo, started: dict[int, Sequence], *, unstarted: bool
    ) -> Iterator[list[Completion]]:
        """End all running samples of a request, by sequence number, with an error.

        `unstarted`: whether other samples have not started; one completion represents them all.
        """
        samples = list(started.items())
        never_started = self._sequence_or_failed(request, 0) if unstarted else None
        if not samples and never_started is None:
            return
        group = self._open.setdefault(request.index, _OpenPrompt(0))
        group.remaining = len(samples) + unstarted
        for number, sequence in samples:
            sequence.fail(error)
            yield from self.end(number, sequence)
        if never_started is not None:
            never_started.fail(error)
            done = self._outputs.finish_sample(never_started)
            if not samples:
                self._streams.finish_unstarted(request, done)
            if never_started.logits_state is not None:
                self._rules.finish(never_started.logits_state)
            yield from self._add(never_started, done)

    def _add(self, sequence: Sequence, done: Completion) -> Iterator[list[Completion]]:
        """Add the completion of a sample to those of its prompt, and yield them if it was the last."""
        request, index = sequence.request, sequence.request.index
        group = self._open[index]
        group.finished.append((sequence.mean_logprob, done))
        group.remaining -= 1
        if group.remaining:
            return
        del self._open[index]
        if self.states is not None:
            self.states.release(index)
        if request.score_start >= 0:
            failed = next((c.error for _, c in group.finished if c.error is not None), None)
            if scored := self._scores.add(request, failed):
                yield scored
            self.prompts.buffers.release(index)
            return
        samples = self._joined(request, lambda: self._outputs.finish_prompt(request, group.finished))
        self.prompts.buffers.release(index)
        yield samples
        for follower in self._workload.followers_of(index):
            copied = partial(self._outputs.copy_for_follower, follower, samples)
            yield self._joined(self._workload.table[follower], copied)

    @staticmethod
    def _joined(request: Request, join: Callable[[], list[Completion]]) -> list[Completion]:
        """The completions of a prompt, or its row's error."""
        try:
            return join()
        except Exception as error:
            info = row_error(error, "collecting the samples")
            return [Completion(request.row_index, request.prompt_index, error=info, seed=request.seed)]

    def without_steps(self) -> Iterator[list[Completion]]:
        """Completions of requests that no step computes: idle ones, and those that cannot run."""
        for index in self._workload.idle.tolist():
            request = self._workload.table[index]
            samples = self._joined(request, partial(self._empty, request))
            for sample in samples:
                self._streams.finish_unstarted(request, sample)
            yield samples
        for index, error in self._workload.failed.items():
            for each in (index, *self._workload.followers_of(index)):
                request = self._workload.table[each]
                failed = Completion(request.row_index, request.prompt_index, error=error, seed=request.seed)
                if each == index:
                    self._streams.finish_unstarted(request, failed)
                yield [failed]

    def _empty(self, request: Request) -> list[Completion]:
        """The samples of a request that computes nothing."""
        sequences = [self._sequence(request, index) for index in range(request.params.n)]
        for sequence in sequences:
            sequence.finish_reason = "length"
        samples = list(map(self._outputs.finish_sample, sequences))
        if request.params.best_of is not None:
            samples[0] = replace(samples[0], dropped_tokens=0)
        return samples
