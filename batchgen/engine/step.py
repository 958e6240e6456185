"""`StepRunner`: a step plan onto the device, and what came of it, one step late. Waits for nothing while it issues."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.batch import StepArrays, StepBatch, lay_out_step
from batchgen.engine.decode_table import DecodeTable
from batchgen.engine.graphs import DecodeGraphs
from batchgen.engine.halving import Halver, Part, is_out_of_memory
from batchgen.engine.joined import Drawn, FailedDraws, JoinedDraws
from batchgen.engine.output_ring import OutputRing
from batchgen.engine.planning import Workload
from batchgen.engine.prompt_logprobs import PendingPrompts, PromptLogprobs
from batchgen.engine.row_table import Rows, RowTable
from batchgen.engine.sampler import Sampled, Sampler
from batchgen.engine.states import PendingStates, StateKeeper
from batchgen.engine.step_times import StepTimes
from batchgen.errors import DeviceError
from batchgen.kernels.backend import Backend
from batchgen.kernels.cpu.background import Background, feed, record
from batchgen.kernels.device import Device
from batchgen.kernels.pooled import AttentionCounts, PooledAttention
from batchgen.kernels.sampling import SampleResult
from batchgen.kernels.types import KVPool
from batchgen.models.base import Model, ModelInput
from batchgen.plan.types import PageCopy, StepPlan

__all__ = ["Flight", "StepRunner"]


@dataclass(slots=True)
class Flight:
    """A step that has been issued and not been read yet."""

    plan: StepPlan
    rows: Rows | None = None
    """[R] of the plan's samples; None where nothing is drawn"""
    draws: Drawn | None = None
    """None where nothing is drawn"""
    tapped: PendingStates | None = None
    scored: PendingPrompts | None = None
    under_way: bool = False
    """whether it may still be computed, so that it pays to plan the next step before this one is read"""
    seen: bool = False
    """whether its sequences have their tokens"""
    parts: list[Flight] = field(default_factory=list)
    """of a step that memory did not hold whole: what was run in its place"""
    failed: list[Part[Flight]] = field(default_factory=list)
    """what of it memory did not hold even alone, and what hung on that"""

    def drew(self, rows: Rows, draws: Drawn) -> None:
        """A token of each of `rows` is on its way."""
        rows.drew()
        self.rows, self.draws = rows, draws


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
        max_tokens: int,
    ) -> None:
        """`max_tokens`: most tokens of a step."""
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
        self.halver = Halver(pool.page_size, max_tokens, device.release_cache)
        """what is run in place of a step that memory does not hold"""
        self.attention = AttentionCounts()
        """what attention did in all steps"""
        self.times = StepTimes()
        self._copies: Seq[PageCopy] = ()
        """of the step at hand, not made yet"""
        self._background: Background | None = None
        """for steps that ask for tokens alone; None: the device works on its own, or the kernels cannot be recorded"""
        if backend.background is not None and not device.asynchronous and model.recordable():
            self._background = backend.background()
        self.graphs: DecodeGraphs | None = None
        """for steps of decode rows alone; None: the device or the kernels have no graphs"""
        if backend.static is not None and device.captures:
            self.graphs = DecodeGraphs(model, backend.static(pool, device), backend.ops, device)

    @torch.inference_mode()
    def issue(self, plan: StepPlan, running: RowTable, last: Flight | None, catch_up: Callable[[], None]) -> Flight:
        """Queue a step.

        Args:
            plan: the step; its sequences have begun.
            running: at least its sequences.
            last: the step before.
            catch_up: reads that step; called while the device computes, and only for rows that have to know.
        """
        self._copies = plan.copies
        if not plan.tokens:
            self._settle()
            return Flight(plan)
        tokens, unread = _unread(last)

        def run(part: StepPlan) -> Flight:
            return self._issue(part, running, tokens, unread, catch_up)

        parts = self.halver.run(plan, run)
        return parts[0].result if parts[0].plan is plan and parts[0].result else self._join(plan, parts, running)

    @torch.inference_mode()
    def issue_whole(self, plan: StepPlan, running: RowTable, last: Flight | None) -> Flight:
        """Queue a step in one piece, whatever its size: memory that runs out is the caller's to see."""
        self._copies = plan.copies
        return self._issue(plan, running, *_unread(last), lambda: None)

    def _issue(
        self,
        plan: StepPlan,
        running: RowTable,
        tokens: Tensor | None,
        unread: Rows | None,
        catch_up: Callable[[], None],
    ) -> Flight:
        """Queue a step or a part of one. When it fails it can be called anew.

        `tokens` [R'] int64 are the last step's draws on the device, those of `unread`.
        """
        flight = Flight(plan, under_way=self._device.asynchronous)
        try:
            workload, size = self._workload, self._pool.page_size
            step = lay_out_step(plan, workload.table, running, self._decodes, size, workload.adapter, unread)
            beside = self._background is not None and self._run_beside(flight, step, tokens, running, self._background)
            if not beside and not self._run_graph(flight, step, tokens, running, catch_up):
                self._run(flight, step.upload(self._device), tokens, running, catch_up)
            self.times.leave(1 - 1 / torch.get_num_threads() if beside else 0.0)
        except BaseException:
            self._withdraw(flight)
            raise
        return flight

    def _join(self, plan: StepPlan, parts: list[Part[Flight]], running: RowTable) -> Flight:
        """One flight of the parts of a step."""
        self.close()  # their tokens are put together
        flight = Flight(plan, running.rows(plan.samples.numbers), under_way=self._device.asynchronous)
        draws: list[Drawn] = []
        for part in parts:
            if part.result is None:
                flight.failed.append(part)
                if count := len(part.plan.samples):
                    draws.append(FailedDraws.out_of_memory(count, self._device.torch_device, part.problem))
                continue
            flight.parts.append(part.result)
            if part.result.draws is not None:
                draws.append(part.result.draws)
        flight.draws = JoinedDraws.of(draws) if draws else None
        return flight

    def read(self, flight: Flight) -> Sampled:
        """What was drawn, once it is here. Steps are read in their order; prompts' and states' keepers take theirs."""
        sampled = Sampled(np.zeros(0, np.int64)) if flight.draws is None else flight.draws.read()
        for part in flight.parts or (flight,):
            if self._states is not None and part.tapped is not None:
                self._states.keep(part.tapped)
            if part.scored is not None:
                self._prompts.keep(part.scored)
        return sampled

    def _run(
        self,
        flight: Flight,
        batch: StepBatch,
        tokens: Tensor | None,
        running: RowTable,
        catch_up: Callable[[], None],
    ) -> None:
        plan = flight.plan
        rows = running.rows(plan.samples.numbers)
        needs_host = len(rows) > 0 and self._sampler.prepare(rows)
        self.times.enter()
        self._settle()
        hidden = self._forward(flight, batch, tokens)
        if not len(rows):
            return
        logits = self._model.logits(hidden)  # [U, V]
        if batch.sample_rows is not None:
            # Samples of one prompt draw from the same logits, each from a copy it may mask.
            logits = logits[batch.sample_rows]  # [R, V]
        if needs_host:
            catch_up()
        flight.drew(rows, self._sampler.draw(logits, rows, batch.drawn))

    def _run_graph(
        self,
        flight: Flight,
        step: StepArrays,
        tokens: Tensor | None,
        running: RowTable,
        catch_up: Callable[[], None],
    ) -> bool:
        """The same by a graph; False where none runs such a step, and nothing has been done."""
        graphs = self.graphs
        if graphs is None or graphs.refused is not None or not step.decodes_alone:
            return False
        rows = running.rows(flight.plan.samples.numbers)
        needs_host = self._sampler.prepare(rows)
        tapped = flight.tapped = None if self._states is None else self._states.taps(flight.plan, self._device)
        self.times.enter()
        self._settle()
        found = graphs.run(step, tokens, self._sampler.plain(rows), None if tapped is None else tapped.taps)
        if found is None:
            self._withdraw(flight)
            flight.tapped = None
            return False
        if self._states is not None and tapped is not None:
            self._states.send(tapped, self.outputs)
        if needs_host:
            catch_up()
        if found.logits is not None:
            flight.drew(rows, self._sampler.draw(found.logits, rows, found.drawn))
        else:
            assert found.tokens is not None
            assert found.bad is not None
            flight.drew(rows, self._sampler.took(found.tokens, found.bad, rows))
        return True

    def _run_beside(
        self, flight: Flight, step: StepArrays, tokens: Tensor | None, running: RowTable, background: Background
    ) -> bool:
        """The same beside what the host does next; False where the step asks for more than tokens, and nothing has been
        done.
        """
        threads, ops = torch.get_num_threads(), self._backend.ops
        more = step.adapters is not None or step.embeds is not None or self._states is not None
        if threads < 2 or more or self._prompts:
            return False
        rows = running.rows(flight.plan.samples.numbers)
        plain = self._sampler.plain(rows) if len(rows) else None
        if plain is None and len(rows):
            return False
        batch = step.upload(self._device)
        attention = self._backend.attention(self._pool, batch.attention)
        drawn: SampleResult | None = None
        fed = batch.source is not None and tokens is not None
        with record(threads) as noted:
            self._copy_pages(self._copies)
            if batch.source is not None and tokens is not None:
                feed(batch.input_ids, batch.source, tokens)
            inputs = ModelInput(batch.input_ids, batch.positions, attention, ops=ops, wanted=batch.logit_rows)
            hidden = self._model.hidden(inputs)
            if plain is not None:
                logits = self._model.logits(hidden)  # [U, V]
                drawn = ops.sample(logits, plain.at(batch.drawn, ops), batch.sample_rows)
        expected = bool(self._copies) + fed + (1 if plain is None else 3)
        assert len(noted) == expected, "what runs now would run too early"
        if isinstance(attention, PooledAttention):
            self.attention.add(attention.counts)
        self.times.enter()
        flight.under_way, self._copies = True, ()
        if drawn is None:
            background.begin(noted, [])
            return True
        assert drawn.bad is not None
        download = background.begin(noted, [drawn.tokens, drawn.bad])
        flight.drew(rows, self._sampler.took(drawn.tokens, drawn.bad, rows, download))
        return True

    def close(self) -> None:
        """Wait for what is computed beside Python. Its memory may go then, if nobody will read it."""
        if self._background is not None:
            self._background.join()

    def _settle(self) -> None:
        """Wait, on a CPU, for the step before, and copy pages: what is done to the pool is done after that."""
        if self._background is not None:
            self._background.join()
        self._copy_pages(self._copies)
        self._copies = ()

    def _withdraw(self, flight: Flight) -> None:
        """The step has failed: what is kept of it is asked for again when it is issued anew."""
        if flight.scored is not None:
            self._prompts.withdraw(flight.scored)
        if self._states is not None and flight.tapped is not None:
            self._states.withdraw(flight.tapped)

    def _forward(self, flight: Flight, batch: StepBatch, last: Tensor | None) -> Tensor:
        """[U, H] states after the final norm, of tokens that are drawn for."""
        plan = flight.plan
        tapped = flight.tapped = None if self._states is None else self._states.taps(plan, self._device)
        attention, scores = self._backend.attention(self._pool, batch.attention), bool(self._prompts)
        inputs = ModelInput(
            batch.feed(last),
            batch.positions,
            attention,
            None if tapped is None else tapped.taps,
            lora=batch.lora,
            embeds=batch.embeds,
            ops=self._backend.ops,
            wanted=None if scores else batch.logit_rows,
        )
        hidden = self._model.hidden(inputs)
        if isinstance(attention, PooledAttention):
            self.attention.add(attention.counts)
        if scores:
            flight.scored = self._prompts.score(plan, hidden, self._model.logits, self.outputs)
            hidden = hidden if batch.logit_rows is None else hidden[batch.logit_rows]
        if self._states is not None and tapped is not None:
            self._states.send(tapped, self.outputs)
        return hidden

    def _copy_pages(self, copies: Seq[PageCopy]) -> None:
        """Copy pages, once and in order: a page that was a source may be a later one's target, never before."""
        if not copies:
            return
        (table,) = self._device.upload(np.array([(copy.source, copy.target, copy.tokens) for copy in copies], np.int64))
        try:
            self._backend.copy_pages(self._pool, table)
        except RuntimeError as problem:
            if is_out_of_memory(problem):
                raise DeviceError(f"memory ran out for copies of {len(copies)} KV pages; lower --kv-memory") from None
            raise


def _unread(last: Flight | None) -> tuple[Tensor | None, Rows | None]:
    """The last step's draws [R'] int64 on the device and for whom they are, where nobody has read them."""
    if last is None or last.seen or last.draws is None:
        return None, None
    return last.draws.tokens, last.rows
