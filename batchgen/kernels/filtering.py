"""Scores of the distribution that `sampling` draws from, for rows that return them.

With x = (logit - m) / temperature and m the row's largest logit, a token that survives top_k, top_p and min_p (see
`sampling`) has the score x, any other -inf; the log-softmax of the scores is the distribution. A greedy row counts as
temperature 1, unfiltered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.sampling import GREEDY_TEMPERATURE


def filtered_scores(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, drawn: Tensor
) -> Tensor:
    """Scores of a few rows, [r, V]. Sorts each row that has a filter, so it is meant for rows that return scores only.

    Args:
        logits: [r, V] float32, after penalties and masks; left as it is.
        temperature: [r] float32; below 1e-5 the row is greedy.
        top_k: [r] int64; 0 or less keeps all.
        top_p: [r] float32 in (0, 1].
        min_p: [r] float32 in [0, 1].
        drawn: [r] int64, a token that the row drew; it always survives, even if rounding at the edge differs.

    Returns:
        [r, V] float32.
    """
    greedy = temperature < GREEDY_TEMPERATURE
    x = (logits - logits.amax(-1, keepdim=True)).div_(temperature.where(~greedy, 1.0)[:, None])
    cut = ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)) & ~greedy
    if bool(cut.any()):
        rows = cut.nonzero().flatten()
        x[rows] = _cut(x[rows], top_k[rows], top_p[rows], min_p[rows], drawn[rows])
    return x


def _cut(x: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, drawn: Tensor) -> Tensor:
    ranked, order = torch.sort(x, dim=-1, descending=True, stable=True)  # stable: ties by lowest id
    q = ranked.exp()
    rank = torch.arange(x.shape[1], device=x.device)
    in_top_k = (rank < top_k[:, None]) | (top_k[:, None] <= 0)
    mass = (q * in_top_k).cumsum(-1, dtype=torch.float64)
    before = mass - q
    survives = in_top_k & ((before < top_p[:, None].double() * mass[:, -1:]) | (top_p[:, None] >= 1.0))
    survives &= q >= min_p[:, None]
    survives |= order == drawn[:, None]
    return torch.full_like(x, -torch.inf).scatter_(-1, order, ranked.masked_fill_(~survives, -torch.inf))
