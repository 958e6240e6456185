"""Hidden states and routed experts of finished samples, against transformers' eager model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.engine.engine import Engine
from batchgen.errors import ErrorCode
from batchgen.models.base import CaptureSpec
from batchgen.request.completion import Completion, StateBlock
from tests.engine.fake_device import LateDevice
from tests.engine.reference import eager_model, save_with_words, shared_prefix_prompts
from tests.engine.sampling.grammar_model import save_grammar_model
from tests.models.tiny import VOCAB

torch.set_num_threads(1)

LAYERS = 3
TOLERANCE = 1e-4
SPANS = ("prompt", "output", "all", "last")
POOLS = ("none", "last", "mean")


class Reference:
    """States of whole texts, computed one at a time and cached."""

    def __init__(self, folder: Path) -> None:
        self.model = eager_model(folder)
        self.after: list[torch.Tensor] = []
        self.model.model.layers[-1].register_forward_hook(
            lambda m, a, out: self.after.append(out[0] if isinstance(out, tuple) else out)
        )
        self.known: dict[tuple[int, ...], dict[int, np.ndarray]] = {}

    def states(self, ids: list[int]) -> dict[int, np.ndarray]:
        """[len(ids), H] by layer."""
        key = tuple(ids)
        if key not in self.known:
            self.after.clear()
            with torch.no_grad():
                out = self.model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
            last = len(out.hidden_states) - 1
            found = {layer: out.hidden_states[layer][0].numpy() for layer in range(last)}
            found[last] = self.after[0].reshape(-1, found[0].shape[1]).numpy()
            found[-1] = out.hidden_states[-1][0].numpy()
            self.known[key] = found
        return self.known[key]

    def experts(self, ids: list[int], k: int) -> np.ndarray:
        """[len(ids), MoE layers, k] ids of the routed experts."""
        with torch.no_grad():
            out = self.model(input_ids=torch.tensor([ids]), use_cache=False, output_router_logits=True)
        return torch.stack([logits.topk(k, dim=-1).indices for logits in out.router_logits], dim=1).numpy()


def expected(
    reference: Reference, prompt: list[int], output: list[int], requested: dict[str, Any]
) -> Iterator[StateBlock]:
    """Expected blocks: row j is the state after token j was computed."""
    states = reference.states([*prompt, *output[:-1]])
    p, c = len(prompt), len(output)
    start, count = {
        "prompt": (0, p),
        "output": (p - 1, c),
        "all": (0, max(p, p + c - 1)),
        "last": (max(p - 1, p + c - 2), 1),
    }[requested.get("tokens", "all")]
    for layer in requested.get("layers", [-1]):
        rows = states[layer][start : start + count]
        token_start = start
        if requested.get("pool", "none") == "last":
            rows, token_start = rows[-1:], start + count - 1
        elif requested.get("pool") == "mean":
            rows = rows.mean(axis=0, dtype=np.float64)[None].astype(np.float32)
        yield StateBlock(layer, requested.get("tokens", "all"), token_start, rows, "float32")


def check(result: Completion, reference: Reference, prompt: list[int], requested: dict[str, Any] | None) -> None:
    assert result.error is None, result.error
    if requested is None:
        assert result.states is None
        return
    output = list(result.output_ids or [])
    expected_blocks = [*expected(reference, prompt, output, requested)]
    assert len(result.states) == len(expected_blocks)
    for got, want in zip(result.states, expected_blocks, strict=True):
        assert (got.layer, got.span, got.token_start) == (want.layer, want.span, want.token_start)
        assert got.dtype == want.dtype
        assert got.values.shape == want.values.shape, requested
        assert got.values.dtype == np.float32
        np.testing.assert_allclose(got.values, want.values, atol=TOLERANCE, rtol=TOLERANCE, err_msg=str(requested))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_words("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def engine_of(folder: Path, implementation: str, **options: Any) -> Engine:
    return Engine(str(folder), model_impl=implementation, dtype="float32", page_size=4, **options)  # type: ignore[arg-type]


def row(prompt: list[int], requested: Any, tokens: int = 5, **more: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **more}
    if requested is not None:
        params["return_hidden_states"] = requested
    return {"input_ids": prompt, "sampling_params": params}


EVERY = [
    {"layers": layers, "tokens": tokens, "pool": pool}
    for tokens, pool, layers in product(SPANS, POOLS, ([-1], [2, 0, -1, 1, 3]))
]


@pytest.mark.field("return_hidden_states")
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_every_span_pool_and_layer_in_one_batch(folder: Path, reference: Reference, implementation: str) -> None:
    """Together with rows without states, over prompts that share prefixes at several depths."""
    prompts = shared_prefix_prompts(72, VOCAB, seed=5, longest=32)
    requested = [[None, *EVERY][i % (len(EVERY) + 1)] for i in range(len(prompts))]
    engine = engine_of(folder, implementation)
    rows = [row(prompt, ask) for prompt, ask in zip(prompts, requested, strict=True)]
    for result in engine.generate(rows):
        check(result, reference, prompts[result.row_index], requested[result.row_index])


@pytest.mark.field("return_hidden_states")
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_chunks_preemption_and_samples_change_nothing(
    folder: Path, reference: Reference, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool for two rows, steps of a few tokens, several samples per row."""
    prompts = shared_prefix_prompts(2 * len(EVERY), VOCAB, seed=9, longest=30)
    requested = EVERY * 2
    engine = engine_of(folder, implementation, max_tokens_per_step=8, max_num_seqs=8)
    engine.order, engine.admission = "tree", "free"  # rows are to be preempted
    monkeypatch.setattr("batchgen.engine.engine.pool_pages", lambda *_: 2 * (max(map(len, prompts)) + 9) // 4 + 4)
    rows = [row(prompt, ask, 8, temperature=1.0, n=2) for prompt, ask in zip(prompts, requested, strict=True)]
    results = [*engine.generate(rows)]
    assert len(results) == 2 * len(prompts)
    for result in results:
        check(result, reference, prompts[result.row_index], requested[result.row_index])
    assert engine.last_run.scheduler.stats.preemptions > 0
    assert engine.last_run.loop.states.nbytes == 0, "all stored states are freed"
    assert engine.last_run.loop.states.num_samples == 0


@pytest.mark.field("return_hidden_states")
def test_prompt_only_rows(folder: Path, reference: Reference) -> None:
    """`max_new_tokens: 0`: every token is computed, so `all` has P rows."""
    asked = [{"layers": [1, -1], "tokens": tokens, "pool": pool} for tokens, pool in product(SPANS, POOLS)] * 3
    prompts = shared_prefix_prompts(len(asked), VOCAB, seed=2, longest=24)
    rows = [row(prompt, requested, 0) for prompt, requested in zip(prompts, asked, strict=True)]
    for result in engine_of(folder, "native", max_tokens_per_step=16, max_num_seqs=4).generate(rows):
        requested = asked[result.row_index]
        if requested["tokens"] == "output" and requested["pool"] != "none":
            assert result.error.code == ErrorCode.INVALID_FIELD
            assert result.error.param == "return_hidden_states"
        else:
            check(result, reference, prompts[result.row_index], requested)


def test_states_of_ends_copies_and_kept_samples(folder: Path, reference: Reference) -> None:
    """`true` is the last layer of all tokens. States end with a stop; copies and the samples of best_of have theirs."""
    engine = engine_of(folder, "native")
    (free,) = engine.generate([row([9, 8, 7], None, 12)])
    stop = list(free.output_ids or [])[4]
    output = {"tokens": "output"}
    rows = [
        row([5, 6, 7], True),
        row([9, 8, 7], output, 12, stop_token_ids=[stop]),
        *[row([4, 5, 6], {"layers": [0, 2]})] * 3,
        row([4, 5, 6], output, n=2, best_of=5, temperature=1.0),
        row([5, 6, 7], False),
    ]
    whole = {"layers": [-1], "tokens": "all", "pool": "none"}
    asked: list[Any] = [whole, output, *[{"layers": [0, 2]}] * 3, output, None]
    results = list(engine.generate(rows, ordered=True))
    assert [r.dedup_of for r in results] == [None] * 3 + [2, 2] + [None] * 3
    assert len(list(results[1].output_ids or [])) < 12
    for result in results:
        prompt = rows[result.row_index]["input_ids"]
        check(result, reference, prompt, asked[result.row_index])


def test_shared_prompt_states_are_stored_once(folder: Path) -> None:
    """Sixteen rows share a long prefix: its positions are stored once; means store one row per node."""
    prefix = [3 + i % 200 for i in range(64)]
    prompts = [[*prefix, 10 + i] for i in range(16)]
    peaks = {}
    for pool in ("none", "mean"):
        engine = engine_of(folder, "native")
        table_rows = [row(prompt, {"tokens": "prompt", "pool": pool}, 3) for prompt in prompts]
        peaks[pool] = max(engine.last_run.loop.states.nbytes for _ in engine.generate(table_rows))
    hidden = 64
    assert peaks["none"] <= (64 + 16) * hidden * 4
    assert peaks["mean"] <= (1 + 16) * hidden * 8


@pytest.mark.parametrize("pool", ["none", "mean"])
def test_bfloat16_states_are_bfloat16_values(folder: Path, pool: str) -> None:
    """Means are rounded to bfloat16, unless float32 is requested."""
    prompts = shared_prefix_prompts(6, VOCAB, seed=3, longest=20)
    found = {}
    for dtype in ("auto", "float32"):
        engine = Engine(str(folder), dtype="bfloat16", page_size=4, hidden_states_dtype=dtype)
        rows = [row(prompt, {"layers": [0, -1], "pool": pool}) for prompt in prompts]
        results = sorted(engine.generate(rows), key=lambda c: c.row_index)
        found[dtype] = [block for result in results for block in result.states or ()]
    for auto, exact in zip(found["auto"], found["float32"], strict=True):
        assert (auto.dtype, exact.dtype) == ("bfloat16", "float32")
        assert not (auto.values.view(np.uint32) & 0xFFFF).any()
        rounded = torch.from_numpy(exact.values).bfloat16().float().numpy()
        assert np.array_equal(auto.values, rounded)
    exact_values = np.concatenate([block.values.reshape(-1) for block in found["float32"]])
    assert bool((exact_values.view(np.uint32) & 0xFFFF).any()) == (pool == "mean")


@pytest.mark.field("return_hidden_states", "return_routed_experts")
def test_layers_and_experts_that_do_not_exist_are_errors(folder: Path) -> None:
    rows = [row([5, 6], {"layers": [LAYERS + 1]}), row([5, 6], None, return_routed_experts=True)]
    layer, experts = (done.error for done in engine_of(folder, "native").generate(rows, ordered=True))
    assert (layer.code, layer.param) == (ErrorCode.INVALID_FIELD, "return_hidden_states")
    assert "layer 4" in layer.message
    assert (experts.code, experts.param) == (ErrorCode.UNSUPPORTED_FIELD, "return_routed_experts")


@pytest.mark.field("return_routed_experts")
def test_experts_of_every_computed_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with_words("mixtral", tmp_path, num_hidden_layers=LAYERS)
    reference = Reference(tmp_path)
    prompts = shared_prefix_prompts(24, VOCAB, seed=4, longest=30)
    engine = engine_of(tmp_path, "transformers", max_tokens_per_step=16, max_num_seqs=8)
    spec = engine.model.spec
    monkeypatch.setattr("batchgen.engine.engine.pool_pages", lambda *_: 2 * (max(map(len, prompts)) + 9) // 4 + 4)
    tokens = [(0, 1, 6)[i % 3] for i in range(len(prompts))]
    both = {"return_routed_experts": True, "return_hidden_states": {"layers": [1], "tokens": "all"}}
    rows = [
        row(p, None, n, **(both if i % 4 == 1 else {"return_routed_experts": bool(i % 4)}))
        for i, (p, n) in enumerate(zip(prompts, tokens, strict=True))
    ]
    for result in engine.generate(rows):
        i = result.row_index
        if not i % 4:
            assert result.routed_experts is None
            continue
        consumed = [*prompts[i], *(result.output_ids or [])]
        consumed = consumed[:-1] if tokens[i] else consumed
        want = reference.experts(consumed, spec.experts_per_token)
        got = np.asarray(result.routed_experts)
        assert got.dtype == np.int32
        assert got.shape == (len(consumed) * len(spec.moe_layers) * spec.experts_per_token,)
        assert np.array_equal(got.reshape(want.shape), want)
        check(result, reference, prompts[i], both["return_hidden_states"] if i % 4 == 1 else None)  # type: ignore[arg-type]


@pytest.mark.parametrize("pool", ["none", "mean"])
def test_states_with_another_dtype_than_the_weights(folder: Path, monkeypatch: pytest.MonkeyPatch, pool: str) -> None:
    """Some models have a float32 residual stream and bfloat16 weights."""
    engine = Engine(str(folder), dtype="bfloat16", page_size=4)
    plain = CaptureSpec.store
    monkeypatch.setattr(CaptureSpec, "store", lambda self, layer, states: plain(self, layer, states.float() / 3))
    (result,) = engine.generate([row([5, 6, 7, 8], {"layers": [1], "pool": pool})])
    monkeypatch.setattr(CaptureSpec, "store", plain)
    (usual,) = engine.generate([row([5, 6, 7, 8], {"layers": [1]})])
    assert result.states[0].dtype == "float32"
    want = usual.states[0].values / 3
    want = want.mean(0, keepdims=True, dtype=np.float64) if pool == "mean" else want
    np.testing.assert_allclose(result.states[0].values, want, rtol=1e-6)


@pytest.mark.parametrize(("regex", "tokens", "late"), [("ab?", 1, True), ("b?", 0, False)])
def test_rows_whose_grammar_ends_without_a_token(tmp_path: Path, regex: str, tokens: int, late: bool) -> None:
    """The state of a discarded token is not returned, whether a step is read at once or one step late."""
    save_grammar_model(tmp_path)
    reference = Reference(tmp_path)
    engine = Engine(str(tmp_path), dtype="float32", page_size=4)
    if late:
        engine.device = LateDevice(poison_uploads=True)
    (a,) = engine.tokenizer.encode_plain(["a"])[0]
    prompt = [7, 8, 9, 10, 11]
    requested = [{"layers": [0, 1, -1], "tokens": span, "pool": pool} for span, pool in product(SPANS, POOLS)]
    rows = [row(prompt, ask, 6, ignore_eos=False, regex=regex, allowed_token_ids=[a]) for ask in requested]
    for result in engine.generate(rows):
        ask = requested[result.row_index]
        assert (result.error, result.completion_tokens) == (None, tokens)
        if ask["tokens"] == "output" and ask["pool"] != "none" and not tokens:
            assert result.states is not None
            continue
        check(result, reference, prompt, ask)
