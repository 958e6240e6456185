"""`ModelRunner`: issues step plans to the device without waiting, and reads their sampled tokens one step later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.media.job import JobMedia
from batchgen.engine.memory.oom import OOMSplitter, Part, is_out_of_memory, out_of_memory
from batchgen.engine.parallel.peers import NO_PEERS, Peers
from batchgen.engine.step.cuda_graph import CudaGraphExecutor, GraphCounts
from batchgen.engine.step.decode_table import DecodeTable
from batchgen.engine.step.eager import EagerExecutor
from batchgen.engine.step.executor import DecodeForecast, Executor, ExecutorContext, InFlight, Step
from batchgen.engine.step.input_batch import BatchView, InputBatch
from batchgen.engine.step.overlapped_cpu import OverlappedCpuExecutor
from batchgen.engine.step.sampler import Sampler, StepSamples
from batchgen.engine.step.step_batch import lay_out_step
from batchgen.engine.workload import JobWorkload
from batchgen.errors import DeviceError
from batchgen.kernels.cpu.command_buffer import CommandBuffers
from batchgen.kernels.kv_stream import StreamedPool
from batchgen.kernels.stream import LayerStream
from batchgen.kernels.types import Graphs
from batchgen.plan.step_plan import PageCopy, StepPlan, split_decodes

Issued = tuple[Executor, InFlight]
"""What an executor has issued, and the executor, which reads it."""


@dataclass(slots=True)
class InFlightStep:
    """A step that has been issued and not read yet."""

    plan: StepPlan
    rows: BatchView | None = None
    """[R] sequences that the step samples for, in the order of its parts; None: none"""
    tokens: Tensor | None = None
    """[R] int64 sampled tokens on the device, possibly not computed yet; None: none"""
    pending: bool = False
    """Whether the device may still compute it, so that planning the next step before reading this one pays"""
    consumed: bool = False
    """Whether its sequences have received their tokens"""
    parts: list[Part[Issued]] = field(default_factory=list)
    """The step, or the parts that were run in its place, in order"""

    @property
    def failed(self) -> list[Part[Issued]]:
        """Parts that did not fit into memory even alone, and the parts that depend on them."""
        return [part for part in self.parts if part.result is None]


class ModelRunner:
    """Runs the steps of one job: each by the first of its executors that can."""

    def __init__(
        self,
        workload: JobWorkload,
        context: ExecutorContext,
        sampler: Sampler,
        max_tokens: int,
        media: JobMedia | None = None,
        peers: Peers = NO_PEERS,
    ) -> None:
        """`max_tokens`: most tokens in a step; `media`: the job's images and sounds; `peers`: other ranks' engines."""
        self._peers = peers
        self._media = None if media is None else media.step
        self._workload = workload
        self._context = context
        self._sampler = sampler
        self._executors = executors_for(context)
        self._streams = [s for s in (context.model.stream, context.pool) if isinstance(s, LayerStream | StreamedPool)]
        self._streamed_before = [each.counts() for each in self._streams]
        page_size = context.pool.page_size
        self._decode_tables = [DecodeTable(page_size) for _ in context.pool.parts]
        self.oom_splitter = OOMSplitter(page_size, max_tokens, context.device.release_cache, workload.spans)
        """Runs a step in parts when it does not fit into memory"""

    @torch.inference_mode()
    def issue(
        self,
        plan: StepPlan,
        running: InputBatch,
        last: InFlightStep | None,
        read_last: Callable[[], None] = lambda: None,
        *,
        split: bool = True,
    ) -> InFlightStep:
        """Queue a step, whose sequences are in `running`.

        `read_last` reads the step before, `last`; it is called while the device computes, and only if a row's sampling
        depends on its earlier tokens. With `split`, the step is run in parts if it does not fit into memory, or if an
        executor takes its decode rows alone.
        """
        copies = list(plan.copies)
        if not plan.tokens:
            if copies:
                self.close()
                self._context.copy_pages(copies)
            return InFlightStep(plan)
        for table in () if plan.decodes else self._decode_tables:
            table.clear()
        unread = None if last is None or last.consumed or last.tokens is None else last

        def run(part: StepPlan) -> Issued:
            return self._issue(part, running, unread, read_last, copies)

        decodes_first = split and any(executor.takes_decodes(plan) for executor in self._executors)
        if not split:
            parts = [Part(plan, run(plan))]
        elif self._context.pool.states is None and self._context.model.spec.ranks.count == 1:
            parts = self.oom_splitter.run(plan, run, decodes_first=decodes_first)
        else:
            plans = split_decodes(plan) if decodes_first else (plan,)
            parts = [Part(each, self._run_whole(each, run)) for each in plans]
        return self._in_flight(plan, parts, running)

    def _run_whole(self, plan: StepPlan, run: Callable[[StepPlan], Issued]) -> Issued:
        """Run a step that is not split: other ranks would not do so, or recurrent states are those of a failed try.

        Raises:
            DeviceError: it does not fit into memory.
        """
        try:
            return run(plan)
        except (RuntimeError, MemoryError) as problem:
            if not is_out_of_memory(problem):
                raise
            why = "as the model has recurrent layers" if self._context.pool.states else "among several processes"
            raise DeviceError(
                f"out of memory in a step of {plan.tokens} tokens, which is not split {why}; lower "
                "--max-tokens-per-step or --max-num-seqs"
            ) from None

    def _issue(
        self,
        plan: StepPlan,
        running: InputBatch,
        unread: InFlightStep | None,
        read_last: Callable[[], None],
        copies: list[PageCopy],
    ) -> Issued:
        """Queue a step or a part of one, after the step `unread`. After a failure it can be called again."""
        workload, rows = self._workload, running.rows(plan.samples.sequence_ids) if plan.samples else None
        spec, (last_rows, last) = self._context.model.spec, (None, None)
        if unread is not None:
            last_rows, last = unread.rows, unread.tokens
        arrays = lay_out_step(plan, workload, running, self._decode_tables, last_rows, self._media, spec, self._peers)
        sampling = None if rows is None else self._sampler.metadata(rows)
        step = Step(plan, arrays, sampling, last, read_last, copies, wait=self.close)
        try:
            executor, issued = next((e, issued) for e in self._executors if (issued := e.issue(step)) is not None)
        except BaseException:
            self._context.cancel(step.captured)
            raise
        self._context.times.end_compute(issued.host_share)
        if rows is not None:
            rows.count_sampled()
        return executor, issued

    def _in_flight(self, plan: StepPlan, parts: list[Part[Issued]], running: InputBatch) -> InFlightStep:
        """The step that consists of `parts`, in order."""
        device, alone = self._context.device, parts[0].result if len(parts) == 1 else None
        pending = device.asynchronous if alone is None else alone[1].pending
        if alone is None:
            self.close()  # concatenation reads the parts' tokens
        sampled = [part for part in parts if part.plan.samples]
        if not sampled:
            return InFlightStep(plan, pending=pending, parts=parts)
        ids = [part.plan.samples.sequence_ids for part in sampled]
        rows = running.rows(ids[0] if len(ids) == 1 else np.concatenate(ids))
        tokens = [_part_tokens(part, device.torch_device) for part in sampled]
        return InFlightStep(plan, rows, tokens[0] if len(tokens) == 1 else torch.cat(tokens), pending, parts=parts)

    @torch.inference_mode()
    def prepare(self, forecast: DecodeForecast) -> None:
        """See `Executor.prepare`."""
        for executor in self._executors:
            executor.prepare(forecast)

    def read(self, in_flight: InFlightStep) -> StepSamples:
        """Sampled tokens of a step, once they are on the host. Steps must be read in order.

        The step's hidden states and prompt logprobs go to their collectors.
        """
        parts = [_read_part(part) for part in in_flight.parts]
        return parts[0] if len(parts) == 1 else StepSamples.join(parts)

    def close(self) -> None:
        """Wait for steps that use the host's memory; after that, it may be freed."""
        for executor in self._executors:
            executor.close()

    def counts(self) -> dict[str, int]:
        """Counters of all steps, by report key."""
        context = self._context
        counts = {
            "in_flight_peak_bytes": context.outputs.peak_bytes,
            "forced_syncs": context.outputs.forced_syncs,
            **context.times.milliseconds(),
            **{f"attention_{name}": count for name, count in asdict(context.attention).items()},
            **GraphCounts().by_key(),
        }
        for executor in self._executors:
            counts |= executor.counts()
        for before, stream in zip(self._streamed_before, self._streams, strict=True):
            counts |= {name: count - before[name] for name, count in stream.counts().items()}
        return counts

    def notes(self) -> list[str]:
        """Remarks for the user on executors that do not run what they should."""
        return [note for executor in self._executors if (note := executor.note()) is not None]


def executors_for(context: ExecutorContext) -> list[Executor]:
    """The executors that the backend offers for the context's device, in order of preference.

    What is streamed comes by calls between the blocks, which no graph has.
    """
    executors: list[Executor] = []
    streamed = context.model.stream is not None or isinstance(context.pool, StreamedPool)
    for support in () if streamed else context.backend.executors:
        match support:
            case Graphs():
                if context.device.captures:
                    executors.append(CudaGraphExecutor(context, support))
            case CommandBuffers():
                # An asynchronous device needs no thread; the PyTorch of recurrent layers does not wait for kernels.
                if not context.device.asynchronous and context.pool.states is None:
                    executors.append(OverlappedCpuExecutor(context, support))
    return [*executors, EagerExecutor(context)]


def _read_part(part: Part[Issued]) -> StepSamples:
    """Sampled tokens of a part; an error for each row if it does not fit into memory."""
    if part.result is not None:
        executor, in_flight = part.result
        return executor.read(in_flight)
    rows = len(part.plan.samples)
    return StepSamples(np.zeros(rows, np.int64), dict.fromkeys(range(rows), out_of_memory(part.problem)))


def _part_tokens(part: Part[Issued], device: torch.device) -> Tensor:
    """[r] int64 tokens of a part on the device; zeros if it does not fit into memory."""
    if part.result is None or part.result[1].samples is None:
        return torch.zeros(len(part.plan.samples), dtype=torch.int64, device=device)
    return part.result[1].samples.tokens
