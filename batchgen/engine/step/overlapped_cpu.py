"""Runs steps that return only tokens on a background thread, while Python reads the last step and plans the next one.

The step's kernels are recorded and not run; then the background thread runs them one after the other.
"""

from __future__ import annotations

import torch

from batchgen.engine.step.executor import Executor, ExecutorContext, InFlight, Step
from batchgen.engine.step.step_batch import StepBatch
from batchgen.kernels.cpu.command_buffer import CannotRecord, CommandBuffers, fill_sampled_ids, record_commands
from batchgen.kernels.pooled import PooledAttention
from batchgen.kernels.sampling import SampleResult
from batchgen.kernels.types import PagedAttention
from batchgen.models.base import ModelInput


class OverlappedCpuExecutor(Executor):
    """Runs steps of models that compiled kernels compute as a whole."""

    def __init__(self, context: ExecutorContext, support: CommandBuffers) -> None:
        super().__init__(context)
        self._thread = support.thread()
        self._recordable: bool | None = None
        """Whether the model's steps are recorded completely, as the first one shows; None: there was none"""

    def issue(self, step: Step) -> InFlight | None:
        """See `Executor.issue`."""
        context, sampling, threads = self.context, step.sampling, torch.get_num_threads()
        needs_more = context.captures or step.arrays.adapters is not None or step.arrays.embeds is not None
        if sampling is not None:
            needs_more = needs_more or sampling.plain is None or sampling.plain.top_logprobs is not None
        if self._recordable is False or threads < 2 or needs_more:
            return None
        batch = step.arrays.upload(context.device)
        attention = context.attend(batch.attention, step)
        feeds_samples = batch.source is not None and step.last is not None
        try:
            with record_commands(threads) as commands:
                sampled = self._record(step, batch, attention)
        except CannotRecord:
            assert not self._recordable, "a model's steps are all recorded, or none"
            self._recordable = False
            return None
        # All layers are one command, and so are the head and sampling. What was not recorded ran too early.
        complete = len(commands) == bool(step.copies) + feeds_samples + (1 if sampled is None else 3)
        assert complete or not self._recordable, "a kernel that was not recorded ran before the recorded ones"
        self._recordable = complete
        if not complete:
            return None
        if isinstance(attention, PooledAttention):
            context.attention.add(attention.counts)
        context.times.begin_compute()
        step.copies.clear()
        share = 1 - 1 / threads
        if sampled is None or sampling is None:
            self._thread.submit(commands, [])
            return InFlight(None, step.captured, pending=True, host_share=share)
        assert sampled.bad is not None
        download = self._thread.submit(commands, [sampled.tokens, sampled.bad])
        return InFlight(sampling.collect(sampled, download=download), step.captured, pending=True, host_share=share)

    def _record(self, step: Step, batch: StepBatch, attention: PagedAttention) -> SampleResult | None:
        """Record a step's kernels; the result is that of the sampling kernel, None if the step samples no rows."""
        context, ops = self.context, self.context.backend.ops
        context.copy_pages(step.copies)
        if batch.source is not None and step.last is not None:
            fill_sampled_ids(batch.input_ids, batch.source, step.last)
        wanted, rope = batch.logit_rows, batch.rope_positions
        inputs = ModelInput(batch.input_ids, batch.positions, attention, ops=ops, wanted=wanted, rope_positions=rope)
        hidden = context.model.hidden(inputs)
        if step.sampling is None or step.sampling.plain is None:
            return None
        logits = context.model.logits(hidden)  # [U, V]
        return ops.sample(logits, step.sampling.plain.at(batch.num_sampled, ops), batch.sample_rows)

    def close(self) -> None:
        """See `Executor.close`."""
        self._thread.join()
