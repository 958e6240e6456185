"""Whole jobs with Triton's kernels in the interpreter, against plain PyTorch, with every kind of row."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.engine.engine import Engine
from batchgen.errors import ErrorCode, UsageError
from batchgen.kernels.gpu.launch import recording
from batchgen.request.completion import Completion
from tests.engine.reference import assert_all_same, assert_same, save_with_words, shared_prefix_prompts
from tests.engine.sampling.grammar_model import save_grammar_model
from tests.models.adapters import KINDS, save_adapter
from tests.models.tiny import VOCAB

NEW_TOKENS = 2


def rows(adapter: str | None) -> list[dict[str, Any]]:
    """One row of each kind, with prefixes shared at several depths."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0},
        {"temperature": 0.8, "top_k": 5, "seed": 1},
        {"temperature": 1.2, "top_p": 0.7, "seed": 2, "n": 2},
        {"temperature": 1.0, "min_p": 0.05, "seed": 3, "return_logprob": True, "token_ids_logprob": [4, 9]},
        {"temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
        {"temperature": 1.0, "seed": 4, "logit_bias": {"5": 3.0, "6": -100.0}, "bad_words": [[7], [8, 9]]},
        {"temperature": 1.0, "seed": 5, "allowed_token_ids": [10, 20, 30]},
        {"temperature": 0, "min_new_tokens": 2, "stop_token_ids": list(range(3, VOCAB, 2)), "ignore_eos": False},
        {"temperature": 0, "return_hidden_states": {"layers": [0, 1, -1], "tokens": "all"}},
        {"temperature": 0, "lora_path": adapter},
    ]
    prompts = shared_prefix_prompts(len(kinds), VOCAB, seed=2, longest=12)
    common = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return [{"input_ids": p, **common, **kind} for p, kind in zip(prompts, kinds, strict=True)]


def generate(folder: Path, attention: str, work: list[dict[str, Any]], **options: Any) -> list[Completion]:
    engine = Engine(str(folder), attention=attention, dtype="float32", page_size=4, max_tokens_per_step=64, **options)
    assert engine.backend.name == attention
    done = list(engine.generate(work, ordered=True))
    assert all(c.error is None for c in done)
    return done


@pytest.mark.parametrize(
    ("model_type", "implementation"), [("qwen3", "native"), ("gpt_oss", "transformers"), ("youtu", "transformers")]
)
def test_every_kind_of_row(tmp_path: Path, model_type: str, implementation: str) -> None:
    """The transformers model has experts, sinks, and layers with and without a window."""
    sizes = {"layer_types": ["sliding_attention", "full_attention"]}
    folder = save_with_words(model_type, tmp_path / "model", num_hidden_layers=2, use_sliding_window=True, **sizes)
    adapters = {}
    if model_type == "qwen3":
        adapters["all"] = str(save_adapter(folder, tmp_path / "all", seed=1, **KINDS["all"]))
    work = rows("all" if adapters else None)
    options = {"model_impl": implementation, "lora": adapters}
    want = generate(folder, "torch", work, **options)
    got = generate(folder, "triton", work, **options)
    assert len(got) == len(work) + 1
    assert_all_same(got, want)


def test_constrained_rows(tmp_path: Path) -> None:
    folder = save_grammar_model(tmp_path)
    kinds: list[dict[str, Any]] = [
        {"regex": "[a-f]{2,5}", "temperature": 1.0},
        {"choice": ["yes", "no", "nothing"], "temperature": 0, "return_logprob": True},
        {"json_schema": {"enum": ["x", "y"]}, "temperature": 0.7, "n": 2},
        {"ebnf": 'root ::= "(" root ")" | [xyz]', "temperature": 0, "min_new_tokens": 3},
        {"temperature": 0},
    ]
    work = [{"text": "Row: ", "max_new_tokens": 5, "seed": i, **kind} for i, kind in enumerate(kinds)]
    want, got = (generate(folder, attention, work) for attention in ("torch", "triton"))
    assert len(got) == len(want) == len(work) + 1
    for ours, theirs in zip(got, want, strict=True):
        assert_same(ours, theirs)
        assert ours.constraint_ok == theirs.constraint_ok


def test_greedy_rows_launch_only_the_kernels_that_they_need(tmp_path: Path) -> None:
    """Norms, rotary tables, heads, attention and activations, and one kernel that samples and finds NaN logits."""
    folder = save_with_words("llama", tmp_path / "model")
    engine = Engine(str(folder), attention="triton", dtype="float32", page_size=4)
    kernels: Counter[str] = Counter()

    def run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        kernels[kernel.fn.__name__] += 1
        if all(grid):
            kernel[grid](*args, **constants)

    work = [{"input_ids": [5, 6, 7 + i], "temperature": 0, "max_new_tokens": 3, "ignore_eos": True} for i in range(3)]
    with recording(run):
        assert all(c.error is None for c in engine.generate(work))
    layers = engine.model.spec.num_layers
    assert kernels.total() == engine.last_run.loop.state.steps * (5 * layers + 3), kernels


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter
@pytest.mark.parametrize("edited", [{}, {"repetition_penalty": 1.2}])
def test_only_rows_with_nan_logits_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edited: dict[str, Any]
) -> None:
    """Found by the sampling kernel for plain rows, and before logits processing for other rows."""
    folder = save_with_words("llama", tmp_path / "model")
    engine = Engine(str(folder), attention="triton", dtype="float32", page_size=4)
    logits = engine.model.logits

    def broken(hidden: Tensor) -> Tensor:
        found = logits(hidden)
        found[1, 3], found[2] = torch.nan, -torch.inf
        return found

    monkeypatch.setattr(engine.model, "logits", broken)
    work = [{"input_ids": [i + 3, 7], "max_new_tokens": 1, "temperature": i % 2, **edited} for i in range(4)]
    done = list(engine.generate(work, ordered=True))
    assert [c.error.code if c.error else None for c in done] == [None, *[ErrorCode.NAN_LOGITS] * 2, None]


def test_a_deterministic_job_with_gpu_kernels(tmp_path: Path) -> None:
    """Equals the plain job, and every linear layer uses the batch-invariant matmul kernel."""
    save_with_words("qwen3", tmp_path / "base", num_hidden_layers=1)
    work = rows(None)[:6]
    wanted = generate(tmp_path / "base", "torch", work)
    kernels: Counter[str] = Counter()
    options = {"attention": "triton", "dtype": "float32", "page_size": 4, "max_tokens_per_step": 64}
    engine = Engine(str(tmp_path / "base"), **options, deterministic=True)
    assert_all_same(engine.generate(work, ordered=True), wanted)
    with recording(lambda kernel, *_: kernels.update([kernel.__name__])):
        engine.model.logits(torch.zeros(3, engine.model.spec.hidden_size))
    assert kernels == {"_matmul": 1}


def test_a_deterministic_job_on_a_gpu_rejects_a_transformers_model(tmp_path: Path) -> None:
    save_with_words("gemma2", tmp_path)
    message = "transformers computes a gemma2 model; leave the option out, or compute on a CPU"
    with pytest.raises(UsageError, match=message):
        Engine(str(tmp_path), attention="triton", dtype="float32", deterministic=True)
