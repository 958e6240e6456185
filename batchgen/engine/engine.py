"""`Engine`: the Python API. The same rows and the same semantics as `batchgen run`, without files."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchgen.config import EngineConfig
from batchgen.embeds import EmbedsStore
from batchgen.engine.counts import lists_bytes
from batchgen.engine.intake import Intake
from batchgen.engine.kernels import fixed_kernels, kernels_for, products_of
from batchgen.engine.loop import Loop
from batchgen.engine.memory import DeviceMemory, device_memory, most_pages, pool_pages
from batchgen.engine.planning import Workload, plan_workload
from batchgen.engine.profile import CudaMeter, largest_step
from batchgen.engine.quantization import quantize
from batchgen.engine.rehearsal import PAGES, counted_bytes, rehearsal
from batchgen.engine.states import state_keeper
from batchgen.engine.streaming import Emit
from batchgen.engine.threads import cpu_quota
from batchgen.errors import UsageError
from batchgen.kernels.backend import Backend
from batchgen.kernels.chips import chip_tuning
from batchgen.kernels.device import Device, device_for
from batchgen.kernels.linear import describe_products
from batchgen.kernels.types import KVPool
from batchgen.media_root import MediaRoot
from batchgen.models.base import Model
from batchgen.models.invariant import invariant_model
from batchgen.models.load import load_model
from batchgen.models.quantize import QuantizationLoss
from batchgen.params import SamplingParams
from batchgen.plan.config import GROUP_MIN_SAVING, Admit, Order
from batchgen.plan.scheduler import Scheduler, SchedulerConfig
from batchgen.processors import load_processors
from batchgen.request import Completion, RequestTable, StreamEvent
from batchgen.rows import RowDefaults
from batchgen.text.encode import Encoder
from batchgen.text.grammars import Grammars
from batchgen.text.tokenizer import Tokenizer

__all__ = ["Engine", "Running"]

_THREADS_BEFORE: dict[int, int] = {}
"""Threads that an engine was given -> those that the process had without it."""


@dataclass(frozen=True, slots=True)
class Running:
    """A job under way: iterate `loop.run()`; `scheduler.stats` counts what it did."""

    workload: Workload
    scheduler: Scheduler
    loop: Loop
    pool: KVPool

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        tensors = (*self.pool.keys, *self.pool.values)
        return sum(t[0].numel() * t.element_size() for t in tensors)


class Engine:
    """A model ready to generate.

    Args:
        model: folder of a Hugging Face checkpoint, or a hub id that stands in the local cache.
        options: any field of `EngineConfig`.

    Raises:
        ModelError: the model cannot be loaded.
        UsageError: an option is wrong or cannot be done here.
    """

    def __init__(self, model: str, **options: Any) -> None:
        config = EngineConfig(model=model, **options)
        prepare_device(config)
        load_processors(config.logit_processor)  # refuses before the weights are read
        loaded = load_model(
            model,
            implementation=config.model_impl,
            dtype=config.dtype,
            device=config.device,
            max_model_len=config.max_model_len,
            revision=config.revision,
            lora=config.lora,
            products=products_of(config),
        )
        self._init(config, loaded, Tokenizer.load(config.tokenizer or model, config.revision, model))

    @classmethod
    def from_parts(
        cls, config: EngineConfig, model: Model, tokenizer: Tokenizer, grammars: Grammars | None = None
    ) -> Engine:
        """An engine around a model and tokenizer already loaded, and grammars compiled for them.

        With `quantization` the model itself is quantised: its full weights would take more memory than is saved.
        """
        engine = cls.__new__(cls)
        engine._init(config, model, tokenizer, grammars)
        return engine

    def _init(self, config: EngineConfig, model: Model, tokenizer: Tokenizer, grammars: Grammars | None = None) -> None:
        self.config = config
        self._media_root = MediaRoot(config.media_root)
        self.backend: Backend | None = fixed_kernels(config, model.spec)
        """The kernels of every run; where `auto` measures them, chosen by the first."""
        self.model: Model = model
        self.quantization: QuantizationLoss | None = None
        """What the quantised model is held to; None for full weights."""
        if config.quantization != "none":
            self.quantization = quantize(model, config, tokenizer)
        if config.deterministic:
            assert self.backend is not None, "what is measured is not deterministic"
            self.model = invariant_model(self.model, self.backend)
        self.tokenizer = tokenizer
        self.grammars = grammars or Grammars(tokenizer, model.spec.vocab_size, lenient=config.lenient_schemas)
        """Constraints of rows, each compiled once."""
        self.processors = load_processors(config.logit_processor)
        """Logit processors that rows may name."""
        self.device: Device = device_for(model.spec.device)
        """The way to the device, and back."""
        self.order: Order = "longest"
        self.admission: Admit = "foreseen"
        """How prompts are chosen and admitted; anything but the defaults is for comparisons."""
        self.last_run: Running | None = None
        """The latest job, for its counted quantities."""
        self._pool: KVPool | None = None
        """On a CPU the latest job's, as large as it was taken; the next one that fits has it."""

    @property
    def kernels(self) -> str:
        """The kernels' names and versions, what multiplies on a CPU, and why; "auto" before `auto` has chosen."""
        found = self.config.attention if self.backend is None else self.backend.describes
        spec = self.model.spec
        if self.quantization is not None:
            return f"{found}; products: compiled {self.config.quantization} ({self.quantization})"
        products = describe_products(spec.dtype, spec.device, products_of(self.config))
        return found if products is None else f"{found}; products: {products}"

    def generate(
        self,
        rows: Iterable[Mapping[str, Any] | str],
        params: SamplingParams | None = None,
        *,
        ordered: bool = False,
        on_event: Callable[[StreamEvent], None] | None = None,
    ) -> Iterator[Completion]:
        """Generate for rows in the vocabulary of `batchgen run`; all rows are read before the first token is computed.

        Args:
            rows: mappings as in an input file, or plain prompt strings.
            params: defaults for sampling fields that a row does not give.
            ordered: yield in input order instead of completion order.
            on_event: called with the events of rows that have `stream`, as tokens are drawn.

        Yields:
            One `Completion` per row, prompt and sample; a bad row gives one with `error` set.

        Raises:
            UsageError: at the call, where `rows` is a single row.

        While rows are generated Python's garbage collector runs between steps alone, in the whole process: close or
        exhaust the iterator to have it back.
        """
        if isinstance(rows, str | bytes | Mapping):
            raise UsageError(f"`rows` takes a list of rows, got one {type(rows).__name__}: generate([row])")
        return self._generate(rows, params, ordered=ordered, on_event=on_event)

    def _generate(
        self,
        rows: Iterable[Mapping[str, Any] | str],
        params: SamplingParams | None,
        *,
        ordered: bool,
        on_event: Callable[[StreamEvent], None] | None,
    ) -> Iterator[Completion]:
        table = RequestTable(EmbedsStore(self.model.spec.embeds_size))
        spec = self.model.spec
        name = self.config.model or ""
        defaults = RowDefaults(
            flags=_given(params),
            model=self.tokenizer.generation.sampling_defaults(),
            model_names=frozenset({name, Path(name).name} - {""}),
            adapters=frozenset(spec.adapters),
            processors=frozenset(self.processors),
            events=on_event is not None,
        )
        encoder = Encoder(
            self.tokenizer,
            spec.vocab_size,
            spec.context_length,
            run_seed=self.config.seed,
            limits=spec.state_limits,
            grammars=self.grammars,
        )
        ids: dict[int, str] = {}
        failed: list[Completion] = []
        values = ((i, {"text": row} if isinstance(row, str) else row) for i, row in enumerate(rows))
        for taken in Intake(table, encoder, defaults, media_root=self._media_root).feed(values):
            ids[taken.row_index] = taken.id
            if taken.error is not None:
                failed.append(Completion(taken.row_index, error=taken.error))

        def emit(events: Sequence[StreamEvent]) -> None:
            for event in events:
                assert on_event is not None
                on_event(replace(event, id=ids[event.row_index]))

        groups = self._groups(table, failed, emit if on_event is not None else None)
        if ordered:
            groups = _in_order(groups, [(int(r), int(p)) for r, p in _keys(table, failed)])
        for group in groups:
            for completion in group:
                yield completion.named(ids[completion.row_index])

    def _groups(self, table: RequestTable, failed: list[Completion], emit: Emit | None) -> Iterator[list[Completion]]:
        yield from ([c] for c in failed)
        if len(table):
            yield from self.start(table, emit=emit).loop.run()

    def start(
        self,
        table: RequestTable,
        done: npt.NDArray[np.bool_] | None = None,
        *,
        prompt_ids: bool = True,
        emit: Emit | None = None,
    ) -> Running:
        """Plan a table, allocate its pool and make the loop ready.

        Args:
            table: every prompt of the job.
            done: [N] requests finished by an earlier run.
            prompt_ids: whether completions carry their prompt's ids.
            emit: called after each step with the events of rows that have `stream`.
        """
        config, spec = self.config, self.model.spec
        # No-one is to wait for a grammar later on; those of encoded rows are known.
        self.grammars.prepare(table.constraints(done))
        workload = plan_workload(table, done, dedup=config.dedup, adapters=list(spec.adapters))
        if table.embeds_id is not None and not self.model.takes_embeds():
            workload.refuse_embeds()
        seqs, tokens = step_limits(config, spec.device)
        if self.backend is None:  # before the pool takes the memory
            self.backend = kernels_for(config, spec, workload, seqs, tokens)
        pool, pages, tokens = self._pool_for(workload, seqs, tokens)
        workload.set_aside_too_large(pages - 1, config.page_size)
        scheduler = self._scheduler(workload, pages, seqs, tokens)
        loop = self._loop(workload, scheduler, pool, prompt_ids=prompt_ids, emit=emit)
        self.last_run = Running(workload, scheduler, loop, pool)
        return self.last_run

    def _pool_for(self, workload: Workload, seqs: int, tokens: int) -> tuple[KVPool, int, int]:
        """The pool of a job, its pages, and the tokens of a step that it is for.

        On a CPU a job that fits into the last one's takes it: memory taken anew is zeroed by the system page by page,
        for 5 % of the time of 64 short rows. A GPU's pool takes all there is, and costs nothing to take again.
        """
        config, spec = self.config, self.model.spec
        last, kept = self.last_run, self._pool
        self.last_run = self._pool = None
        if last is None or not last.loop.over or (kept and kept.num_pages < most_pages(workload, config.page_size)):
            kept = None
        del last  # where nothing is kept its pool's memory is this one's
        memory, tokens = self._memory(workload, seqs, tokens)
        if kept is not None:
            memory = replace(memory, free=memory.free + kept.nbytes)
        pages = pool_pages(workload, spec, config.page_size, config.kv_memory, memory)
        if kept is None or kept.num_pages < pages:
            layers = list(spec.kv_layers)
            kept = KVPool.allocate(layers, pages, config.page_size, spec.dtype, spec.device)
            if self.backend is not None and self.backend.beside_pool is not None:
                room = memory.budget(config.kv_memory) - kept.nbytes
                beside = self.backend.beside_pool(layers, spec.dtype, config.page_size, pages, room)
                kept = replace(kept, beside=beside)
        if spec.device.type == "cpu":
            self._pool = kept
        return kept.first(pages), pages, tokens

    def _memory(self, workload: Workload, seqs: int, tokens: int) -> tuple[DeviceMemory, int]:
        """The device's memory with what the job's largest step takes, and the tokens of a step that it is for."""
        spec, size = self.model.spec, self.config.page_size
        if not workload.samples.any():
            return device_memory(spec.device), tokens
        if spec.device.type == "cpu":
            return device_memory(
                spec.device, counted_bytes(spec, rehearsal(workload, spec, size, seqs, tokens))
            ), tokens

        def rehearser(job: Workload, pool: KVPool) -> Loop:
            return self._loop(job, self._scheduler(job, PAGES, seqs, tokens), pool)

        taken, tokens = largest_step(rehearser, workload, spec, size, (seqs, tokens), CudaMeter(spec.device))
        # Its lists of penalised tokens are short: nobody knows how many distinct ones a job's rows will draw.
        prompts = self.config.repetition_penalty_scope == "prompt+output"
        taken += lists_bytes(workload, seqs, spec.vocab_size, prompts=prompts)
        return device_memory(spec.device, taken), tokens

    def _scheduler(self, workload: Workload, pages: int, seqs: int, tokens: int) -> Scheduler:
        config = SchedulerConfig(
            num_pages=pages,
            page_size=self.config.page_size,
            max_num_seqs=seqs,
            max_tokens_per_step=tokens,
            group_min_saving=group_min_saving(self.model.spec.device, self.backend),
            group_rows=None if self.backend is None else self.backend.group_rows,
            order=self.order,
            admission=self.admission,
        )
        kinds = workload.kinds(repeats_end=self.config.stop_on_repeat is not None)
        return Scheduler(workload.tree, workload.samples, workload.draws, config, kinds)

    def _loop(
        self,
        workload: Workload,
        scheduler: Scheduler,
        pool: KVPool,
        *,
        prompt_ids: bool = True,
        emit: Emit | None = None,
    ) -> Loop:
        config, spec = self.config, self.model.spec
        assert self.backend is not None
        return Loop(
            workload,
            scheduler,
            self.model,
            pool,
            self.backend,
            self.device,
            self.tokenizer,
            self.grammars,
            prompt_ids=prompt_ids,
            repeat_span=config.stop_on_repeat,
            processors=self.processors,
            logprobs_mode=config.logprobs_mode,
            repetition_scope=config.repetition_penalty_scope,
            emit=emit,
            states=state_keeper(workload, spec, exact=config.hidden_states_dtype == "float32"),
        )


def step_limits(config: EngineConfig, device: torch.device) -> tuple[int, int]:
    """(max_num_seqs, max_tokens_per_step): as given, else the device's, bent to the one that was given."""
    cuda = device.type == "cuda"
    seqs, tokens = config.max_num_seqs, config.max_tokens_per_step
    if seqs is None:
        seqs = min(256, tokens or 256)  # more rows at once are fewer steps, each of which costs Python something
    # A CPU's activations of a step are to stay in its last level of cache.
    return seqs, tokens or max(8192 if cuda else 1024, seqs)


def group_min_saving(device: torch.device, backend: Backend | None = None) -> int:
    """Reads of cached positions that a prefix group must save per step.

    The chip's on a GPU; on a CPU measured, once in a process, by kernels that can; else as ever.
    """
    if device.type == "cuda":
        return chip_tuning(device).prefix_pass_tokens
    return GROUP_MIN_SAVING if backend is None or backend.group_saving is None else backend.group_saving()


def prepare_device(config: EngineConfig) -> None:
    """Cap the threads of the CPU backend: oversubscribed cores are very slow.

    An engine without `cpu_threads` has as many as the process had before an earlier engine was given fewer.
    """
    now = torch.get_num_threads()
    free = _THREADS_BEFORE.get(now, now)
    threads = config.cpu_threads or min(free, cpu_quota() or free)
    if threads != now:
        torch.set_num_threads(threads)
    _THREADS_BEFORE.clear()  # somebody else's choice, made since, stands
    _THREADS_BEFORE[threads] = free


def _given(params: SamplingParams | None) -> dict[str, Any]:
    """All fields of `params` as defaults for every row; no seed unless it names one."""
    if params is None:
        return {}
    values = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
    return values if params.seed is not None else {name: v for name, v in values.items() if name != "seed"}


def _keys(table: RequestTable, failed: list[Completion]) -> list[tuple[int, int]]:
    """(row, prompt) of everything that will be yielded, in input order."""
    keys = {(r.row_index, r.prompt_index) for r in table}
    return sorted(keys | {(c.row_index, 0) for c in failed})


def _in_order(groups: Iterator[list[Completion]], keys: list[tuple[int, int]]) -> Iterator[list[Completion]]:
    """Hold back what finished early until everything before it is out."""
    waiting: list[tuple[tuple[int, int], int, list[Completion]]] = []
    expected = iter(keys)
    head = next(expected, None)
    for number, group in enumerate(groups):
        heapq.heappush(waiting, ((group[0].row_index, group[0].prompt_index), number, group))
        while waiting and waiting[0][0] == head:
            yield heapq.heappop(waiting)[2]
            head = next(expected, None)
    assert not waiting, "every group has a key"
