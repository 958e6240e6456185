"""Attention of further kinds, against transformers: by a learned index, as far as it selects all keys, and in loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchgen.engine.engine import Engine
from tests.engine.reference import eager_greedy, save_with_words, shared_prefix_prompts
from tests.models.tiny import SPARSE_TYPES, VOCAB

NEW = 12
LIMIT = 64
COMMON = ("deepseek_v32", "minimax_m3_vl_text", "dory")
"""Types that every run of the tests covers: single keys, blocks of keys, and loops."""


def engine_of(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), dtype="float32", page_size=4, **options)


def marked(names: tuple[str, ...]) -> list[Any]:
    return [name if name in COMMON else pytest.param(name, marks=pytest.mark.slow) for name in names]


def check(model_type: str, folder: Path) -> None:
    """Rows together, the longest one alone, and all shuffled in small chunks."""
    save_with_words(model_type, folder)
    prompts = shared_prefix_prompts(8, VOCAB, seed=3)
    prompts.append((prompts[0] * LIMIT)[: LIMIT - NEW])
    expected = eager_greedy(folder, prompts, NEW, use_cache=False, padded=1)  # padding would move blocks of keys
    everything = list(range(len(prompts)))
    engine = engine_of(folder)
    expected.check(engine, prompts, everything)
    expected.check(engine, prompts, [len(prompts) - 1])
    expected.check(engine_of(folder, max_tokens_per_step=24, max_num_seqs=8), prompts, everything[::-1])


@pytest.mark.parametrize("model_type", marked(SPARSE_TYPES))
def test_an_index_that_selects_all_keys_equals_the_full_forward(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


@pytest.mark.parametrize("model_type", marked(("dory", "hrm_text", "diffllama")))
def test_modules_that_attend_several_times_equal_the_full_forward(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


def test_longer_rows_are_errors_that_name_the_limit(tmp_path: Path) -> None:
    engine = engine_of(save_with_words("deepseek_v32", tmp_path))
    lengths = [(40, LIMIT - 40), (40, LIMIT - 39), (LIMIT, 1)]
    rows = [{"input_ids": [3] * length, "sampling_params": {"max_new_tokens": new}} for length, new in lengths]
    fits, longer, full = engine.generate(rows, ordered=True)
    assert (fits.error, len(fits.output_ids or ())) == (None, LIMIT - 40)
    for failed, param in ((longer, "max_new_tokens"), (full, None)):
        assert failed.error is not None
        assert (failed.error.code, failed.error.param) == ("context_length_exceeded", param)
        assert "the context is 64 (past it a learned index selects the keys" in failed.error.message
