"""The largest steps that a job can come to, as a small job of their own: run once, they tell what memory a step takes.

They need no pool of the job's size, since all their pages are one and the same: what is read there means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from batchgen.engine.planning import Workload, plan_workload
from batchgen.models.base import ModelSpec
from batchgen.params import CONSTRAINT_KINDS, HiddenStates, SamplingParams
from batchgen.plan.types import (
    DecodeRow,
    DecodeRows,
    PrefillChunk,
    PrefixGroup,
    SampleRow,
    SampleRows,
    SequenceStart,
    StepPlan,
)
from batchgen.request import RequestTable

__all__ = ["PAGES", "Rehearsal", "counted_bytes", "rehearsal", "widest_params"]

PAGES: Final = 2
"""Pages of the pool that a rehearsal needs, the scratch page included."""
_PAGE: Final = 1
_DIGITS: Final = 64
_BLOCK: Final = 64 << 20
"""Bytes of the logits of prompt positions that are made at once, in float32."""
_TILES: Final = 48 << 20
"""Bytes of scores, gathered keys and values that attention on a CPU works on at once."""
_REPLAYS: Final = 3
"""Steps that only decode: enough for a graph of them to be captured and played. They come first, as what graphs hold is
held by the job beside its largest steps."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A job of steps that are never scheduled, only run."""

    workload: Workload
    begin: StepPlan
    """Begins the rows that decode in the others."""
    steps: list[StepPlan]
    """By sequence each has a token to feed once `begin` has run; positions and lengths are the job's longest."""
    rows: int
    """Sequences of `begin`, which are numbered from 0."""


def rehearsal(workload: Workload, spec: ModelSpec, page_size: int, rows: int, tokens: int) -> Rehearsal:
    """The largest steps of a job: all rows decode at the longest context, beside as long a prefill as can be.

    Args:
        workload: the job; at least one sample is to run.
        spec: the model's.
        page_size: S, positions of a page.
        rows: most sequences at once.
        tokens: most tokens of a step.
    """
    live = workload.samples > 0
    lengths = np.diff(workload.table.offsets)[live]
    longest = int(lengths.max())
    last = int((lengths + workload.draws[live]).max()) - 2  # position of the last token that is fed
    rows = min(rows, int(workload.samples.sum(dtype=np.int64)))
    prompts = workload.tree.end - workload.tree.start
    chunk = min(tokens, int(prompts.sum(dtype=np.int64)))
    used = np.unique(workload.table.params_id[live]).tolist()
    widest = widest_params([workload.table.params[i] for i in used])
    texts = bool((workload.table.score_start[live] >= 0).any())
    table = _table(widest, rows, [longest, *_lengths(chunk, longest)], last - longest + 2, texts)
    # Never past the job's own positions: a model may have no more of them.
    decodes = DecodeRows.of(DecodeRow(i, last, _pages(last + 1, page_size)) for i in range(rows))
    shared = min(longest, last) // page_size
    groups = [PrefixGroup(list(range(rows)), [_PAGE] * shared, 0, shared)] if shared and rows > 1 else []
    lengths_of = enumerate(_lengths(chunk, longest), start=1)
    prefills = [PrefillChunk(i, None, 0, length, _pages(length, page_size)) for i, length in lengths_of]
    late = PrefillChunk(0, None, max(0, longest - chunk), longest, _pages(longest, page_size))
    piece = min(chunk, longest, page_size)
    pieces = [replace(late, start=longest - piece)] * (chunk // piece)
    return Rehearsal(
        workload=plan_workload(table, dedup=False, adapters=list(spec.adapters)),
        begin=StepPlan(
            starts=[SequenceStart(i, 0, i) for i in range(rows)],
            prefills=[replace(late, start=longest - 1)],
            samples=SampleRows.of(SampleRow(i, 0) for i in range(rows)),
        ),
        steps=[
            *[_mixed([], decodes, groups)] * _REPLAYS,
            _mixed(prefills, decodes, []),
            _mixed([late], decodes, groups),
            _mixed(pieces, decodes, groups),
        ],
        rows=rows,
    )


def widest_params(params: Sequence[SamplingParams]) -> SamplingParams:
    """Parameters that ask for all at once that any of `params` asks of a step. Custom processors are not called."""
    widest = SamplingParams(
        max_new_tokens=None,
        temperature=float(any(not p.greedy for p in params)),
        top_p=min(p.top_p for p in params),
        top_k=max(p.top_k for p in params),
        min_p=max(p.min_p for p in params),
        min_new_tokens=max(p.min_new_tokens for p in params),
        frequency_penalty=0.1 * any(p.penalised for p in params),
        repetition_penalty=1.0 + 0.1 * any(p.penalised for p in params),
        logit_bias=max((p.logit_bias for p in params), key=len),
        bad_words=max((p.bad_words for p in params), key=len),
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


def counted_bytes(spec: ModelSpec, job: Rehearsal) -> int:
    """What the largest step takes beside weights and pool, estimated from sizes: for a device where it is not run.

    Per token the residual stream and its norms, a layer's projections and the widest inner layer that the model's
    parameters allow for; per row its logits, in float32 and sorted with their places where they are drawn from or
    edited; prompt logits in their fixed blocks; the states that are kept; and an attention's fixed tiles.
    """
    step, params = job.steps[_REPLAYS], job.workload.table.params[-1]
    states = params.return_hidden_states
    kept = 0 if states is None else len(states.layers)
    heads = max((x.kv_heads * (x.key_dim + x.value_dim) for x in spec.kv_layers), default=0)
    head = max((x.key_dim for x in spec.kv_layers), default=0)
    inner = -(-spec.parameters // max(1, 3 * spec.hidden_size * spec.num_layers))
    token = 6 * spec.hidden_size + 2 * heads + 6 * spec.num_heads * head + 4 * inner + kept * spec.hidden_size
    row = spec.dtype.itemsize + 4 + (4 if _edits(params) else 0) + (0 if params.greedy else 32)
    texts = bool((job.workload.table.score_start >= 0).any())
    blocks = 4 if texts or params.logprob_start_len >= 0 else 0
    return step.tokens * token * 4 + job.rows * spec.vocab_size * row + blocks * _BLOCK + _TILES


def _edits(params: SamplingParams) -> bool:
    return params.shapes_logits or params.min_new_tokens > 0 or params.needs_logprobs


def _mixed(prefills: list[PrefillChunk], decodes: DecodeRows, groups: list[PrefixGroup]) -> StepPlan:
    at = sum(chunk.end - chunk.start for chunk in prefills)
    samples = SampleRows(decodes.numbers, at + np.arange(len(decodes)))
    return StepPlan(prefills=prefills, decodes=decodes, groups=groups, samples=samples)


def _table(widest: SamplingParams, rows: int, lengths: list[int], draws: int, texts: bool) -> RequestTable:
    """Request 0 is that of the rows that decode, the others' prompts are prefilled with all that is kept of them."""
    table = RequestTable()
    states = widest.return_hidden_states
    output = None if states is None else replace(states, tokens="output")
    decoding = replace(widest, n=rows, logprob_start_len=-1, return_hidden_states=output, return_routed_experts=False)
    table.append(0, 0, _ids(0, lengths[0]), decoding, 0, draws)
    for i, length in enumerate(lengths[1:], start=1):
        table.append(i, 0, _ids(i, length), widest, i, 1, score_start=min(1, length - 1) if texts else -1)
    return table


def _lengths(tokens: int, longest: int) -> list[int]:
    """Of prompts no longer than the longest that add up to `tokens`."""
    full, rest = divmod(tokens, longest)
    return [longest] * full + [rest] * (rest > 0)


def _ids(number: int, length: int) -> list[int]:
    """A prompt that shares next to nothing with those of other numbers, made of ids that every model has."""
    digits = [number // _DIGITS**place % _DIGITS for place in range(min(length, 8))]
    return digits + [0] * (length - len(digits))


def _pages(positions: int, page_size: int) -> list[int]:
    return [_PAGE] * -(-positions // page_size)


def _widest_states(states: Sequence[HiddenStates | None]) -> HiddenStates | None:
    asked = [one for one in states if one is not None]
    if not asked:
        return None
    layers = tuple(sorted({layer for one in asked for layer in one.layers}))
    prompts = any(one.tokens in ("prompt", "all") for one in asked)
    return HiddenStates(layers, "all" if prompts else "output")
