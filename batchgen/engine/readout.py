"""Output logprobs: of the token drawn, of the K most likely, and of the ids that a row names.

In mode `raw` they are the log-softmax of the model's own logits at temperature 1, read before anything shapes them; in
mode `processed` that of the distribution drawn from (greedy rows: after penalties, biases and masks, at temperature 1).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.row_table import Rows
from batchgen.kernels.device import Array, Device
from batchgen.kernels.ops import Ops
from batchgen.kernels.sampling import SamplingColumns

__all__ = ["LogprobsMode", "RawLogprobs", "Readout", "StepLogprobs"]

LogprobsMode = Literal["raw", "processed"]

_CHUNK = 1 << 18
"""Logits whose distribution is written out at once on a CPU: they stay in its cache."""
_WIDE_CHUNK = 1 << 24
"""The same on a device, which a few rows would leave idle: 64 MiB of logits, and as much of scores."""


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """What W rows learn of one step, on the host: K and I are those of the row that asks for most."""

    places: npt.NDArray[np.int64]
    """[W] among the step's rows"""
    drawn: Array
    """[W] float32"""
    top_ids: Array
    """[W, K] int64"""
    top: Array
    """[W, K] float32, most likely first; -inf where fewer tokens can be drawn"""
    asked: Array
    """[W, I] float32 of the ids that each row names, in its order"""

    def of(self, some: npt.NDArray[np.bool_]) -> StepLogprobs:
        """Those of some of the rows [W]."""
        return StepLogprobs(self.places[some], self.drawn[some], self.top_ids[some], self.top[some], self.asked[some])

    def shifted(self, by: int) -> StepLogprobs:
        """The same of rows that stand `by` places later."""
        return replace(self, places=self.places + by)


@dataclass(frozen=True, slots=True)
class _Read:
    """Of W rows, on the device."""

    normalizers: Tensor
    """[W] float32"""
    top: tuple[Tensor, Tensor] | None
    """[W, K] ids and logprobs"""
    asked: Tensor | None
    """[W, I] float32"""


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """What was read before the logits were shaped."""

    read: _Read
    kept: Tensor | None
    """[A, V]: rows whose logits shaping is about to alter"""


class Readout:
    """Reads the logprobs of one set of rows, step after step: `before`, `after` on the device, `found` on the host."""

    def __init__(
        self,
        rows: Rows,
        places: npt.NDArray[np.int64],
        altered: Collection[int],
        sampling: SamplingColumns,
        mode: LogprobsMode,
        device: Device,
        ops: Ops,
    ) -> None:
        """`places` [W] of the rows that want logprobs; `altered`: those whose logits are not only masked."""
        self._mode = mode
        self._ops = ops
        self._sampling = sampling
        self._places = places.copy()  # nobody looks at what was uploaded again
        table, slots = rows.table, rows.slots[places]
        self._top_k = int(table.top_logprobs[slots].max())
        widest = int(table.num_named[slots].max())
        kept = np.isin(places, np.fromiter(altered, np.int64, len(altered))).nonzero()[0]
        self._index, named, self._altered = device.upload(places, table.named[slots, :widest], kept)
        self._named = named if widest else None
        self._alters = len(kept) > 0

    def before(self, logits: Tensor) -> RawLogprobs | None:
        """Read raw logprobs from [R, V] logits that nothing has shaped yet; None in processed mode."""
        if self._mode == "processed":
            return None
        source = logits if len(self._places) == logits.shape[0] else logits[self._index]
        kept = source[self._altered] if self._alters else None
        return RawLogprobs(self._read(source, slice(None)), kept)

    def after(self, logits: Tensor, tokens: Tensor, raw: RawLogprobs | None) -> list[Tensor]:
        """Every row's logprobs: what `found` takes, once it is on the host.

        Args:
            logits: [R, V], shaped.
            tokens: [R] int64 that were drawn.
            raw: what `before` read.
        """
        drawn_tokens = tokens[self._index]
        if raw is None:
            return self._processed(logits, drawn_tokens)
        values = logits[self._index, drawn_tokens].float()  # a mask leaves what can be drawn as it was
        if raw.kept is not None:
            values[self._altered] = raw.kept.gather(-1, drawn_tokens[self._altered, None]).squeeze(-1).float()
        return _tensors(values - raw.read.normalizers, raw.read)

    def _processed(self, logits: Tensor, drawn_tokens: Tensor) -> list[Tensor]:
        step = max(1, (_CHUNK if logits.device.type == "cpu" else _WIDE_CHUNK) // logits.shape[1])
        reads, drawn = [], []
        for begin in range(0, len(self._places), step):
            part = slice(begin, begin + step)
            rows, columns = self._index[part], self._sampling
            scores = self._ops.filtered_scores(
                logits[rows].float(),
                columns.temperature[rows],
                columns.top_k[rows],
                columns.top_p[rows],
                columns.min_p[rows],
                drawn_tokens[part],
            )
            reads.append(self._read(scores, part))
            drawn.append(self._ops.token_logprobs(scores, drawn_tokens[part], reads[-1].normalizers))
        tops = [read.top for read in reads if read.top is not None]
        asked = [read.asked for read in reads if read.asked is not None]
        joined = _Read(
            torch.cat([read.normalizers for read in reads]),
            (torch.cat([ids for ids, _ in tops]), torch.cat([values for _, values in tops])) if tops else None,
            torch.cat(asked) if asked else None,
        )
        return _tensors(torch.cat(drawn), joined)

    def _read(self, scores: Tensor, part: slice) -> _Read:
        """Everything but the tokens drawn, which are not known yet, of [w, V] scores."""
        normalizers = self._ops.log_normalizers(scores)
        return _Read(
            normalizers,
            self._ops.top_logprobs(scores, self._top_k, normalizers) if self._top_k else None,
            None if self._named is None else scores.gather(-1, self._named[part]).float() - normalizers[:, None],
        )

    def found(self, arrays: list[Array]) -> StepLogprobs:
        """What `after` gave, once it is on the host."""
        drawn, *others = arrays
        none = np.zeros((len(self._places), 0), np.float32)
        asked = others.pop() if self._named is not None else none
        top_ids, top = others or (none, none)
        return StepLogprobs(self._places, drawn, top_ids, top, asked)


def _tensors(drawn: Tensor, read: _Read) -> list[Tensor]:
    """[W] of the tokens drawn, then what was read: ids and values of the likeliest, and of the ids named."""
    return [drawn, *(read.top or ()), *(() if read.asked is None else (read.asked,))]
