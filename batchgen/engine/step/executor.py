"""`Executor`: runs steps on a device; the base of all executors, with the values that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from batchgen.engine.capture.hidden_states import HiddenStateCollector, PendingStates
from batchgen.engine.capture.prompt_logprobs import PendingPromptLogprobs, PromptLogprobs
from batchgen.engine.memory.d2h_queue import D2HQueue
from batchgen.engine.memory.oom import is_out_of_memory
from batchgen.engine.step.sampler import SampledTokens, SamplingMetadata, StepSamples
from batchgen.engine.step.step_batch import StepArrays
from batchgen.engine.step.step_times import StepTimes
from batchgen.errors import DeviceError
from batchgen.kernels.backend import Backend
from batchgen.kernels.device import Device
from batchgen.kernels.grouped import GroupedPool, attention_of, grouped_attention
from batchgen.kernels.kv_stream import StreamedAttention, StreamedPool
from batchgen.kernels.pooled import AttentionCounts, in_turn
from batchgen.kernels.sampling import SamplingColumns
from batchgen.kernels.types import AttentionBatch, PagedAttention
from batchgen.models.base import CaptureSpec, Model
from batchgen.plan.step_plan import PageCopy, StepPlan


@dataclass(slots=True)
class Captured:
    """A step's results other than tokens, on their way to the host."""

    states: PendingStates | None = None
    """Hidden states and routed experts"""
    prompts: PendingPromptLogprobs | None = None


@dataclass(slots=True)
class Step:
    """A step, or a part of one, to issue."""

    plan: StepPlan
    arrays: StepArrays
    sampling: SamplingMetadata | None
    """Sampling of the plan's [R] sampled rows; None: there are none"""
    last: Tensor | None
    """[R'] int64 on the device: tokens of the last step, which `arrays.source` refers to; None: they are on the host"""
    read_last: Callable[[], None]
    """Reads the last step; called before rows are sampled whose `sampling.needs_host` is set"""
    copies: list[PageCopy]
    """Page copies to make before anything else, in order; emptied by the executor that makes them"""
    wait: Callable[[], None]
    """Waits for earlier steps that executors compute in the host's memory"""
    captured: Captured = field(default_factory=Captured)
    """Filled by the executor; cancelled if the step fails"""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that an executor has issued."""

    samples: SampledTokens | None
    """Tokens sampled for the step's rows; None: it samples none"""
    captured: Captured
    pending: bool
    """Whether it may still be computed, so that planning the next step before reading this one pays"""
    host_share: float = 0.0
    """Share of the host's threads that go on computing it"""


@dataclass(frozen=True, slots=True)
class DecodeForecast:
    """What is known before a job's first step of the steps in which all rows decode."""

    steps: npt.NDArray[np.float64]
    """[R + 1] about how many of them have each number of rows"""
    plain: bool
    """Whether a graph samples all rows: they have no rules on logits, and return no logprobs or plain ones"""
    top_logprobs: int | None
    """Most top logprobs of a row, if the graph computes them; None: it computes none"""
    longest: int
    """Most positions that a row attends to, all but its last token"""
    shared: int
    """Positions of the longest prefix that rows share, in full pages"""
    adapted: bool = False
    """Whether a row has an adapter"""


@dataclass(slots=True)
class ExecutorContext:
    """What the executors of one job share."""

    model: Model
    pool: GroupedPool
    backend: Backend
    device: Device
    outputs: D2HQueue
    """Hidden states and prompt logprobs that are copied to the host"""
    prompts: PromptLogprobs
    states: HiddenStateCollector | None
    """None: no row returns hidden states or routed experts"""
    sampling: SamplingColumns | None = None
    """Of all rows of the job, if ranks share the logits"""
    attention: AttentionCounts = field(default_factory=AttentionCounts)
    """Attention work, summed over all steps"""
    times: StepTimes = field(default_factory=StepTimes)

    @property
    def captures(self) -> bool:
        """Whether any row of the job returns more than its tokens' values."""
        return self.states is not None or bool(self.prompts)

    def begin(self, step: Step) -> None:
        """Start computing a step at once: its kernels may write to the pool after this call."""
        self.times.begin_compute()
        step.wait()
        self.copy_pages(step.copies)
        step.copies.clear()

    def attend(self, batches: Sequence[AttentionBatch], step: Step) -> PagedAttention:
        """The attention of a step, given over the pages of each cache group."""
        pool, factory = self.pool, self.backend.attention
        if not isinstance(pool, StreamedPool):
            return grouped_attention(factory, pool, batches)
        parts = [attention_of(factory, part, batch) for part, batch in zip(pool.parts, batches, strict=True)]
        return StreamedAttention(parts, pool, step.plan.pages_used(pool.page_size))

    def copy_pages(self, copies: list[PageCopy]) -> None:
        """Copy pages, one after the other: a copy may read or overwrite what an earlier one has written."""
        if not copies:
            return
        try:
            for group, part in enumerate(self.pool.parts):
                table = np.array([(*c.pages[group], c.tokens) for c in copies], np.int64)
                pools = [part] if group or not isinstance(self.pool, StreamedPool) else self.pool.wholes()
                for some in in_turn(table):
                    (uploaded,) = self.device.upload(some)
                    for pool in pools:
                        self.backend.ops.copy_pages(pool, uploaded)
        except RuntimeError as problem:
            if is_out_of_memory(problem):
                raise DeviceError(f"out of memory while copying {len(copies)} KV pages; lower --kv-memory") from None
            raise

    def capture_states(self, step: Step) -> CaptureSpec | None:
        """Select the hidden states and experts that the model captures in a step; None: none."""
        captured = step.captured.states = None if self.states is None else self.states.capture(step.plan, self.device)
        return None if captured is None else captured.capture

    def send_states(self, step: Step) -> None:
        """Start copying the captured states and experts to the host."""
        if self.states is not None and step.captured.states is not None:
            self.states.send(step.captured.states, self.outputs)

    def collect(self, captured: Captured) -> None:
        """Store what a step has captured; steps must be collected in order."""
        if self.states is not None and captured.states is not None:
            self.states.collect(captured.states)
        if captured.prompts is not None:
            self.prompts.collect(captured.prompts)

    def cancel(self, captured: Captured) -> None:
        """Cancel the captures of a failed or declined step, so that the next try captures again."""
        if captured.prompts is not None:
            self.prompts.cancel(captured.prompts)
        if self.states is not None and captured.states is not None:
            self.states.cancel(captured.states)
        captured.states = captured.prompts = None


class Executor(ABC):
    """Runs the steps of one job."""

    def __init__(self, context: ExecutorContext) -> None:
        self.context = context

    @abstractmethod
    def issue(self, step: Step) -> InFlight | None:
        """Queue a step without waiting for it. After an error it may be called again with parts of the step.

        Returns:
            None if this executor cannot run the step; nothing has happened then that another one would not overwrite.
        """

    def takes_decodes(self, plan: StepPlan) -> bool:
        """Whether the decode rows of a step are to be issued in front of its chunks, as a step of this executor."""
        return False

    def read(self, in_flight: InFlight) -> StepSamples:
        """Sampled tokens of a step, once they are on the host. Steps must be read in order.

        What the step has captured goes to its collectors.
        """
        sampled = StepSamples.join([]) if in_flight.samples is None else in_flight.samples.read()
        self.context.collect(in_flight.captured)
        return sampled

    def prepare(self, forecast: DecodeForecast) -> None:  # noqa: B027 most have nothing to prepare
        """Get ready for a job before its first step."""

    def close(self) -> None:
        """Wait for issued steps that use the host's memory, which others may use or free then; `issue` may follow."""
        return

    def counts(self) -> dict[str, int]:
        """Counters for the report, by key."""
        return {}

    def note(self) -> str | None:
        """Why it does not run steps that it should; None: it does."""
        return None
