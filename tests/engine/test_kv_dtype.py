"""Jobs with keys and values in E4M3, in Triton's interpreter, and where the option is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchgen import Engine
from batchgen.config.engine_config import EngineConfig
from batchgen.demo import model_path
from batchgen.engine.backend_choice import refuse_kv_dtype
from batchgen.errors import UsageError
from batchgen.kernels.types import E4M3, LayerKV
from batchgen.request.completion import Completion
from tests.e2e.runner import run
from tests.engine.reference import save_with_words, shared_prefix_prompts
from tests.models.loading import inspect_model
from tests.models.tiny import VOCAB


def generate(folder: Path, **options: Any) -> tuple[Engine, list[Completion]]:
    prompts = shared_prefix_prompts(5, VOCAB, seed=3, longest=24)
    kinds: list[dict[str, Any]] = [{"temperature": 0, "return_logprob": True}, {"n": 2, "seed": 1}]
    work = [
        {"input_ids": ids, "max_new_tokens": 3, "ignore_eos": True, **kinds[i % 2]} for i, ids in enumerate(prompts)
    ]
    engine = Engine(str(folder), attention="triton", dtype="float32", page_size=4, max_tokens_per_step=64, **options)
    done = list(engine.generate(work, ordered=True))
    assert all(c.error is None for c in done)
    return engine, done


WAYS = [
    ("qwen3", {}),
    pytest.param("llama", {"deterministic": True}, marks=pytest.mark.slow),
    pytest.param("gpt_oss", {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model_type", "options"), WAYS)
def test_rows_are_near_those_of_full_keys_and_values(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Natively, batch-invariant, and through transformers with windows and sinks."""
    folder = save_with_words(model_type, tmp_path)
    full, expected = generate(folder, **options)
    engine, got = generate(folder, kv_dtype="fp8", **options)
    assert engine.model.spec.kv_bytes_per_token * 4 == full.model.spec.kv_bytes_per_token
    assert engine.last_run is not None
    peaks = [sum(each.last_run.kv_peak_bytes.values()) for each in (engine, full)]  # type: ignore[union-attr]
    assert 4 * peaks[0] == peaks[1] > 0
    compared = 0
    for ours, theirs in zip(got, expected, strict=True):
        if theirs.output_logprobs is not None and ours.output_logprobs is not None:
            first = slice(0, 1)  # later tokens may differ
            torch.testing.assert_close(
                torch.tensor(ours.output_logprobs[first]), torch.tensor(theirs.output_logprobs[first]), rtol=0, atol=0.2
            )
            assert not np.array_equal(ours.output_logprobs, theirs.output_logprobs)
            compared += 1
    assert compared == 3


SPEC = replace(inspect_model(model_path(), dtype="bfloat16", device="cpu"), device=torch.device("cuda"))


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"device": torch.device("cpu")}, {}, "it needs a GPU"),
        ({}, {"attention": "flash"}, "flash attention reads keys and values in the dtype of the run"),
        ({"kv_layers": (LayerKV(1, 24, 16, latent=True),)}, {}, r"stores latents \(MLA\)"),
    ],
)
def test_where_it_is_refused(changes: dict[str, Any], options: dict[str, Any], reason: str) -> None:
    refuse_kv_dtype(EngineConfig(kv_dtype="fp8"), SPEC)
    refuse_kv_dtype(EngineConfig(**options), replace(SPEC, **changes))
    with pytest.raises(UsageError, match=f"`--kv-dtype fp8` is not supported: .*{reason}.*; leave the option out"):
        refuse_kv_dtype(EngineConfig(kv_dtype="fp8", **options), replace(SPEC, **changes))


def test_check_counts_the_smaller_cache_and_refuses_it_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "Sort: 3 1 2"}\n')
    sizes = []
    for flags in ([], ["--kv-dtype", "fp8"]):
        words = ["check", "rows.jsonl", "--device", "cuda", "--dtype", "bfloat16", "--json", *flags]
        report = run(words, tmp_path).report
        sizes.append((report["model"]["kv_bytes_per_token"], report["kv_peak_bytes"]))
    assert [2 * each for each in sizes[1]] == [*sizes[0]]
    for command in ("check", "run"):
        refused = run([command, "rows.jsonl", "--kv-dtype", "fp8", "--device", "cpu"], tmp_path, expect=2).stderr
        assert "`--kv-dtype fp8` is not supported: it needs a GPU; leave the option out" in refused
    assert E4M3.itemsize == 1
