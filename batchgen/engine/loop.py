"""The loop: step plans in, completions out. Knows nothing of files, rows or signals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Final

from batchgen.engine.collector import QuietCollector
from batchgen.engine.constraints import GrammarState
from batchgen.engine.finished import Finished
from batchgen.engine.graphs import DecodeGraphs, GraphCounts
from batchgen.engine.halving import stranded
from batchgen.engine.joined import out_of_memory
from batchgen.engine.logprob_columns import LogprobColumns
from batchgen.engine.output_ring import OutputRing
from batchgen.engine.planning import Workload
from batchgen.engine.readout import LogprobsMode
from batchgen.engine.rehearsal import Rehearsal
from batchgen.engine.row_table import RowTable
from batchgen.engine.sampler import Sampler
from batchgen.engine.scoring import Scores
from batchgen.engine.sequence import Sequence
from batchgen.engine.shaping import RepetitionScope, Shapes
from batchgen.engine.states import StateKeeper
from batchgen.engine.step import Flight, StepRunner
from batchgen.engine.step_times import StepTimes
from batchgen.engine.streaming import Emit, Streams
from batchgen.errors import DeviceError, ErrorCode, ErrorInfo
from batchgen.kernels.backend import Backend
from batchgen.kernels.device import Device
from batchgen.kernels.types import KVPool
from batchgen.models.base import Model
from batchgen.plan.scheduler import Scheduler
from batchgen.plan.types import StepPlan
from batchgen.processors import LoadedProcessor
from batchgen.request import Completion, Request
from batchgen.text.grammars import Grammars
from batchgen.text.stops import StopState, stopping_ids
from batchgen.text.tokenizer import Tokenizer

__all__ = ["Loop", "LoopState"]


_NOBODY: Final = -1
"""Number of a sequence that the scheduler never named."""


@dataclass(slots=True)
class LoopState:
    """Counters a caller may watch between steps."""

    steps: int = 0
    output_tokens: int = 0
    running: int = 0
    overrun: int = 0
    """Tokens drawn for samples that had ended a step before, unknown to the host then, and dropped."""
    kv_pages_used: int = 0
    kv_pages: int = 0


@dataclass(slots=True)
class _Open:
    """A request with samples still being generated."""

    remaining: int
    finished: list[tuple[float, Completion]] = field(default_factory=list)
    """Samples with the mean logprob of their tokens, which counts where `best_of` chooses."""


@dataclass(slots=True)
class _Ended:
    """What became known between two steps."""

    sequences: list[int] = field(default_factory=list)
    dropped: int = 0
    """Draws that gave nobody a token."""


class Loop:
    """Runs a workload on a model. Iterate it: each item holds all samples of one prompt, in order of completion.

    Where the device works on its own, a step is read only when the next one is under way: the device finds its work
    queued, and what the host does with tokens takes no time of it. A sample that has ended may then be in one step too
    many, whose draw for it is dropped; one that ends by its length never is.
    """

    def __init__(
        self,
        workload: Workload,
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
        states: StateKeeper | None = None,
    ) -> None:
        """`prompt_ids`: whether completions carry their prompt's ids. `repeat_span`: see `repetition.repeats`.
        `processors`: those that rows may name. `emit` takes the events of rows with `stream`. `states`: for jobs whose
        rows ask for hidden states or routed experts.
        """
        self._workload = workload
        self._scheduler = scheduler
        self._model = model
        self._pool = pool
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._repeat_span = repeat_span
        self._device = device
        self._shapes = Shapes(tokenizer, model.spec.vocab_size, repetition_scope, device)
        self._finished = Finished(workload, tokenizer, model.spec.vocab_size, backend.ops, prompt_ids=prompt_ids)
        self.prompts = self._finished.prompts
        self._states = states
        sampler = Sampler(device, backend.ops, processors, logprobs_mode)
        self._runner = StepRunner(
            workload, model, pool, backend, device, sampler, self.prompts, states, scheduler.config.max_tokens_per_step
        )
        self._running = running = RowTable()
        self._logprobs = logprobs = LogprobColumns()
        # Of the tables alone: a loop that held itself would keep its pool after the job.
        self._streams = Streams(workload, tokenizer, emit, lambda n: logprobs.last(running.slot(n)))
        self._scores = Scores(workload, self.prompts, prompt_ids=prompt_ids)
        self._sequences: dict[int, Sequence] = {}
        self._prompt_only: set[int] = set()
        """Sequences that run for their prompt alone: their one draw is dropped."""
        self._open: dict[int, _Open] = {}
        self.over = False
        """Whether `run` has ended, in whatever way: nothing touches the pool any more."""
        self.state = LoopState(kv_pages=max(0, pool.num_pages - 1))

    @property
    def outputs(self) -> OutputRing:
        """Where results that no step waits for are on their way to the host."""
        return self._runner.outputs

    @property
    def graphs(self) -> DecodeGraphs | None:
        """Those of steps of decode rows alone; None where the device or the kernels have none."""
        return self._runner.graphs

    @property
    def times(self) -> StepTimes:
        """Where the time of the steps went."""
        return self._runner.times

    def counts(self) -> dict[str, int]:
        """What the steps took beside what the scheduler counts."""
        graphs = GraphCounts() if self.graphs is None else self.graphs.counts
        return {
            "overrun_tokens": self.state.overrun,
            "in_flight_peak_bytes": self.outputs.peak_bytes,
            "early_reads": self.outputs.early_reads,
            **self.times.milliseconds(),
            "group_min_saving": self._scheduler.config.group_min_saving,
            **{f"attention_{name}": count for name, count in asdict(self._runner.attention).items()},
            **{f"graph_{name}": count for name, count in asdict(graphs).items()},
        }

    def run(self, stop: Callable[[], bool] = lambda: False) -> Iterator[list[Completion]]:
        """Generate until everything is done or `stop` says so; unfinished prompts yield nothing."""
        try:
            yield from self._without_tokens()
            with QuietCollector() as collector:
                yield from self._steps(stop, collector)
        finally:
            self._runner.close()
            self.over = True

    def _steps(self, stop: Callable[[], bool], collector: QuietCollector) -> Iterator[list[Completion]]:
        last: Flight | None = None
        self.times.begin()
        while not stop():
            plan = self._scheduler.step()
            if plan is None:
                break
            self._begin(plan)
            ended = _Ended()
            reading = partial(self._read, last, ended)
            try:
                flight = self._runner.issue(plan, self._running, last, reading)
            except Exception:
                yield from self._salvaged(reading, ended)
                raise
            collector.tick()
            reading()
            if not flight.under_way or flight.failed:
                self._read(flight, ended)
            last = flight
            self._scheduler.commit(ended.sequences, ended.dropped)
            self.state.steps += 1
            yield from self._after(ended)
            if self._runner.halver.retries:
                yield from self._recover(flight)
        ended = _Ended()
        self._read(last, ended)
        self._scheduler.stats.sampled_tokens -= ended.dropped
        yield from self._after(ended)

    def _salvaged(self, reading: Callable[[], None], ended: _Ended) -> Iterator[list[Completion]]:
        """What the step before has finished, where the next one cannot be issued."""
        with suppress(Exception):  # a device that failed for good gives nothing any more
            reading()
        yield from self._after(ended)

    def _recover(self, flight: Flight) -> Iterator[list[Completion]]:
        """After a step that memory did not hold: smaller ones from now on, and an end for what hangs on a position
        that could not be computed.
        """
        stats, halver = self._scheduler.stats, self._runner.halver
        stats.oom_retries = halver.retries
        self._scheduler.limit_tokens(halver.limit)
        for part in flight.failed:
            requests = stranded(part.plan, self._workload.tree)
            halver.strand(len(requests), part.problem)
            for request in requests:
                yield from self._give_up(request, out_of_memory(part.problem))

    def _give_up(self, index: int, error: ErrorInfo) -> Iterator[list[Completion]]:
        """End a request, however many of its samples run."""
        if not self._workload.samples[index]:
            return
        waiting = self._scheduler.unended
        begun = self._scheduler.cancel(index)
        leaving = [(number, self._leave(number)) for number in begun]
        if waiting - self._scheduler.unended > len(begun):  # one for all those that never began
            leaving.append((_NOBODY, self._start(self._workload.table[index], 0)))
        if not leaving:
            return
        self._open[index].remaining = len(leaving)
        for number, sequence in leaving:
            sequence.fail(error)
            if number == _NOBODY and not begun:
                self._streams.finish_unstarted(sequence.request, self._finished.sample(sequence))
            yield from self._retire(number, sequence)

    def rehearse(self, job: Rehearsal) -> None:
        """Run the steps of a rehearsal, two in flight as in a job, and nothing else on this object."""
        self._begin(job.begin)
        last: Flight | None = None
        for plan in (job.begin, *job.steps):
            flight = self._runner.issue_whole(plan, self._running, last)
            if last is not None:
                self._runner.read(last)
            last = flight
        if last is not None:
            self._runner.read(last)

    def _begin(self, plan: StepPlan) -> None:
        """Sequences that a plan names for the first time."""
        for start in plan.starts:
            sequence = self._start(self._workload.table[start.request], start.sample_index)
            self._sequences[start.sequence] = sequence
            self._streams.start(start.sequence, sequence)
            prompt_only = not sequence.request.max_new_tokens
            if prompt_only:
                self._prompt_only.add(start.sequence)
            self._running.begin(start.sequence, sequence, plain=not prompt_only)
            if self._states is not None:
                self._states.begin(start.sequence, sequence.request)

    def _read(self, flight: Flight | None, ended: _Ended) -> None:
        """Hand a step's tokens to its sequences, if that was not done before."""
        if flight is None or flight.seen:
            return
        flight.seen = True
        before = len(ended.sequences)
        try:
            dropped = self._take(flight, ended.sequences)
        except MemoryError as problem:  # the next step, which may be reading this one, must not be tried anew for it
            raise DeviceError("the host's memory ran out for what a step gave its rows") from problem
        prompt_only = self._prompt_only.intersection(ended.sequences[before:])
        self._prompt_only -= prompt_only
        dropped += len(prompt_only)
        ended.dropped += dropped
        self.state.output_tokens += len(flight.plan.samples) - dropped

    def _after(self, ended: _Ended) -> Iterator[list[Completion]]:
        """Between two steps: those that have ended leave."""
        self.state.running = len(self._sequences) - len(ended.sequences)
        self.state.kv_pages_used = self._scheduler.pages_in_use
        for sequence in ended.sequences:
            yield from self._retire(sequence, self._leave(sequence))

    def _start(self, request: Request, sample_index: int) -> Sequence:
        stops = StopState(request.params, self._tokenizer.eos_ids, self._tokenizer)
        masked: tuple[int, ...] = ()
        if request.params.min_new_tokens:
            vocab = self._model.spec.vocab_size
            ids = stopping_ids(request.params, self._tokenizer.eos_ids)
            masked = tuple(sorted(i for i in ids if i < vocab))
            if len(masked) == vocab:
                masked = ()  # nothing would be left to draw: the row says `min_new_tokens_unmet` if it ends early
        if request.index not in self._open:
            self._open[request.index] = _Open(remaining=request.params.samples)
        shaping = self._shapes.start(request, stops.output_ids)
        constraint = request.params.constraint
        grammar = GrammarState(self._grammars, request.params, constraint) if constraint is not None else None
        return Sequence(request, sample_index, stops, masked, self._repeat_span, shaping, grammar)

    def _take(self, flight: Flight, finished: list[int]) -> int:
        """Hand each sequence its token, and note those that ended; returns how many draws gave nobody a token."""
        sampled, rows = self._runner.read(flight), flight.rows
        if rows is None:
            return 0
        for found in sampled.logprobs:
            self._logprobs.take(rows, found)
        told, dropped = self._running.take(rows, sampled.tokens, sampled.errors.keys() | sampled.exhausted)
        self.state.overrun += dropped
        before, numbers = len(finished), rows.numbers[told].tolist()
        for row, number in zip(told, numbers, strict=True):
            sequence = self._sequences[number]
            if row in sampled.errors:
                sequence.fail(sampled.errors[row])
            elif self._prompt_only and number in self._prompt_only:
                sequence.finish_reason = "length"
            elif row in sampled.exhausted:
                sequence.exhaust()
                dropped += 1
            elif not sequence.append(int(sampled.tokens[row])):
                continue
            finished.append(number)
        for number in finished[before:]:
            self._running.close(number)
        if self._streams:
            self._streams.step(numbers)
        return dropped

    def _leave(self, number: int) -> Sequence:
        """A sequence that has ended."""
        sequence = self._sequences.pop(number)
        if sequence.request.params.needs_logprobs:
            self._logprobs.leave(self._running.slot(number), sequence)
        self._running.leave(number)
        return sequence

    def _retire(self, number: int, sequence: Sequence) -> Iterator[list[Completion]]:
        """Yield a prompt's samples once the last of them is done, then its copies."""
        index = sequence.request.index
        group = self._open[index]
        done = self._finished.sample(sequence)
        if sequence.shaping is not None:
            self._shapes.finish(sequence.shaping)
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
        samples = self._finished.prompt(sequence.request, group.finished)
        self.prompts.release(index)
        yield samples
        for follower in self._workload.followers_of(index):
            yield self._finished.copied(follower, samples)

    def _with_states(self, number: int, done: Completion) -> Completion:
        """The finished sample with its hidden states and routed experts, as far as its row asks for them."""
        assert self._states is not None
        if done.error is not None:
            self._states.drop(number)
            return done
        blocks, routed = self._states.finish(number, len(done.output_ids or ()))
        # An array is a sequence of ints to its readers.
        return replace(done, states=blocks, routed_experts=routed)  # type: ignore[arg-type]

    def _without_tokens(self) -> Iterator[list[Completion]]:
        """Requests for no tokens at all, and those whose keys and values exceed the whole pool."""
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
                f"{pages} KV pages of {self._pool.page_size} tokens, more than the {self.state.kv_pages} there are; "
                "raise --kv-memory or lower max_new_tokens",
            )
            yield from self._failed(index, error)
        for index in workload.refused:
            name = self._model.spec.name
            message = (
                f"`input_embeds` cannot be given to a {name} model, which looks the ids up again; give `input_ids`"
            )
            yield from self._failed(index, ErrorInfo(ErrorCode.UNSUPPORTED_FIELD, message, "input_embeds"))

    def _failed(self, index: int, error: ErrorInfo) -> Iterator[list[Completion]]:
        """A request that never begins, and those that would have copied it."""
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
        return self._finished.sample(sequence)
