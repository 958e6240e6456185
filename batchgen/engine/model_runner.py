"""`ModelRunner`: issues step plans to the device without waiting, and reads their sampled tokens one step later."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.capture.hidden_states import HiddenStateCollector, PendingStates
from batchgen.engine.capture.prompt_logprobs import PendingPromptLogprobs, PromptLogprobs
from batchgen.engine.cuda_graph import DecodeGraphs
from batchgen.engine.d2h_queue import D2HQueue
from batchgen.engine.decode_table import DecodeTable
from batchgen.engine.input_batch import BatchView, InputBatch
from batchgen.engine.memory.oom import (
    ConcatenatedSamples,
    FailedSamples,
    OOMSplitter,
    Part,
    PendingSamples,
    is_out_of_memory,
)
from batchgen.engine.sampling.sampler import Sampler, StepSamples
from batchgen.engine.step_batch import StepArrays, StepBatch, lay_out_step
from batchgen.engine.step_times import StepTimes
from batchgen.engine.workload import JobWorkload
from batchgen.errors import DeviceError
from batchgen.kernels.backend import Backend
from batchgen.kernels.cpu.command_buffer import BackgroundThread, fill_sampled_ids, record_commands
from batchgen.kernels.device import Device
from batchgen.kernels.pooled import AttentionCounts, PooledAttention
from batchgen.kernels.sampling import SampleResult
from batchgen.kernels.types import KVPool
from batchgen.models.base import Model, ModelInput
from batchgen.plan.step_plan import PageCopy, StepPlan

__all__ = ["InFlightStep", "ModelRunner"]


@dataclass(slots=True)
class InFlightStep:
    """A step that has been issued and not read yet."""

    plan: StepPlan
    rows: BatchView | None = None
    """[R] sequences that the step samples for; None: none"""
    samples: PendingSamples | None = None
    """Tokens sampled for `rows`; None: none"""
    pending_states: PendingStates | None = None
    """Hidden states and routed experts that are copied to the host"""
    pending_prompts: PendingPromptLogprobs | None = None
    """Prompt logprobs that are copied to the host"""
    pending: bool = False
    """Whether the device may still compute it, so that planning the next step before reading this one pays"""
    consumed: bool = False
    """Whether its sequences have received their tokens"""
    parts: list[InFlightStep] = field(default_factory=list)
    """Parts that were run in place of a step that did not fit into memory"""
    failed: list[Part[InFlightStep]] = field(default_factory=list)
    """Parts that did not fit into memory even alone, and the parts that depend on them"""

    def set_samples(self, rows: BatchView, samples: PendingSamples) -> None:
        """Record that one token was sampled for each of `rows`."""
        rows.count_sampled()
        self.rows, self.samples = rows, samples


class ModelRunner:
    """Runs the steps of one job."""

    def __init__(
        self,
        workload: JobWorkload,
        model: Model,
        pool: KVPool,
        backend: Backend,
        device: Device,
        sampler: Sampler,
        prompts: PromptLogprobs,
        states: HiddenStateCollector | None,
        max_tokens: int,
    ) -> None:
        """`max_tokens`: most tokens in a step."""
        self._workload = workload
        self._model = model
        self._pool = pool
        self._backend = backend
        self._device = device
        self._decode_table = DecodeTable(pool.page_size)
        self._sampler = sampler
        self._prompts = prompts
        self._states = states
        self.outputs = D2HQueue(device)
        """Hidden states and prompt logprobs that are copied to the host"""
        self.oom_splitter = OOMSplitter(pool.page_size, max_tokens, device.release_cache)
        """Runs a step in parts when it does not fit into memory"""
        self.attention = AttentionCounts()
        """Attention work, summed over all steps"""
        self.times = StepTimes()
        self._copies: Seq[PageCopy] = ()
        """Page copies of the current step that are not made yet"""
        self._background: BackgroundThread | None = None
        """Runs steps that return only tokens, while Python continues; None: an asynchronous device needs no thread, or
        the kernels cannot be recorded"""
        if backend.background_thread is not None and not device.asynchronous and model.supports_command_buffer():
            self._background = backend.background_thread()
        self.graphs: DecodeGraphs | None = None
        """CUDA graphs of decode-only steps; None: the device or the kernels do not support graphs"""
        if backend.static is not None and device.captures:
            self.graphs = DecodeGraphs(model, backend.static(pool, device), backend.ops, device)

    @torch.inference_mode()
    def issue(
        self, plan: StepPlan, running: InputBatch, last: InFlightStep | None, read_last: Callable[[], None]
    ) -> InFlightStep:
        """Queue a step.

        Args:
            plan: the step; its sequences are in `running`.
            running: the running batch.
            last: the previous step.
            read_last: reads the previous step; called while the device computes, and only if a row's sampling depends
                on its earlier tokens.
        """
        self._copies = plan.copies
        if not plan.tokens:
            self._flush_page_copies()
            return InFlightStep(plan)
        tokens, unread = _unread_samples(last)

        def run(part: StepPlan) -> InFlightStep:
            return self._issue(part, running, tokens, unread, read_last)

        parts = self.oom_splitter.run(plan, run)
        return (
            parts[0].result if parts[0].plan is plan and parts[0].result else self._combine_parts(plan, parts, running)
        )

    @torch.inference_mode()
    def issue_unsplit(self, plan: StepPlan, running: InputBatch, last: InFlightStep | None) -> InFlightStep:
        """Queue a step without splitting it; the caller handles out-of-memory errors."""
        self._copies = plan.copies
        return self._issue(plan, running, *_unread_samples(last), lambda: None)

    def _issue(
        self,
        plan: StepPlan,
        running: InputBatch,
        tokens: Tensor | None,
        unread: BatchView | None,
        read_last: Callable[[], None],
    ) -> InFlightStep:
        """Queue a step or a part of one. After a failure it can be called again.

        `tokens` [R'] int64: the last step's tokens on the device, sampled for `unread`.
        """
        in_flight = InFlightStep(plan, pending=self._device.asynchronous)
        try:
            workload, size = self._workload, self._pool.page_size
            step = lay_out_step(plan, workload.table, running, self._decode_table, size, workload.adapter, unread)
            overlapped = self._background is not None and self._run_overlapped(
                in_flight, step, tokens, running, self._background
            )
            if not overlapped and not self._run_graph(in_flight, step, tokens, running, read_last):
                self._run_eager(in_flight, step.upload(self._device), tokens, running, read_last)
            self.times.end_compute(1 - 1 / torch.get_num_threads() if overlapped else 0.0)
        except BaseException:
            self._cancel_capture(in_flight)
            raise
        return in_flight

    def _combine_parts(self, plan: StepPlan, parts: list[Part[InFlightStep]], running: InputBatch) -> InFlightStep:
        """One in-flight step that combines the parts of a step."""
        self.close()  # concatenation reads the parts' tokens
        in_flight = InFlightStep(plan, running.rows(plan.samples.numbers), pending=self._device.asynchronous)
        samples: list[PendingSamples] = []
        for part in parts:
            if part.result is None:
                in_flight.failed.append(part)
                if count := len(part.plan.samples):
                    samples.append(FailedSamples.out_of_memory(count, self._device.torch_device, part.problem))
                continue
            in_flight.parts.append(part.result)
            if part.result.samples is not None:
                samples.append(part.result.samples)
        in_flight.samples = ConcatenatedSamples.of(samples) if samples else None
        return in_flight

    def read(self, in_flight: InFlightStep) -> StepSamples:
        """Sampled tokens of a step, once they are on the host. Steps must be read in order.

        The step's hidden states and prompt logprobs go to their collectors.
        """
        sampled = StepSamples(np.zeros(0, np.int64)) if in_flight.samples is None else in_flight.samples.read()
        for part in in_flight.parts or (in_flight,):
            if self._states is not None and part.pending_states is not None:
                self._states.collect(part.pending_states)
            if part.pending_prompts is not None:
                self._prompts.collect(part.pending_prompts)
        return sampled

    def _run_eager(
        self,
        in_flight: InFlightStep,
        batch: StepBatch,
        tokens: Tensor | None,
        running: InputBatch,
        read_last: Callable[[], None],
    ) -> None:
        plan = in_flight.plan
        rows = running.rows(plan.samples.numbers)
        needs_host = len(rows) > 0 and self._sampler.prepare(rows)
        self.times.begin_compute()
        self._flush_page_copies()
        hidden = self._forward(in_flight, batch, tokens)
        if not len(rows):
            return
        logits = self._model.logits(hidden)  # [U, V]
        if batch.sample_rows is not None:
            # Samples of one prompt share logits; each gets a copy, which masks may change.
            logits = logits[batch.sample_rows]  # [R, V]
        if needs_host:
            read_last()
        in_flight.set_samples(rows, self._sampler.sample(logits, rows, batch.num_sampled))

    def _run_graph(
        self,
        in_flight: InFlightStep,
        step: StepArrays,
        tokens: Tensor | None,
        running: InputBatch,
        read_last: Callable[[], None],
    ) -> bool:
        """Run a decode-only step as a CUDA graph; False: the step cannot run as a graph, and nothing was done."""
        graphs = self.graphs
        if graphs is None or graphs.disabled_reason is not None or not step.decode_only:
            return False
        rows = running.rows(in_flight.plan.samples.numbers)
        needs_host = self._sampler.prepare(rows)
        captured = in_flight.pending_states = (
            None if self._states is None else self._states.capture(in_flight.plan, self._device)
        )
        self.times.begin_compute()
        self._flush_page_copies()
        found = graphs.run(step, tokens, self._sampler.plain(rows), None if captured is None else captured.capture)
        if found is None:
            self._cancel_capture(in_flight)
            in_flight.pending_states = None
            return False
        if self._states is not None and captured is not None:
            self._states.send(captured, self.outputs)
        if needs_host:
            read_last()
        if found.logits is not None:
            in_flight.set_samples(rows, self._sampler.sample(found.logits, rows, found.num_sampled))
        else:
            assert found.tokens is not None
            assert found.bad is not None
            in_flight.set_samples(rows, self._sampler.wrap(found.tokens, found.bad, rows))
        return True

    def _run_overlapped(
        self,
        in_flight: InFlightStep,
        step: StepArrays,
        tokens: Tensor | None,
        running: InputBatch,
        background: BackgroundThread,
    ) -> bool:
        """Run a step on the background thread; False: the step returns more than tokens, and nothing was done."""
        threads, ops = torch.get_num_threads(), self._backend.ops
        needs_more = step.adapters is not None or step.embeds is not None or self._states is not None
        if threads < 2 or needs_more or self._prompts:
            return False
        rows = running.rows(in_flight.plan.samples.numbers)
        plain = self._sampler.plain(rows) if len(rows) else None
        if plain is None and len(rows):
            return False
        batch = step.upload(self._device)
        attention = self._backend.attention(self._pool, batch.attention)
        sampled: SampleResult | None = None
        feeds_samples = batch.source is not None and tokens is not None
        with record_commands(threads) as commands:
            self._copy_pages(self._copies)
            if batch.source is not None and tokens is not None:
                fill_sampled_ids(batch.input_ids, batch.source, tokens)
            inputs = ModelInput(batch.input_ids, batch.positions, attention, ops=ops, wanted=batch.logit_rows)
            hidden = self._model.hidden(inputs)
            if plain is not None:
                logits = self._model.logits(hidden)  # [U, V]
                sampled = ops.sample(logits, plain.at(batch.num_sampled, ops), batch.sample_rows)
        expected_commands = bool(self._copies) + feeds_samples + (1 if plain is None else 3)
        assert len(commands) == expected_commands, "a kernel that was not recorded ran before the recorded ones"
        if isinstance(attention, PooledAttention):
            self.attention.add(attention.counts)
        self.times.begin_compute()
        in_flight.pending, self._copies = True, ()
        if sampled is None:
            background.submit(commands, [])
            return True
        assert sampled.bad is not None
        download = background.submit(commands, [sampled.tokens, sampled.bad])
        in_flight.set_samples(rows, self._sampler.wrap(sampled.tokens, sampled.bad, rows, download))
        return True

    def close(self) -> None:
        """Wait for the background thread; after that, its memory may be freed."""
        if self._background is not None:
            self._background.join()

    def _flush_page_copies(self) -> None:
        """Wait for the previous step on a CPU, and copy pages, before this step writes to the pool."""
        if self._background is not None:
            self._background.join()
        self._copy_pages(self._copies)
        self._copies = ()

    def _cancel_capture(self, in_flight: InFlightStep) -> None:
        """Cancel the captures of a failed step, so that the next try captures again."""
        if in_flight.pending_prompts is not None:
            self._prompts.cancel(in_flight.pending_prompts)
        if self._states is not None and in_flight.pending_states is not None:
            self._states.cancel(in_flight.pending_states)

    def _forward(self, in_flight: InFlightStep, batch: StepBatch, last: Tensor | None) -> Tensor:
        """[U, H] states after the final norm, of the tokens whose logits are needed."""
        plan = in_flight.plan
        captured = in_flight.pending_states = None if self._states is None else self._states.capture(plan, self._device)
        attention, scores = self._backend.attention(self._pool, batch.attention), bool(self._prompts)
        inputs = ModelInput(
            batch.feed(last),
            batch.positions,
            attention,
            None if captured is None else captured.capture,
            lora=batch.lora,
            embeds=batch.embeds,
            ops=self._backend.ops,
            wanted=None if scores else batch.logit_rows,
        )
        hidden = self._model.hidden(inputs)
        if isinstance(attention, PooledAttention):
            self.attention.add(attention.counts)
        if scores:
            in_flight.pending_prompts = self._prompts.score(plan, hidden, self._model.logits, self.outputs)
            hidden = hidden if batch.logit_rows is None else hidden[batch.logit_rows]
        if self._states is not None and captured is not None:
            self._states.send(captured, self.outputs)
        return hidden

    def _copy_pages(self, copies: Seq[PageCopy]) -> None:
        """Copy pages, in order: the source of one copy may be the target of a later one."""
        if not copies:
            return
        (table,) = self._device.upload(np.array([(copy.source, copy.target, copy.tokens) for copy in copies], np.int64))
        try:
            self._backend.ops.copy_pages(self._pool, table)
        except RuntimeError as problem:
            if is_out_of_memory(problem):
                raise DeviceError(f"out of memory while copying {len(copies)} KV pages; lower --kv-memory") from None
            raise


def _unread_samples(last: InFlightStep | None) -> tuple[Tensor | None, BatchView | None]:
    """Tokens [R'] int64 of the last step on the device, and their rows; None if the step was read already."""
    if last is None or last.consumed or last.samples is None:
        return None, None
    return last.samples.tokens, last.rows
