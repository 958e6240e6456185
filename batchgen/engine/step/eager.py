"""Runs any step by launching its kernels one by one."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from batchgen.engine.step.executor import Executor, InFlight, Step
from batchgen.engine.step.step_batch import StepBatch
from batchgen.kernels.mixers.states import PooledStates
from batchgen.kernels.pooled import PooledAttention
from batchgen.models.base import ModelInput


class EagerExecutor(Executor):
    """Runs every step, so it is the last of all executors."""

    def issue(self, step: Step) -> InFlight:
        """See `Executor.issue`."""
        context, sampling = self.context, step.sampling
        batch = step.arrays.upload(context.device)
        context.begin(step)
        adapters = self._head_adapters(step)
        hidden = self._forward(step, batch, adapters)
        samples = None
        if sampling is not None:
            of_rows = adapters if adapters is None or batch.logit_rows is None else adapters[batch.logit_rows]
            logits = self._logits(hidden, of_rows)  # [U, V]
            if batch.sample_rows is not None:
                # Samples of one prompt share logits; each gets a copy, which masks may change.
                logits = logits[batch.sample_rows]  # [R, V]
            samples = sampling.sample(logits, batch.num_sampled, step.read_last)
        return InFlight(samples, step.captured, pending=context.device.asynchronous)

    def _head_adapters(self, step: Step) -> Tensor | None:
        """[T] int64 adapter of each flat token, -1 for none; None if the head is the same for all."""
        adapters, device = step.arrays.adapters, self.context.device
        if adapters is None or not self.context.model.spec.adapts_head or not step.arrays.adapted:
            return None
        (uploaded,) = device.upload(adapters.astype(np.int64))
        return uploaded

    def _logits(self, hidden: Tensor, adapters: Tensor | None) -> Tensor:
        """[R, H], and [R] adapters if one of them changes the head -> [R, V]."""
        head = self.context.model.logits
        return head(hidden) if adapters is None else head(hidden, adapters)

    def _forward(self, step: Step, batch: StepBatch, adapters: Tensor | None) -> Tensor:
        """[U, H] states after the final norm, of the tokens whose logits are needed; `adapters`: for the head."""
        context = self.context
        attention, scores = context.attend(batch.attention, step), bool(context.prompts)
        inputs = ModelInput(
            batch.feed(step.last),
            batch.positions,
            attention,
            context.capture_states(step),
            lora=batch.lora,
            embeds=batch.embeds,
            ops=context.backend.ops,
            wanted=None if scores else batch.logit_rows,
            rope_positions=batch.rope_positions,
            states=None if context.pool.states is None else PooledStates(context.pool.states, batch.runs),
        )
        hidden = context.model.hidden(inputs)
        if isinstance(attention, PooledAttention):
            context.attention.add(attention.counts)
        if scores:

            def logits(rows: Tensor) -> Tensor:
                return self._logits(hidden[rows], None if adapters is None else adapters[rows])

            step.captured.prompts = context.prompts.score(step.plan, logits, context.outputs)
            hidden = hidden if batch.logit_rows is None else hidden[batch.logit_rows]
        context.send_states(step)
        return hidden
