"""`StepRunner`: a step plan onto the device, and what came of it, one step late. Waits for nothing while it issues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.batch import StepBatch, build_batch
from batchgen.engine.decode_table import DecodeTable
from batchgen.engine.output_ring import OutputRing
from batchgen.engine.planning import Workload
from batchgen.engine.prompt_logprobs import PendingPrompts, PromptLogprobs
from batchgen.engine.sampler import Draws, Sampled, Sampler
from batchgen.engine.sequence import Sequence
from batchgen.engine.states import PendingStates, StateKeeper
from batchgen.kernels.backend import Backend
from batchgen.kernels.device import Device
from batchgen.kernels.types import KVPool
from batchgen.models.base import Model, ModelInput
from batchgen.plan.types import PageCopy, StepPlan

__all__ = ["Flight", "StepRunner"]


@dataclass(slots=True)
class Flight:
    """A step that has been issued and not been read yet."""

    plan: StepPlan
    rows: list[Sequence] = field(default_factory=list)
    """[R] of the plan's samples"""
    draws: Draws | None = None
    """None where nothing is drawn"""
    tapped: PendingStates | None = None
    scored: PendingPrompts | None = None
    seen: bool = False
    """whether its sequences have their tokens"""

    @property
    def places(self) -> dict[int, int]:
        """Sequence -> place of its token among the step's draws."""
        return {sample.sequence: place for place, sample in enumerate(self.plan.samples)}


class StepRunner:
    """Runs the steps of one job."""

    def __init__(
        self,
        workload: Workload,
        model: Model,
        pool: KVPool,
        backend: Backend,
        device: Device,
        sampler: Sampler,
        prompts: PromptLogprobs,
        states: StateKeeper | None,
    ) -> None:
        self._workload = workload
        self._model = model
        self._pool = pool
        self._backend = backend
        self._device = device
        self._decodes = DecodeTable(pool.page_size)
        self._sampler = sampler
        self._prompts = prompts
        self._states = states
        self.outputs = OutputRing(device)
        """what rows ask for beside their tokens, on its way to the host"""

    @torch.inference_mode()
    def issue(
        self, plan: StepPlan, sequences: Mapping[int, Sequence], last: Flight | None, catch_up: Callable[[], None]
    ) -> Flight:
        """Queue a step.

        Args:
            plan: the step; its sequences have begun.
            sequences: the running ones, by number.
            last: the step before.
            catch_up: reads that step; called while the device computes, and only for rows that have to know.
        """
        self._copy_pages(plan.copies)
        if not plan.tokens:
            return Flight(plan)
        tokens = None if last is None or last.seen or last.draws is None else last.draws.tokens
        unread = {} if last is None or tokens is None else last.places
        batch = build_batch(
            plan,
            self._workload.table,
            sequences,
            self._decodes,
            self._pool.page_size,
            self._device,
            self._workload.adapter,
            unread,
        )
        flight = Flight(plan)
        try:
            self._run(flight, batch, tokens, sequences, catch_up)
        except BaseException:
            self._withdraw(flight)
            raise
        return flight

    def read(self, flight: Flight) -> Sampled:
        """What was drawn, once it is here. Steps are read in their order; prompts' and states' keepers take theirs."""
        sampled = Sampled([]) if flight.draws is None else flight.draws.read()
        if self._states is not None and flight.tapped is not None:
            self._states.keep(flight.tapped)
        if flight.scored is not None:
            self._prompts.keep(flight.scored)
        return sampled

    def _run(
        self,
        flight: Flight,
        batch: StepBatch,
        tokens: Tensor | None,
        sequences: Mapping[int, Sequence],
        catch_up: Callable[[], None],
    ) -> None:
        plan = flight.plan
        hidden = self._forward(flight, batch, tokens)
        if not plan.samples:
            return
        logits = self._model.logits(hidden[batch.logit_rows])  # [U, V]
        if batch.sample_rows is not None:
            # Samples of one prompt draw from the same logits, each from a copy it may mask.
            logits = logits[batch.sample_rows]  # [R, V]
        rows = [sequences[sample.sequence] for sample in plan.samples]
        if self._sampler.prepare(rows):
            catch_up()
        draws = self._sampler.draw(logits, rows, batch.drawn)
        for row in rows:
            row.drawn += 1
        flight.rows, flight.draws = rows, draws

    def _withdraw(self, flight: Flight) -> None:
        """The step has failed: what is kept of it is asked for again when it is issued anew."""
        if flight.scored is not None:
            self._prompts.withdraw(flight.scored)
        if self._states is not None and flight.tapped is not None:
            self._states.withdraw(flight.tapped)

    def _forward(self, flight: Flight, batch: StepBatch, last: Tensor | None) -> Tensor:
        """[T, H] states of the step's tokens after the final norm."""
        plan = flight.plan
        tapped = flight.tapped = None if self._states is None else self._states.taps(plan, self._device)
        inputs = ModelInput(
            batch.feed(last),
            batch.positions,
            self._backend.attention(self._pool, batch.attention),
            None if tapped is None else tapped.taps,
            lora=batch.lora,
            embeds=batch.embeds,
            ops=self._backend.ops,
        )
        hidden = self._model.hidden(inputs)
        if self._prompts:
            flight.scored = self._prompts.score(plan, hidden, self._model.logits, self.outputs)
        if self._states is not None and tapped is not None:
            self._states.send(tapped, self.outputs)
        return hidden

    def _copy_pages(self, copies: Seq[PageCopy]) -> None:
        if copies:
            self._pool.copy_pages(
                *self._device.upload(
                    np.array([copy.source for copy in copies], np.int64),
                    np.array([copy.target for copy in copies], np.int64),
                )
            )
