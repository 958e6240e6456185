"""Estimated size of a job's output files if every row runs to its limit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchgen.config.run_config import RunConfig
from batchgen.errors import UsageError
from batchgen.job.ingest import Ingested
from batchgen.models.base import ModelSpec
from batchgen.request.params import SamplingParams
from batchgen.request.printable import format_size
from batchgen.request.table import RequestTable

_ROW_BYTES = 160
"""Approximate compressed bytes of an output row without its lists and text."""
_TOKEN_BYTES = 6
"""Approximate compressed bytes of a generated token's id and text."""
_LOGPROB_BYTES = 4
"""Bytes of a logprob."""
_SCORE_BYTES = 21
"""Bytes of a scored text's sum, mean, token count and `is_greedy`."""
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


def estimate_output(rows: Ingested, config: RunConfig, spec: ModelSpec) -> OutputEstimate:
    """Estimate both output files of a job from its rows, whose files may be closed."""
    table = rows.table
    texts = _ROW_BYTES * (rows.rows - rows.skipped) + int(_TEXT_SHARE * (rows.texts.spool.size + rows.bad.size))
    if not len(table):
        return OutputEstimate(texts, 0)
    prompt = np.diff(table.offsets)
    new = table.max_new_tokens.astype(np.int64)
    samples = _by_request(table, [p.n for p in table.params])
    output = _by_request(table, [_output_bytes(p) for p in table.params]) * new
    scored = np.maximum(prompt - _by_request(table, [max(p.logprob_start_len, 0) for p in table.params]), 0)
    inputs = _by_request(table, [_input_bytes(p) for p in table.params]) * scored
    computed = prompt + np.maximum(new - 1, 0)
    experts = len(spec.moe_layers) * spec.experts_per_token
    routed = _by_request(table, [experts * p.return_routed_experts for p in table.params]) * computed
    value_bytes = 4 if config.engine.hidden_states_dtype == "float32" else spec.dtype.itemsize
    states = _state_rows(table, prompt, new, computed) * spec.hidden_size * value_bytes
    scores = np.where(table.score_start >= 0, _SCORE_BYTES + _LOGPROB_BYTES * (prompt - table.score_start), 0)
    results = texts + int((samples * (output + inputs + routed + scores)).sum())
    results += int((_by_request(table, [_ECHO_BYTES * p.echo for p in table.params]) * prompt).sum())
    if config.include_prompt_ids:
        results += _PROMPT_ID_BYTES * _prompt_ids(table, prompt)
    return OutputEstimate(results, int((samples * states).sum()))


def _prompt_ids(table: RequestTable, prompt: npt.NDArray[np.int64]) -> int:
    """Number of token ids of all prompts, each counted once; prompts of embeddings have none."""
    ids = np.where(table.score_start >= 0, table.score_start, prompt)
    repeated = (np.diff(table.row_index, prepend=-1) == 0) & (np.diff(table.prompt_index, prepend=-1) == 0)
    if table.embeds_id is not None:
        repeated |= table.embeds_id >= 0
    return int(ids[~repeated].sum())


def _by_request(table: RequestTable, by_params: list[int]) -> npt.NDArray[np.int64]:
    """[N] int64: `by_params` of each request's parameter set."""
    return np.array(by_params, np.int64)[table.params_id]


def _output_bytes(params: SamplingParams) -> int:
    """Bytes of a generated token."""
    return _TOKEN_BYTES + (_logprob_bytes(params) if params.return_logprob else 0)


def _input_bytes(params: SamplingParams) -> int:
    """Bytes of a prompt token whose logprobs are returned."""
    return _logprob_bytes(params) if params.return_logprob and params.logprob_start_len >= 0 else 0


def _logprob_bytes(params: SamplingParams) -> int:
    text = _LOGPROB_BYTES * params.return_text_in_logprobs
    return text + _LOGPROB_BYTES * (1 + len(params.token_ids_logprob)) + _TOP_BYTES * params.top_logprobs_num


def _state_rows(
    table: RequestTable, prompt: npt.NDArray[np.int64], new: npt.NDArray[np.int64], computed: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """[N] int64: rows of hidden states, over all layers, of one sample that runs to its limit."""
    requested = [p.return_hidden_states for p in table.params]
    layers = _by_request(table, [0 if states is None else len(states.layers) for states in requested])
    spans = ["none" if states is None else "last" if states.pool != "none" else states.tokens for states in requested]
    rows: npt.NDArray[np.int64] = np.select(
        [_by_request(table, [span == name for span in spans]) > 0 for name in ("prompt", "output", "all", "last")],
        [prompt, new, computed, np.ones_like(prompt)],
        0,
    )
    total: npt.NDArray[np.int64] = layers * rows
    return total
