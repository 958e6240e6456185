"""Reference outputs: transformers' eager model in float32."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast

from batchgen.request.completion import Completion
from tests.models.tiny import VOCAB, save_tiny

EXACT = ("error", "output_ids", "output_top_ids", "routed_experts", "finish_reason", "stop_kind", "text")
PLANNED = ("prompt_tokens", "cached_tokens", "seed")
"""Columns that are also equal if the job is planned in the same way."""
FLOATS = (
    "output_logprobs", "output_top_logprobs", "output_ids_logprobs", "input_logprobs", "input_top_logprobs",
    "input_top_ids", "input_ids_logprobs", "score_logprobs",
)  # fmt: skip


def assert_same(
    got: Completion, want: Completion, atol: float = 2e-5, exact: tuple[str, ...] = (*EXACT, *PLANNED)
) -> None:
    """Equal ids, texts and ends, and nearly equal logprobs and states."""
    assert got.key == want.key
    for name in exact:
        assert np.array_equal(getattr(got, name), getattr(want, name)), name
    for name in FLOATS:
        values, expected = getattr(got, name), getattr(want, name)
        assert (values is None) == (expected is None), name
        if values is not None:
            ours, theirs = (np.ma.filled(np.ma.asarray(x, np.float64), np.nan) for x in (values, expected))
            np.testing.assert_allclose(ours, theirs, atol=atol, rtol=0, err_msg=name)
    assert len(got.states or ()) == len(want.states or ())
    for block, other in zip(got.states or (), want.states or (), strict=True):
        assert (block.layer, block.span, block.token_start) == (other.layer, other.span, other.token_start)
        assert block.dtype == other.dtype
        np.testing.assert_allclose(block.values, other.values, atol=atol, rtol=1e-5)


def assert_all_same(got: Iterable[Completion], want: Iterable[Completion]) -> None:
    """`assert_same` for each."""
    for ours, theirs in zip(got, want, strict=True):
        assert_same(ours, theirs)


@cache
def eager_model(folder: Path) -> PreTrainedModel:
    """The checkpoint in transformers with eager attention in float32, without stops."""
    packed = "text_config" in json.loads((folder / "config.json").read_text())
    kind = AutoModelForImageTextToText if packed else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    return model.eval()


def shared_prefix_prompts(count: int, vocab: int, seed: int, longest: int = 48) -> list[list[int]]:
    """Prompts of mixed lengths with prefixes shared at several depths; some are duplicates or prefixes of others."""
    rng = np.random.default_rng(seed)

    def draw(length: int) -> list[int]:
        return rng.integers(3, vocab, size=length).tolist()

    roots = [draw(int(rng.integers(5, longest // 2))) for _ in range(4)]
    stems = [root + draw(int(rng.integers(1, longest // 4))) for root in roots for _ in range(3)]
    prompts: list[list[int]] = []
    while len(prompts) < count:
        kind = rng.integers(0, 10)
        if kind < 5:
            prompts.append(stems[rng.integers(len(stems))] + draw(int(rng.integers(1, longest // 4))))
        elif kind < 7:
            prompts.append(draw(int(rng.integers(1, longest))))
        elif kind < 8 and prompts:
            prompts.append(list(prompts[rng.integers(len(prompts))]))
        elif kind < 9 and prompts:
            whole = prompts[rng.integers(len(prompts))]
            prompts.append(whole[: int(rng.integers(1, len(whole) + 1))])
        else:
            prompts.append(list(stems[rng.integers(len(stems))]))
    return prompts


def save_word_tokenizer(folder: Path, vocab: int) -> None:
    """Save a tokenizer with one word per id, for models that tests use with token ids."""
    backend = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0").save_pretrained(folder)


def save_with_words(model_type: str, folder: Path, **overrides: Any) -> Path:
    """A tiny checkpoint with a tokenizer of one word per id."""
    save_tiny(model_type, folder, **overrides)
    save_word_tokenizer(folder, overrides.get("vocab_size", VOCAB))
    return folder


def eager_logprobs(folder: Path, prompts: list[list[int]]) -> list[np.ndarray]:
    """[P, V] log-softmax of each position's logits, for each prompt, with eager attention in float32."""
    model = eager_model(folder)
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0].float().log_softmax(-1).numpy() for ids in prompts]


NEAR_TIE = 1e-4
"""Logprob difference below which the order of a floating-point sum may decide which of two tokens wins."""


PADDED = 16
"""Prompts are padded to multiples of this, so that prompts of similar length share a batch."""


@dataclass
class Greedy:
    """The reference's greedy outputs."""

    ids: list[list[int]]
    logprobs: list[list[float]]
    settled: list[int]
    """Number of tokens before the first near tie, for each prompt"""
    tolerance: float = 1e-4
    """Of logprobs: a recurrent state sums over all tokens, in the order of chunks."""

    def assert_same_ids(self, prompt: int, result: Completion) -> None:
        """Equal ids, up to the prompt's first near tie."""
        assert result.error is None, result.error
        assert len(result.output_ids or []) == len(self.ids[prompt])
        settled = slice(self.settled[prompt])
        assert list(result.output_ids or [])[settled] == self.ids[prompt][settled], f"prompt {prompt}"

    def check(self, engine: Any, prompts: list[list[int]], members: list[int]) -> None:
        """Generate some of the prompts together and compare each."""
        params = {"temperature": 0, "max_new_tokens": len(self.ids[0]), "ignore_eos": True}
        rows = [{"input_ids": prompts[i], "sampling_params": params, "return_logprob": True} for i in members]
        for i, completion in zip(members, engine.generate(rows, ordered=True), strict=True):
            self.assert_same(i, completion)

    def check_preempted(self, engine: Any, prompts: list[list[int]], patch: pytest.MonkeyPatch) -> None:
        """Generate all prompts in a cache of four rows, which are admitted freely: some are preempted."""
        positions = 4 * (max(map(len, prompts)) + len(self.ids[0]))
        with patch.context() as limited:
            limited.setattr("batchgen.engine.engine.pool_pages", lambda *_: positions // engine.config.page_size)
            limited.setattr(engine, "order", "tree")
            limited.setattr(engine, "admission", "free")
            self.check(engine, prompts, list(range(len(prompts))))
        stats = engine.last_run.scheduler.stats
        assert stats.preemptions > 0
        assert stats.recomputed_tokens > 0

    def assert_same(self, prompt: int, result: Completion) -> None:
        """Equal ids and logprobs, up to the prompt's first near tie."""
        self.assert_same_ids(prompt, result)
        settled = slice(self.settled[prompt])
        got = result.output_logprobs
        assert got is not None
        np.testing.assert_allclose(got[settled], self.logprobs[prompt][settled], atol=self.tolerance, rtol=0)


def eager_greedy(
    folder: Path, prompts: list[list[int]], new_tokens: int, *, use_cache: bool = True, padded: int = PADDED
) -> Greedy:
    """Greedy ids and logprobs of transformers' `generate`, with eager attention in float32 and without stops.

    `use_cache`: whether it goes on from keys, values and states; else it computes all tokens at each, without padding.

    Prompts of similar length share a batch, padded on the left to multiples of `padded`; attention weights of the
    padding are exactly 0.
    """
    model = eager_model(folder)
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, prompt in enumerate(prompts):
        multiple = padded if use_cache else 1
        by_length[-(-len(prompt) // multiple) * multiple].append(i)
    result = Greedy([[] for _ in prompts], [[] for _ in prompts], [0 for _ in prompts], 1e-4 if use_cache else 5e-4)
    for length, members in by_length.items():
        padding = [length - len(prompts[i]) for i in members]
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([[0] * n + prompts[i] for n, i in zip(padding, members, strict=True)]),
                attention_mask=torch.tensor([[0] * n + [1] * (length - n) for n in padding]),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                use_cache=use_cache,
                return_dict_in_generate=True,
                output_logits=True,
            )
        tokens = out.sequences[:, length:]
        steps = torch.stack(out.logits, dim=1).float().log_softmax(-1)
        chosen = steps.gather(-1, tokens[..., None])[..., 0]
        best = steps.topk(2).values
        near = (best[..., 0] - best[..., 1]) < NEAR_TIE
        settled = (near.cumsum(-1) == 0).sum(-1)
        for row, i in enumerate(members):
            result.ids[i] = tokens[row].tolist()
            result.logprobs[i] = chosen[row].tolist()
            result.settled[i] = int(settled[row])
    assert sum(result.settled) > 0.97 * len(prompts) * new_tokens, "too many near ties to compare with"
    return result
