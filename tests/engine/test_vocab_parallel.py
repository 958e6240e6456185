"""Jobs whose logits are split among ranks, against one process: every rank returns the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen import Completion, Engine
from batchgen.config.engine_config import EngineConfig
from batchgen.engine.memory.dummy_run import dummy_run, estimated_bytes
from batchgen.engine.workload import plan_workload
from batchgen.kernels.ops import TORCH_OPS
from batchgen.kernels.ranks import Ranks
from batchgen.kernels.sampling import SamplingColumns
from batchgen.kernels.vocab_parallel import vocab_parallel_ops
from batchgen.models.base import Model, ModelInput, ModelSpec
from batchgen.request.fields.params import SamplingParams
from batchgen.request.processors import ProcessorRow
from batchgen.request.table.request_table import RequestTable
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.engine.fake_device import LateDevice
from tests.engine.reference import EXACT, assert_all_same, assert_same
from tests.engine.sampling.grammar_model import save_grammar_model
from tests.kernels.thread_ranks import in_ranks
from tests.models.loading import load_model

ALL: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 70, "token_ids_logprob": [0, 40, 100, 149]}
RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"top_k": 9, "top_p": 0.9, "n": 2},
    {"top_p": 0.6},
    {"min_p": 0.2, "top_p": 0.8},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    {"temperature": 0, "repetition_penalty": 1.5},
    {"logit_bias": {"5": 3.0, "70": 4.0, "140": 5.0}},
    {"bad_words": [[8], [70, 71], [140]], "suppress_tokens": [9, 100]},
    {"temperature": 0, "allowed_token_ids": [10, 70, 140], "bad_words": [[70]]},
    {"allowed_token_ids": [10, 11]},
    {"temperature": 0, "min_new_tokens": 4, "stop_token_ids": list(range(3, 149, 2)), "ignore_eos": False},
    {"allowed_token_ids": [10, 140], "min_new_tokens": 3, "stop_token_ids": [10, 140], "ignore_eos": False},
    {"allowed_token_ids": [140], "bad_words": [[140]]},
    {"regex": "[a-f]{3,9}", "ignore_eos": False},
    {"choice": ["yes", "no", "nothing"], "temperature": 0, "ignore_eos": False},
    {"logprob_start_len": 0},
    {"logprob_start_len": 2, "temperature": 0},
    {"custom_logit_processor": "push", "custom_params": {"token": 130}, "logit_bias": {"3": 1.0}},
    {"custom_logit_processor": "push", "custom_params": {"token": 4}, "temperature": 0},
]
FAILING = [{"custom_logit_processor": "push", "custom_params": {"do": kind}} for kind in ("raise", "nan", "mask")]


def push(logits: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
    for i, row in enumerate(rows):
        match row.params.get("do"):
            case "raise":
                raise ValueError("cannot go on")
            case "nan":
                logits[i, 70] = torch.nan
            case "mask":
                logits[i] = -torch.inf
            case _:
                logits[i, row.params["token"]] += 4.0
    return logits


class CutModel:
    """A model of which each rank computes everything but the logits of the others' tokens."""

    stream = None

    def __init__(self, model: Model, ranks: Ranks) -> None:
        self._model = model
        self._spec = replace(model.spec, ranks=ranks)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def hidden(self, inputs: ModelInput) -> Tensor:
        return self._model.hidden(inputs)

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        return self._model.logits(hidden, adapters)[:, self._spec.vocab]

    def accepts_embeds(self) -> bool:
        return self._model.accepts_embeds()

    def fit_positions(self, longest: int) -> None:
        self._model.fit_positions(longest)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_grammar_model(tmp_path_factory.mktemp("grammar"))


def rows_of(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rng = np.random.default_rng(5)
    return [
        {"input_ids": [5, 6, *rng.integers(4, 130, 4).tolist()], "max_new_tokens": 6, "ignore_eos": True, "seed": i}
        | ({"temperature": 1.3} | ALL | rule)
        for i, rule in enumerate(rules)
    ]


def run(folder: Path, rows: list[dict[str, Any]], count: int, **options: Any) -> list[list[Completion]]:
    """The completions of each rank."""
    model, tokenizer = load_model(folder, dtype="float32", device="cpu"), Tokenizer.load(folder)
    config = EngineConfig(model=str(folder), dtype="float32", page_size=4, logit_processor={"push": push}, **options)

    def work(ranks: Ranks) -> list[Completion]:
        own = model if count == 1 else CutModel(model, ranks)
        engine = Engine.from_parts(config, own, tokenizer)
        return list(engine.generate([dict(row) for row in rows], ordered=True))

    return in_ranks(count, work)


@pytest.mark.field("logit_bias", "allowed_token_ids", "min_new_tokens", "regex", "token_ids_logprob")
@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_rows_of_all_rules_equal_those_of_one_process(folder: Path, count: int, mode: str, attention: str) -> None:
    rows, options = rows_of(RULES), {"logprobs_mode": mode, "attention": attention}
    (expected,) = run(folder, rows, 1, **options)
    assert sum(done.error is not None for done in expected) == 1, "all but a row whose masks leave no token"
    for found in run(folder, rows, count, **options):
        assert_all_same(found, expected)


@pytest.mark.field("custom_logit_processor")
def test_rows_fail_on_all_ranks(folder: Path) -> None:
    rows = rows_of([*FAILING, *RULES[-2:], *RULES[:3]])
    (expected,) = run(folder, rows, 1)
    codes = [None if done.error is None else done.error.code for done in expected]
    assert len(set(codes[: len(FAILING)])) == 1
    assert set(codes[len(FAILING) :]) == {None}
    first, second = run(folder, rows, 2)
    assert_all_same(first, expected)
    assert [None if done.error is None else done.error.code for done in second] == codes
    for ours, theirs in zip(second, expected, strict=True):
        assert_same(ours, theirs, exact=tuple(set(EXACT) - {"error"}))


class Twins(Ranks):
    """The first of two ranks with equal logits; its exchange can be captured."""

    def _reduce(self, x: Tensor, how: Any) -> None:
        if how == torch.distributed.ReduceOp.SUM:
            x.mul_(2)

    def _gather(self, x: Tensor) -> Tensor:
        return torch.stack((x, x))


def test_sampling_can_be_captured() -> None:
    """It never waits for the host, and a replay draws from the logits that are there then."""
    ops = vocab_parallel_ops(TORCH_OPS, Twins(0, 2), 128)
    logits, keys = torch.randn(4, 64), torch.arange(4)
    top_k, top_p = torch.tensor([0, 5, 0, 7]), torch.tensor([1.0, 0.9, 0.5, 1.0])
    temperature = torch.tensor([1.0, 2.0, 1.5, 0.0])
    columns = SamplingColumns.of(temperature, top_k, top_p, torch.full((4,), 0.01)).with_keys(keys)

    def step() -> list[Tensor]:
        tokens = ops.sample(logits, columns).tokens
        filtered = ops.filtered_scores(logits, temperature, top_k, top_p, columns.min_p, tokens)
        top = ops.top_logprobs(logits, 3, ops.log_normalizers(logits))
        return [tokens, ops.nan_rows(logits), ops.token_logprobs(logits, tokens), *top, filtered]

    results: list[Tensor] = []
    graph = LateDevice(captures=True).capture(lambda: results.extend(step()))
    for _ in range(3):
        logits.copy_(torch.randn(4, 64))
        graph.replay()
        for replayed, eager in zip(results, step(), strict=True):
            assert torch.equal(replayed, eager)


def test_a_rank_needs_memory_for_its_part_of_the_logits(folder: Path) -> None:
    spec = replace(load_model(folder, dtype="float32", device="cpu").spec, vocab_size=1 << 20)
    table = RequestTable()
    table.append(0, 0, [5, 6, 7], SamplingParams(max_new_tokens=5, temperature=0), 0, 5)
    job = dummy_run(plan_workload(table), spec, 4, 8, 64)
    whole, part = (estimated_bytes(each, job) for each in (spec, replace(spec, ranks=Ranks(0, 4))))
    assert whole - part == pytest.approx(0.75 * job.rows * spec.vocab_size * 8)
