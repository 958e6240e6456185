"""Sampling: the same tokens as the plain version on the same logits.

Both add the same noise to scores that differ by rounding, so two tokens whose scores nearly tie may swap. No other
difference is allowed: the scores of each differing token are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.kernels.device import device_for
from batchgen.kernels.noise import gumbel_at, row_keys
from batchgen.kernels.sampling import GREEDY_TEMPERATURE, SamplingColumns
from tests.gpu.compare import Verdict, judge, judge_equal, poisoned
from tests.gpu.device import Gpu
from tests.gpu.registry import DTYPES, Labelled, case
from tests.gpu.under_test import kernel, reference
from tests.kernels.op_arguments import bad_rows

TIE = 1e-5
"""Score difference below which two tokens may swap."""
EDGE = 1e-6
"""Distance to the cut of top_p or min_p below which a token may be kept or dropped."""


@dataclass(frozen=True, slots=True)
class Mode:
    """Sampling parameters of a batch; each tuple is cycled over the rows."""

    temperature: tuple[float, ...] = (1.0,)
    top_k: tuple[int, ...] = (0,)
    top_p: tuple[float, ...] = (1.0,)
    min_p: tuple[float, ...] = (0.0,)

    def columns(self, rows: int, device: torch.device) -> SamplingColumns:
        """Sampling columns of `rows` rows, without noise keys."""

        def spread(values: tuple[float, ...]) -> list[float]:
            return [values[i % len(values)] for i in range(rows)]

        top_k = [self.top_k[i % len(self.top_k)] for i in range(rows)]
        columns = (spread(self.temperature), top_k, spread(self.top_p), spread(self.min_p))
        return SamplingColumns.of(*columns, device_for(device))


MODES = {
    "greedy": Mode(temperature=(0.0,)),
    "temperature": Mode(temperature=(0.3, 0.7, 1.0, 1.5)),
    "top_k 50": Mode(temperature=(0.8,), top_k=(50,)),
    "top_p 0.9": Mode(temperature=(0.9,), top_p=(0.9,)),
    "min_p": Mode(temperature=(1.2,), min_p=(0.05,)),
    "mixed": Mode((0.0, 0.7, 1.0, 1.3, 1.0), (0, 50, 0, 3, 1000, 0, 1), (1.0, 0.9, 0.5, 0.99), (0.0, 0.0, 0.1)),
}


def keys_of(rows: int, position: int = 7) -> Tensor:
    """[rows] noise keys of rows with different seeds."""
    seeds = torch.arange(rows, dtype=torch.int64) * 7919 + 11
    return row_keys(seeds, torch.arange(rows) % 4, torch.full((rows,), position))


@case(
    "parity",
    "sample",
    [
        {"rows": 24, "vocab": 151936, "host": 1},
        {"rows": 256, "vocab": 151936, "host": 0},
        {"rows": 64, "vocab": 128256, "host": 0},
        {"rows": 129, "vocab": 257, "host": 1},
        {"rows": 1, "vocab": 32000, "host": 1},
    ],
    [{"rows": 6, "vocab": 150, "host": 1}],
    DTYPES,
)
def sample(gpu: Gpu, dtype: torch.dtype, *, rows: int, vocab: int, host: int) -> Iterator[Labelled]:
    """Compared with the plain version on the host, or on the device for numbers of rows that are slow on the host."""
    logits = gpu.logits(rows, vocab, dtype)
    where = torch.device("cpu") if host else gpu.device
    copied = logits.to(where)
    for name, mode in MODES.items():
        keys = keys_of(rows)
        columns = mode.columns(rows, gpu.device).with_keys(keys.to(gpu.device))
        with poisoned():
            got = kernel("sample")(logits, columns).tokens
        want = reference("sample")(copied, mode.columns(rows, where).with_keys(keys.to(where))).tokens
        yield name, judge_draws(logits, mode, keys, got.cpu(), want.cpu())


def judge_draws(logits: Tensor, mode: Mode, keys: Tensor, got: Tensor, want: Tensor) -> Verdict:
    """Compare sampled tokens: they may differ only if their scores tie."""
    rows, vocab = logits.shape
    if got.shape != want.shape or bool(((got < 0) | (got >= vocab)).any()):
        return Verdict(False, float("inf"), 0.0, 0.0, "tokens out of range")
    differ = (got != want).nonzero().flatten()
    if not len(differ):
        return Verdict(True, 0.0, 0.0, TIE)
    columns = mode.columns(rows, torch.device("cpu"))
    greedy = columns.temperature < GREEDY_TEMPERATURE
    both = torch.stack((got, want), -1)[differ]  # [d, 2]
    chosen = logits[differ.to(logits.device)].cpu().gather(-1, both).double()
    scores = chosen / columns.temperature.where(~greedy, 1.0)[differ, None].double()
    scores += gumbel_at(keys[differ], both).masked_fill_(greedy[differ, None], 0.0)
    gap = float((scores[:, 0] - scores[:, 1]).abs().max())
    return Verdict(gap < TIE, gap, 0.0, TIE, f"{len(differ)} of {rows} rows differ, scores apart by at most {gap:.2g}")


@case(
    "parity",
    "sample",
    [{"rows": 256, "vocab": 151936}, {"rows": 3, "vocab": 32001}],
    [{"rows": 4, "vocab": 150}],
    DTYPES,
    name="unusable_rows",
)
def unusable_rows(gpu: Gpu, dtype: torch.dtype, *, rows: int, vocab: int) -> Iterator[Labelled]:
    """One row each with a not-a-number, with +inf, and with only -inf; the other rows are sampled as usual."""
    logits = bad_rows(gpu, dtype, rows, vocab)["logits"]
    columns = MODES["top_k 50"].columns(rows, gpu.device).with_keys(keys_of(rows).to(gpu.device))
    with poisoned():
        drawn, (ids, *_, bad) = kernel("sample")(logits, columns), kernel("argmax_lse")(logits)
    want = reference("nan_rows")(logits)
    for name, found in (("draw", drawn.bad), ("largest", bad)):
        yield f"rows of a {name}", judge_equal(want if found is None else found, want)
    for name, tokens in (("draw", drawn.tokens), ("largest", ids)):
        inside = (tokens >= 0) & (tokens < vocab)
        yield f"tokens of a {name} in range", judge_equal(inside, torch.ones_like(inside))


@case(
    "parity",
    "filtered_scores",
    [{"rows": 64, "vocab": 151936}, {"rows": 129, "vocab": 257}, {"rows": 1, "vocab": 32000}],
    [{"rows": 4, "vocab": 150}],
    DTYPES,
)
def filtered_scores(gpu: Gpu, dtype: torch.dtype, *, rows: int, vocab: int) -> Iterator[Labelled]:
    """Tokens that the filters keep, except those that rounding decides, and their scores."""
    logits = gpu.logits(rows, vocab, dtype)
    for name, mode in MODES.items():
        columns = mode.columns(rows, gpu.device).with_keys(keys_of(rows).to(gpu.device))
        drawn = reference("sample")(logits, columns).tokens
        args = (columns.temperature, columns.top_k, columns.top_p, columns.min_p, drawn)
        with poisoned():
            got = kernel("filtered_scores")(logits, *args)
        plain = reference("filtered_scores")(logits.float(), *args)
        differ = torch.isfinite(got) != torch.isfinite(plain)
        near = _near_cut(logits.double(), columns, differ)
        yield f"{name}: survivors", judge_equal(differ & ~near, torch.zeros_like(differ))
        greedy = columns.temperature < GREEDY_TEMPERATURE
        heat = columns.temperature.where(~greedy, 1.0).double()[:, None]
        truth = (logits.double() - logits.double().amax(-1, keepdim=True)) / heat
        both = torch.isfinite(got) & torch.isfinite(plain)
        yield f"{name}: scores", judge(got[both], plain[both], truth[both], torch.float32)


def _near_cut(logits: Tensor, columns: SamplingColumns, differ: Tensor) -> Tensor:
    """[R, V] bool: tokens of `differ` [R, V] within rounding of the cut of top_p or min_p.

    Checks at most R tokens: rounding leaves no more.
    """
    found = torch.zeros_like(differ)
    for row, token in differ.nonzero()[: len(differ)].tolist():
        x = (logits[row] - logits[row].max()) / float(columns.temperature[row])
        ranked, order = x.sort(descending=True, stable=True)
        q = ranked.exp()
        k = int(columns.top_k[row])
        q[k if k > 0 else len(q) :] = 0.0
        at = int((order == token).nonzero())
        mass = float(q[:at].sum() / q.sum()) - float(columns.top_p[row])
        found[row, token] = min(abs(mass), abs(float(q[at] - columns.min_p[row]))) < EDGE
    return found
