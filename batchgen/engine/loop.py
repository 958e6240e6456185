"""`Loop`: plans, runs and reads the steps of a job, and yields completions. Independent of files and signals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from batchgen.engine.capture.hidden_states import HiddenStateCollector
from batchgen.engine.capture.scoring import Scores
from batchgen.engine.d2h_queue import D2HQueue
from batchgen.engine.executors.base import ExecutorContext
from batchgen.engine.gc_control import DeferredGC
from batchgen.engine.input_batch import InputBatch
from batchgen.engine.memory.dummy_run import DummyRun
from batchgen.engine.memory.oom import blocked_requests, out_of_memory
from batchgen.engine.model_runner import InFlightStep, ModelRunner
from batchgen.engine.outputs import OutputProcessor
from batchgen.engine.sampling.constraints import GrammarState
from batchgen.engine.sampling.logits_processor import RepetitionScope, RulesCache
from batchgen.engine.sampling.logprobs import LogprobColumns, LogprobsMode
from batchgen.engine.sampling.sampler import Sampler
from batchgen.engine.sequence import Sequence
from batchgen.engine.step_times import StepTimes
from batchgen.engine.streaming import Emit, Streams
from batchgen.engine.workload import JobWorkload
from batchgen.errors import DeviceError, ErrorCode, ErrorInfo
from batchgen.kernels.backend import Backend
from batchgen.kernels.device import Device
from batchgen.kernels.types import KVPool
from batchgen.models.base import Model
from batchgen.plan.scheduler import Scheduler
from batchgen.plan.step_plan import StepPlan
from batchgen.request.completion import Completion
from batchgen.request.processors import LoadedProcessor
from batchgen.request.table import Request
from batchgen.text.grammar.grammars import Grammars
from batchgen.text.stops import StopState, all_stop_token_ids
from batchgen.text.tokenizer import Tokenizer

__all__ = ["Loop", "LoopState"]


_NEVER_STARTED: Final = -1
"""Sequence number of a sample that the scheduler never started."""


@dataclass(slots=True)
class LoopState:
    """Counters of a running job, which a caller may read between steps."""

    steps: int = 0
    output_tokens: int = 0
    running: int = 0
    discarded: int = 0
    """Number of discarded tokens: sampled before the host knew that their sequence had ended."""
    kv_pages_used: int = 0
    kv_pages: int = 0


@dataclass(slots=True)
class _OpenPrompt:
    """A request with samples that are still being generated."""

    remaining: int
    finished: list[tuple[float, Completion]] = field(default_factory=list)
    """(mean logprob, completion) of finished samples; `best_of` ranks by mean logprob."""


@dataclass(slots=True)
class _StepResult:
    """Sequences that ended with a step."""

    sequences: list[int] = field(default_factory=list)
    """Numbers of the ended sequences"""
    dropped: int = 0
    """Number of sampled tokens that no sequence received"""


class Loop:
    """Runs a workload on a model. Iterate `run`: each item holds all samples of one prompt, in order of completion.

    On an asynchronous device, a step is read only after the next one was issued, so that the device always has work
    queued. A sequence that ended with a stop may therefore be part of one more step, whose token is discarded; a
    sequence that ends by its length never is.
    """

    def __init__(
        self,
        workload: JobWorkload,
        scheduler: Scheduler,
        model: Model,
        pool: KVPool,
        backend: Backend,
        device: Device,
        tokenizer: Tokenizer,
        grammars: Grammars,
        *,
        prompt_ids: bool = True,
        repeat_span: int | None = None,
        processors: Mapping[str, LoadedProcessor] | None = None,
        logprobs_mode: LogprobsMode = "raw",
        repetition_scope: RepetitionScope = "output",
        emit: Emit | None = None,
        states: HiddenStateCollector | None = None,
    ) -> None:
        """Set up a job.

        Args:
            workload: the job's requests.
            scheduler: plans the steps.
            model: computes the steps.
            pool: KV pages.
            backend: kernels.
            device: transfers between host and device.
            tokenizer: the model's tokenizer.
            grammars: compiled constraints.
            prompt_ids: whether completions contain their prompt's ids.
            repeat_span: as for `sequence.is_repeating`; None: repetition does not end a sample.
            processors: custom logit processors by name.
            logprobs_mode: whether output logprobs are raw or processed.
            repetition_scope: whether repetition penalties include prompt tokens.
            emit: receives the events of rows with `stream`.
            states: collects hidden states and routed experts; None: no row returns them.
        """
        self._workload = workload
        self._scheduler = scheduler
        self._model = model
        self._pool = pool
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._repeat_span = repeat_span
        self._device = device
        self._rules = RulesCache(tokenizer, model.spec.vocab_size, repetition_scope, device)
        self._output_processor = OutputProcessor(
            workload, tokenizer, model.spec.vocab_size, backend.ops, prompt_ids=prompt_ids
        )
        self.prompts = self._output_processor.prompts
        self._states = states
        sampler = Sampler(device, backend.ops, processors, logprobs_mode)
        self._context = ExecutorContext(model, pool, backend, device, D2HQueue(device), self.prompts, states)
        self._runner = ModelRunner(workload, self._context, sampler, scheduler.config.max_tokens_per_step)
        self._batch = running = InputBatch()
        self._logprobs = logprobs = LogprobColumns()
        # The closure must not hold `self`: that cycle would keep the pool alive after the job.
        self._streams = Streams(workload, tokenizer, emit, lambda n: logprobs.last_logprob(running.slot(n)))
        self._scores = Scores(workload, self.prompts, prompt_ids=prompt_ids)
        self._sequences: dict[int, Sequence] = {}
        self._prompt_only: set[int] = set()
        """Sequences that only compute their prompt; their one sampled token is discarded."""
        self._open: dict[int, _OpenPrompt] = {}
        self.over = False
        """Whether `run` has ended, so that the pool is not used any more."""
        self.state = LoopState(kv_pages=max(0, pool.num_pages - 1))

    @property
    def outputs(self) -> D2HQueue:
        """The queue of hidden states and prompt logprobs that are copied to the host."""
        return self._context.outputs

    @property
    def times(self) -> StepTimes:
        """Time spent in the steps."""
        return self._context.times

    @property
    def notes(self) -> list[str]:
        """Remarks for the user on how the steps were run."""
        return self._runner.notes()

    def counts(self) -> dict[str, int]:
        """Counters of the steps, in addition to the scheduler's, by report key."""
        return {
            "discarded_tokens": self.state.discarded,
            "group_min_saving": self._scheduler.config.group_min_saving,
            **self._runner.counts(),
        }

    def run(self, stop: Callable[[], bool] = lambda: False) -> Iterator[list[Completion]]:
        """Generate until everything is done or `stop` returns True; unfinished prompts yield nothing."""
        try:
            yield from self._requests_without_steps()
            with DeferredGC() as deferred_gc:
                yield from self._steps(stop, deferred_gc)
        finally:
            self._runner.close()
            self.over = True

    def _steps(self, stop: Callable[[], bool], deferred_gc: DeferredGC) -> Iterator[list[Completion]]:
        last: InFlightStep | None = None
        self.times.start()
        while not stop():
            plan = self._scheduler.step()
            if plan is None:
                break
            self._add_sequences(plan)
            ended = _StepResult()
            read_last = partial(self._consume, last, ended)
            try:
                in_flight = self._runner.issue(plan, self._batch, last, read_last)
            except Exception:
                yield from self._finish_last_step(read_last, ended)
                raise
            deferred_gc.tick()
            read_last()
            if not in_flight.pending or in_flight.failed:
                self._consume(in_flight, ended)
            last = in_flight
            self._scheduler.commit(ended.sequences, ended.dropped)
            self.state.steps += 1
            yield from self._retire_ended(ended)
            if self._runner.oom_splitter.retries:
                yield from self._recover_from_oom(in_flight)
        ended = _StepResult()
        self._consume(last, ended)
        self._scheduler.stats.sampled_tokens -= ended.dropped
        yield from self._retire_ended(ended)

    def _finish_last_step(self, read_last: Callable[[], None], ended: _StepResult) -> Iterator[list[Completion]]:
        """Yield what the last step has finished, after an error in the next one."""
        with suppress(Exception):  # a device in an error state cannot be read
            read_last()
        yield from self._retire_ended(ended)

    def _recover_from_oom(self, in_flight: InFlightStep) -> Iterator[list[Completion]]:
        """After an out-of-memory error, make steps smaller and fail the requests that cannot be computed."""
        stats, oom_splitter = self._scheduler.stats, self._runner.oom_splitter
        stats.oom_retries = oom_splitter.retries
        self._scheduler.limit_tokens(oom_splitter.limit)
        for part in in_flight.failed:
            requests = blocked_requests(part.plan, self._workload.tree)
            oom_splitter.check_blocked(len(requests), part.problem)
            for request in requests:
                yield from self._fail_request(request, out_of_memory(part.problem))

    def _fail_request(self, index: int, error: ErrorInfo) -> Iterator[list[Completion]]:
        """End all samples of a request with an error."""
        if not self._workload.samples[index]:
            return
        waiting = self._scheduler.unended
        started = self._scheduler.cancel(index)
        removed = [(number, self._remove(number)) for number in started]
        if waiting - self._scheduler.unended > len(started):  # one completion for all samples that never started
            removed.append((_NEVER_STARTED, self._start(self._workload.table[index], 0)))
        if not removed:
            return
        self._open[index].remaining = len(removed)
        for number, sequence in removed:
            sequence.fail(error)
            if number == _NEVER_STARTED and not started:
                self._streams.finish_unstarted(sequence.request, self._output_processor.finish_sample(sequence))
            yield from self._retire(number, sequence)

    def run_dummy(self, job: DummyRun) -> None:
        """Run the steps of a dummy run, two in flight as in a job. The loop cannot be used afterwards."""
        self._add_sequences(job.start)
        last: InFlightStep | None = None
        for plan in (job.start, *job.steps):
            in_flight = self._runner.issue(plan, self._batch, last, split=False)
            if last is not None:
                self._runner.read(last)
            last = in_flight
        if last is not None:
            self._runner.read(last)

    def _add_sequences(self, plan: StepPlan) -> None:
        """Add the sequences that a plan starts."""
        for start in plan.starts:
            sequence = self._start(self._workload.table[start.request], start.sample_index)
            self._sequences[start.sequence] = sequence
            self._streams.start(start.sequence, sequence)
            prompt_only = not sequence.request.max_new_tokens
            if prompt_only:
                self._prompt_only.add(start.sequence)
            self._batch.add(start.sequence, sequence, plain=not prompt_only)
            if self._states is not None:
                self._states.add(start.sequence, sequence.request)

    def _consume(self, in_flight: InFlightStep | None, ended: _StepResult) -> None:
        """Append a step's tokens to its sequences, once per step."""
        if in_flight is None or in_flight.consumed:
            return
        in_flight.consumed = True
        before = len(ended.sequences)
        try:
            dropped = self._append_tokens(in_flight, ended.sequences)
        except MemoryError as problem:  # not for `OOMSplitter`, which would retry the next step
            raise DeviceError(
                "the host ran out of memory while reading a step's results; lower --max-num-seqs"
            ) from problem
        prompt_only = self._prompt_only.intersection(ended.sequences[before:])
        self._prompt_only -= prompt_only
        dropped += len(prompt_only)
        ended.dropped += dropped
        self.state.output_tokens += len(in_flight.plan.samples) - dropped

    def _retire_ended(self, ended: _StepResult) -> Iterator[list[Completion]]:
        """Remove the sequences that have ended and yield their completions."""
        self.state.running = len(self._sequences) - len(ended.sequences)
        self.state.kv_pages_used = self._scheduler.pages_in_use
        for sequence in ended.sequences:
            yield from self._retire(sequence, self._remove(sequence))

    def _start(self, request: Request, sample_index: int) -> Sequence:
        stops = StopState(request.params, self._tokenizer.eos_ids, self._tokenizer)
        masked: tuple[int, ...] = ()
        if request.params.min_new_tokens:
            vocab = self._model.spec.vocab_size
            ids = all_stop_token_ids(request.params, self._tokenizer.eos_ids)
            masked = tuple(sorted(i for i in ids if i < vocab))
            if len(masked) == vocab:
                masked = ()  # no token would be left; `min_new_tokens_unmet` reports an early end
        if request.index not in self._open:
            self._open[request.index] = _OpenPrompt(remaining=request.params.samples)
        logits_state = self._rules.start(request, stops.output_ids)
        constraint = request.params.constraint
        grammar = GrammarState(self._grammars, request.params, constraint) if constraint is not None else None
        return Sequence(request, sample_index, stops, masked, self._repeat_span, logits_state, grammar)

    def _append_tokens(self, in_flight: InFlightStep, finished: list[int]) -> int:
        """Append each sequence's token and collect the ended ones; returns the number of discarded tokens."""
        sampled, rows = self._runner.read(in_flight), in_flight.rows
        if rows is None:
            return 0
        for found in sampled.logprobs:
            self._logprobs.append(rows, found)
        notified, dropped = self._batch.append_tokens(rows, sampled.tokens, sampled.errors.keys() | sampled.exhausted)
        self.state.discarded += dropped
        before, numbers = len(finished), rows.numbers[notified].tolist()
        for row, number in zip(notified, numbers, strict=True):
            sequence = self._sequences[number]
            if row in sampled.errors:
                sequence.fail(sampled.errors[row])
            elif self._prompt_only and number in self._prompt_only:
                sequence.finish_reason = "length"
            elif row in sampled.exhausted:
                sequence.end_exhausted()
                dropped += 1
            elif not sequence.append(int(sampled.tokens[row])):
                continue
            finished.append(number)
        for number in finished[before:]:
            self._batch.mark_ended(number)
        if self._streams:
            self._streams.step(numbers)
        return dropped

    def _remove(self, number: int) -> Sequence:
        """Remove an ended sequence from the batch."""
        sequence = self._sequences.pop(number)
        if sequence.request.params.needs_logprobs:
            self._logprobs.finish(self._batch.slot(number), sequence)
        self._batch.remove(number)
        return sequence

    def _retire(self, number: int, sequence: Sequence) -> Iterator[list[Completion]]:
        """Finish a sample; yield its prompt's samples if it was the last one, then those of duplicate requests."""
        index = sequence.request.index
        group = self._open[index]
        done = self._output_processor.finish_sample(sequence)
        if sequence.logits_state is not None:
            self._rules.finish(sequence.logits_state)
        if self._states is not None:
            done = self._with_states(number, done)
        if self._streams:
            self._streams.finish(number, done)
        group.finished.append((sequence.mean_logprob, done))
        group.remaining -= 1
        if group.remaining:
            return
        del self._open[index]
        if self._states is not None:
            self._states.release(index)
        if sequence.request.score_start >= 0:
            failed = next((c.error for _, c in group.finished if c.error is not None), None)
            if scored := self._scores.add(sequence.request, failed):
                yield scored
            self.prompts.release(index)
            return
        samples = self._output_processor.finish_prompt(sequence.request, group.finished)
        self.prompts.release(index)
        yield samples
        for follower in self._workload.followers_of(index):
            yield self._output_processor.copy_for_follower(follower, samples)

    def _with_states(self, number: int, done: Completion) -> Completion:
        """The finished sample with the hidden states and routed experts that its row returns."""
        assert self._states is not None
        if done.error is not None:
            self._states.drop(number)
            return done
        blocks, routed = self._states.finish(number, len(done.output_ids or ()))
        # A numpy array is used like a sequence of ints.
        return replace(done, states=blocks, routed_experts=routed)  # type: ignore[arg-type]

    def _requests_without_steps(self) -> Iterator[list[Completion]]:
        """Completions of requests that no step computes: idle ones, and those that cannot run."""
        workload = self._workload
        for index in workload.idle.tolist():
            request = workload.table[index]
            samples = [self._empty(request, i) for i in range(request.params.n)]
            if request.params.best_of is not None:
                samples[0] = replace(samples[0], dropped_tokens=0)
            for sample in samples:
                self._streams.finish_unstarted(request, sample)
            yield samples
        for index, pages in workload.too_large.items():
            request = workload.table[index]
            error = ErrorInfo(
                ErrorCode.OOM,
                f"the prompt ({len(request.prompt_ids)} tokens) and up to {request.max_new_tokens} new tokens need "
                f"{pages} KV pages of {self._pool.page_size} tokens, but the pool has {self.state.kv_pages}; "
                "raise --kv-memory or lower max_new_tokens",
            )
            yield from self._failed_completions(index, error)
        for index in workload.refused:
            name = self._model.spec.name
            message = (
                f"`input_embeds` cannot be given to a {name} model, which looks the ids up again; give `input_ids`"
            )
            yield from self._failed_completions(index, ErrorInfo(ErrorCode.UNSUPPORTED_FIELD, message, "input_embeds"))

    def _failed_completions(self, index: int, error: ErrorInfo) -> Iterator[list[Completion]]:
        """Error completions of a request that cannot run, and of its duplicates."""
        request = self._workload.table[index]
        failed = Completion(request.row_index, request.prompt_index, error=error, seed=request.seed)
        self._streams.finish_unstarted(request, failed)
        for each in (index, *self._workload.followers_of(index)):
            row = self._workload.table[each]
            yield [Completion(row.row_index, row.prompt_index, error=error, seed=row.seed)]

    def _empty(self, request: Request, sample_index: int) -> Completion:
        sequence = self._start(request, sample_index)
        del self._open[request.index]
        sequence.finish_reason = "length"
        return self._output_processor.finish_sample(sequence)
