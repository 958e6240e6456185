"""Dummy run: runs a job's largest steps before the job starts, to measure the memory that a step needs.

The steps use a pool of two pages, because all their block tables name the same page; the results are meaningless.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Final

import numpy as np
import torch

from batchgen.engine.memory.kv_budget import cache_groups
from batchgen.engine.memory.oom import is_out_of_memory
from batchgen.engine.workload import JobWorkload, plan_workload
from batchgen.errors import UsageError
from batchgen.kernels.grouped import GroupedPool
from batchgen.kernels.mixers.states import StatePool
from batchgen.models.base import ModelSpec
from batchgen.plan.cache_groups import StateSpan
from batchgen.plan.step_plan import (
    DecodeRow,
    DecodeRows,
    PrefillChunk,
    PrefixGroup,
    SampleRow,
    SampleRows,
    SequenceStart,
    StepPlan,
)
from batchgen.plan.window_pages import WindowGroup
from batchgen.request.fields.constraint import CONSTRAINT_KINDS
from batchgen.request.fields.hidden_states import HiddenStates
from batchgen.request.fields.params import SamplingParams
from batchgen.request.table.request_table import RequestTable

Meter = Callable[[Callable[[], None]], int]
"""Peak bytes that a function allocates on a device, in addition to those allocated before."""


def cuda_peak(device: torch.device, body: Callable[[], None]) -> int:
    """Peak bytes that PyTorch's CUDA allocator reserves for `body`, with fragmentation and CUDA graph pools."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    body()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_reserved(device) - held)


def measure_largest_step(
    run: Callable[[DummyRun, GroupedPool], None],
    workload: JobWorkload,
    spec: ModelSpec,
    page_size: int,
    limits: tuple[int, int],
    meter: Meter,
) -> tuple[int, int]:
    """Run the largest steps of a job: their bytes, and the most tokens in a step, halved each time memory ran out.

    `run` waits until the device has finished the steps of a dummy run; `limits`: most sequences and tokens in a step.

    Raises:
        UsageError: even a step of one token per sequence does not fit into memory.
    """
    rows, tokens = limits
    if not workload.samples.any():
        return 0, tokens
    layers = [group.layers for group in cache_groups(spec, page_size)]
    pages = [PAGES] * len(layers)
    pool = GroupedPool.allocate(spec.kv_layers, layers, pages, page_size, spec.kv_dtype, spec.device)
    while True:
        job = dummy_run(workload, spec, page_size, rows, tokens)
        if spec.states:
            pool = replace(pool, states=StatePool.allocate(spec.states, job.slots, spec.dtype, spec.device))
        try:
            return meter(partial(run, job, pool)), tokens
        except (RuntimeError, MemoryError) as problem:
            if not is_out_of_memory(problem):
                raise
        gc.collect()  # frames of the failed try may form cycles that hold its tensors
        if tokens <= rows:
            size = f"a step of {tokens} tokens and {rows} sequences does not fit next to the weights"
            raise UsageError(f"out of memory: {size}; lower --max-num-seqs or --max-tokens-per-step")
        tokens = max(tokens // 2, rows)


PAGES: Final = 2
"""Pages in the pool of a dummy run, including the scratch page."""
_PAGE_ID: Final = 1
_HELD_PAGES: Final = np.arange(PAGES)
_DISTINCT_IDS: Final = 64
_LOGITS_BYTES: Final = 64 << 20
"""Bytes of prompt logits that are computed at once, in float32."""
_ATTENTION_BYTES: Final = 48 << 20
"""Bytes of the scores, keys and values that CPU attention gathers at once."""
_DECODE_STEPS: Final = 3
"""Decode-only steps: enough to capture and replay a CUDA graph. They run first, so that the memory of graphs counts in
the largest steps."""


@dataclass(frozen=True, slots=True)
class DummyRun:
    """A workload and its largest steps, which are run without a scheduler."""

    workload: JobWorkload
    start: StepPlan
    """Step that starts the sequences which decode in `steps`"""
    steps: list[StepPlan]
    """Steps to run after `start`, at the job's longest positions and lengths"""
    rows: int
    """Number of sequences, which are numbered from 0"""
    slots: int = 0
    """Slots of the recurrent states that the steps use, the first included"""


def dummy_run(workload: JobWorkload, spec: ModelSpec, page_size: int, rows: int, tokens: int) -> DummyRun:
    """The largest steps of a job: all rows decode at the longest context, together with the longest prefill.

    The job has at least one sample to run; `rows` and `tokens`: most sequences and tokens in a step.
    """
    active = workload.samples > 0
    lengths = np.diff(workload.table.offsets)[active]
    longest = int(lengths.max())
    last = int((lengths + workload.max_tokens[active]).max()) - 2  # position of the last input token
    rows = min(rows, int(workload.samples.sum(dtype=np.int64)))
    prompts = workload.tree.end - workload.tree.start
    chunk = min(tokens, int(prompts.sum(dtype=np.int64)))
    used = np.unique(workload.table.params_id[active]).tolist()
    widest = widest_params([workload.table.params[i] for i in used])
    has_texts = bool((workload.table.score_start[active] >= 0).any())
    table = _request_table(widest, rows, [longest, *_split_lengths(chunk, longest)], last - longest + 2, has_texts)
    # No positions beyond the job's: a model may not support them.
    decodes = DecodeRows.of(DecodeRow(i, last, _page_list(last + 1, page_size)) for i in range(rows))
    shared = min(longest, last) // page_size
    groups = [PrefixGroup(list(range(rows)), [_PAGE_ID] * shared, 0, shared)] if shared and rows > 1 else []
    lengths_of = enumerate(_split_lengths(chunk, longest), start=1)
    prefills = [PrefillChunk(i, None, 0, length, _page_list(length, page_size)) for i, length in lengths_of]
    last_chunk = PrefillChunk(0, None, max(0, longest - chunk), longest, _page_list(longest, page_size))
    short_length = min(chunk, longest, page_size)
    short_chunks = [replace(last_chunk, start=longest - short_length)] * (chunk // short_length)
    slots = 0
    if spec.states:
        slots = 1 + rows + max(1, len(prefills), len(short_chunks))
        decodes = replace(decodes, states=np.stack([np.zeros(rows, np.int64), np.arange(1, rows + 1)]))
        prefills, short_chunks = _with_states(prefills, rows), _with_states(short_chunks, rows)
        (last_chunk,) = _with_states([last_chunk], rows)
    steps = [_step_plan([], decodes, groups)] * _DECODE_STEPS + [_step_plan(prefills, decodes, [])]
    steps += [_step_plan(chunks, decodes, groups) for chunks in ([last_chunk], short_chunks)]
    group_pages = [_HELD_PAGES if isinstance(group, WindowGroup) else None for group in cache_groups(spec, page_size)]
    return DummyRun(
        workload=plan_workload(table, dedup=False, adapters=list(spec.adapters)),
        start=StepPlan(
            starts=[SequenceStart(i, 0, i) for i in range(rows)],
            prefills=[replace(last_chunk, start=longest - 1)],
            samples=SampleRows.of(SampleRow(i, 0) for i in range(rows)),
            group_pages=group_pages,
        ),
        steps=[replace(step, group_pages=group_pages) for step in steps],
        rows=rows,
        slots=slots,
    )


def _with_states(chunks: Sequence[PrefillChunk], rows: int) -> list[PrefillChunk]:
    """The chunks, each with a slot behind those of the decode rows."""
    return [replace(chunk, states=(StateSpan(chunk.end, 0, 1 + rows + i),)) for i, chunk in enumerate(chunks)]


def widest_params(params: Sequence[SamplingParams]) -> SamplingParams:
    """Parameters that combine the most expensive request of each field in `params`. Custom processors are left out."""
    widest = SamplingParams(
        max_new_tokens=None,
        temperature=float(any(not p.greedy for p in params)),
        top_p=min(p.top_p for p in params),
        top_k=max(p.top_k for p in params),
        min_p=max(p.min_p for p in params),
        min_new_tokens=max(p.min_new_tokens for p in params),
        frequency_penalty=0.1 * any(p.has_penalties for p in params),
        repetition_penalty=1.0 + 0.1 * any(p.has_penalties for p in params),
        logit_bias=max((p.logit_bias for p in params), key=len),
        bad_words=max((p.bad_words for p in params), key=len),
        suppress_tokens=max((p.suppress_tokens for p in params), key=len),
        begin_suppress_tokens=max((p.begin_suppress_tokens for p in params), key=len),
        allowed_token_ids=max((p.allowed_token_ids for p in params), key=lambda ids: len(ids or ())),
        return_logprob=any(p.needs_logprobs for p in params),
        top_logprobs_num=max(p.top_logprobs_num for p in params),
        token_ids_logprob=max((p.token_ids_logprob for p in params), key=len),
        logprob_start_len=0 if any(p.return_logprob and p.logprob_start_len >= 0 for p in params) else -1,
        return_hidden_states=_widest_states([p.return_hidden_states for p in params]),
        return_routed_experts=any(p.return_routed_experts for p in params),
        lora_path=next((p.lora_path for p in params if p.lora_path), None),
    )
    constrained = next((p for p in params if p.constraint is not None), None)
    if constrained is None:
        return widest
    return replace(widest, **{kind: getattr(constrained, kind) for kind in CONSTRAINT_KINDS})


def estimated_bytes(spec: ModelSpec, job: DummyRun) -> int:
    """Estimated bytes of the largest step without weights and pool, for a device on which it is not run.

    Counts per token the residual stream, its norms, a layer's projections, the widest MLP layer that the model's
    parameters allow and captured hidden states; per row the logits, in float32 and sorted with their indexes if they
    are sampled from or edited; and fixed sizes for prompt logits and attention.
    """
    params = job.workload.table.params[-1]
    kept = edits_logits(params) or params.needs_logprobs
    row = spec.dtype.itemsize + 4 + (4 if kept else 0) + (0 if params.greedy else 32 if spec.ranks.count == 1 else 64)
    has_texts = bool((job.workload.table.score_start >= 0).any())
    blocks = 4 if has_texts or params.logprob_start_len >= 0 else 0
    logits = job.rows * spec.vocab_size // spec.ranks.count
    return _activation_bytes(spec, job) + logits * row + blocks * _LOGITS_BYTES + _ATTENTION_BYTES


def expected_bytes(spec: ModelSpec, job: DummyRun) -> int:
    """As `estimated_bytes`, with the compiled kernels: they sort no logits and gather no scores, keys or values.

    Ranks draw with PyTorch's operations.
    """
    draws = spec.ranks.count > 1 and not job.workload.table.params[-1].greedy
    row = 4 + (spec.dtype.itemsize if spec.dtype != torch.float32 else 0) + 64 * draws
    return _activation_bytes(spec, job) + job.rows * spec.vocab_size // spec.ranks.count * row


def _activation_bytes(spec: ModelSpec, job: DummyRun) -> int:
    states = job.workload.table.params[-1].return_hidden_states
    kept = 0 if states is None else len(states.layers)
    heads = max((x.kv_heads * (x.key_dim + x.value_dim) for x in spec.kv_layers), default=0)
    head = max((x.key_dim for x in spec.kv_layers), default=0)
    inner = -(-spec.parameters // max(1, 3 * spec.hidden_size * spec.num_layers))
    # What a recurrent layer reads and gives for a token is as wide as the longer side of its state.
    widths = ([prod(size.shape) // min(size.shape[-2:]) for size in sizes] for sizes in spec.states)
    mixer = max((4 * sum(width) for width in widths), default=0)
    token = 6 * spec.hidden_size + 2 * heads + 6 * spec.num_heads * head + 4 * inner + mixer + kept * spec.hidden_size
    return job.steps[_DECODE_STEPS].tokens * token * 4


def edits_logits(params: SamplingParams) -> bool:
    """Whether rows with these parameters change their logits before they are sampled."""
    early = params.min_new_tokens > 0 or bool(params.begin_suppress_tokens)
    return params.modifies_logits or early


def _step_plan(prefills: list[PrefillChunk], decodes: DecodeRows, groups: list[PrefixGroup]) -> StepPlan:
    at = sum(chunk.end - chunk.start for chunk in prefills)
    samples = SampleRows(decodes.sequence_ids, at + np.arange(len(decodes)))
    return StepPlan(prefills=prefills, decodes=decodes, groups=groups, samples=samples)


def _request_table(
    widest: SamplingParams, rows: int, lengths: list[int], max_tokens: int, has_texts: bool
) -> RequestTable:
    """The requests of a dummy run: request 0 of the decoding rows, the others for prefill with all prompt outputs."""
    table = RequestTable()
    states = widest.return_hidden_states
    output = None if states is None else replace(states, tokens="output")
    decoding = replace(widest, n=rows, logprob_start_len=-1, return_hidden_states=output, return_routed_experts=False)
    table.append(0, 0, _distinct_prompt(0, lengths[0]), decoding, 0, max_tokens)
    for i, length in enumerate(lengths[1:], start=1):
        table.append(i, 0, _distinct_prompt(i, length), widest, i, 1)
        if has_texts:
            table.set_score_start(min(1, length - 1))
    return table


def _split_lengths(tokens: int, longest: int) -> list[int]:
    """Prompt lengths of at most `longest` that add up to `tokens`."""
    full, rest = divmod(tokens, longest)
    return [longest] * full + [rest] * (rest > 0)


def _distinct_prompt(number: int, length: int) -> list[int]:
    """A prompt that shares almost no prefix with other numbers' prompts, of ids that every model has."""
    digits = [number // _DISTINCT_IDS**place % _DISTINCT_IDS for place in range(min(length, 8))]
    return digits + [0] * (length - len(digits))


def _page_list(positions: int, page_size: int) -> list[int]:
    return [_PAGE_ID] * -(-positions // page_size)


def _widest_states(states: Sequence[HiddenStates | None]) -> HiddenStates | None:
    requested = [one for one in states if one is not None]
    if not requested:
        return None
    layers = tuple(sorted({layer for one in requested for layer in one.layers}))
    prompts = any(one.tokens in ("prompt", "all") for one in requested)
    return HiddenStates(layers, "all" if prompts else "output")
