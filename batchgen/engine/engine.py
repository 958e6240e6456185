"""`Engine`: the Python API. The same rows and the same semantics as `batchgen run`, without files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from batchgen.config.engine_config import ENGINE_OPTIONS, EngineConfig
from batchgen.config.python_words import in_python, in_python_info, python_errors, refuse_unknown, with_python_errors
from batchgen.demo import named_model
from batchgen.engine.advice import input_advice, output_advice, warn_advice
from batchgen.engine.backend_choice import fixed_kernels, group_min_saving, kernels_for, of_ranks
from batchgen.engine.front_end import FrontEnd, default_fields
from batchgen.engine.loop import Loop, completion_keys, in_order
from batchgen.engine.machine import prepare_device, step_limits
from batchgen.engine.media.job import device_feature_bytes, open_media
from batchgen.engine.memory.d2h_queue import QUEUE_BYTES
from batchgen.engine.memory.dummy_run import (
    PAGES,
    DummyRun,
    cuda_peak,
    dummy_run,
    estimated_bytes,
    expected_bytes,
    measure_largest_step,
)
from batchgen.engine.memory.gc_control import trim_heap
from batchgen.engine.memory.kv_budget import (
    DeviceMemory,
    job_memory,
    most_pages,
    pool_pages,
    sized_groups,
    sized_states,
    with_job_windows,
    with_windows_in,
)
from batchgen.engine.memory.kv_offload import streamed_cache
from batchgen.engine.memory.offload import with_stream
from batchgen.engine.outputs.streaming import Emit
from batchgen.engine.parallel.peers import NO_PEERS, Peers, Start, WarmUp, peers_of, ranks_of
from batchgen.engine.quantization import QuantizationLoss, choose_numbers, describe_weights, quantize
from batchgen.engine.row_reader import ArrowTable, python_rows
from batchgen.engine.running import PromptsBar, Running
from batchgen.engine.sampling.penalty_counts import lists_bytes
from batchgen.engine.settings import EngineResources, LoopSettings, WorkRecord
from batchgen.engine.workload import JobWorkload, plan_workload
from batchgen.errors import UsageError
from batchgen.kernels.backend import Backend
from batchgen.kernels.device import Device, device_for
from batchgen.kernels.grouped import GroupedPool
from batchgen.kernels.kv_stream import StreamedPool
from batchgen.kernels.linear import describe_products
from batchgen.kernels.mixers.states import StatePool
from batchgen.kernels.ranks import Ranks
from batchgen.models.base import Model, ModelSpec, Numbers
from batchgen.models.check import check_model
from batchgen.models.checkpoint.model_files import TOKENIZER_FILES, resolve_model
from batchgen.models.checkpoint.overrides import Overrides
from batchgen.models.deterministic import deterministic_model
from batchgen.models.embed.encoder import EncoderModel
from batchgen.models.load import checked_spec, load_checked, of_rank
from batchgen.plan.cache_groups import ONE_BYTE_PAGES, CacheGroup
from batchgen.plan.config import Admit, Order
from batchgen.plan.scheduler import Scheduler, SchedulerConfig
from batchgen.request.completion import AnswerCounts, Completion, StreamEvent
from batchgen.request.fields.params import SamplingParams
from batchgen.request.processors import load_processors
from batchgen.request.rows.raw_row import RawRow
from batchgen.request.rows.unknown_keys import carried_notes, note_line
from batchgen.request.table.embeds_store import EmbedsStore
from batchgen.request.table.request_table import RequestTable
from batchgen.text.grammar.grammars import Grammars
from batchgen.text.tokens.tokenizer import Tokenizer

_WARM_UP_ROWS: Final = 8


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What the KV pool of a job holds, and the steps that fit next to it."""

    groups: tuple[CacheGroup, ...]
    pages: int
    """Pages of page tables, the scratch page included"""
    limits: tuple[int, int]
    """Most rows and most tokens of a step"""


class Engine:
    """A loaded model that generates completions for rows.

    Args:
        model: folder of a Hugging Face checkpoint, or the id of a model in the local Hugging Face cache; `demo` is the
            demonstration model.
        options: any field of `EngineConfig`.

    Raises:
        ModelError: the model cannot be loaded.
        UsageError: an option is unknown, invalid or not supported on this machine.
    """

    @python_errors()
    def __init__(self, model: str = "demo", **options: Any) -> None:
        refuse_unknown(options, "Engine", [option.name for option in ENGINE_OPTIONS])
        config = EngineConfig(model=model, **options)
        self._open(config, ranks_of(config), partial(peers_of, config))

    @classmethod
    def of_rank(
        cls, config: EngineConfig, ranks: Ranks, connect: Callable[[ModelSpec], Peers], numbers: Numbers
    ) -> Engine:
        """The engine of a rank above 0, which runs what rank 0 tells it.

        Args:
            config: as that of rank 0.
            ranks: the rank.
            connect: connects the ranks of a model before its weights are read.
            numbers: those that rank 0 has chosen.
        """
        engine = cls.__new__(cls)
        engine._open(config, ranks, connect, numbers)
        return engine

    def _open(
        self,
        config: EngineConfig,
        ranks: Ranks,
        connect: Callable[[ModelSpec], Peers],
        numbers: Numbers | None = None,
    ) -> None:
        prepare_device(config)
        processors = load_processors(config.logit_processor)  # errors come before the weights are read
        checked = check_model(
            named_model(config.model),
            implementation=config.model_impl,
            max_model_len=config.max_model_len,
            revision=config.revision,
            lora=config.lora,
            overrides=Overrides(config.hf_overrides, config.rope_scaling),
            pickles=config.allow_pickle_weights,
        )
        checked = of_rank(checked, ranks)
        spec = checked_spec(checked, dtype=config.dtype, device=config.device, kv_dtype=config.kv_dtype, ranks=ranks)
        spec = replace(spec, numbers=numbers or choose_numbers(config, checked, spec))
        spec = with_stream(config, checked, spec)
        peers = connect(spec)
        loaded = load_checked(checked, spec)
        folder = checked.folder.path
        named = resolve_model(config.tokenizer, files=TOKENIZER_FILES) if config.tokenizer is not None else folder
        tokenizer = Tokenizer.load(named, model=folder, config=checked.folder.config)
        front_end = FrontEnd.build(config, spec, tokenizer, processors)
        self._init(loaded, front_end.of_folder(checked.folder), peers)

    @classmethod
    def from_parts(
        cls, config: EngineConfig, model: Model, tokenizer: Tokenizer, grammars: Grammars | None = None
    ) -> Engine:
        """An engine with a loaded model and tokenizer, and optionally grammars compiled for them.

        A model whose numbers are int8 is quantised in place.
        """
        processors = load_processors(config.logit_processor)
        return cls.from_front_end(model, FrontEnd.build(config, model.spec, tokenizer, processors, grammars=grammars))

    @classmethod
    def from_front_end(cls, model: Model, front_end: FrontEnd, peers: Peers = NO_PEERS) -> Engine:
        """An engine with a loaded model and the front end that was built for it, as by `from_parts`."""
        engine = cls.__new__(cls)
        engine._init(model, front_end, peers)
        return engine

    def _init(self, model: Model, front_end: FrontEnd, peers: Peers) -> None:
        self._peers = peers
        self.config = config = front_end.config
        self._front_end = front_end
        self._advised: set[str] = set()
        self.backend: Backend | None = fixed_kernels(config, model.spec)
        """Kernel backend; None until the first job if `auto` measures the candidates on it."""
        self.model: Model = model
        self.quantization: QuantizationLoss | None = None
        """Measured quantisation loss; None without quantisation."""
        if model.spec.numbers.form == "int8":
            self.quantization = quantize(model, config, front_end.tokenizer)
        if isinstance(self.model, EncoderModel):
            if config.deterministic:
                raise UsageError(f"`--deterministic` is not supported for a {model.spec.name} encoder; leave it out")
            self.model.separator = front_end.encoder.tasks.separator
        elif config.deterministic:
            assert self.backend is not None, "a measured backend is not deterministic"
            self.model = deterministic_model(self.model, self.backend)
        self.tokenizer = front_end.tokenizer
        self.grammars = front_end.grammars
        """Compiled constraints of rows."""
        self.device: Device = device_for(model.spec.device)
        """Transfers between host and device."""
        self.order: Order = "longest"
        self.admission: Admit = "foreseen"
        """Scheduling order and admission policy; other values than the defaults are for comparisons."""
        self.queue_bytes = QUEUE_BYTES
        """As in `LoopSettings`."""
        self.scaled_positions = False
        """Whether rows of the last job got the rotary frequencies past an `unscaled_context`."""
        self.last_run: Running | None = None
        """The last job, for its counters."""
        self._pool: GroupedPool | None = None
        """On a CPU: the last job's pool, which the next job reuses if it fits."""

    def __repr__(self) -> str:
        spec = self.model.spec
        size, dtype = f"{spec.parameters / 1e6:,.0f}M parameters", str(spec.dtype).removeprefix("torch.")
        return f"Engine({self.config.model or spec.name!r}, {spec.name}, {size}, {dtype} on {spec.device})"

    @property
    def kernels(self) -> str:
        """Names and versions of the attention and matmul kernels; "auto" before `auto` has chosen."""
        spec, attention = self.model.spec, self.config.attention if self.backend is None else self.backend.description
        products = [describe_weights(self.model, self.quantization)]
        if self.quantization is None:
            products.append(describe_products(spec.dtype, spec.device, spec.numbers.products))
        named = [each for each in products if each is not None]
        return f"{attention}; products: {', others '.join(named)}" if named else attention

    @property
    def facts(self) -> dict[str, Any]:
        """How the rows of the last job were computed, for the footer."""
        return {"kernels": self.kernels, "scaled_positions": self.scaled_positions}

    def generate(
        self,
        rows: Iterable[Mapping[str, Any] | str] | ArrowTable,
        params: SamplingParams | None = None,
        *,
        ordered: bool = False,
        on_event: Callable[[StreamEvent], None] | None = None,
        progress: bool | None = None,
        **others: Any,
    ) -> Iterator[Completion]:
        """Generate completions for rows, with the fields of `batchgen run`. All rows are read before the first step.

        Args:
            rows: mappings as in an input file, or prompt strings; or a table of pandas, polars, pyarrow or datasets.
            params: defaults for sampling fields that a row does not set.
            ordered: yield in input order instead of completion order.
            on_event: called with the events of rows that have `stream`, as tokens are sampled.
            progress: whether to show a bar on stderr; None: if that is a terminal, or in a notebook.
            others: arguments that do not exist, which are refused with the right name.

        Yields:
            One `Completion` per row, prompt and sample; an invalid row yields one with `error` set.

        Warns:
            UserWarning: for each key of rows that looks like a misspelt field or is an option of another system.
            AdviceWarning: for what is probably not as meant, once per engine.

        Raises:
            UsageError: `rows` is a single row, or columns by name; an argument does not exist, or has another type.

        While rows are generated, Python's garbage collector only runs between steps, in the whole process. Exhaust or
        close the iterator to restore it.
        """
        refuse_unknown(others, "generate()", ("rows", "params", "ordered", "on_event", "progress"))
        if params is not None and not isinstance(params, SamplingParams):
            remedy = "write SamplingParams(**params)" if isinstance(params, Mapping) else "give rows their own fields"
            raise UsageError(f"`params` must be one SamplingParams for all rows, got {type(params).__name__}; {remedy}")
        return with_python_errors(self._shown(progress, python_rows(rows), params, ordered=ordered, on_event=on_event))

    def _shown(self, progress: bool | None, *job: Any, **options: Any) -> Iterator[Completion]:
        with closing(PromptsBar(progress)) as bar:
            yield from self._generate(bar, *job, **options)

    def _generate(
        self,
        bar: PromptsBar,
        raw: Iterator[RawRow],
        params: SamplingParams | None,
        *,
        ordered: bool,
        on_event: Callable[[StreamEvent], None] | None,
    ) -> Iterator[Completion]:
        table = RequestTable(EmbedsStore(self.model.spec.embeds_size))
        defaults = self._front_end.defaults(default_fields(params), events=on_event is not None)
        if (unapplied := self.tokenizer.generation.note) is not None:
            warnings.warn(unapplied, UserWarning, stacklevel=4)
        ids: dict[int, str] = {}
        failed: list[Completion] = []
        is_plain, counts = True, AnswerCounts()
        for row in self._front_end.row_reader(table, defaults).read(raw):
            ids[row.raw.index] = row.id
            bar.read()
            if row.error is not None:
                failed.append(Completion(row.raw.index, error=row.error))
            is_plain = is_plain and (row.row is None or row.row.is_plain)

        carried = map(note_line, carried_notes(defaults.carried_options.rows, "none"))
        for line in (*self._front_end.notes, *carried):
            warnings.warn(in_python(line), UserWarning, stacklevel=4)
        if len(table):
            warn_advice(input_advice(table, self.tokenizer, is_plain=is_plain), self._advised)

        def emit(events: Sequence[StreamEvent]) -> None:
            for event in events:
                assert on_event is not None
                on_event(replace(event, id=ids[event.row_index]))

        keys = [(int(r), int(p)) for r, p in completion_keys(table, failed)] if ordered or bar.is_shown else []
        bar.begin(len(keys))
        groups = bar.count(self._groups(table, failed, emit if on_event is not None else None, bar))
        if ordered:
            groups = in_order(groups, keys)
        for completion in chain.from_iterable(groups):
            if completion.error is not None:
                completion = replace(completion, error=in_python_info(completion.error))
            elif completion.finish_reason is not None:
                has_calls = completion.tool_calls is not None
                counts.add(completion.text, completion.finish_reason, has_calls=has_calls)
            yield completion.set_id(ids[completion.row_index])
        if len(table):
            warn_advice(output_advice(counts, table), self._advised)

    def _groups(
        self, table: RequestTable, failed: list[Completion], emit: Emit | None, bar: PromptsBar
    ) -> Iterator[list[Completion]]:
        yield from ([c] for c in failed)
        if len(table):
            with self._peers.together():
                loop = self.start(table, emit=emit).loop
            yield from loop.run(lambda: bar.step(loop.state.output_tokens))

    def start(
        self,
        table: RequestTable,
        done: npt.NDArray[np.bool_] | None = None,
        record: WorkRecord | None = None,
        *,
        prompt_ids: bool = True,
        emit: Emit | None = None,
        scaled: bool | None = None,
    ) -> Running:
        """Plan a job with all prompts of `table`, allocate its KV pool and create its loop.

        `done`: [N] requests finished by an earlier run; `record` receives which samples are running, and names rows
        that do not run, or not with others; `prompt_ids`: whether completions contain those of their prompts; `emit` is
        called after each step with the events of rows that have `stream`; `scaled`: of a model with an
        `unscaled_context`, whether rows get the frequencies past it; None: if one of the table is longer.
        """
        spec = self.model.spec
        aside, alone = ({}, ()) if record is None else (dict(record.set_aside), list(record.alone))
        if self.last_run is not None:
            self.last_run.loop.replaced = spec.ranks.count > 1
        self._peers.tell(Start(table, done, scaled, emit is not None, aside, alone))
        if spec.unscaled_context is not None:
            self.scaled_positions = table.longest > spec.unscaled_context if scaled is None else scaled
            self.model.fit_positions(spec.context_length if self.scaled_positions else spec.unscaled_context)
        workload = self._plan(table, done)
        if spec.device.type == "cuda":
            self.last_run = None  # its pool takes the memory that is left
        needed = self.config.max_num_seqs is None or spec.stream is not None
        memory = self._device_memory() if needed else None
        limits = self._peers.agree(lambda: step_limits(self.config, spec, workload, memory))
        resources = self.resources(workload, limits)
        pool, cache = self._pool_for(workload, resources, limits)
        workload, scheduler = self._schedule(workload, cache, resources.backend, record)
        media = None
        if resources.towers is not None:
            support, together = self._front_end.media, not self.config.deterministic
            media = open_media(workload, support, resources.towers, spec, self.device, together)
        resources = replace(resources, media=media)
        loop = Loop(workload, scheduler, pool, resources, self._settings(record, prompt_ids=prompt_ids), emit)
        self.last_run = Running(workload, scheduler, loop, pool, media)
        return self.last_run

    def _plan(self, table: RequestTable, done: npt.NDArray[np.bool_] | None) -> JobWorkload:
        """The workload of a job, with its grammars compiled, so that no step waits for one."""
        spec, dedup = self.model.spec, self.config.dedup
        self.grammars.prepare(table.constraints(done))
        adapters = list(spec.adapters)
        workload = plan_workload(table, done, dedup=dedup, adapters=adapters, bidirectional=spec.bidirectional)
        trim_heap()
        if table.embeds_id is not None and not self.model.accepts_embeds():
            workload.refuse_embeds(spec.name)
        return workload

    def resources(self, workload: JobWorkload, limits: tuple[int, int]) -> EngineResources:
        """What computes a job: all that is on the device but the pool, which takes the memory that is left."""
        front_end = self._front_end
        spec = self.model.spec
        if self.backend is None:
            config = self.config
            if spec.ranks.count > 1:
                name: Any = self._peers.agree(lambda: kernels_for(config, spec, workload, *limits).name)
                config = replace(config, attention=name)
            self.backend = kernels_for(config, spec, workload, *limits)
        backend = of_ranks(self.backend, spec)
        towers = None
        if workload.table.media is not None and spec.ranks.rank == 0:
            towers = front_end.media.encoder(self.model)
        read_by = self.tokenizer, self.grammars, front_end.processors, front_end.encoder.reasoning
        heads = front_end.heads() if any(p.task for p in workload.table.params) else None
        return EngineResources(self.model, backend, self.device, *read_by, heads, towers, peers=self._peers)

    def _schedule(
        self, workload: JobWorkload, cache: CachePlan, backend: Backend, record: WorkRecord | None
    ) -> tuple[JobWorkload, Scheduler]:
        """The scheduler of the rows that fit the cache and run together, and their workload in its order."""
        workload.skip_too_large(cache.pages - 1, self.config.page_size)
        if record is not None:
            workload.set_aside(record.set_aside)
            workload.hold(record.alone)
        scheduler = self._scheduler(workload, cache, backend)
        workload = workload.reordered(scheduler.tree)  # so that there is one tree
        trim_heap()
        return workload, scheduler

    def _pool_for(
        self, workload: JobWorkload, resources: EngineResources, limits: tuple[int, int]
    ) -> tuple[GroupedPool, CachePlan]:
        """The KV pool of a job and what it holds.

        On a CPU, a job reuses the last job's pool if it fits, because the system zeroes new memory page by page. A GPU
        pool uses all free memory and is cheap to allocate again.
        """
        config, spec = self.config, self.model.spec
        last, kept = self.last_run, self._pool
        self.last_run = self._pool = None
        if last is None or not last.loop.over or (kept and kept.num_pages < most_pages(workload, config.page_size)):
            kept = None
        del last  # frees the last pool before this one is sized
        memory, limits = self._memory(workload, resources, (limits[0], max(limits[1], workload.longest_span)))
        reserved = device_feature_bytes(workload.table, spec, self.device)
        again = 0 if kept is None or memory.exclusive else kept.nbytes
        memory = replace(memory, free=max(0, memory.free - reserved) + again)
        budget = memory.budget(config.kv_budget)
        agree = self._peers.agree
        states = agree(lambda: sized_states(spec, workload, limits[0], budget))
        kv_budget = config.kv_budget
        if states is not None:
            size = states.num_pages * states.page_bytes
            kv_budget = budget = budget - size
            memory = replace(memory, free=max(0, memory.free - size))
        planned = with_job_windows(spec, workload, config.page_size)
        windows = agree(lambda: with_windows_in(planned, workload, config.page_size, budget).windows)
        planned = replace(planned, windows=windows)
        room = min(budget, memory.room)
        streamed = streamed_cache(config, planned, workload, room, memory.host, limits)
        pages, plan = streamed or (
            agree(lambda: pool_pages(workload, planned, config.page_size, kv_budget, memory, limits)),
            None,
        )
        groups = agree(lambda: sized_groups(workload, planned, config.page_size, pages, limits, room))
        layers, counts = [group.layers for group in groups], [group.pool_pages(pages) for group in groups]
        pool = None if kept is None or plan is not None else kept.first(layers, counts)
        if plan is not None:
            kept, sizes = None, (config.page_size, spec.kv_dtype, self.device)
            pool = StreamedPool.of(spec.kv_layers, layers, counts, *sizes, plan)
        elif pool is None:
            kept = None  # frees its memory
            size, dtype, backend = config.page_size, spec.kv_dtype, resources.backend
            kept = GroupedPool.allocate(spec.kv_layers, layers, counts, size, dtype, spec.device)
            shares = [(part, (budget - kept.nbytes) * part.nbytes // max(1, kept.nbytes)) for part in kept.parts]
            pool = kept = replace(kept, parts=[backend.extend_pool(part, share) for part, share in shares])
        if states is not None:
            slots = StatePool.allocate(spec.states, states.num_pages, spec.dtype, spec.device)
            pool, groups = replace(pool, states=slots), (*groups, states)
        if spec.device.type == "cpu":
            self._pool = kept
        return pool, CachePlan(groups, pages, limits)

    def _memory(
        self, workload: JobWorkload, resources: EngineResources, limits: tuple[int, int]
    ) -> tuple[DeviceMemory, tuple[int, int]]:
        """The device's memory, with the bytes of the job's largest step, and the limits of a step, lowered to it."""
        spec, size, (seqs, tokens) = self.model.spec, self.config.page_size, limits
        if not workload.samples.any():
            return self._device_memory(), limits
        if spec.device.type == "cpu":
            estimate = estimated_bytes if spec.stream is None else expected_bytes
            return self._device_memory(estimate(spec, dummy_run(workload, spec, size, seqs, tokens))), limits
        run = self.dummy_runner(resources, limits)
        step_bytes, tokens = measure_largest_step(run, workload, spec, size, limits, partial(cuda_peak, spec.device))
        # The dummy run's token count lists are short, so their largest size is added here.
        prompts = self.config.repetition_penalty_scope == "prompt+output"
        step_bytes += lists_bytes(workload, seqs, spec.vocab_size, prompts=prompts)
        return self._device_memory(step_bytes), (seqs, max(tokens, workload.longest_span))

    def _device_memory(self, step: int = 0) -> DeviceMemory:
        """The memory that every rank has, with the bytes of its largest step; on a CPU they share what there is."""
        spec = self.model.spec
        memory, ranks = job_memory(self.config, spec, step), spec.ranks
        if ranks.count == 1:
            return memory
        share = 1 if memory.exclusive else ranks.count
        sizes = torch.tensor([-memory.free // share, -memory.total // share, step], device=spec.device)
        free, total, step = ranks.largest(sizes).tolist()
        return replace(memory, free=-free, total=-total, step=step)

    def warm_up(self) -> None:
        """On a GPU, run the dummy run of a small job, so that kernels are compiled and libraries started before a job.

        How much memory a job's largest step takes depends on its rows, so `start` measures that.
        """
        spec, size, backend = self.model.spec, self.config.page_size, self.backend
        if spec.device.type != "cuda":
            return
        self._peers.tell(WarmUp())
        limits, table = (_WARM_UP_ROWS, _WARM_UP_ROWS * size), RequestTable()
        length = min(2 * size + 1, spec.context_length - _WARM_UP_ROWS)
        table.append(0, 0, [0] * max(1, length), SamplingParams(n=_WARM_UP_ROWS), 0, _WARM_UP_ROWS)
        workload = plan_workload(table, adapters=list(spec.adapters), bidirectional=spec.bidirectional)
        run = self.dummy_runner(self.resources(workload, limits), limits)
        measure_largest_step(run, workload, spec, size, limits, partial(cuda_peak, spec.device))
        self.backend = backend  # candidates are measured on the rows of a job

    def dummy_runner(
        self, resources: EngineResources, limits: tuple[int, int]
    ) -> Callable[[DummyRun, GroupedPool], None]:
        """Runs dummy runs whose steps have at most as many rows and tokens as `limits`."""

        def run(job: DummyRun, pool: GroupedPool) -> None:
            cache = CachePlan(ONE_BYTE_PAGES, PAGES, limits)
            scheduler = self._scheduler(job.workload, cache, resources.backend)
            Loop(job.workload, scheduler, pool, resources, self._settings()).run_dummy(job)

        return run

    def _scheduler(self, workload: JobWorkload, cache: CachePlan, backend: Backend) -> Scheduler:
        config = SchedulerConfig(
            num_pages=cache.pages,
            page_size=self.config.page_size,
            max_num_seqs=cache.limits[0],
            max_tokens_per_step=cache.limits[1],
            group_min_saving=self._peers.agree(lambda: group_min_saving(self.model.spec.device, backend)),
            group_rows=None if backend.group_saving is None else backend.group_saving.rows,
            order=self.order,
            admission=self.admission,
            cache_groups=cache.groups,
        )
        kinds = workload.kinds(repeats_end=self.config.stop_on_repeat is not None)
        return Scheduler(workload.tree, workload.samples, workload.max_tokens, config, kinds, workload.spans)

    def _settings(self, record: WorkRecord | None = None, *, prompt_ids: bool = True) -> LoopSettings:
        config = self.config
        return LoopSettings(
            prompt_ids=prompt_ids,
            repeat_span=config.stop_on_repeat,
            logprobs_mode=config.logprobs_mode,
            repetition_scope=config.repetition_penalty_scope,
            exact_states=config.hidden_states_dtype == "float32",
            queue_bytes=self.queue_bytes,
            record=record,
        )
