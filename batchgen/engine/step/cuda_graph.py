"""CUDA graphs of decode rows: model, head, plain sampling and its logprobs, captured once per padded batch size.

A graph replays its launches on fixed addresses. So each graph has static inputs, padded to one of a few sizes, which
every step overwrites in two or three transfers. A padding token attends to token 0 only and is stored in the scratch
page, and its recurrent state is not kept; its result is ignored.

The decode rows of a step with chunks run as a graph in front of the chunks, unless these have so many tokens that
computing few rows with them costs nothing. Steps with adapters have other graphs, whose tiles are static inputs. With
DoRA, or adapters of biases, embeddings, heads, experts or latents, whose layers go through a step's segments, they run
eagerly.

A new graph costs as much time as several steps, and the batch of a job that ends shrinks through all sizes. So a step
is padded to a larger size that has a graph, until that has wasted about the time of a new one.

Sizes that a job is expected to run for long are captured before its first step, largest first. Of any other kind the
first step runs eagerly, which compiles kernels, and the second one is captured. After a failed capture (the model waits
for the host, or memory runs out again and again) all steps run eagerly.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.memory.oom import is_out_of_memory
from batchgen.engine.step.executor import DecodeForecast, Executor, ExecutorContext, InFlight, Step
from batchgen.engine.step.logprobs import plain_logprobs
from batchgen.engine.step.sampler import PlainColumns
from batchgen.engine.step.step_batch import StepArrays, select_input_ids
from batchgen.kernels.device import Graph
from batchgen.kernels.grouped import GroupedPlanner, GroupedWork
from batchgen.kernels.lora import LoraStep, static_tiles, tile_columns
from batchgen.kernels.mixers.states import PooledStates, decode_batch
from batchgen.kernels.ops import Ops
from batchgen.kernels.sampling import SampleResult, SamplingColumns
from batchgen.kernels.types import AttentionBatch, Graphs, GroupPages
from batchgen.models.base import CaptureSpec, ModelInput
from batchgen.plan.step_plan import StepPlan

_PADDED_SIZES: Final = ((64, 8), (256, 16), (512, 32))
"""(up to, step): padded batch sizes above 8."""
_LARGE_STEP: Final = 64
_LEAST_STEPS: Final = 8.0
"""Steps that a size must be expected to have to be captured before the first step."""
WASTED_STEPS: Final = 8.0
"""Time of a new graph, in steps: a size gets one once its rows have caused that much padding in a larger one."""
_MAX_FULL: Final = 3
"""How often memory may run out before graphs are off."""
_MAX_RETIRED: Final = 4
"""Retired graphs that are kept because the device may still run them: two per step, at most two steps in flight."""
_MAX_FED_TOKENS: Final = 8192
"""Most sampled tokens of one step that the next step can use as input."""
_MOST_CHUNK_TOKENS: Final = 8
"""Most tokens of chunks per decode row where a graph pays. It reads all weights once more, which costs nothing where
the host's launches take longer than the step, and little where the rows are many."""


def padded_rows(rows: int) -> int:
    """The smallest batch size of a graph with `rows` decode rows."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = next((step for max_graphs, step in _PADDED_SIZES if rows <= max_graphs), _LARGE_STEP)
    return -(-rows // step) * step


@dataclass(slots=True)
class GraphCounts:
    """Counters of graph steps."""

    captures: int = 0
    replays: int = 0
    padded: int = 0
    """Number of padding rows, over all steps."""
    first: int = 0
    """Number of steps that ran eagerly because they were the first of their kind."""
    prepared: int = 0
    """Captures before the first step, which `captures` leaves out."""
    capture_ms: float = 0.0
    """Time of all captures."""

    def by_key(self) -> dict[str, int]:
        """The counters by report key."""
        return {f"graph_{name}": round(count) for name, count in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class _Result:
    """Results of a step of R rows. All but `sampled` are overwritten by the next step."""

    num_sampled: Tensor
    """[R] int64 tokens sampled so far for each row"""
    logits: Tensor | None
    """[R, V], which the caller may change; None: the graph has sampled tokens"""
    sampled: SampleResult | None
    """None: the caller samples from `logits`"""
    logprobs: list[Tensor]
    """`plain_logprobs` of the rows, if a row returns any and the graph has sampled"""


class _Variant(NamedTuple):
    """What distinguishes graphs of one size."""

    samples: bool
    """Whether tokens are sampled"""
    top_logprobs: int | None
    """K of the `plain_logprobs` that are computed; None: none are"""
    captured: tuple[tuple[int, ...], bool] | None
    """Layers whose states are captured, and whether experts are"""
    adapted: bool
    """Whether tokens have adapters"""


_Kind = tuple[int, _Variant]
"""Padded batch size, and the variant"""
_Key = tuple[_Kind, Hashable]
"""Kind, and the attention's launches."""


class CudaGraphExecutor(Executor):
    """Runs decode-only steps."""

    def __init__(self, context: ExecutorContext, support: Graphs) -> None:
        super().__init__(context)
        self._planner = GroupedPlanner(support, context.pool, context.device)
        self._device = context.device
        self._most = support.max_graphs
        self._shared = _SharedBuffers(context)
        self._steps: OrderedDict[_Key, _GraphStep] = OrderedDict()
        self._retired: deque[_GraphStep] = deque(maxlen=_MAX_RETIRED)
        self._counts = GraphCounts()
        self._wasted: defaultdict[_Kind, float] = defaultdict(float)
        """Size and kind without a graph -> steps' worth of padding in larger graphs."""
        self._full = 0
        """How often memory ran out."""
        self._disabled_reason: str | None = None
        """Why graphs are off for the rest of the job; None: they are on."""

    def counts(self) -> dict[str, int]:
        """See `Executor.counts`."""
        return self._counts.by_key()

    def note(self) -> str | None:
        """See `Executor.note`."""
        return None if self._disabled_reason is None else f"no CUDA graphs: {self._disabled_reason}"

    def prepare(self, forecast: DecodeForecast) -> None:
        """Capture the sizes that the job is expected to run for as long as a capture takes. See `Executor.prepare`."""
        expected: defaultdict[int, float] = defaultdict(float)
        for rows, steps in enumerate(forecast.steps[1:].tolist(), start=1):
            expected[padded_rows(rows)] += steps
        worth = sorted((rows for rows, steps in expected.items() if steps >= _LEAST_STEPS), reverse=True)
        if forecast.adapted and not self.context.model.spec.tiled_adapters:
            return
        parts, page_size = len(self.context.pool.parts), self.context.pool.page_size
        top = forecast.top_logprobs if forecast.plain else None
        variant = _Variant(forecast.plain, top, None, forecast.adapted)
        for rows in worth[: self._most]:
            states = None if self._shared.states is None else np.zeros((2, rows), np.int64)
            arrays = _synthetic(rows, parts, page_size, forecast, states)
            try:
                work = self._planner.plan(arrays.attention, rows)
                static = _GraphStep(self._shared, self._planner, work, rows, variant, 0)
                static.load(arrays, None, None)
                static.body()
                static.warmed_up = True
                static.graph = self._capture(static)
            except RuntimeError as problem:
                self._give_up(problem)
                return
            self._store(((rows, variant), static.attention.launches), static)
            self._counts.prepared += 1

    def takes_decodes(self, plan: StepPlan) -> bool:
        """See `Executor.takes_decodes`."""
        rows = len(plan.decodes)
        replays = self._disabled_reason is None and self.context.model.spec.tiled_adapters
        return replays and 0 < plan.tokens - rows <= _MOST_CHUNK_TOKENS * rows

    def issue(self, step: Step) -> InFlight | None:
        """See `Executor.issue`."""
        context, sampling = self.context, step.sampling
        if self._disabled_reason is not None or sampling is None or not step.arrays.decode_only:
            return None
        if step.arrays.adapted and not context.model.spec.tiled_adapters:
            return None
        if step.last is not None and len(step.last) > _MAX_FED_TOKENS:
            return None
        capture = context.capture_states(step)
        context.begin(step)
        replayed = self._run_or_disable(step.arrays, step.last, sampling.plain, capture)
        if replayed is None:
            context.cancel(step.captured)
            return None
        context.send_states(step)
        if replayed.sampled is not None:
            samples = sampling.collect(replayed.sampled, replayed.logprobs)
        else:
            assert replayed.logits is not None
            samples = sampling.sample(replayed.logits, replayed.num_sampled, step.read_last)
        return InFlight(samples, step.captured, pending=True)

    def _run_or_disable(
        self, step: StepArrays, last: Tensor | None, plain: PlainColumns | None, capture: CaptureSpec | None
    ) -> _Result | None:
        """Run a decode-only step, without `plain` up to its logits, and fill `capture`; None if it must run eagerly."""
        try:
            return self._run(step, last, plain, capture)
        except RuntimeError as problem:
            self._give_up(problem)
            return None

    def _give_up(self, problem: RuntimeError) -> None:
        """Free all graphs after a problem, which is raised unless steps can go on without."""
        full = is_out_of_memory(problem)
        if not isinstance(problem, _CannotCapture) and not full:
            raise problem
        self._full += full
        if not full or self._full >= _MAX_FULL:
            self._disabled_reason = str(problem)
        self._device.download(self._shared.last[:1]).wait()  # waits until no graph runs
        self._steps.clear()
        self._retired.clear()
        self._shared.logits = None
        self._device.release_cache()

    def _run(
        self, step: StepArrays, last: Tensor | None, plain: PlainColumns | None, capture: CaptureSpec | None
    ) -> _Result:
        rows = len(step.ids)
        variant = _Variant(
            samples=plain is not None,
            top_logprobs=None if plain is None else plain.top_logprobs,
            captured=None if capture is None else (capture.layers, capture.experts),
            adapted=step.adapted,
        )
        padded = self._batch_size(rows, variant)
        work = self._planner.plan(step.attention, padded)
        kind = (padded, variant)
        static = self._fitting(kind, work)
        if static is None:
            axes = 0 if step.rope_positions is None else len(step.rope_positions)
            static = _GraphStep(self._shared, self._planner, work, padded, variant, axes)
        static.load(step, last, plain)
        if not static.warmed_up:
            self._warm_up(static)
            self._counts.first += 1
        else:
            if static.graph is None:
                static.graph = self._capture(static)
                self._counts.captures += 1
            static.graph.replay()
            self._counts.replays += 1
        # The launches are known only after the layers have run once.
        self._store((kind, static.attention.launches), static)
        self._counts.padded += padded - rows
        return static.result(rows, capture)

    def _fitting(self, kind: _Kind, work: GroupedWork) -> _GraphStep | None:
        """The graph of a kind with the launches of a step, or with larger ones, filled with its lists."""
        same = [key for key in self._steps if key[0] == kind and key[1] != work.launches]
        for key in ((kind, work.launches), *reversed(same)):
            static = self._steps.get(key)
            if static is not None and static.attention.refill(work):
                return static
        return None

    def _warm_up(self, static: _GraphStep) -> None:
        try:
            static.body()
        except RuntimeError as problem:
            if is_out_of_memory(problem) and self._shared.states is not None:
                raise MemoryError from problem  # eagerly it would go on from states that it has written
            raise
        static.warmed_up = True

    def _batch_size(self, rows: int, variant: _Variant) -> int:
        """The batch size of a step of `rows` rows: the smallest one, or a larger one that has a graph already."""
        smallest = padded_rows(rows)
        made = {size for (size, made_for), _ in self._steps if made_for == variant and size >= smallest}
        if smallest in made or not made:
            return smallest
        size = min(made)
        self._wasted[smallest, variant] += 1 - smallest / size
        return size if self._wasted[smallest, variant] <= WASTED_STEPS else smallest

    def _store(self, key: _Key, static: _GraphStep) -> None:
        before = self._steps.get(key)
        if before is not None and before is not static:
            self._retired.append(before)
        self._steps[key] = static
        self._steps.move_to_end(key)
        while len(self._steps) > self._most:
            self._retired.append(self._steps.popitem(last=False)[1])

    def _capture(self, static: _GraphStep) -> Graph:
        began = time.perf_counter()
        try:
            graph = self._device.capture(static.body)
        except RuntimeError as problem:
            if is_out_of_memory(problem):
                raise
            first: BaseException = problem
            while isinstance(first.__context__, RuntimeError):  # ending a failed capture raises another error
                first = first.__context__
            why = str(first).strip().split("\n")[0]
            raise _CannotCapture(f"the model's decode steps cannot be captured: {why}") from problem
        self._counts.capture_ms += 1e3 * (time.perf_counter() - began)
        return graph


def _synthetic(
    rows: int, parts: int, page_size: int, forecast: DecodeForecast, states: npt.NDArray[np.int64] | None
) -> StepArrays:
    """A step of decode rows as long as any, which read and write the scratch page, page 0."""
    shared = forecast.shared if rows > 1 else 0
    zeros, own = np.zeros(rows, np.int64), max(1, forecast.longest - shared)
    attention = AttentionBatch(
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        decode_pages=np.zeros((rows, -(-own // page_size)), np.int64),
        decode_lens=np.full(rows, own),
        decode_own_start=np.full(rows, shared),
        max_decode_len=own,
    )
    if shared:
        attention.groups = [GroupPages(np.arange(rows), np.zeros(shared // page_size, np.int64), 0)]
    return StepArrays(
        ids=zeros,
        positions=np.full(rows, shared + own - 1),
        slots=[zeros] * parts,
        source=None,
        logit_rows=np.arange(rows),
        sample_rows=None,
        num_sampled=zeros,
        attention=[attention] * parts,
        adapters=zeros.astype(np.int32) if forecast.adapted else None,
        embeds=None,
        decode_states=states,
    )


class _CannotCapture(RuntimeError):
    """The model does something that a CUDA graph cannot capture."""


class _SharedBuffers:
    """Buffers that all graphs of a job share, because only one graph runs at a time."""

    def __init__(self, context: ExecutorContext) -> None:
        self.groups = len(context.pool.parts)
        """Number of slot mappings."""
        self.states = context.pool.states
        self.model = context.model
        self.ops = context.backend.ops
        self.draws = () if context.sampling is None else context.sampling.draws
        self.device = context.device
        with torch.inference_mode():
            self.last = torch.zeros(_MAX_FED_TOKENS, dtype=torch.int64, device=self.device.torch_device)
        self.logits: Tensor | None = None
        """[largest padded batch size so far, V]"""

    def logits_buffer(self, logits: Tensor) -> Tensor:
        """A buffer for logits [R, V] that are sampled from outside of a graph; shared, because logits are large."""
        if self.logits is None or len(self.logits) < len(logits):
            self.logits = torch.empty_like(logits)
        return self.logits[: len(logits)]


class _GraphStep:
    """One kind of step: its static inputs and outputs, and the graph that computes the outputs."""

    def __init__(
        self,
        shared: _SharedBuffers,
        planner: GroupedPlanner,
        work: GroupedWork,
        padded: int,
        variant: _Variant,
        rope_axes: int,
    ) -> None:
        device = shared.device.torch_device
        self.warmed_up = False
        """Whether the body has run eagerly."""
        self.graph: Graph | None = None
        self._shared = shared
        self._padded = padded
        # Rows of an even number of int64 start at multiples of 16 bytes, which kernels need for wide loads.
        rope_at = 4 + shared.groups
        states_at = rope_at + rope_axes
        tiles_at = states_at if shared.states is None else states_at + 2
        columns = tiles_at + 4 * variant.adapted
        self._int_columns = torch.zeros(columns, max(2, padded), dtype=torch.int64, device=device)
        self._ids, self._source, self._positions, self._num_sampled = self._int_columns[:4, :padded]
        self.attention = planner.attention(self._int_columns[4:rope_at, :padded], work)
        self._rope = self._int_columns[rope_at:states_at, :padded] if rope_axes else None
        self._states = None
        if shared.states is not None:
            self._states = PooledStates(
                shared.states, [decode_batch(0, self._int_columns[states_at:tiles_at, :padded])]
            )
        self._tiles = None
        if variant.adapted:
            self._tiles = static_tiles(self._int_columns[tiles_at:], padded, len(shared.model.spec.adapters))
        self._top_logprobs, self._captured = variant.top_logprobs, variant.captured
        self._columns = _StaticColumns(padded, device, shared) if variant.samples else None
        self._all_rows = torch.arange(padded, device=device) if variant.captured is not None else None
        self._logits: Tensor | None = None
        self._out: dict[str, Tensor] = {}

    def load(self, step: StepArrays, last: Tensor | None, plain: PlainColumns | None) -> None:
        """Overwrite the static inputs, except the attention lists."""
        int_columns = np.zeros(tuple(self._int_columns.shape), np.int64)
        int_columns[1] = -1
        columns = [step.ids, step.source, step.positions, step.num_sampled, *step.slots]
        if step.rope_positions is not None:
            columns.extend(step.rope_positions)
        if step.decode_states is not None:
            columns.extend(step.decode_states)
        if self._tiles is not None and step.adapters is not None:
            columns.extend(tile_columns(step.adapters, self._tiles.rows, int_columns.shape[1]))
        for row, values in zip(int_columns, columns, strict=True):
            if values is not None:
                row[: len(values)] = values
        self._shared.device.upload_into(int_columns.reshape(-1), self._int_columns.view(-1))
        if last is not None and step.source is not None:
            self._shared.last[: len(last)].copy_(last)
        if self._columns is not None and plain is not None:
            self._columns.load(plain)

    def body(self) -> None:
        """Compute the step, on the device only."""
        shared, capture = self._shared, None
        if self._captured is not None and self._all_rows is not None:
            capture = CaptureSpec(self._all_rows, self._padded, *self._captured)
        ids = select_input_ids(self._ids, self._source, shared.last)
        inputs = ModelInput(
            ids,
            self._positions,
            self.attention,
            capture,
            ops=shared.ops,
            lora=None if self._tiles is None else LoraStep((), self._tiles),
            rope_positions=self._rope,
            states=self._states,
        )
        hidden = shared.model.hidden(inputs)
        logits = shared.model.logits(hidden)  # [padded, V]
        if self._columns is not None:
            sampled = shared.ops.sample(logits, self._columns.at(self._num_sampled, shared.ops))
            self._set_output("tokens", sampled.tokens)
            self._set_output("bad", shared.ops.nan_rows(logits) if sampled.bad is None else sampled.bad)
            if self._top_logprobs is not None:
                logprobs = plain_logprobs(logits, sampled.tokens, self._top_logprobs, shared.ops)
                for number, values in enumerate(logprobs):
                    self._set_output(f"logprobs {number}", values)
        else:
            if self._logits is None:
                self._logits = shared.logits_buffer(logits)
            self._logits.copy_(logits)
        if capture is not None:
            for layer, states in capture.states.items():
                self._set_output(f"states {layer}", states)
            if capture.routed is not None:
                self._set_output("routed", capture.routed)

    def _set_output(self, name: str, value: Tensor) -> None:
        if name in self._out:
            self._out[name].copy_(value)
        else:
            self._out[name] = value

    def result(self, rows: int, capture: CaptureSpec | None) -> _Result:
        """The step's results, for its first `rows` rows."""
        if capture is not None:
            capture.states = {layer: self._out[f"states {layer}"][capture.rows] for layer in capture.layers}
            capture.routed = self._out["routed"][capture.rows] if "routed" in self._out else None
        sampled = None
        if "tokens" in self._out:
            sampled = SampleResult(self._out["tokens"][:rows].clone(), self._out["bad"][:rows].clone())
        logprobs = [values[:rows].clone() for name, values in self._out.items() if name.startswith("logprobs")]
        logits = None if self._logits is None else self._logits[:rows]
        return _Result(self._num_sampled[:rows], logits, sampled, logprobs)


class _StaticColumns:
    """Sampling parameters at fixed addresses. Padding rows are greedy."""

    def __init__(self, padded: int, device: torch.device, shared: _SharedBuffers) -> None:
        self._loaded: PlainColumns | None = None
        self._draws = shared.draws
        floats = torch.zeros(3, max(4, padded), dtype=torch.float32, device=device)
        ints = torch.zeros(3, max(2, padded), dtype=torch.int64, device=device)
        self._temperature, self._top_p, self._min_p = floats[:, :padded]
        self._top_k, self._seeds, self._samples = ints[:, :padded]

    def load(self, plain: PlainColumns) -> None:
        """Copy the rows' parameters, which are on the device already, unless they are the same as before."""
        if plain is self._loaded:
            return
        self._loaded = plain
        columns = plain.sampling
        rows = len(plain.seeds)
        for target, source in (
            (self._temperature, columns.temperature),
            (self._top_p, columns.top_p),
            (self._min_p, columns.min_p),
            (self._top_k, columns.top_k),
            (self._seeds, plain.seeds),
            (self._samples, plain.samples),
        ):
            target[:rows].copy_(source)
        self._temperature[rows:].zero_()

    def at(self, num_sampled: Tensor, ops: Ops) -> SamplingColumns:
        """The columns with noise keys; `num_sampled`: [padded] tokens sampled so far for each row."""
        keys = ops.row_keys(self._seeds, self._samples, num_sampled)
        filters = self._top_k, self._top_p, self._min_p
        return SamplingColumns(self._temperature, *filters, keys, greedy_rows=None, draws=self._draws)
