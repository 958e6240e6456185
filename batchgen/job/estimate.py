"""Estimated size of a job's output files, and of its memory, if every row runs to its limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from batchgen.engine.machine import step_limits
from batchgen.engine.media.job import most_media_bytes
from batchgen.engine.memory.dummy_run import dummy_run, expected_bytes
from batchgen.engine.workload import JobWorkload
from batchgen.errors import UsageError
from batchgen.job.rows.ingest import Ingested
from batchgen.job.setup import Setup
from batchgen.kernels.linear import repacks, shares_rows
from batchgen.kernels.ranks import Ranks
from batchgen.models.check import CheckedModel
from batchgen.models.load import checked_spec, of_rank
from batchgen.plan.tree import blocks
from batchgen.request.fields.params import SamplingParams
from batchgen.request.printable import format_size
from batchgen.request.table.request_table import RequestTable

Int64s = npt.NDArray[np.int64]

_ROW_BYTES = 160
"""Approximate compressed bytes of an output row without its lists and text."""
_TOKEN_BYTES = 6
"""Approximate compressed bytes of a generated token's id and text."""
_LOGPROB_BYTES = 4
"""Bytes of a logprob."""
_SCORE_BYTES = 21
"""Bytes of a scored text's sum, mean, token count and `is_greedy`."""
_NUMBER_BYTES = 4
"""Bytes of a number of an embedding."""
_PROMPT_ID_BYTES = 3
"""Approximate compressed bytes of a prompt's token id; those of further samples compress to nothing."""
_ECHO_BYTES = 2
"""Approximate compressed bytes of the text of an echoed prompt token; as above for further samples."""
_TEXT_SHARE = 0.5
"""Approximate compression ratio of carried fields and prompt texts; as above for further samples."""
_TOP_BYTES = 8
"""Bytes of one top token: id and logprob."""


@dataclass(frozen=True, slots=True)
class OutputEstimate:
    """Estimated bytes of the results and of the hidden states."""

    results: int
    states: int

    @property
    def total(self) -> int:
        """Bytes of both files."""
        return self.results + self.states

    def check(self, limit: int | None) -> None:
        """Refuse a job that may exceed `--max-output-bytes`.

        Raises:
            UsageError: the estimate exceeds `limit`.
        """
        if limit is None or self.total <= limit:
            return
        what = f"about {format_size(self.total)}"
        remedy = "lower max_new_tokens, or write less of the input (--carry, --include-prompt, --include-prompt-ids)"
        if self.states:
            what += f" (results {format_size(self.results)}, hidden states {format_size(self.states)})"
            remedy = "return hidden states of fewer layers or tokens, pool them, or lower max_new_tokens"
        problem = f"the output may take {what}, more than --max-output-bytes {format_size(limit)}"
        raise UsageError(f"{problem}. Raise the limit, or {remedy}.")


def estimate_output(rows: Ingested, setup: Setup) -> OutputEstimate:
    """Estimate both output files of a job from its rows, whose files may be closed."""
    table, spec, config = rows.table, setup.spec, setup.config
    texts = _ROW_BYTES * (rows.rows - rows.skipped) + int(_TEXT_SHARE * (rows.texts.spool.size + rows.bad.size))
    if not len(table):
        return OutputEstimate(texts, 0)
    offsets, params_id, limits, starts = table.offsets, table.params_id, table.max_new_tokens, table.score_start
    experts = len(spec.moe_layers) * spec.experts_per_token
    value_bytes = 4 if config.engine.hidden_states_dtype == "float32" else spec.dtype.itemsize
    results, states = texts, 0
    for part in blocks(len(table)):
        prompts = np.diff(offsets[part.start : part.stop + 1]).astype(np.int64)
        requests = _Requests(table.params, params_id[part], prompts, limits[part].astype(np.int64), starts[part])
        samples = requests.by_params([p.n for p in table.params])
        results += int((samples * requests.result_bytes(experts)).sum()) + requests.echo_bytes()
        results += requests.embedding_bytes(setup.front_end.encoder.tasks.size)
        states += int((samples * requests.state_rows()).sum()) * spec.hidden_size * value_bytes
    if config.include_prompt_ids:
        results += _PROMPT_ID_BYTES * _prompt_ids(table)
    return OutputEstimate(results, states)


def estimate_memory(setup: Setup, workload: JobWorkload, kv_bytes: int, tower_bytes: int) -> int | None:
    """Estimated peak of a run's resident memory, in bytes, called when its rows are read; None on a GPU.

    The program is as large as this process. Next to the weights are either, while they are loaded, the largest matrix
    in another layout, or keys and values and the largest step, with the towers of a job with images or sounds, its
    prepared items and features.
    """
    spec, engine = setup.spec, setup.config.engine
    if spec.device.type != "cpu":
        return None
    products = spec.numbers.products
    head = spec.vocab_size * spec.embeds_size * spec.dtype.itemsize
    weights, loading = setup.weight_bytes, head if repacks(spec.dtype, spec.device, products) else 0
    if spec.stream is not None:
        weights += spec.stream.slots * spec.stream.slot_bytes
    if spec.tied and not shares_rows(spec.dtype, spec.device, products):
        weights += head
    step = 0
    if workload.samples.any():
        limits = step_limits(engine, spec)
        step = expected_bytes(spec, dummy_run(workload, spec, engine.page_size, *limits))
    program = int(psutil.Process().memory_info().rss)
    media = tower_bytes + most_media_bytes(workload.table, spec.features_size)
    return program + weights + max(loading, kv_bytes + step + media)


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """Bytes that one process of `--tensor-parallel` needs on its device."""

    weights: int
    kv_token: int
    """Keys and values of one token, in all layers."""
    kv_peak: int
    """Keys and values at the job's peak."""
    step: int
    """The largest step."""


def rank_needs(model: CheckedModel, setup: Setup, workload: JobWorkload, kv_peak: int) -> list[RankNeeds]:
    """What each process of a job needs.

    Args:
        model: the whole model.
        setup: of the job, as rank 0 has it.
        workload: the job's.
        kv_peak: rank 0's peak of keys and values.
    """
    needs: list[RankNeeds] = []
    engine, first = setup.config.engine, setup.spec
    limits = step_limits(engine, first)
    for rank in range(first.ranks.count):
        ranks = Ranks(rank, first.ranks.count)
        part = of_rank(model, ranks)
        device: Any = first.device.type
        spec = checked_spec(
            part, dtype=engine.dtype, device=device, elsewhere=True, kv_dtype=engine.kv_dtype, ranks=ranks
        )
        own = replace(setup, model=part, spec=replace(spec, numbers=first.numbers))
        step = 0
        if workload.samples.any():
            step = expected_bytes(own.spec, dummy_run(workload, own.spec, engine.page_size, *limits))
        kept = kv_peak * spec.kv_bytes_per_token // max(1, first.kv_bytes_per_token)
        needs.append(RankNeeds(own.weight_bytes, spec.kv_bytes_per_token, kept, step))
    return needs


@dataclass(frozen=True, slots=True)
class _Requests:
    """Some requests, [R] each."""

    params: Sequence[SamplingParams]
    """Parameter sets."""
    params_id: npt.NDArray[np.int32]
    """Index of each one's set."""
    prompt: Int64s
    """Prompt tokens."""
    new: Int64s
    """Limits of new tokens."""
    score_start: npt.NDArray[np.int32]
    """Position at which the text to score begins; -1: there is none."""

    def by_params(self, values: list[int]) -> Int64s:
        """The value of each request's parameter set."""
        by_request: Int64s = np.array(values, np.int64)[self.params_id]
        return by_request

    @property
    def computed(self) -> Int64s:
        """Tokens whose positions are computed."""
        return np.asarray(self.prompt + np.maximum(self.new - 1, 0))

    def result_bytes(self, experts: int) -> Int64s:
        """Bytes of the results of one sample; `experts`: chosen in all layers for one token."""
        output = self.by_params([_output_bytes(p) for p in self.params]) * self.new
        scored = np.maximum(self.prompt - self.by_params([max(p.logprob_start_len, 0) for p in self.params]), 0)
        inputs = self.by_params([_input_bytes(p) for p in self.params]) * scored
        routed = self.by_params([experts * p.return_routed_experts for p in self.params]) * self.computed
        scores = np.where(self.score_start >= 0, _SCORE_BYTES + _LOGPROB_BYTES * (self.prompt - self.score_start), 0)
        return np.asarray(output + inputs + routed + scores)

    def embedding_bytes(self, size: int) -> int:
        """Bytes of the embeddings of all, of `size` numbers where a row does not limit them."""
        return int(self.by_params([_NUMBER_BYTES * (p.dimensions or size) * p.embed for p in self.params]).sum())

    def echo_bytes(self) -> int:
        """Bytes of the prompts in front of the texts, of all."""
        return int((self.by_params([_ECHO_BYTES * p.echo for p in self.params]) * self.prompt).sum())

    def state_rows(self) -> Int64s:
        """Rows of hidden states, over all layers, of one sample that runs to its limit."""
        requested = [None if p.task else p.return_hidden_states for p in self.params]
        layers = self.by_params([0 if states is None else len(states.layers) for states in requested])
        spans = [
            "none" if states is None else "last" if states.pool != "none" else states.tokens for states in requested
        ]
        rows: Int64s = np.select(
            [self.by_params([span == name for span in spans]) > 0 for name in ("prompt", "output", "all", "last")],
            [self.prompt, self.new, self.computed, np.ones_like(self.prompt)],
            0,
        )
        total: Int64s = layers * rows
        return total


def _prompt_ids(table: RequestTable) -> int:
    """Number of token ids of all prompts, each counted once; prompts of embeddings have none."""
    ids = np.where(table.score_start >= 0, table.score_start, np.diff(table.offsets))
    repeated = (np.diff(table.row_index, prepend=-1) == 0) & (np.diff(table.prompt_index, prepend=-1) == 0)
    if table.embeds_id is not None:
        repeated |= table.embeds_id >= 0
    return int(ids[~repeated].sum())


def _output_bytes(params: SamplingParams) -> int:
    """Bytes of a generated token."""
    return _TOKEN_BYTES + (_logprob_bytes(params) if params.return_logprob else 0)


def _input_bytes(params: SamplingParams) -> int:
    """Bytes of a prompt token whose logprobs are returned."""
    return _logprob_bytes(params) if params.return_logprob and params.logprob_start_len >= 0 else 0


def _logprob_bytes(params: SamplingParams) -> int:
    text = _LOGPROB_BYTES * params.return_text_in_logprobs
    return text + _LOGPROB_BYTES * (1 + len(params.token_ids_logprob)) + _TOP_BYTES * params.top_logprobs_num
