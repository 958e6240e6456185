"""Whole runs with compiled attention against plain PyTorch, and their counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchgen.engine import engine as engine_module
from batchgen.engine.engine import Engine
from batchgen.kernels.cpu.library import loaded
from batchgen.plan.config import GROUP_MIN_SAVING
from tests.engine.reference import save_with_words, shared_prefix_prompts
from tests.models.tiny import VOCAB

pytestmark = pytest.mark.skipif(not loaded(), reason="no C++ compiler here")

NEW_TOKENS = 8


def generate(folder: Path, attention: str, **options: Any) -> tuple[list[list[int]], Engine]:
    engine = Engine(str(folder), attention=attention, dtype="float32", page_size=4, **options)
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    prompts = shared_prefix_prompts(40, VOCAB, seed=3)
    done = engine.generate(({"input_ids": p, "sampling_params": params} for p in prompts), ordered=True)
    return [list(c.output_ids or ()) for c in done], engine


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "deepseek_v3"])
def test_tokens_equal_the_torch_backend(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many prefix groups as possible; `test_parity` has none."""
    monkeypatch.setattr(engine_module, "group_min_saving", lambda *given: 1)
    save_with_words(model_type, tmp_path)
    expected, _ = generate(tmp_path, "torch")
    got, engine = generate(tmp_path, "compiled")
    assert got == expected
    assert engine.last_run.scheduler.stats.group_passes > 0


@pytest.mark.parametrize(("model_type", "position_size"), [("llama", 2 * 2 * 16), ("deepseek_v3", 16 + 8)])
@pytest.mark.parametrize("saving", [1, 1 << 20])
def test_bytes_read_equal_the_plan(
    model_type: str, position_size: int, saving: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of keys and values, or of the latent and the rotated key."""
    monkeypatch.setattr(engine_module, "group_min_saving", lambda *given: saving)
    save_with_words(model_type, tmp_path)
    _, engine = generate(tmp_path, "compiled")
    stats, counts, layers = engine.last_run.scheduler.stats, engine.last_run.loop.counts(), engine.model.spec.kv_layers
    position_bytes = len(layers) * position_size * 4
    assert counts["attention_kv_bytes"] == position_bytes * (stats.decode_kv_reads + stats.chunk_kv_positions)
    assert counts["attention_items"] == len(layers) * (stats.prefill_chunks + stats.decode_tokens + stats.group_passes)
    assert (counts["attention_merges"] > 0) == (saving == 1)
    assert counts["group_min_saving"] == saving


def test_the_group_threshold_is_measured_or_a_constant(tmp_path: Path) -> None:
    save_with_words("llama", tmp_path)
    found = {}
    for name, options in (("compiled", {}), ("torch", {}), ("auto", {"deterministic": True})):
        _, engine = generate(tmp_path, name, **options)
        found[name] = engine.last_run.loop.counts()["group_min_saving"]
    assert found["compiled"] in {1 << n for n in range(6, 13)}
    assert found["torch"] == found["auto"] == GROUP_MIN_SAVING
