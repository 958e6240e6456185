"""Sampling of one token per row: temperature, top_k, then top_p over its survivors, min_p, then Gumbel-max.

With the row's largest logit m, x = (logit - m) / temperature and q = exp(x), a token survives

    top_k   if fewer than k tokens precede it in the order (logit falling, id rising)
    top_p   if the q of the survivors before it sum to less than p times the sum over all survivors
    min_p   if q >= min_p, which is prob >= min_p * largest prob

and the sampled token is the survivor with the largest x + gumbel(seed, sample, position, id). A row's token depends
only on that row.

Rows with top_k sort their k candidates. Rows without it need no sort: draw from the whole row, then check whether the
token survives, with one sum over the tokens before it; if not, no token after it survives either, so draw again among
those before it. A fraction of about `top_p` of the draws is accepted at once, and each further draw halves the
remaining mass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.kernels.device import HOST, Device
from batchgen.kernels.noise import gumbel_at
from batchgen.kernels.top import largest

GREEDY_TEMPERATURE = 1e-5
"""Rows with a lower temperature are greedy."""
_CHUNK = 1 << 18
"""Logits processed at once, so that intermediate results stay in the cache."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Sampled tokens of a step."""

    tokens: Tensor
    """[R] int64"""
    bad: Tensor | None = None
    """[R] bool, `nan_rows` of the logits; None: not checked"""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that are sampled in one call. `index` None: all rows of the batch, in order."""

    index: Tensor | None
    top_k: int
    """largest top_k of the rows; 0: no top_k"""
    has_top_p: bool
    has_min_p: bool

    def of(self, values: Tensor) -> Tensor:
        """The rows' part of a tensor [R, ...]."""
        return values if self.index is None else values.index_select(0, self.index)


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Sampling parameters of R rows, one contiguous tensor each, and the rows grouped by the work they need."""

    temperature: Tensor
    """[R] float32; below 1e-5 the row is greedy"""
    top_k: Tensor
    """[R] int64; 0 or less keeps all"""
    top_p: Tensor
    """[R] float32 in (0, 1]"""
    min_p: Tensor
    """[R] float32 in [0, 1]"""
    keys: Tensor | None
    """[R] int64 of `noise.row_keys`; ignored for greedy rows"""
    greedy_rows: Tensor | None
    """[g] int64, None: all rows"""
    draws: tuple[_Rows, ...]
    """Rows that are not greedy, grouped by their filters"""

    @staticmethod
    def of(
        temperature: npt.ArrayLike,
        top_k: npt.ArrayLike,
        top_p: npt.ArrayLike,
        min_p: npt.ArrayLike,
        device: Device = HOST,
    ) -> SamplingColumns:
        """Columns of R rows, without keys; see `with_keys`."""
        temperatures, top_ps, min_ps = (np.asarray(values, np.float32) for values in (temperature, top_p, min_p))
        top_ks = np.asarray(top_k, np.int64)
        count = len(temperatures)
        drawing = temperatures >= np.float32(GREEDY_TEMPERATURE)
        places: list[npt.NDArray[np.int64]] = []
        kinds: list[tuple[int, bool, bool]] = []
        if drawing.any():
            for kind in np.unique(code := _groups(drawing, top_ks, top_ps, min_ps)).tolist():
                if kind >= 0:
                    index = np.flatnonzero(code == kind)
                    places.append(index)
                    kinds.append((int(top_ks[index].max()), True, True) if kind > 3 else (0, kind & 1 > 0, kind > 1))
        on_device = device.upload(temperatures, top_ps, min_ps, top_ks, np.flatnonzero(~drawing), *places)
        greedy_index, *drawn = (None if len(index) == count else index for index in on_device[4:])
        return SamplingColumns(
            temperature=on_device[0],
            top_k=on_device[3],
            top_p=on_device[1],
            min_p=on_device[2],
            keys=None,
            greedy_rows=greedy_index,
            draws=tuple(_Rows(index, *kind) for index, kind in zip(drawn, kinds, strict=True)),
        )

    @property
    def all_greedy(self) -> bool:
        """Whether all rows are greedy, so that no keys are needed."""
        return not self.draws

    @property
    def filters(self) -> tuple[int | None, bool, bool]:
        """Largest top_k if all drawn rows have one, 0 if none has, else None; whether any has top_p, and min_p."""
        ks = [rows.top_k for rows in self.draws]
        most = None if any(ks) and not all(ks) else max(ks, default=0)
        return most, any(rows.has_top_p for rows in self.draws), any(rows.has_min_p for rows in self.draws)

    def with_keys(self, keys: Tensor) -> SamplingColumns:
        """The same columns with the noise keys [R] int64 of a step."""
        return replace(self, keys=keys.contiguous())


def _groups(
    drawing: npt.NDArray[np.bool_],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float32],
    min_p: npt.NDArray[np.float32],
) -> npt.NDArray[np.int64]:
    """[R] group number of each row, equal for rows that are sampled in one call; -1 for greedy rows.

    Rows of similar top_k share a group, 4 + ceil(log2(top_k)); rows without top_k are grouped by their filters.
    """
    filters = (top_p < 1.0).astype(np.int64) + 2 * (min_p > 0.0)
    power = np.ceil(np.log2(np.maximum(top_k, 1))).astype(np.int64)
    return np.where(drawing, np.where(top_k > 0, 4 + power, filters), -1)


def nan_rows(logits: Tensor) -> Tensor:
    """[R] bool: rows that cannot be sampled, with a not-a-number or +inf among the logits, or all of them -inf."""
    return ~torch.isfinite(logits.amax(dim=-1))


def greedy(logits: Tensor) -> Tensor:
    """[R] int64: the most likely token of each row of [R, V], the lowest id of equal ones."""
    if logits.device.type == "cpu":
        logits = logits.float()  # on a CPU, argmax of bfloat16 takes twice as long as this conversion and argmax
    return logits.argmax(dim=-1)  # returns the first of equal values; a test checks that


def sample(
    logits: Tensor, columns: SamplingColumns, sample_rows: Tensor | None = None, *, rows_at_once: int | None = None
) -> SampleResult:
    """Sample one token per row.

    Args:
        logits: [U, V], after penalties and masks; not modified, converted to float32. -inf is never sampled. Rows that
            `nan_rows` reports yield some id in range.
        columns: the parameters of R rows, with keys unless all are greedy.
        sample_rows: [R] int64, the row of the logits that each draw uses; None: R is U, one draw per row in order.
        rows_at_once: rows per call of each operation; None: as many as fit the cache.
    """
    if sample_rows is not None:
        logits = logits[sample_rows]
    if columns.all_greedy:
        return SampleResult(greedy(logits))
    assert columns.keys is not None, "draws need keys"
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if columns.greedy_rows is not None and columns.greedy_rows.numel():
        tokens[columns.greedy_rows] = greedy(logits.index_select(0, columns.greedy_rows))
    for rows in columns.draws:
        drawn = _draw(logits, rows, columns, columns.keys, rows_at_once)
        if rows.index is None:
            return SampleResult(drawn)
        tokens[rows.index] = drawn
    return SampleResult(tokens)


def _draw(logits: Tensor, rows: _Rows, columns: SamplingColumns, keys: Tensor, rows_at_once: int | None) -> Tensor:
    """Sample the rows of one group: [r] int64."""
    vocab = logits.shape[1]
    temperature, top_k = rows.of(columns.temperature), rows.of(columns.top_k)
    top_p, min_p, keys = rows.of(columns.top_p), rows.of(columns.min_p), rows.of(keys)
    step = rows_at_once or max(1, _CHUNK // vocab)
    parts = []
    for begin in range(0, temperature.shape[0], step):
        at = slice(begin, begin + step)
        part = (logits[at] if rows.index is None else logits.index_select(0, rows.index[at])).float()
        if rows.top_k:
            k = top_k[at].clamp(max=vocab)
            candidates = largest(part, min(rows.top_k, vocab))
            parts.append(draw_candidates(*candidates, temperature[at], k, top_p[at], min_p[at], keys[at]))
        else:
            parts.append(
                _draw_whole(
                    part,
                    temperature[at],
                    top_p[at] if rows.has_top_p else None,
                    min_p[at] if rows.has_min_p else None,
                    keys[at],
                )
            )
    return torch.cat(parts)


def _scaled(logits: Tensor, largest_logit: Tensor, temperature: Tensor) -> Tensor:
    """Scores x = (logit - m) / temperature: 0 for the most likely token, whatever the temperature."""
    return (logits - largest_logit).div_(temperature[:, None])


def draw_candidates(
    values: Tensor, ids: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> Tensor:
    """Sample among candidates [r, M], which are in order and include every survivor of top_k."""
    x = _scaled(values, values[:, :1], temperature)
    q = x.exp().masked_fill_(torch.arange(x.shape[1], device=x.device) >= top_k[:, None], 0.0)
    before = q.cumsum(-1, dtype=torch.float64)
    total = before[:, -1:].clone()
    before -= q
    survives = (before < top_p[:, None].double() * total) & (q >= min_p[:, None]) & (q > 0)
    survives[:, 0] = True
    scores = (x + gumbel_at(keys, ids)).masked_fill_(~survives, -torch.inf)
    return ids.gather(-1, greedy(scores)[:, None]).squeeze(-1)


def _draw_whole(
    logits: Tensor, temperature: Tensor, top_p: Tensor | None, min_p: Tensor | None, keys: Tensor
) -> Tensor:
    """Sample among all tokens [r, V]; `top_p` or `min_p` is None if no row has that filter."""
    x = _scaled(logits, logits.amax(-1, keepdim=True), temperature)
    scores = gumbel_at(keys, torch.arange(logits.shape[1], device=logits.device)[None]).add_(x)
    if top_p is None and min_p is None:
        return greedy(scores)
    q = x.exp_()
    if min_p is not None:
        scores.masked_fill_(q < min_p[:, None], -torch.inf)
    tokens = greedy(scores)
    if top_p is not None:
        _redraw_outside_top_p(logits, q, scores, top_p, tokens)
    return tokens


def _redraw_outside_top_p(logits: Tensor, q: Tensor, scores: Tensor, top_p: Tensor, tokens: Tensor) -> None:
    """Replace the `tokens` [r] that do not survive top_p by the best-scored survivors, in place."""
    limit = q.sum(-1, dtype=torch.float64) * top_p.double()
    ids = torch.arange(logits.shape[1], device=logits.device)
    rows = torch.arange(logits.shape[0], device=logits.device)  # rows whose token is not yet accepted
    while rows.numel():
        chosen = tokens[rows, None]
        value = logits.gather(-1, chosen)
        before = (logits > value).logical_or_((logits == value).logical_and_(ids < chosen))
        mass = (q * before).sum(-1, dtype=torch.float64)
        outside = ((mass >= limit) & (mass > 0)).nonzero().flatten()  # the first token in the order always survives
        rows, limit = rows[outside], limit[outside]
        logits, q = logits[outside], q[outside]
        scores = scores[outside].masked_fill_(~before[outside], -torch.inf)
        tokens[rows] = greedy(scores)
