"""20,000 sampled tokens compared with the exact filtered distribution by the chi-square test."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchgen.engine.engine import Engine

SAMPLES = 20_000
PROMPT = [0, 40, 41, 50, 60, 70]
MIXES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.6, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 1.4, "top_k": 12, "top_p": 0.85, "min_p": 0.02},
]


def exact_distribution(logits: npt.NDArray[np.float64], mix: dict[str, Any]) -> npt.NDArray[np.float64]:
    """[V] float64: probabilities after temperature, top-k, top-p and min-p, in this order."""
    logits = logits / mix["temperature"]
    p = np.exp(logits - logits.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if mix.get("top_k", -1) > 0:
        p[order[mix["top_k"] :]] = 0
        p /= p.sum()
    if mix.get("top_p", 1.0) < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= mix["top_p"]]] = 0
        p /= p.sum()
    if mix.get("min_p", 0.0) > 0:
        p[p < mix["min_p"] * p.max()] = 0
        p /= p.sum()
    return p


def p_value(counts: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> float:
    """p-value of the chi-square test. Cells with an expected count below five are merged."""
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    if wanted[-1] < 5:
        at = int(np.argmin(wanted[:-1]))
        observed[at] += observed[-1]
        wanted[at] += wanted[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    assert len(wanted) > 2
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    return upper_gamma((len(wanted) - 1) / 2, statistic / 2)


def upper_gamma(a: float, x: float) -> float:
    """Regularised upper incomplete gamma function, by its series or its continued fraction (Numerical Recipes 6.2)."""
    scale = math.exp(-x + a * math.log(x) - math.lgamma(a)) if x > 0 else 0.0
    if x < a + 1:
        term = total = 1 / a
        n = a
        while abs(term) > abs(total) * 1e-15:
            n += 1
            term *= x / n
            total += term
        return 1 - total * scale
    b = x + 1 - a
    c, d = 1e300, 1 / b
    h = d
    for i in range(1, 10_000):
        an = -i * (i - a)
        b += 2
        d = 1 / (an * d + b)
        c = b + an / c
        h *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return h * scale


@pytest.mark.parametrize(
    ("a", "x", "value"),
    [(0.5, 1.920729410347062, 0.05), (5.0, 9.153519013675757, 0.05), (50.0, 67.9033, 0.01), (5.0, 1.0, 0.99634015)],
)
def test_upper_gamma_gives_tabulated_quantiles(a: float, x: float, value: float) -> None:
    """Chi-square quantiles 3.841 at 1, 18.307 at 10 and 135.807 at 100 degrees of freedom."""
    assert upper_gamma(a, x) == pytest.approx(value, rel=2e-4)


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine(str(model), dtype="float32")


@pytest.fixture(scope="module")
def logits(model: Path) -> npt.NDArray[np.float64]:
    """[V] float64: logits of transformers' eager model after the prompt."""
    eager = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        last: torch.Tensor = eager(torch.tensor([PROMPT])).logits[0, -1]
    return last.double().numpy()


@pytest.mark.field("temperature", "top_k", "top_p", "min_p", "seed", "n")
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_first_tokens_have_the_exact_distribution(
    engine: Engine, logits: npt.NDArray[np.float64], mix: dict[str, Any]
) -> None:
    """Rows with `n` and `seed`, rows with `n` alone, and rows with one sample each."""
    off = {"top_k": -1, "top_p": 1.0, "min_p": 0.0}
    row = {"input_ids": PROMPT, **off, **mix, "max_new_tokens": 1, "ignore_eos": True}
    rows = [row | {"n": 500, "seed": seed} for seed in range(-10, 10)]
    rows += [row | {"n": 500, "id": f"unseeded {i}"} for i in range(14)]
    rows += [row | {"id": f"alone {i}"} for i in range(3_000)]
    counts = Counter((c.output_ids or [-1])[0] for c in engine.generate(rows))
    assert counts.total() == SAMPLES
    probabilities = exact_distribution(logits, mix)
    observed = np.array([counts[i] for i in range(len(probabilities))], np.int64)
    # float32 rounding at a filter's threshold may add or lose a token of negligible probability.
    assert observed[probabilities == 0].sum() <= SAMPLES * 1e-4
    assert p_value(observed, probabilities * SAMPLES) > 1e-3


def test_a_slightly_different_distribution_fails(logits: npt.NDArray[np.float64]) -> None:
    """Samples at temperature 1.05 differ from the distribution at 1.0."""
    probabilities = exact_distribution(logits, {"temperature": 1.0})
    tilted = exact_distribution(logits, {"temperature": 1.05})
    counts = np.random.default_rng(0).multinomial(SAMPLES, tilted)
    assert p_value(counts, probabilities * SAMPLES) < 1e-3
