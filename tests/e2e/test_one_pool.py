"""One long prompt and many short rows in a pool that is little larger than the long prompt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.one_pool import LONG, NEW, POOL, SHORT, VOCAB
from tests.engine.reference import save_with_words

SIZES = {"hidden_size": 8, "head_dim": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 16}


def test_a_long_prompt_and_many_rows_in_one_pool(tmp_path: Path) -> None:
    save_with_words("llama", tmp_path, vocab_size=VOCAB, max_position_embeddings=1 << 15, num_hidden_layers=1, **SIZES)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.one_pool", str(tmp_path)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["errors"] == []
    assert found["rows"] == SHORT + 1
    assert found["tokens"] == NEW * (SHORT + 1)
    assert found["pool"] <= POOL
    assert LONG // 16 < found["peak_pages"] < POOL // 1024, "the long prompt's pages and those of other rows"
    assert found["prompt_tokens"] >= LONG
    assert found["recomputed_tokens"] == 0
    assert found["steps"] >= LONG // 2048
    assert found["grown"] < 4 * 2048 * LONG, "the scores of one chunk against its whole context would be as much"
