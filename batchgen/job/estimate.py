"""About how large a job's files become if every row runs to its limit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchgen.config import RunConfig
from batchgen.errors import UsageError
from batchgen.job.ingest import Ingested
from batchgen.models.base import ModelSpec
from batchgen.params import SamplingParams
from batchgen.request import RequestTable
from batchgen.units import format_size

__all__ = ["OutputEstimate", "estimate_output"]

_ROW_BYTES = 160
"""An output row without its lists and text, compressed, about."""
_TOKEN_BYTES = 6
"""A generated token's id and text, compressed, about."""
_LOGPROB_BYTES = 4
_SCORE_BYTES = 21
"""A text's sum, mean, count and verdict."""
_PROMPT_ID_BYTES = 3
"""A prompt's id, compressed, about; zstd finds those of its further samples again."""
_ECHO_BYTES = 2
"""The text of an echoed prompt's token, compressed, about; of further samples nothing, as above."""
_TEXT_SHARE = 0.5
"""What is left of carried fields and prompts' texts, compressed, about; of further samples nothing, as above."""
_TOP_BYTES = 8
"""One of the most likely tokens, id and logprob."""


@dataclass(frozen=True, slots=True)
class OutputEstimate:
    """Bytes of each file."""

    results: int
    states: int

    @property
    def total(self) -> int:
        """Of both."""
        return self.results + self.states

    def hold(self, limit: int | None) -> None:
        """Refuse a job that may exceed `--max-output-bytes`.

        Raises:
            UsageError: with the estimate and what to do.
        """
        if limit is None or self.total <= limit:
            return
        what = f"about {format_size(self.total)}"
        remedy = "lower max_new_tokens, or write less of the input (--carry, --include-prompt, --include-prompt-ids)"
        if self.states:
            what += f" (results {format_size(self.results)}, hidden states {format_size(self.states)})"
            remedy = "ask for states of fewer layers or tokens, pool them, or lower max_new_tokens"
        problem = f"the output may take {what}, more than --max-output-bytes {format_size(limit)}"
        raise UsageError(f"{problem}. Raise the limit, or {remedy}.")


def estimate_output(rows: Ingested, config: RunConfig, spec: ModelSpec) -> OutputEstimate:
    """Estimate both files of a job from all its rows; they may be closed."""
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
    fed = prompt + np.maximum(new - 1, 0)
    choices = len(spec.moe_layers) * spec.experts_per_token
    routed = _by_request(table, [choices * p.return_routed_experts for p in table.params]) * fed
    values = 4 if config.engine.hidden_states_dtype == "float32" else spec.dtype.itemsize
    states = _state_rows(table, prompt, new, fed) * spec.hidden_size * values
    scores = np.where(table.score_start >= 0, _SCORE_BYTES + _LOGPROB_BYTES * (prompt - table.score_start), 0)
    results = texts + int((samples * (output + inputs + routed + scores)).sum())
    results += int((_by_request(table, [_ECHO_BYTES * p.echo for p in table.params]) * prompt).sum())
    if config.include_prompt_ids:
        results += _PROMPT_ID_BYTES * _prompt_ids(table, prompt)
    return OutputEstimate(results, int((samples * states).sum()))


def _prompt_ids(table: RequestTable, prompt: npt.NDArray[np.int64]) -> int:
    """Ids of all prompts, each once whatever is scored behind it; where embeddings are given there are none."""
    ids = np.where(table.score_start >= 0, table.score_start, prompt)
    again = (np.diff(table.row_index, prepend=-1) == 0) & (np.diff(table.prompt_index, prepend=-1) == 0)
    if table.embeds_id is not None:
        again |= table.embeds_id >= 0
    return int(ids[~again].sum())


def _by_request(table: RequestTable, by_params: list[int]) -> npt.NDArray[np.int64]:
    """[N] a number of each request's parameters."""
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
    table: RequestTable, prompt: npt.NDArray[np.int64], new: npt.NDArray[np.int64], fed: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """[N] rows of hidden states over all layers of a sample at its limit."""
    asked = [p.return_hidden_states for p in table.params]
    layers = _by_request(table, [0 if states is None else len(states.layers) for states in asked])
    spans = ["none" if states is None else "last" if states.pool != "none" else states.tokens for states in asked]
    rows: npt.NDArray[np.int64] = np.select(
        [_by_request(table, [span == name for span in spans]) > 0 for name in ("prompt", "output", "all", "last")],
        [prompt, new, fed, np.ones_like(prompt)],
        0,
    )
    total: npt.NDArray[np.int64] = layers * rows
    return total
