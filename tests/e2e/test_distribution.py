"""20,000 tokens drawn by the engine compared with the exact filtered distribution by the chi-square test."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchgen import Engine
from tests.chi_square import excess
from tests.kernels.references import filtered_distribution

SAMPLES = 20_000
PROMPT = [0, 40, 41, 50, 60, 70]
LARGEST = 3.0
"""Standard deviations; a chi-square statistic exceeds its mean by more than that in one of some hundred tests."""


@pytest.fixture(scope="module")
def logits(model: Path) -> npt.NDArray[np.float32]:
    """[V] logits of transformers' eager model after the prompt."""
    eager = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return eager(torch.tensor([PROMPT])).logits[0, -1].numpy()  # type: ignore[no-any-return]


@pytest.mark.field("temperature", "top_k", "top_p", "min_p", "seed", "n")
@pytest.mark.parametrize(
    "mix",
    [
        *((0.7, -1, 1.0, 0.0), (1.6, 5, 1.0, 0.0), (1.4, 12, 0.85, 0.02)),
        *(
            pytest.param(mix, marks=pytest.mark.slow)
            for mix in ((1.0, -1, 1.0, 0.0), (1.3, -1, 0.8, 0.0), (1.5, -1, 1.0, 0.1))
        ),
    ],
    ids=str,
)
def test_first_tokens_have_the_exact_distribution(
    engine: Engine, logits: npt.NDArray[np.float32], mix: tuple[float, int, float, float]
) -> None:
    """Rows with `n` and `seed`, rows with `n` alone, and rows with one sample each."""
    names = ("temperature", "top_k", "top_p", "min_p")
    row: dict[str, Any] = {"input_ids": PROMPT, "max_new_tokens": 1, "ignore_eos": True}
    row |= dict(zip(names, mix, strict=True))
    rows = [row | {"n": 500, "seed": seed} for seed in range(-10, 10)]
    rows += [row | {"n": 500, "id": f"unseeded {i}"} for i in range(14)]
    rows += [row | {"id": f"alone {i}"} for i in range(3_000)]
    counts = Counter((c.output_ids or [-1])[0] for c in engine.generate(rows))
    assert counts.total() == SAMPLES
    observed = np.array([counts[i] for i in range(len(logits))], np.int64)
    assert excess(observed, filtered_distribution(logits, *mix)) < LARGEST


def test_a_slightly_different_distribution_fails(logits: npt.NDArray[np.float32]) -> None:
    """Samples at temperature 1.05 differ from the distribution at 1.0."""
    exact, tilted = (filtered_distribution(logits, t, -1, 1.0, 0.0) for t in (1.0, 1.05))
    assert excess(np.random.default_rng(0).multinomial(SAMPLES, tilted), exact) > LARGEST
