"""From a step's logits to its tokens: masks, the draw, and the logprobs that rows asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from batchgen.engine.sequence import Sequence
from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.kernels.logprobs import log_normalizers, mask_tokens, token_logprobs, top_logprobs
from batchgen.kernels.noise import row_keys
from batchgen.kernels.sampling import SamplingColumns, nan_rows, sample

__all__ = ["Sampled", "Sampler"]

_NAN = ErrorInfo(
    ErrorCode.NAN_LOGITS,
    "the model's logits held a not-a-number for this row; try --dtype float32 or check the weights",
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step's draws, on the host. Rows are those handed to the sampler, in order."""

    tokens: list[int]
    """[R]"""
    errors: dict[int, ErrorInfo] = field(default_factory=dict)
    """rows that end here, and why; their tokens mean nothing"""
    logprobs: dict[int, float] = field(default_factory=dict)
    """by row, for those that asked"""
    top: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)
    """by row: K ids and logprobs, most likely first"""


class Sampler:
    """Draws for all rows of a step at once. Parameter columns are kept while the rows stay the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: list[Sequence] = []
        self._columns: _Columns | None = None

    def __call__(self, logits: Tensor, rows: list[Sequence]) -> Sampled:
        """Draw one token per row.

        Args:
            logits: [R, V] float32 as the model gave them; masked in place.
            rows: [R] the sequences the rows belong to.
        """
        columns = self._columns
        if columns is None or rows != self._rows:
            columns = self._columns = _Columns.of(rows, self._device)
            self._rows = list(rows)
        bad = nan_rows(logits)  # [R] bool
        lse_input = logits
        wanted = columns.logprob_rows
        before = top = None
        if wanted:
            # Raw logprobs are of the model's own logits: read them before any mask is applied.
            lse_input = logits if len(wanted) == len(rows) else logits[columns.logprob_index]
            before = log_normalizers(lse_input)  # [W]
            if columns.top_k_logprobs:
                top = top_logprobs(lse_input, columns.top_k_logprobs, before)
        pairs = [(i, token) for i, row in enumerate(rows) if row.masks_stops for token in row.masked_ids]
        if pairs:
            mask = torch.tensor(pairs, dtype=torch.int64, device=self._device)
            mask_tokens(logits, mask[:, 0], mask[:, 1])
        positions = torch.tensor([len(row.output_ids) for row in rows], dtype=torch.int64, device=self._device)
        tokens = sample(logits, columns.at(positions)).tokens  # [R]
        result = Sampled(tokens=tokens.tolist(), errors=dict.fromkeys(bad.nonzero().flatten().tolist(), _NAN))
        if wanted:
            assert before is not None
            drawn = token_logprobs(lse_input, tokens[columns.logprob_index], before).tolist()
            result.logprobs.update(zip(wanted, drawn, strict=True))
            if top is not None:
                _keep_top(result, rows, wanted, *top)
        return result


def _keep_top(result: Sampled, rows: list[Sequence], wanted: list[int], ids: Tensor, logprobs: Tensor) -> None:
    """Give each row the K it asked for out of the widest K of the step."""
    for row, some_ids, some_logprobs in zip(wanted, ids.tolist(), logprobs.tolist(), strict=True):
        k = rows[row].request.params.top_logprobs_num
        result.top[row] = (some_ids[:k], some_logprobs[:k])


@dataclass(frozen=True, slots=True)
class _Columns:
    """Everything about the rows that does not change from step to step."""

    seeds: Tensor
    samples: Tensor
    sampling: SamplingColumns
    logprob_rows: list[int]
    logprob_index: Tensor
    top_k_logprobs: int

    @staticmethod
    def of(rows: list[Sequence], device: torch.device) -> _Columns:
        params = [row.request.params for row in rows]

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        wanted = [i for i, p in enumerate(params) if p.needs_logprobs]
        return _Columns(
            seeds=ints([row.request.seed for row in rows]),
            samples=ints([row.sample_index for row in rows]),
            sampling=SamplingColumns.of(
                [p.temperature for p in params],
                [p.top_k for p in params],
                [p.top_p for p in params],
                [p.min_p for p in params],
                device,
            ),
            logprob_rows=wanted,
            logprob_index=ints(wanted),
            top_k_logprobs=max((params[i].top_logprobs_num for i in wanted), default=0),
        )

    def at(self, positions: Tensor) -> SamplingColumns:
        """The columns with this step's noise keys."""
        if self.sampling.all_greedy:
            return self.sampling
        return self.sampling.with_keys(row_keys(self.seeds, self.samples, positions))
