"""`Loop`: plans, runs and reads the steps of a job, and yields completions. Independent of files and signals."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from batchgen.engine.memory.d2h_queue import D2HQueue
from batchgen.engine.memory.dummy_run import DummyRun, edits_logits
from batchgen.engine.memory.gc_control import DeferredGC
from batchgen.engine.memory.oom import blocked_requests, out_of_memory
from batchgen.engine.observer import StepObserver
from batchgen.engine.outputs.processor import OpenPrompts
from batchgen.engine.outputs.streaming import Emit, Streams
from batchgen.engine.parallel.peers import Peers
from batchgen.engine.sequence import Sequence
from batchgen.engine.settings import EngineResources, LoopSettings
from batchgen.engine.step.executor import DecodeForecast, ExecutorContext
from batchgen.engine.step.input_batch import InputBatch
from batchgen.engine.step.logprobs import GRAPH_TOP, LogprobColumns
from batchgen.engine.step.model_runner import InFlightStep, ModelRunner
from batchgen.engine.step.sampler import Sampler
from batchgen.engine.step.step_times import StepTimes
from batchgen.engine.workload import JobWorkload
from batchgen.errors import DeviceError, ErrorInfo, UsageError, row_error
from batchgen.kernels.grouped import GroupedPool
from batchgen.kernels.sampling import SamplingColumns
from batchgen.plan.length_predictor import EXACT, LengthPredictor
from batchgen.plan.order import pages_held
from batchgen.plan.scheduler import Scheduler
from batchgen.plan.simulate import steps_by_rows
from batchgen.plan.step_plan import StepPlan
from batchgen.request.completion import Completion
from batchgen.request.table.request_table import RequestTable


@dataclass(slots=True)
class LoopState:
    """Counters of a running job, which a caller may read between steps."""

    steps: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    """Number of computed prompt tokens."""
    running: int = 0
    discarded: int = 0
    """Number of discarded tokens: sampled before the host knew that their sequence had ended."""
    kv_pages_used: int = 0
    kv_pages: int = 0
    in_flight: bool = False
    """Whether the device may still compute the last step."""


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
        pool: GroupedPool,
        resources: EngineResources,
        settings: LoopSettings,
        emit: Emit | None = None,
    ) -> None:
        """`emit` receives the events of rows with `stream`."""
        device, backend = resources.device, resources.backend
        self._workload = workload
        self._scheduler = scheduler
        self.settings = settings
        """Options of the job."""
        self._resources, self._emit = resources, emit
        self._observers: list[StepObserver] = [each for each in (resources.media, settings.record) if each is not None]
        self._batch = running = InputBatch()
        self._logprobs = logprobs = LogprobColumns()
        # The closure must not hold `self`: that cycle would keep the pool alive after the job.
        self._streams = Streams(workload, resources.tokenizer, emit, lambda n: logprobs.last_logprob(running.slot(n)))
        self._open = OpenPrompts(workload, resources, settings, self._streams)
        self.prompts, self.states = self._open.prompts, self._open.states
        self._context = ExecutorContext(
            resources.model, pool, backend, device, D2HQueue(device, settings.queue_bytes), self.prompts, self.states
        )
        if resources.model.spec.ranks.count > 1:
            each = [(params.temperature, params.top_k, params.top_p, params.min_p) for params in workload.table.params]
            self._context.sampling = SamplingColumns.of(*np.array(each).reshape(-1, 4).T)
        self._top = max((params.top_logprobs_num for params in workload.table.params), default=0)
        sampler = Sampler(device, backend.ops, resources.processors, settings.logprobs_mode, self._top)
        most = scheduler.config.max_tokens_per_step
        self._runner = ModelRunner(workload, self._context, sampler, most, resources.media, resources.peers)
        self._sequences: dict[int, Sequence] = {}
        self._prompt_only: set[int] = set()
        """Sequences that only compute their prompt; their one sampled token is discarded."""
        self._token_sum = 0
        """Sum of all tokens that were drawn: ranks with other sums would wait for one another without end"""
        self._may_be_slow = resources.model.spec.ranks.count > 1 and any(
            params.constraint or params.stop_regex for params in workload.table.params
        )
        """Whether rows have what is given up when it takes long, which differs between ranks."""
        self.replaced = False
        """Whether another job was begun, which the engines of other ranks now run."""
        self.over = False
        """Whether `run` has ended, so that the pool is not used any more."""
        self.state = LoopState(kv_pages=max(0, pool.num_pages - 1))

    def again(self, workload: JobWorkload, scheduler: Scheduler) -> Loop:
        """A loop for further requests of the job, when this one has run."""
        return Loop(workload, scheduler, self._context.pool, self._resources, self.settings, self._emit)

    @property
    def peers(self) -> Peers:
        """The engines of other ranks, which run the same steps."""
        return self._resources.peers

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
            **({} if self._resources.media is None else self._resources.media.counts()),
        }

    def run(self, stop: Callable[[], bool] = lambda: False) -> Iterator[list[Completion]]:
        """Generate until everything is done or `stop` returns True; unfinished prompts yield nothing."""
        try:
            if self._context.device.captures and (forecast := self._forecast()) is not None:
                with self.peers.together():
                    self._runner.prepare(forecast)
            yield from self._open.without_steps()
            with DeferredGC() as deferred_gc:
                yield from self._steps(stop, deferred_gc)
        finally:
            self._runner.close()
            self.over = True
            for observer in self._observers:
                observer.close()

    def _forecast(self) -> DecodeForecast | None:
        """The decode steps to expect; None if rows return states, or have images, whose positions differ."""
        workload, slots = self._workload, self._scheduler.config.max_num_seqs
        live = workload.samples > 0
        if self.states is not None or workload.table.media is not None or not live.any():
            return None
        table, page_size = workload.table, self._context.pool.page_size
        kinds = workload.kinds(repeats_end=self.settings.repeat_span is not None)
        expected = LengthPredictor(workload.max_tokens, kinds).expected
        shared, each = pages_held(workload.tree, workload.samples, expected, page_size)
        slots = max(1, min(slots, int((self._context.pool.num_pages - shared) / each)))
        params = [table.params[i] for i in np.unique(table.params_id[live]).tolist()]
        returned = [each for each in params if each.needs_logprobs]
        raw = self.settings.logprobs_mode == "raw" and not any(each.token_ids_logprob for each in returned)
        return DecodeForecast(
            steps_by_rows(workload.samples, expected, kinds == EXACT, slots),
            not any(map(edits_logits, params)) and (not returned or (raw and self._top <= GRAPH_TOP)),
            self._top if returned else None,
            int((np.diff(table.offsets)[live] + workload.max_tokens[live]).max()) - 1,
            shared * page_size,
            workload.adapter is not None and bool((workload.adapter[live] >= 0).any()),
        )

    def _steps(self, stop: Callable[[], bool], deferred_gc: DeferredGC) -> Iterator[list[Completion]]:
        last: InFlightStep | None = None
        self.times.start()
        for observer in self._observers:
            observer.begin()

        def news() -> tuple[bool, list[tuple[int, ErrorInfo]], int]:
            return stop(), [failed for observer in self._observers for failed in observer.failed()], self._token_sum

        while True:
            if self.replaced:
                raise UsageError("another job of `--tensor-parallel` has begun; exhaust or close the first iterator")
            ready: list[list[Completion]] = []
            ended = _StepResult()
            read_last = partial(self._consume, last, ended)
            try:
                with self.peers.together():  # and nothing is yielded, as a caller may leave then
                    stopped, failed, token_sum = self.peers.agree(news)
                    if stopped:
                        break
                    if token_sum != self._token_sum:
                        raise DeviceError("this process has drawn other tokens than rank 0, a fault of batchgen")
                    ready += (group for request, error in failed for group in self._fail_request(request, error))
                    if (plan := self._scheduler.step()) is not None:
                        for observer in self._observers:
                            self.times.add_compute(observer.before(plan))
                        self._add_sequences(plan)
                        in_flight = self._runner.issue(plan, self._batch, last, read_last)
            except Exception:
                with suppress(Exception):  # a device in an error state cannot be read
                    read_last()
                yield from ready
                yield from self._retire_ended(ended)
                raise
            if plan is None:
                yield from ready
                break
            deferred_gc.tick()
            read_last()
            if not in_flight.pending or in_flight.failed:
                self._consume(in_flight, ended)
            last = in_flight
            self.state.in_flight = in_flight.pending
            if self._may_be_slow:
                self._agree_on_failed(ended)
            self._scheduler.commit(ended.sequences, ended.dropped)
            self.state.steps += 1
            yield from ready
            yield from self._retire_ended(ended)
            if self._runner.oom_splitter.retries:
                yield from self._recover_from_oom(in_flight)
        ended = _StepResult()
        self._consume(last, ended)
        self._scheduler.stats.sampled_tokens -= ended.dropped
        yield from self._retire_ended(ended)

    def _agree_on_failed(self, ended: _StepResult) -> None:
        """Rank 0 decides which rows took too long.

        Raises:
            DeviceError: a row failed in this process alone.
        """
        known = {number: error for number in ended.sequences if (error := self._sequences[number].error) is not None}
        failed = self.peers.agree(lambda: known)
        if alone := next((known[number] for number in known if number not in failed), None):
            raise DeviceError(f"a row failed in this process and not in the first: {alone.message}")
        for number, error in failed.items():
            if number not in ended.sequences:
                self._sequences[number].fail(error)
                self._batch.mark_ended(number)
                ended.sequences.append(number)

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
        started = {number: self._remove(number) for number in self._scheduler.cancel(index)}
        unstarted = waiting - self._scheduler.unended > len(started)
        yield from self._open.fail(self._workload.table[index], error, started, unstarted=unstarted)
        for observer in self._observers:
            observer.ended(index, list(started), waiting - self._scheduler.unended)

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
            request = self._workload.table[start.request]
            for observer in self._observers:
                observer.started(start.sequence, request.row_index)
            sequence = self._sequences[start.sequence] = self._open.start(start.sequence, request, start.sample_index)
            prompt_only = not request.max_new_tokens
            if prompt_only:
                self._prompt_only.add(start.sequence)
            self._batch.add(start.sequence, sequence, plain=not prompt_only and not sequence.ended)

    def _consume(self, in_flight: InFlightStep | None, ended: _StepResult) -> None:
        """Append a step's tokens to its sequences, once per step."""
        if in_flight is None or in_flight.consumed:
            return
        in_flight.consumed, before = True, len(ended.sequences)
        try:
            dropped = self._append_tokens(in_flight, ended.sequences)
        except MemoryError as problem:  # not for `OOMSplitter`, which would retry the next step
            message = "the host ran out of memory while reading a step's results; lower --max-num-seqs"
            raise DeviceError(message) from problem
        prompt_only = self._prompt_only.intersection(ended.sequences[before:])
        self._prompt_only -= prompt_only
        dropped += len(prompt_only)
        ended.dropped += dropped
        self.state.output_tokens += len(in_flight.plan.samples) - dropped

    def _retire_ended(self, ended: _StepResult) -> Iterator[list[Completion]]:
        """Remove the sequences that have ended and yield their completions."""
        self.state.running = len(self._sequences) - len(ended.sequences)
        self.state.kv_pages_used = self._scheduler.group_pages_in_use[0]
        stats = self._scheduler.stats
        self.state.prompt_tokens = stats.prompt_tokens + stats.recomputed_last_tokens
        for sequence in ended.sequences:
            removed = self._remove(sequence)
            index = removed.request.index
            for observer in self._observers:
                # The step that ended it may be the one that found an item unusable.
                if (error := observer.error_of(index)) is not None:
                    removed.fail(error)
            yield from self._open.end(sequence, removed)
            for observer in self._observers:
                observer.ended(index, [sequence])

    def _append_tokens(self, in_flight: InFlightStep, finished: list[int]) -> int:
        """Append each sequence's token and collect the ended ones; returns the number of discarded tokens."""
        sampled, rows = self._runner.read(in_flight), in_flight.rows
        if rows is None:
            return 0
        self._token_sum += int(sampled.tokens.sum())
        for logprobs in sampled.logprobs:
            self._logprobs.append(rows, logprobs)
        notified, dropped = self._batch.append_tokens(rows, sampled.tokens, sampled.errors.keys() | sampled.exhausted)
        self.state.discarded += dropped
        before, numbers = len(finished), rows.sequence_ids[notified].tolist()
        for row, number in zip(notified, numbers, strict=True):
            sequence = self._sequences[number]
            if row in sampled.errors:
                sequence.fail(sampled.errors[row])
            elif sequence.error is not None:
                pass  # it could not be started
            elif self._prompt_only and number in self._prompt_only:
                sequence.finish_reason = "length"
            elif row in sampled.exhausted:
                sequence.end_exhausted()
                dropped += 1
            elif not sequence.append(int(sampled.tokens[row])):
                continue
            finished.append(number)
        for number, error in self._streams.step(numbers).items() if self._streams else ():
            if not self._sequences[number].ended:
                finished.append(number)
            self._sequences[number].fail(error)
        for number in finished[before:]:
            self._batch.mark_ended(number)
        return dropped

    def _remove(self, number: int) -> Sequence:
        """Remove an ended sequence from the batch."""
        sequence = self._sequences.pop(number)
        if sequence.request.params.needs_logprobs:
            try:
                self._logprobs.finish(self._batch.slot(number), sequence)
            except Exception as error:
                sequence.fail(row_error(error, "collecting the logprobs"))
        self._batch.remove(number)
        return sequence


def completion_keys(table: RequestTable, failed: list[Completion]) -> list[tuple[int, int]]:
    """(row index, prompt index) of all completions that will be yielded, in input order."""
    keys = {(r.row_index, r.prompt_index) for r in table}
    return sorted(keys | {(c.row_index, 0) for c in failed})


def in_order(groups: Iterator[list[Completion]], keys: list[tuple[int, int]]) -> Iterator[list[Completion]]:
    """Yield groups of completions in the order of `keys`, holding back early ones."""
    waiting: list[tuple[tuple[int, int], int, list[Completion]]] = []
    expected = iter(keys)
    head = next(expected, None)
    for number, group in enumerate(groups):
        heapq.heappush(waiting, ((group[0].row_index, group[0].prompt_index), number, group))
        while waiting and waiting[0][0] == head:
            yield heapq.heappop(waiting)[2]
            head = next(expected, None)
    assert not waiting, "a group of completions has no key"
